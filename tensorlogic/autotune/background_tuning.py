"""Measuring unmeasured keys during later calls, within 5 % of the time the process has already spent in each key."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..core import policy
from ..core.candidate import Launcher
from ..core.key import Key
from ..core.op import Op
from ..measure import isolation, timer
from ..native import call_extension
from ..plans import open_stores
from ..plans.environment import environment
from ..system import capture_state, compile_pool, process
from .tuner import KeyTuner

LOG = logging.getLogger("tensorlogic")
SHARE = 0.05
FIRST_STEP_S = 0.02  # inputs, references, a look at eager: at least, or 30 calls
# how many times longer than announced a step may take, by device type: learned as steps are taken
_DOUBT = {"cpu": 2.0}
# kernels are loaded, libraries initialised on the way (seen on an H200: up to 10 times, once)
UNKNOWN_DOUBT = 5.0
FADES = 0.9  # a step as announced makes the doubt smaller by this
_WATCHES: dict[tuple[str, str], Watch] = {}
MOST = 8192  # keys under watch
_BUSY = threading.Lock()  # one study step at a time in the whole process
process.renew_after_fork(globals(), _BUSY=threading.Lock)


def watch(op: Op, key: Key, device: torch.device) -> Watch | None:
    """Who counts the calls of this key: every so often a later one pays for one step of its study. None: nobody does."""
    if open_stores.distributed():
        return None
    known = _WATCHES.get((str(device), key.text))
    if known is None:
        if len(_WATCHES) >= MOST:  # shapes without end: start again rather than grow
            _WATCHES.clear()
        known = _WATCHES[(str(device), key.text)] = Watch(op, key, device)
    return None if known.done else known


def forget() -> None:
    """Let every key be studied again, as a fresh process would."""
    _WATCHES.clear()


class Watch:
    """The calls of one unmeasured key, and the study they pay for."""

    def __init__(self, op: Op, key: Key, device: torch.device) -> None:
        self.op, self.key, self.device = op, key, device
        self.calls, self.look_at, self.done = 0, 8, False
        self.call_s = self.used_s = self.next_s = 0.0
        self.study: KeyTuner | None = None
        self.steps: Iterator[float] | None = None
        if device.type == "cuda":  # whoever measures it next, kernels are compiled
            compile_pool.prepare()

    def wrap(self, launch: Launcher) -> Launcher:
        """The launcher with a counter in front; what it costs shows only until the key is measured."""
        if call_extension.is_launcher(launch):  # counts itself, and is added up when it asks
            compiled: Any = launch
            made: Launcher = self._counting(compiled, compiled.watched)
            return made

        def counted(*dynamic: Any) -> Any:
            self.calls += 1
            if self.calls < self.look_at or self.done:
                return launch(*dynamic)
            return self._look(launch, dynamic)

        return counted

    def direct(self, serve: Callable[..., Any]) -> Callable[..., Any] | None:
        """`serve`, counted in C; None without compiled calls, where a counter in Python would cost what being direct gains."""
        module = call_extension.module()
        if module is None:
            return None
        counted: Callable[..., Any] = self._counting(serve, partial(module.Counted, serve))
        return counted

    def _counting(self, serve: Callable[..., Any], make: Callable[..., Any]) -> Any:
        """What `make(look, left)` makes: it serves `left` calls on its own, then asks to look."""
        given = max(1, self.look_at - self.calls)

        def look(*dynamic: Any) -> Any:
            nonlocal given
            self.calls += given
            early = self.calls < self.look_at or self.done
            outs = serve(*dynamic) if early else self._look(serve, dynamic)
            given = max(1, self.look_at - self.calls) if not self.done else 1 << 60
            served.left = given - 1
            return outs

        served = make(look, given - 1)
        return served

    def _look(self, launch: Callable[..., Any], dynamic: tuple[Any, ...]) -> Any:
        """Time this call; then, if the key has earned it, take one step."""
        begin = time.perf_counter()
        outs = launch(*dynamic)
        if capture_state.can_tune_now(self.device):
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            else:
                timer.synchronize(self.device)
            taken = time.perf_counter() - begin
            self.call_s = min(self.call_s, taken) if self.call_s else taken
            self._advance()
        self.look_at = self.calls + self._interval()
        return outs

    def _interval(self) -> int:
        """Calls until the key has earned its next step (looking itself costs a synchronisation)."""
        missing = (self.used_s + self._next_cost()) / SHARE - self.calls * self.call_s
        return max(64, int(missing / max(self.call_s, 1e-7)))

    def _next_cost(self) -> float:
        """What the next step may take: what it announced, times how wrong such announcements have been."""
        return self.next_s * _DOUBT.get(self.device.type, UNKNOWN_DOUBT)

    def _learn(self, announced: float, taken: float) -> None:
        doubt = FADES * _DOUBT.get(self.device.type, UNKNOWN_DOUBT)
        _DOUBT[self.device.type] = max(1.0, doubt, taken / announced)

    def _advance(self) -> None:
        due = self.used_s + self._next_cost() <= SHARE * self.calls * self.call_s
        if not due or not _BUSY.acquire(blocking=False):
            return
        try:
            begin = time.perf_counter()
            if self.steps is None:
                about = self.op, self.key, self.device, environment(self.device)
                known = open_stores.current(self.device).get(self.key)
                self.study = KeyTuner(*about, known, budget_s=0.05, background=True)
                self.steps = self.study.steps()
                self.next_s = max(FIRST_STEP_S, 30 * self.call_s)
            elif compile_pool.ready(self.study.pending if self.study else ()):
                announced = self.next_s
                with isolation.preserved(self.device, self.op), _side_stream(self.device):
                    self.next_s = next(self.steps, -1.0)
                if announced > 0:
                    self._learn(announced, time.perf_counter() - begin)
            self.used_s += time.perf_counter() - begin
            if self.next_s < 0:
                self._finish()
        except Exception:
            # nothing that measuring meets may reach a caller who did not ask for it
            LOG.exception("tensorlogic: %s cannot be measured", self.key.text)
            self.done = True
            self.study = self.steps = None
        finally:
            _BUSY.release()

    def _finish(self) -> None:
        self.done = True
        if self.study is not None and self.study.plan is not None:
            open_stores.current(self.device).put(self.study.plan)
            policy.forget_entries()
        self.study = self.steps = None


@contextlib.contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Work queued by a study does not line up with the caller's; the caller's stream waits for nothing."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        try:
            yield
        finally:
            torch.cuda.current_stream().synchronize()


open_stores.ON_FORGET.append(forget)
