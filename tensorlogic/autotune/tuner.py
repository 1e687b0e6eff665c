"""Measuring one key: every candidate is checked on fresh data, then timed in pairs, then judged; resumable step by step."""

from __future__ import annotations

import datetime
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ..core.candidate import BIND_ERRORS, EAGER, Candidate, Failed, Outputs, failure_reason
from ..core.key import Key
from ..core.op import Op
from ..measure import interference, timer
from ..measure.verification import Checker
from ..plans.environment import Environment
from ..plans.plan import DISTURBED, UNFINISHED, Evidence, Plan
from ..system import compile_pool
from . import config_queue
from .config_queue import PendingConfig
from .ranking import Contender, clocks_of, measured, nearest, pick, refused

LOG = logging.getLogger("tensorlogic")
Then = Callable[[Outputs], object] | None  # what a caller does next
CUT = 3.0  # times the incumbent's time: dropped after one call
# a single call below this says nothing: most of it may be waiting for a core
TOO_SHORT_US = 300.0
# of a key that is waited for: what is not compiled by then is left for another time
PROMPT_S = 1.5


# Microseconds that our autograd node takes beyond PyTorch's on a CPU, forward and backward;
# set by whoever can bind a recorded call.
AUTOGRAD_OVERHEAD_US: Callable[[], float] = lambda: 0.0  # noqa: E731


