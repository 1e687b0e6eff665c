"""Measuring one key: every candidate is checked on fresh data, then timed in pairs, then judged; resumable step by step."""

from __future__ import annotations

import datetime
import functools
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import compiling, measure, numerics
from .op import EAGER, Candidate, Config, Launcher, Op, Outputs
from .plans import Environment, Evidence, Key, Plan, TensorSpec

LOG = logging.getLogger("tensorlogic")
CUT = 3.0  # a candidate this many times slower than the incumbent is dropped after one call
WHOLE_FLOPS = {
    "cuda": 4e12,
    "cpu": 4e10,
    "mps": 4e10,
}  # above it, float64 on everything costs more than the timing
FINALISTS = 4
BIND_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    NotImplementedError,
    ArithmeticError,
    LookupError,
    AttributeError,
)


@dataclass
class _Entrant:
    """A candidate with one of its configurations, checked and roughly timed."""

    candidate: Candidate
    config: Config
    launch: Launcher
    error: float
    rough_us: float


class InputSet:
    """Fresh random arguments for a key: same shapes, strides, dtypes and alignment, values that the op can bear."""

    def __init__(
        self, op: Op, key: Key, device: torch.device, seed: int, kind: str = "normal"
    ) -> None:
        generator = torch.Generator(device=device if device.type == "cuda" else "cpu").manual_seed(
            seed
        )
        scalars = dict(op.scalars(key))
        values: dict[str, Any] = {}
        for p in op.dynamic:
            if p.is_tensor:
                spec = key.spec(p.name)
                values[p.name] = (
                    None if spec is None else _sample(op, key, p.name, spec, device, generator)
                )
            else:
                values[p.name] = scalars[p.name]
        if op.prepare is not None:
            op.prepare(key, values)
        if kind == "stress" and op.stress is not None:
            op.stress(key, values)
        self.dynamic: list[Any] = [values[p.name] for p in op.dynamic]

    def fresh(self, op: Op) -> list[Any]:
        """The arguments with private copies of what the op updates in place."""
        return [
            a.clone() if p.name in op.mutates and a is not None else a
            for p, a in zip(op.dynamic, self.dynamic, strict=True)
        ]


def _sample(
    op: Op, key: Key, name: str, spec: TensorSpec, device: torch.device, generator: torch.Generator
) -> Tensor:
    own = op.sample(key, name, spec, device, generator)
    if own is not None:
        return own
    return strided(spec, device, lambda n, dtype: normal(n, dtype, device, generator))


def normal(
    count: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Tensor:
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
        return torch.randn(count, dtype=wide, device=device, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.rand(count, device=device, generator=generator) > 0.25
    return torch.randint(-4, 5, (count,), device=device, generator=generator).to(dtype)


def strided(spec: TensorSpec, device: torch.device, fill: Any) -> Tensor:
    """A tensor of the spec's shape, strides and alignment over storage from `fill(count, dtype)`; stride 0 stays stride 0."""
    dtype = numerics.DTYPES[spec.dtype]
    if 0 in spec.shape:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
    offset = spec.align // dtype.itemsize if spec.align < 16 else 0
    count = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)) + offset
    tensor: Tensor = fill(count, dtype)
    return tensor.as_strided(spec.shape, spec.stride, offset)


