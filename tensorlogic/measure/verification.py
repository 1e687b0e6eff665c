"""Whether a launcher may stand for an op on one key: private random inputs, and what the reference and eager PyTorch make of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core import dtypes, tolerance, weight_cache
from ..core.candidate import EAGER, Launcher, Outputs
from ..core.key import Key, TensorSpec
from ..core.op import Op
from . import timer

# above it, float64 on everything costs more than the timing
WHOLE_FLOPS = {"cuda": 4e12, "cpu": 4e10, "mps": 4e10}
# sums that cancel: float32 in another order may be this much further off than eager
STRESS_SLACK = 8.0
Luck = Callable[[Tensor], float] | None  # of eager's errors: how far chance may go
# with a launcher that seems too slow, all its calls together
PATIENCE_US = 20_000.0


class InputSet:
    """Fresh random arguments for a key: same shapes, strides, dtypes and alignment, values that the op can bear."""

    def __init__(
        self, op: Op, key: Key, device: torch.device, seed: int, kind: str = "normal"
    ) -> None:
        drawn_on = device if device.type == "cuda" else torch.device("cpu")
        generator = torch.Generator(device=drawn_on).manual_seed(seed)
        values: dict[str, Any] = dict.fromkeys(p.name for p in op.dynamic) | dict(op.scalars(key))
        for p in op.tensors:
            if (spec := key.spec(p.name)) is not None:
                values[p.name] = _sample(op, key, p.name, spec, device, generator)
        if kind == "landmarks" and op.landmarks is not None:
            op.landmarks(key, values)
        if op.prepare is not None:
            op.prepare(key, values)
        self.lost = 0.0  # by an element, where it is a float32 sum in whatever order
        if kind == "stress" and op.stress is not None:
            self.lost = op.stress(key, values) or 0.0
        self.dynamic: list[Any] = [values[p.name] for p in op.dynamic]
        self._declare(op, key)

    def fresh(self, op: Op) -> list[Any]:
        """The arguments with private copies of what the op updates in place."""
        return [
            a.clone() if p.name in op.mutates and a is not None else a
            for p, a in zip(op.dynamic, self.dynamic, strict=True)
        ]

    def copy(self, op: Op, key: Key) -> InputSet:
        """The same values, strides and alignment in memory of their own."""
        other = object.__new__(InputSet)
        other.dynamic = [_copied(a) if isinstance(a, Tensor) else a for a in self.dynamic]
        other.lost = self.lost
        other._declare(op, key)
        return other

    def _declare(self, op: Op, key: Key) -> None:
        """Constant is what the key calls so: its derivatives are timed as kept, as they are in use."""
        for p, a in zip(op.dynamic, self.dynamic, strict=True):
            spec = key.spec(p.name) if p.is_tensor else None
            if isinstance(a, Tensor) and spec is not None and spec.constant:
                weight_cache.constant(a)

    def tensors(self, op: Op) -> dict[str, Tensor]:
        """The tensors that are present, by parameter."""
        pairs = zip(op.dynamic, self.dynamic, strict=True)
        return {p.name: a for p, a in pairs if isinstance(a, Tensor)}


def _copied(t: Tensor) -> Tensor:
    return _whole(t).clone().as_strided(t.size(), t.stride(), t.storage_offset())


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
    """Normal values; small whole numbers for integers, three quarters True for booleans. Drawn where the generator is."""
    how: dict[str, Any] = {"device": generator.device, "generator": generator}
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.is_complex or dtype == torch.float64 else torch.float32
        drawn = torch.randn(count, dtype=wide, **how)
    elif dtype == torch.bool:
        drawn = torch.rand(count, **how) > 0.25
    else:
        drawn = torch.randint(-4, 5, (count,), **how)
    return drawn.to(dtype).to(device)


def strided(spec: TensorSpec, device: torch.device, fill: Any) -> Tensor:
    """A tensor of the spec's shape, strides and alignment over storage from `fill(count, dtype)`; stride 0 stays stride 0."""
    dtype = dtypes.DTYPES[spec.dtype]
    if 0 in spec.shape:
        return torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=device)
    offset = spec.align // dtype.itemsize if spec.align < 16 else 0
    count = 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True)) + offset
    tensor: Tensor = fill(count, dtype)
    return tensor.as_strided(spec.shape, spec.stride, offset)