class KeyTuner:
    """Everything that happens between meeting a key and having a plan for it."""

    def __init__(
        self,
        op: Op,
        key: Key,
        device: torch.device,
        environment: Environment,
        known: Plan | None = None,
        budget_s: float = 0.3,
        background: bool = False,
        prompt_s: float = math.inf,
        near: Plan | None = None,
    ) -> None:
        self.op, self.key, self.device = op, key, device
        self.environment, self.budget_s = environment, budget_s
        self.evidence: dict[str, Evidence] = {}
        self.known = known
        self.background = background
        self.patience = interference.WaitBudget(background)
        self.prompt_s, self.near = prompt_s, near
        self.plan: Plan | None = None
        self.pending: list[Any] = []  # compile jobs in worker processes
        self.between: timer.Call | None = None

    def run(self) -> Plan | None:
        """All steps at once; None when the key cannot be measured (no memory for its inputs, say)."""
        with compile_pool.awaited():
            for _ in self.steps():
                pass
        return self.plan

    def steps(self) -> Iterator[float]:
        """Run step by step; yields the seconds the next step is expected to take."""
        until = time.perf_counter() + self.prompt_s
        lists = [own for c in self._runnable() if (own := self._turns(c))]
        if self.near is not None and self.device.type == "cuda":
            lists = config_queue.likely(lists, self.near)
        self.pending = config_queue.jobs(lists)
        compile_pool.submit(self.pending)
        eager = self.op.candidates[EAGER]
        try:
            begin = time.perf_counter()
            with torch.no_grad():
                self.checker = Checker(self.op, self.key, self.device)
                self.timed = self.checker.cold()
                if self.key.direction == "backward":  # a training step has other kernels around it
                    self.between = timer.vendor_gap_filler(self.device)
            first = Contender(eager, {}, self.op.plain(self.key, self.device), 1.0, 0.0)
            first.rough_us = self._rough(first)
        except BIND_ERRORS as problem:
            LOG.info("tensorlogic: %s cannot be measured: %s", self.key.text, problem)
            return
        entrants, late = [first], []
        cost = time.perf_counter() - begin
        for own in lists:
            entered: list[Contender] = []
            incumbent_us = min(e.rough_us for e in entrants)
            together = len(own) > 1 and self.device.type != "cuda"
            for turn in own:
                if not compile_pool.there(turn.jobs):
                    late.append(turn)
                    continue
                yield 4 * cost + 20 * first.rough_us * 1e-6
                entrant = self._enter(turn, incumbent_us, together)
                if entrant is not None:
                    entered.append(entrant)
                if self._wrong(turn.candidate):
                    break
            looking = together
            while entered and looking:
                yield from self.patience.wait(clocks_of(entered), self.budget_s)
                looks = len(entered) * (2 if entered[0].candidate.then else 1)
                yield looks * (self.budget_s / 10 + 10e-6 * first.rough_us)
                begin = time.perf_counter()
                self._side_by_side(entered)
                looking = self._again(entered, begin)
            entered = [e for e in entered if not self._cut(e, incumbent_us)]
            if entered:
                self._join(entrants, min(entered, key=lambda e: e.worth_us))
        for turn in config_queue.as_compiled(late, until):
            yield 4 * cost + 20 * first.rough_us * 1e-6
            self._come_late(turn, entrants)
        left = self._left(late, entrants)
        while self.plan is None:
            yield from self.patience.wait(clocks_of(entrants), self.budget_s)
            yield 2 * self.budget_s + 10e-6 * sum(e.rough_us for e in entrants)
            begin = time.perf_counter()
            try:
                self._decide(entrants)
            except Failed as failure:
                entrants.remove(failure.entrant)
                self._refuse(failure.entrant.candidate, failure.reason)
                if failure.entrant is first:
                    return
                continue
            if self._again(entrants, begin):
                self.plan = None
            elif interference.any_slow(clocks_of(entrants)):
                self._doubt(entrants)
        self._note(left, UNFINISHED)

    def _come_late(self, turn: PendingConfig, entrants: list[Contender]) -> None:
        """Let a configuration compete whose kernels were compiled meanwhile."""
        incumbent_us = min(e.rough_us for e in entrants)
        entrant = None if self._wrong(turn.candidate) else self._enter(turn, incumbent_us, False)
        if entrant is not None and not self._cut(entrant, incumbent_us):
            self._join(entrants, entrant)

    def _left(self, late: Sequence[PendingConfig], entrants: Sequence[Contender]) -> set[str]:
        """The candidates of which something was not compiled in time; those with nothing else are refused."""
        left = {turn.candidate.id: turn.candidate for turn in late if not self._wrong(turn.candidate)}  # fmt: skip
        for id in left.keys() - self.evidence.keys() - {e.candidate.id for e in entrants}:
            self._refuse(left[id], "not measured")
        return set(left)

    def _wrong(self, candidate: Candidate) -> bool:
        held = self.evidence.get(candidate.id)
        return held is not None and held.reason.startswith("wrong")

    def _join(self, entrants: list[Contender], new: Contender) -> None:
        """Of a candidate's configurations the fastest competes."""
        before = next((e for e in entrants if e.candidate is new.candidate), None)
        if before is None:
            entrants.append(new)
        elif new.rough_us < before.rough_us:
            entrants[entrants.index(before)] = new
        self.evidence.pop(new.candidate.id, None)

    def _again(self, entrants: Sequence[Contender], begin: float) -> bool:
        """Whether a clock runs slow after a look that began then, and patience is left for another."""
        slow = interference.any_slow(clocks_of(entrants))
        return slow and self.patience.take(time.perf_counter() - begin)

    def _doubt(self, entrants: Sequence[Contender]) -> None:
        """Say by the evidence that the plan was made while a clock ran slow."""
        note = f"{DISTURBED}, both times" if self.known and self.known.disturbed else DISTURBED
        self._note({e.candidate.id for e in entrants if e.candidate.clock}, note)

    def _note(self, ids: set[str], note: str) -> None:
        """End the reason of these candidates' evidence with `note`."""
        assert self.plan is not None
        self.plan.evidence = [
            replace(e, reason=e.reason + note) if e.candidate in ids else e
            for e in self.plan.evidence
        ]

    @torch.no_grad()
    def _side_by_side(self, entered: list[Contender]) -> None:
        """The first look at a candidate's configurations, in rounds: what disturbs them for a moment disturbs none alone."""
        while entered:
            calls = {str(i): self._calls(e) for i, e in enumerate(entered)}
            for i, e in enumerate(entered):
                if e.candidate.then is not None:
                    calls[f"{i} and then"] = self._calls(e, e.candidate.then)
            budget_s = len(calls) * self.budget_s / 20
            try:
                times = self._device_samples(calls, self.device, budget_s, 5)
            except Failed as failure:
                entered.remove(failure.entrant)
                self._refuse(failure.entrant.candidate, failure.reason)
                continue
            for i, e in enumerate(entered):
                e.rough_us = times.quiet(str(i))
                if e.candidate.then is not None:
                    e.then_us = times.quiet(f"{i} and then")
            return

    def _runnable(self) -> list[Candidate]:
        """Candidates other than eager that this machine and key admit; the others leave a reason."""
        chosen = []
        for candidate in self.op.known:
            if candidate.id == EAGER or (self.background and not candidate.background):
                continue
            reason = candidate.unfit(self.key) or self._refused_before(candidate)
            if reason is None:
                chosen.append(candidate)
            else:
                self._refuse(candidate, reason)
        return chosen

    def _turns(self, candidate: Candidate) -> list[PendingConfig]:
        """The candidate's configurations; none, with the reason kept, where it fails to list them."""
        try:
            own = config_queue.listed(candidate, self.key, self.device)
        except BIND_ERRORS as problem:
            self._refuse(candidate, failure_reason(problem))
            return []
        if not own:
            self._refuse(candidate, "unsupported: it has no configuration for this key")
        return own

    def _refused_before(self, candidate: Candidate) -> str | None:
        for e in self.known.evidence if self.known else ():
            same = (e.candidate, e.source, e.status) == (candidate.id, candidate.source, "refused")
            lasting = e.reason.startswith(("wrong", "failed to compile"))
            if same and lasting and not e.reason.endswith(UNFINISHED):
                return e.reason
        return None

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        self.evidence[candidate.id] = refused(candidate, reason)

    def _enter(self, turn: PendingConfig, incumbent_us: float, together: bool) -> Contender | None:
        """Compile, check and roughly time one configuration; a failure leaves its reason. `together`: by single calls only."""
        candidate, config = turn.candidate, turn.config
        try:
            for job in turn.jobs:
                compile_pool.settle(job)
            with torch.no_grad():
                launch = candidate.bind(self.key, config, self.device)
                limit_us = CUT * max(incumbent_us, TOO_SHORT_US)
                verdict = self.checker.check(launch, limit_us, candidate.coarse(self.key))
                if not verdict:
                    self._refuse(candidate, verdict.reason or "wrong")
                    return None
                entrant = Contender(candidate, config, launch, verdict.error, 0.0)
                cut_us = self.checker.cut_us
                entrant.rough_us = cut_us or self._rough(entrant, incumbent_us, together)
        except BIND_ERRORS as problem:
            self._refuse(candidate, failure_reason(problem))
            return None
        return None if self._cut(entrant, max(incumbent_us, TOO_SHORT_US)) else entrant

    def _cut(self, entrant: Contender, incumbent_us: float) -> bool:
        """Whether it is so slow that it leaves at once."""
        if entrant.rough_us <= CUT * incumbent_us:
            return False
        reason = f"cut after one call: over {CUT:g} times the best"
        us = entrant.rough_us
        self.evidence.setdefault(entrant.candidate.id, measured(entrant, us, us, 1.0, reason))
        return True

    def _calls(self, entrant: Contender, then: Then = None) -> list[timer.Call]:
        """The entrant's calls as they are timed, maybe with what comes `then`; a failure or a refusal to serve names the entrant."""

        def call(args: list[Any]) -> None:
            try:
                outs = entrant.launch(*args)
            except BIND_ERRORS as problem:
                raise Failed(problem, entrant) from problem
            if outs is None:
                raise Failed("declined the key it was bound for", entrant)
            if then is not None:
                then(outs)

        return [functools.partial(call, s.fresh(self.op)) for s in self.timed]

    @torch.no_grad()
    def _rough(
        self, entrant: Contender, incumbent_us: float = math.inf, briefly: bool = False
    ) -> float:
        """One synchronised call, then, if it is in the running and not `briefly`, the median of a short loop on the device's clock."""
        calls = self._calls(entrant)
        single = min(timer.once(calls[0], self.device) for _ in range(3))
        if briefly or single > CUT * max(incumbent_us, TOO_SHORT_US):
            return single
        samples = self._device_samples({"one": calls}, self.device, self.budget_s / 20, 5)
        return samples.median("one")

    def _device_samples(
        self, calls: timer.Calls, device: torch.device, budget_s: float, rounds: int
    ) -> timer.Samples:
        return timer.device_samples(calls, device, budget_s, rounds, self.between)

    @torch.no_grad()
    def _decide(self, entrants: list[Contender]) -> None:
        order = list(self.op.candidates)
        head, rest = entrants[0], sorted(entrants[1:], key=lambda e: e.rough_us)
        near = nearest(rest, self.key)
        for late in (e for e in rest if e not in near):
            reason = "not among the fastest few of a first look"
            us = late.rough_us
            self.evidence[late.candidate.id] = measured(late, us, us, 0.1, reason)
        final = sorted([head, *near], key=lambda e: order.index(e.candidate.id))
        calls = {e.candidate.id: self._calls(e) for e in final}
        kind = self.device.type
        bounds = dict.fromkeys(calls, timer.KINSHIP[kind]) | {EAGER: timer.TOLERANCE[kind]}
        device, budget_s = self.device, self.budget_s
        device_times = timer.settled(self._device_samples, calls, device, budget_s, bounds)
        host_times = device_times
        if kind == "cuda":
            host_times = timer.settled(timer.host_samples, calls, device, budget_s / 3, bounds)
        device_us = {name: device_times.quiet(name) for name in calls}
        host_us = {name: host_times.quiet(name) for name in calls}
        waited = {name: max(device_us[name], host_us[name]) for name in calls}
        extra_us, note = self._recording_us(), ""
        if extra_us:
            note = f", {extra_us:.1f} us for the recording included"
            waited = {n: us + extra_us * (n != EAGER) for n, us in waited.items()}
        eager_pick = pick(final, waited, self.key, kind)
        captured_pick = pick(final, device_us, self.key, kind)
        for e in final:
            name = e.candidate.id
            over = waited[name] / waited[eager_pick.candidate.id]
            verdict = "chosen" if e is eager_pick else f"{over:.2f} times the chosen one{note}"
            spread = device_times.spread(name)
            self.evidence[name] = measured(e, device_us[name], host_us[name], spread, verdict)
        self.plan = Plan(
            key=self.key,
            eager=eager_pick.candidate.id,
            eager_config=dict(eager_pick.config),
            captured=captured_pick.candidate.id,
            captured_config=dict(captured_pick.config),
            evidence=[self.evidence[name] for name in order if name in self.evidence],
            versions=self.environment.versions(),
            measured=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def _recording_us(self) -> float:
        """What being recorded costs a candidate beyond torch.eager, which PyTorch records itself: half of it, as backward gains, too."""
        if self.key.direction != "forward" or self.device.type != "cpu":
            return 0.0
        return AUTOGRAD_OVERHEAD_US() / 2