class Study:
    """Everything that happens between meeting a key and having a plan for it."""

    def __init__(
        self,
        op: Op,
        key: Key,
        device: torch.device,
        environment: Environment,
        known: Plan | None = None,
        budget_s: float = 0.3,
    ) -> None:
        self.op, self.key, self.device, self.environment, self.budget_s = (
            op,
            key,
            device,
            environment,
            budget_s,
        )
        self.evidence: dict[str, Evidence] = {}
        self.known = known
        self.plan: Plan | None = None
        self.pending: list[Any] = []  # compile jobs in worker processes

    def run(self) -> Plan | None:
        """All steps at once; None when the key cannot be measured (no memory for its inputs, say)."""
        for _ in self.steps():
            pass
        return self.plan

    def steps(self) -> Iterator[float]:
        """Run step by step; yields the seconds the next step is expected to take."""
        self.pending = [
            job
            for c in self._runnable()
            for config in c.configs(self.key)
            for job in c.jobs(self.key, config, self.device)
        ]
        compiling.submit(self.pending)
        eager = self.op.candidates[EAGER]
        try:
            begin = time.perf_counter()
            with torch.no_grad():
                self.checker = Checker(self.op, self.key, self.device)
            first = _Entrant(eager, {}, self.op.plain(self.key, self.device), 1.0, 0.0)
            first.rough_us = self._rough(first)
        except (torch.OutOfMemoryError, *BIND_ERRORS) as problem:
            LOG.info("tensorlogic: %s cannot be measured: %s", self.key.text, problem)
            return
        entrants = [first]
        cost = time.perf_counter() - begin
        for candidate in self._runnable():
            best: _Entrant | None = None
            for config in candidate.configs(self.key):
                yield cost + 10 * first.rough_us * 1e-6
                entrant = self._enter(candidate, config, min(e.rough_us for e in entrants))
                if entrant is not None and (best is None or entrant.rough_us < best.rough_us):
                    best = entrant
                if candidate.id in self.evidence and self.evidence[candidate.id].reason.startswith(
                    "wrong"
                ):
                    break
            if best is not None:
                entrants.append(best)
                self.evidence.pop(candidate.id, None)
        yield self.budget_s
        self._decide(entrants)

    def _runnable(self) -> list[Candidate]:
        """Candidates other than eager that this machine and key admit; the others leave a reason."""
        chosen = []
        for candidate in self.op.candidates.values():
            if candidate.id == EAGER:
                continue
            reason = (
                candidate.available(self.key.device)
                or candidate.supports(self.key)
                or self._refused_before(candidate)
            )
            if reason is None:
                chosen.append(candidate)
            else:
                self._refuse(candidate, reason)
        return chosen

    def _refused_before(self, candidate: Candidate) -> str | None:
        for e in self.known.evidence if self.known else ():
            if (
                e.candidate == candidate.id
                and e.status == "refused"
                and e.source == candidate.source
                and e.reason.startswith(("wrong", "failed to compile"))
            ):
                return e.reason
        return None

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        self.evidence[candidate.id] = Evidence(
            candidate=candidate.id,
            config={},
            status="refused",
            device_us=0.0,
            host_us=0.0,
            spread=0.0,
            error=0.0,
            reason=reason,
            source=candidate.source,
        )

    def _enter(self, candidate: Candidate, config: Config, incumbent_us: float) -> _Entrant | None:
        """Compile, check and roughly time one configuration; a failure leaves its reason."""
        try:
            for job in candidate.jobs(self.key, config, self.device):
                compiling.settle(job)
            with torch.no_grad():
                launch = candidate.bind(self.key, config, self.device)
                verdict = self.checker.check(launch)
                if not verdict:
                    self._refuse(candidate, verdict.reason or "wrong")
                    return None
                entrant = _Entrant(candidate, config, launch, verdict.error, 0.0)
                entrant.rough_us = self._rough(entrant, incumbent_us)
        except torch.OutOfMemoryError as problem:
            self._refuse(candidate, f"out of memory: {_brief(problem)}")
            return None
        except compiling.CompileFailure as problem:
            self._refuse(candidate, f"failed to compile: {_brief(problem)}")
            return None
        except BIND_ERRORS as problem:
            self._refuse(candidate, f"failed: {type(problem).__name__}: {_brief(problem)}")
            return None
        if entrant.rough_us > CUT * incumbent_us:
            self.evidence.setdefault(
                candidate.id,
                Evidence(
                    candidate=candidate.id,
                    config=dict(config),
                    status="measured",
                    device_us=entrant.rough_us,
                    host_us=entrant.rough_us,
                    spread=1.0,
                    error=entrant.error,
                    reason=f"cut after one call: over {CUT:g} times the best",
                    source=candidate.source,
                ),
            )
            return None
        return entrant

    def _calls(self, launch: Launcher) -> list[measure.Call]:
        return [functools.partial(launch, *s.fresh(self.op)) for s in self.checker.sets]

    @torch.no_grad()
    def _rough(self, entrant: _Entrant, incumbent_us: float | None = None) -> float:
        """One synchronised call, then, if it is in the running, the median of a short loop on the device's clock."""
        calls = self._calls(entrant.launch)
        calls[0]()
        single = min(measure.once(calls[0], self.device) for _ in range(2))
        if incumbent_us is not None and single > CUT * max(incumbent_us, 50.0):
            return single
        return measure.device_samples(
            {"one": calls}, self.device, self.budget_s / 20, rounds=5
        ).median("one")

    @torch.no_grad()
    def _decide(self, entrants: list[_Entrant]) -> None:
        order = list(self.op.candidates)
        head, rest = entrants[0], sorted(entrants[1:], key=lambda e: e.rough_us)
        for late in rest[FINALISTS:]:
            self._measured(
                late, late.rough_us, late.rough_us, 0.1, "not among the fastest few of a first look"
            )
        final = sorted([head, *rest[:FINALISTS]], key=lambda e: order.index(e.candidate.id))
        calls = {e.candidate.id: self._calls(e.launch) for e in final}
        device_times = measure.device_samples(calls, self.device, self.budget_s)
        host_times = device_times
        if self.device.type == "cuda":
            host_times = measure.host_samples(calls, self.device, self.budget_s / 3)
        device_us = {name: device_times.median(name) for name in calls}
        host_us = {name: host_times.median(name) for name in calls}
        waited = {name: max(device_us[name], host_us[name]) for name in calls}
        eager_pick, captured_pick = self._pick(final, waited), self._pick(final, device_us)
        for e in final:
            name = e.candidate.id
            verdict = (
                "chosen"
                if name == eager_pick.candidate.id
                else f"{waited[name] / waited[eager_pick.candidate.id]:.2f} times the chosen one"
            )
            self._measured(e, device_us[name], host_us[name], device_times.spread(name), verdict)
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

    def _measured(
        self, e: _Entrant, device_us: float, host_us: float, spread: float, reason: str
    ) -> None:
        self.evidence[e.candidate.id] = Evidence(
            candidate=e.candidate.id,
            config=dict(e.config),
            status="measured",
            device_us=round(device_us, 3),
            host_us=round(host_us, 3),
            spread=round(spread, 4),
            error=round(e.error, 3),
            reason=reason,
            source=e.candidate.source,
        )

    def _pick(self, final: Sequence[_Entrant], times: Mapping[str, float]) -> _Entrant:
        """The first in registration order that is within the tolerance of the fastest: eager unless beaten, ties the same every time."""
        best = min(times.values())
        limit = best * (1 + measure.TOLERANCE[self.device.type])
        return next(e for e in final if times[e.candidate.id] <= limit)


