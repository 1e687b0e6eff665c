"""Inductor in the background: once a program has worked for long enough, a process compiles, and one call compares."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core import policy, weight_cache
from ...cuda_graphs.captured_graph import FAILURES
from ...guards.errors import first_line
from ...guards.global_state import plain_modes
from ...plans import open_stores
from ...system import capture_state, idle_resources, settings
from ...system.compile_workers import NICENESS
from ..runtime.program import Program
from ..trace.model_copies import undisturbed
from ..verify.whole_model import Whole
from . import compile_process
from .comparison import Contest

LOG = logging.getLogger("tensorlogic")
EARNED_S = 20.0  # of work before a process is started for it
SOON_S = 2.0  # likewise where the machine has cores and memory to spare
# of the work done so far that comparing may take of the caller's time
SHARE = 0.05
LOOK_S = 1.0  # of work between two looks whether the process has ended
# of the original's time that the comparison takes, beside `FIXED_S`
CALLS = 60
FIXED_S = 0.4
TIMED_S = 0.15
WIDE = 8  # bytes of a number in higher precision
SWITCH_S = 1e-4  # between two looks whether another thread wants to run


_SWITCHING = threading.Lock()
_BEGUN: weakref.WeakSet[Later] = weakref.WeakSet()  # whose process has been started


def worthwhile(contest: Contest | None) -> bool:
    """Whether Inductor may compile in the background for a program."""
    return (
        contest is not None
        and settings.inductor()
        and policy.current().tune == "auto"
        and not open_stores.distributed()
        and compile_process.unfit(contest.trace) is None
    )


class Later:
    """Serves calls by a program while Inductor compiles; in the end the faster of the two takes its place."""

    def __init__(
        self, program: Program, contest: Contest, decided: Callable[[Later, Program], None]
    ) -> None:
        """`decided` is told what serves from then on; it shall hold no model."""
        self.program, self.contest, self.decided = program, contest, decided
        self.each_s = max((contest.original.report.after_us or 0.0) / 1e6, 1e-6)
        self.calls, self.look_at = 0, int(min(SOON_S, EARNED_S) / self.each_s)
        self.spent_s = 0.0  # on beginning and comparing
        self.job: compile_process.Compiling | None = None
        self.lock = threading.Lock()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output, or `MISS`."""
        self.calls += 1
        if self.calls >= self.look_at:
            self._look()
        return self.program(args, kwargs)

    @property
    def nbytes(self) -> int:
        """Bytes held besides the model."""
        return self.program.nbytes

    def _look(self) -> None:
        device = self.program.device
        quiet = capture_state.can_tune_now(device) and plain_modes()
        if not quiet or not self.program._context():
            return
        if not self.lock.acquire(blocking=False):
            return
        try:
            self._step()
        # a compiler's code may raise anything; what serves now goes on serving
        except Exception as problem:
            LOG.info("tensorlogic: Inductor in the background: %s", first_line(problem))
            self._close(self.program)
        finally:
            self.lock.release()

    def _step(self) -> None:
        """Start the process; look whether it has ended; compare once that is earned."""
        if not idle_resources.fits(self.program.device, self._needed()):
            self._next(LOOK_S)  # what the caller has taken meanwhile is the caller's
        elif self.job is None:
            if self._may_begin():
                self._begin()
            self._next(LOOK_S)
        elif self.job.process.poll() is None:
            self._next(LOOK_S)
        else:
            before_s = (self.contest.original.report.before_us or 0.0) / 1e6
            cost = FIXED_S + CALLS * max(before_s, self.each_s)
            missing = (self.spent_s + cost) / SHARE - self._work_s()
            if missing > 0:
                self._next(missing)
            else:
                self._compare(self.job)

    def _needed(self) -> int:
        """Bytes that comparing takes: the weights and inputs in higher precision, and about as much for what is computed."""
        trace = self.contest.trace
        tensors = [*(t for _, t in trace.state.values()), *trace.example]
        return 2 * WIDE * sum(t.numel() for t in tensors if isinstance(t, Tensor))

    def _work_s(self) -> float:
        return self.calls * self.each_s

    def _may_begin(self) -> bool:
        """One model at a time, and at once only where nobody needs what the compilers take."""
        if any(other.job is not None and other.job.process.poll() is None for other in _BEGUN):
            return False
        return self._work_s() >= EARNED_S or idle_resources.spare(self.program.device)

    def _next(self, seconds: float) -> None:
        self.look_at = self.calls + max(1, int(seconds / self.each_s))

    def _begin(self) -> None:
        begin = time.perf_counter()
        with self._undisturbed():
            self.job = self.contest.begin(NICENESS)
        weakref.finalize(self, compile_process.Compiling.stop, self.job)
        _BEGUN.add(self)
        self.contest.share_s = TIMED_S
        threading.Thread(target=_imported, daemon=True).start()
        self.spent_s += time.perf_counter() - begin

    def _compare(self, job: compile_process.Compiling) -> None:
        contest, begin = self.contest, time.perf_counter()
        with self._undisturbed():
            job.wait(0.0)
            won = contest.compared(job, Whole(contest.trace, contest.original.training))
        weight_cache.end_pretending()
        self.spent_s += time.perf_counter() - begin
        report = contest.original.report
        report.notes.append(
            f"Inductor compiled in the background and compared after {self.calls} calls, "
            f"{self.spent_s:.1f} s"
        )
        program = self.program if won is None else won
        if contest.keep is not None:
            contest.keep(report, program)
        self._close(program)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Keep random state and set the modes of a compilation: a call of any kind may begin and compare."""
        with (
            undisturbed(),
            torch.inference_mode(False),
            torch.set_grad_enabled(self.contest.original.training),
        ):
            yield

    def _close(self, program: Program) -> None:
        """Let the program serve without this object from now on."""
        self.program, self.look_at = program, 1 << 62
        program.contest = None
        self.decided(self, program)


def _imported() -> None:
    """Import what loading an artifact needs, and ask which instructions the compiler knows: no call shall wait seconds for that."""
    with _yielding(), contextlib.suppress(ImportError, AttributeError, *FAILURES, OSError):
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("torch._inductor.standalone_compile")
        importlib.import_module("torch._inductor.cpu_vec_isa").pick_vec_isa()


@contextlib.contextmanager
def _yielding() -> Iterator[None]:
    """Shorten Python's thread switch interval meanwhile: calls beside an import of 1.5 s took 16 ms at the 99th percentile, 4 so, and three
    times as many got through (a Xeon of two cores). One thread at a time, so that each finds what the program has set."""
    with _SWITCHING:
        before = sys.getswitchinterval()
        sys.setswitchinterval(min(before, SWITCH_S))
        try:
            yield
        finally:
            sys.setswitchinterval(before)