class Checker:
    """Inputs of one key with what the reference and eager PyTorch make of them; decides whether a launcher is right."""

    def __init__(self, op: Op, key: Key, device: torch.device, draw: int = 0) -> None:
        self.op, self.key, self.device = op, key, device
        seed = int.from_bytes(key.text.encode()[-6:], "little") + 3 * draw & 0x7FFFFFFF
        self.sets = [InputSet(op, key, device, seed + i) for i in range(2)]
        kinds = ["stress"] if op.stress is not None else []
        if op.landmarks is not None and key.device == "cpu":
            kinds.append("landmarks")
        self.probes = [*self.sets, *(InputSet(op, key, device, seed + 2, kind) for kind in kinds)]
        tensors = [s.tensors(op) for s in self.probes]
        self.originals = [{n: _bytes(t).clone() for n, t in s.items()} for s in tensors]
        self.expected = [self._expect(s) for s in self.probes]
        self.call_us = 0.0  # of the last call
        self.coarse = 0.0  # error that the launcher in hand is allowed
        self.luck: Luck = None  # beyond that, by chance
        self.cut_us = 0.0  # of the last checked launcher's calls, where it was cut

    def cold(self) -> list[InputSet]:
        """Sets to time with: the two that were checked, and as many copies as it takes to outgrow a GPU's cache."""
        plain, _ = self.expected[0]
        tensors = [*self.sets[0].tensors(self.op).values(), *plain]
        nbytes = sum(t.numel() * t.element_size() for t in tensors if t is not None)
        copies = timer.cold_sets(nbytes, self.device) - len(self.sets)
        return [*self.sets, *(self.sets[i % 2].copy(self.op, self.key) for i in range(copies))]

    def _expect(self, s: InputSet) -> tuple[Outputs, Outputs]:
        """What same-dtype eager PyTorch and the reference make of the inputs; what the op updates counts as output."""
        given = s.fresh(self.op)
        if self.op.baseline is not None:
            plain = self.op.baseline(*self.op.full(self.key, given))
        else:
            plain = self.op.candidates[EAGER].bind(self.key, {}, self.device)(*given)
        small = self.op.flops(self.key) <= WHOLE_FLOPS[self.key.device]
        widen = tolerance.wide if small or self.key.precision != "default" else _single
        wide = [widen(a) if isinstance(a, Tensor) else a for a in s.fresh(self.op)]
        outs = self.op.reference(*self.op.full(self.key, wide))
        ref = outs if isinstance(outs, tuple) else (outs,)
        return (*plain, *self._updated(given)), (*ref, *self._updated(wide))

    def _updated(self, given: Sequence[Any]) -> list[Tensor]:
        pairs = zip(self.op.dynamic, given, strict=True)
        return [a for p, a in pairs if p.name in self.op.mutates and a is not None]

    def check(
        self, launch: Launcher, limit_us: float = math.inf, coarse: float = 0.0, luck: Luck = None
    ) -> tolerance.Verdict:
        """Run on every probe with poisoned memory; judge what came out (`numerics.judge`), and that nothing else was touched.

        A launcher whose second call takes longer than `limit_us` is cut there: `cut_us` says how long that was.
        """
        worst, previous, fastest_us = 0.0, None, float("inf")
        self.cut_us = 0.0
        self.coarse, self.luck = coarse, luck
        for i in range(len(self.probes)):
            outs, verdict = self._probe(launch, i, i)
            fastest_us = min(fastest_us, self.call_us)
            if not verdict:
                return verdict
            if previous is not None and not _same(*previous):
                return _wrong("a later call changed an earlier output")
            previous = (outs, tuple(None if o is None else o.clone() for o in outs))
            worst = max(worst, verdict.error)
            if i == 1 and fastest_us > limit_us:
                fastest_us = self._warm_us(launch, fastest_us, limit_us)
                if fastest_us > limit_us:
                    self.cut_us = fastest_us
                    return tolerance.Verdict(None, worst)
        verdict = self._other_values(launch)
        return tolerance.Verdict(None, worst) if verdict else verdict

    def _warm_us(self, launch: Launcher, fastest_us: float, limit_us: float) -> float:
        """The fastest of `PATIENCE_US` more of calls: a checked call finds its memory cold, while eager was timed warm."""
        spent = fastest_us
        while fastest_us > limit_us and spent < PATIENCE_US:
            begin = time.perf_counter()
            launch(*self.sets[0].fresh(self.op))
            timer.synchronize(self.device)
            once = (time.perf_counter() - begin) * 1e6
            fastest_us, spent = min(fastest_us, once), spent + once
        return fastest_us

    def _probe(self, launch: Launcher, i: int, expected: int) -> tuple[Outputs, tolerance.Verdict]:
        """One call on the tensors of probe `i`, judged against what is expected of probe `expected`."""
        plain, ref = self.expected[expected]
        s = self.probes[i]
        given = s.fresh(self.op)
        _poison(plain)
        begin = time.perf_counter()
        outs = launch(*given)
        timer.synchronize(self.device)
        self.call_us = (time.perf_counter() - begin) * 1e6
        if outs is None:
            return (), tolerance.Verdict("declined the key it was bound for", float("inf"))
        outputs = len(plain) - len(self._updated(given))
        while len(outs) > outputs and outs[-1] is None:  # nothing to keep for backward after all
            outs = outs[:-1]
        judged = (*outs, *[None] * (outputs - len(outs)), *self._updated(given))
        slack, lost = STRESS_SLACK if expected > 1 else 1.0, self.probes[expected].lost
        verdict = tolerance.judge(judged, plain, ref, slack, self.coarse, luck=self.luck, lost=lost)
        if verdict and (reason := self._misuse(s, outs, plain, expected)):
            verdict = _wrong(reason)
        return outs, verdict

    def _misuse(self, s: InputSet, outs: Outputs, plain: Outputs, values: int) -> str | None:
        """An input written to (and mended here), or an output that shares memory with one although eager's does not."""
        inputs = s.tensors(self.op)
        for name, tensor in inputs.items():
            kept = self.originals[values][name]
            if name not in self.op.mutates and not torch.equal(_bytes(tensor), kept):
                _bytes(tensor).copy_(kept)
                return f"it changed its input {name}"
        memory = {_memory(t): name for name, t in inputs.items()}
        eagers = {_memory(t) for t in self.probes[values].tensors(self.op).values()}
        for index, (out, usual) in enumerate(zip(outs, plain, strict=False)):
            if out is None or usual is None or not out.numel() or _memory(usual) in eagers:
                continue
            if _memory(out) in memory:
                return f"output {index} shares memory with its input {memory[_memory(out)]}"
            if _differ(out, usual.stride()):
                return f"output {index} has strides {out.stride()}, eager's {usual.stride()}, on which compiled graphs rely"
        return None

    def _other_values(self, launch: Launcher) -> tolerance.Verdict:
        """The first probe's tensors with the second one's values: a result remembered by address shows."""
        inputs = self.probes[0].tensors(self.op)
        try:
            self._write(inputs, self.originals[1])
            return self._probe(launch, 0, 1)[1]
        finally:
            self._write(inputs, self.originals[0])

    def _write(self, inputs: dict[str, Tensor], values: dict[str, Tensor]) -> None:
        for name, tensor in inputs.items():
            _bytes(tensor).copy_(values[name])
            torch.autograd.graph.increment_version(tensor)


def _differ(out: Tensor, strides: tuple[int, ...]) -> bool:
    """True where the strides differ along a dimension of more than one element."""
    return any(n > 1 and a != b for n, a, b in zip(out.shape, out.stride(), strides, strict=True))


def _wrong(reason: str) -> tolerance.Verdict:
    return tolerance.Verdict(f"wrong: {reason}", float("inf"))


def _memory(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _whole(t: Tensor) -> Tensor:
    """All of the memory that t is a view of, in its dtype."""
    return t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)


def _bytes(t: Tensor) -> Tensor:
    """The same as bytes, which are equal where NaN is not."""
    return _whole(t).view(torch.uint8)


def _single(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() and t.dtype != torch.float64 else t


def _same(outs: Outputs, copies: Outputs) -> bool:
    pairs = [(o, c) for o, c in zip(outs, copies, strict=True) if o is not None and c is not None]
    return all(torch.equal(o.nan_to_num(), c.nan_to_num()) for o, c in pairs)


def _poison(plain: Outputs) -> None:
    """Leave NaN in the memory that outputs of these sizes will be given, so that an element nobody writes shows."""
    floating = [p for p in plain if p is not None and p.is_floating_point()]
    junk = [torch.full_like(p, math.nan) for p in floating]
    del junk