class Checker:
    """Inputs of one key with what the reference and eager PyTorch make of them; decides whether a launcher is right."""

    def __init__(self, op: Op, key: Key, device: torch.device) -> None:
        self.op, self.key = op, key
        seed = int.from_bytes(key.text.encode()[-6:], "little") & 0x7FFFFFFF
        self.sets = [InputSet(op, key, device, seed + i) for i in range(2)]
        self.probes = (
            [*self.sets]
            if op.stress is None
            else [*self.sets, InputSet(op, key, device, seed + 2, "stress")]
        )
        self.expected = [self._expect(s) for s in self.probes]

    def _expect(self, s: InputSet) -> tuple[Outputs, Outputs]:
        flags = self.op.namespace(self.key)
        plain_fn = self.op.baseline
        args = self.op.full(self.key, s.fresh(self.op))
        if plain_fn is not None:
            plain = plain_fn(*args)
        else:
            bound = self.op.candidates[EAGER].bind(
                self.key, {}, next(a.device for a in s.dynamic if isinstance(a, Tensor))
            )
            plain = bound(*s.fresh(self.op))
            assert plain is not None
        del flags
        return plain, self._reference(s)

    def _reference(self, s: InputSet) -> Outputs:
        precise = self.op.flops(self.key) <= WHOLE_FLOPS[self.key.device]
        widen = numerics.wide if precise else _single
        args = self.op.full(
            self.key, [widen(a) if isinstance(a, Tensor) else a for a in s.fresh(self.op)]
        )
        outs = self.op.reference(*args)
        return outs if isinstance(outs, tuple) else (outs,)

    def check(self, launch: Launcher) -> numerics.Verdict:
        """Run on every probe with poisoned memory; judge each output, and that earlier outputs were left alone."""
        worst, previous = 0.0, None
        for s, (plain, ref) in zip(self.probes, self.expected, strict=True):
            _poison(plain)
            outs = launch(*s.fresh(self.op))
            if outs is None:
                return numerics.Verdict("declined the key it was bound for", float("inf"))
            verdict = numerics.judge(_padded(outs, plain), plain, ref)
            if not verdict:
                return verdict
            if previous is not None and not _same(*previous):
                return numerics.Verdict(
                    "wrong: a later call changed an earlier output", float("inf")
                )
            previous = (outs, tuple(None if o is None else o.clone() for o in outs))
            worst = max(worst, verdict.error)
        return numerics.Verdict(None, worst)


def _padded(outs: Outputs, plain: Outputs) -> Outputs:
    return (*outs, *[None] * (len(plain) - len(outs)))


def _single(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() and t.dtype != torch.float64 else t


def _same(outs: Outputs, copies: Outputs) -> bool:
    return all(
        o is None or c is None or torch.equal(o.nan_to_num(), c.nan_to_num())
        for o, c in zip(outs, copies, strict=True)
    )


def _poison(plain: Outputs) -> None:
    """Leave NaN in the memory that outputs of these sizes will be given, so that an element nobody writes shows."""
    junk = [
        torch.full_like(p, float("nan")) for p in plain if p is not None and p.is_floating_point()
    ]
    del junk


def _brief(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]
