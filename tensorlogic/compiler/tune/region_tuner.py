"""Which regions pay, and by which implementation: each is checked in higher precision, then timed against the original calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ...core.dtypes import NAMES
from ...core.key import Key
from ...core.op import Op
from ...core.rewrite_rule import Composite, Way
from ...core.tolerance import Verdict
from ...cuda_graphs import captured_graph
from ...dispatch import candidate_loading
from ...guards import tensor_tree
from ...guards.errors import first_line
from ...measure import timer
from ...system import compile_pool
from ..rewrite.matcher import Region
from ..runtime.codegen import Function
from ..trace import widening
from ..trace.graph_facts import last_uses
from ..trace.traced_graph import Trace
from ..verify import equivalence
from ..verify.whole_model import apart
from . import precompile
from .decision_store import Decision, Plans, Stored, evidence, planned, refused, slowness
from .region_graph import CHOSEN, PLAIN, Fragment, full, value_of, ways_of

HEATS = 3  # rounds in which all ways run
# of the fastest way's time that a way may take there to run in twice as many more
CLOSE = 1.2
# a replacement that takes more of the original's time is not worth having
LEAST_GAIN = 0.98
SHARE_S = {"cuda": 0.01}  # seconds that one implementation of one region is timed for
USUAL_SHARE_S = 0.02  # where no graph replay takes the noise away
FAILURES = (*captured_graph.FAILURES, IndexError)


class Judge:
    """Decides region by region; regions of the same calls, shapes, strides and dtypes are timed once."""

    def __init__(
        self,
        trace: Trace,
        device: torch.device,
        training: bool,
        deadline: float,
        end: float,
        stored: Stored,
    ) -> None:
        self.trace, self.device, self.training, self.stored = trace, device, training, stored
        self.deadline, self.end = deadline, end  # of what must be compiled first, and of the rest
        self.known: dict[Any, Decision] = {}
        self.passed: dict[tuple[str, str, frozenset[str]], Decision] = {}  # regions checked before
        # calls, and their way too inexact
        self.spoilt: list[tuple[frozenset[str], str | None]] = []
        self.writes = False
        self.late = False  # a region was not measured for want of time

    @compile_pool.awaited()
    def decide(self, regions: Sequence[Region], values: Mapping[str, Any]) -> dict[str, Decision]:
        """root -> decision for every region, in one walk over the original graph; `values` are its inputs and state."""
        passed = {r.root: self.passed.get((r.op, r.root, r.calls)) for r in regions}
        found = {root: d for root, d in passed.items() if d is not None}
        at = {r.root: r for r in regions if r.root not in found}
        with torch.no_grad():
            jobs = self._begun(at, regions, values)
            for waits in (False, True) if jobs else (True,):
                for region, env in self._walk(at, regions, values):
                    if waits or compile_pool.there(jobs.get(region.root, ())):
                        with compile_pool.no_new_compiles(self._hurries(region)):
                            found[region.root] = self._one(region, env)
                        self.passed[region.op, region.root, region.calls] = found[region.root]
                at = {root: r for root, r in at.items() if root not in found}
        compile_pool.drop(job for own in jobs.values() for job in own)
        return found

    def _hurries(self, region: Region) -> bool:
        """Whether what nobody has measured waits for no compiler any more: of what a composite's ways call, none was begun ahead."""
        within = region.node is not None and isinstance(region.node.target, Composite)
        return within or time.perf_counter() > self.deadline

    def _begun(
        self, at: Mapping[str, Region], regions: Sequence[Region], values: Mapping[str, Any]
    ) -> dict[str, list[Any]]:
        """root -> kernels that workers compile from here on; regions whose kernels are there are decided first."""
        if self.writes or not compile_pool.elsewhere():
            return {}
        candidate_loading.ready(self.device.type)
        served: dict[str, list[Any]] = {}
        tried: dict[str, list[Any]] = {}
        for region, env in self._walk(at, regions, values):
            found = self._keyed(region, env)
            if found is not None:
                served[region.root] = precompile.jobs(*found, self.device)
                rivals = precompile.rivals(*found, self.device)
                tried[region.root] = [j for _, own in rivals for j in own]
        compile_pool.begin(job for own in served.values() for job in own)
        compile_pool.submit(dict.fromkeys(job for own in tried.values() for job in own))
        return {root: [*own, *tried[root]] for root, own in served.items()}

    def _walk(
        self, at: Mapping[str, Region], regions: Sequence[Region], values: Mapping[str, Any]
    ) -> Iterator[tuple[Region, Mapping[str, Any]]]:
        """The regions of `at` in the order of the original graph, each with the values that its calls read."""
        env: dict[str, Any] = dict(values)
        if self.writes:  # each walk its own
            env |= apart({n: v for n, v in values.items() if isinstance(v, Tensor)})
        nodes = self.trace.calls
        # what a region reads stays until its last call
        ends = {name: r.root for r in regions for name in r.calls}
        last = last_uses(nodes, self.trace.outputs, ends)
        left = len(at)
        for node in nodes if at else ():
            equivalence.evaluate([node], env, self.trace.owner)
            if node.name in at:
                yield at[node.name], env
                left -= 1
                if left == 0:
                    return
            for done in last.get(node.name, ()):
                if done not in values:
                    env.pop(done, None)

    def forget(self, decision: Decision) -> None:
        """Check the regions again for which this stands: another way does by now."""
        self.passed = {k: d for k, d in self.passed.items() if d is not decision}

    def _one(self, region: Region, env: Mapping[str, Any]) -> Decision:
        nodes = [n for n in self.trace.graph.nodes if n.name in region.calls]
        inside = set(nodes)
        inputs = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
        values = [env[n.name] for n in inputs]
        key = (region.op, tuple(str(n.target) for n in nodes), _signature(region, env, self.trace))
        known = self.known.get(key)
        if known is not None and known.way is None:
            return known
        earlier = self.stored.region((*key, self.writes)) if known is None else None
        if earlier is not None and earlier.way is None:
            earlier.row.region = region.root
            return self.known.setdefault(key, earlier)
        if known is None and earlier is None and time.perf_counter() > self.end:
            self.late = True
            late = refused(region, "not measured: no time was left in budget_s", None)
            return self.known.setdefault(key, late)
        before = Function(nodes, [n.name for n in inputs], nodes[-1], {}, self.trace.owner)
        expected = Expected(nodes, before.inputs, nodes[-1].name, values, self.trace.owner)
        if known is not None:
            verdict = expected.judge(Fragment(region, known.way, env))
            known.row.error = max(known.row.error or 0.0, verdict.error)
            why = verdict.reason
            return known if why is None else refused(region, why, verdict.error)
        if earlier is not None and self._stands(region, earlier, env, expected):
            return self.known.setdefault(key, earlier)
        decision = self._measure(region, env, before, values, expected)
        self.known[key] = decision
        # timed: what was refused for its numbers may be asked again
        if decision.row.ratio is not None:
            decision.plans = self._plans(region, env)
            self.stored.keep_region((*key, self.writes), decision)
        return decision

    def _stands(
        self, region: Region, earlier: Decision, env: Mapping[str, Any], expected: Expected
    ) -> bool:
        """Whether what an earlier process found is right here, too; its times are taken as they are."""
        try:
            verdict = expected.judge(Fragment(region, earlier.way, env))
        except FAILURES:
            return False
        earlier.row.region, earlier.row.error = region.root, verdict.error
        return verdict.reason is None

    def _plans(self, region: Region, env: Mapping[str, Any]) -> Plans:
        """The key of a region's op, and when its plan was measured: another plan is a reason to decide anew."""
        found = self._keyed(region, env)
        return {} if found is None else {found[1].text: planned(found[1].text, self.device)}

    def _keyed(self, region: Region, env: Mapping[str, Any]) -> tuple[Op, Key] | None:
        """The op that stands for a region and its key here; None where none does."""
        assert region.node is not None
        op = getattr(region.node.target, "fused", None)
        if op is None:
            return None
        ready = region.node.target.__wrapped__(*(value_of(a, env) for a in region.node.args))  # type: ignore[union-attr]
        whole = (*ready, self.training) if op.gradient is not None else ready
        return op, op.key(whole, "forward" if self.training else "inference")

    def _measure(
        self,
        region: Region,
        env: Mapping[str, Any],
        before: Function,
        values: Sequence[Any],
        expected: Expected,
    ) -> Decision:
        """Check and time every way to run this region beside its original calls."""
        ready, reasons = {}, []
        for way in self._ways(region, env):
            decision = Decision(way.id if isinstance(way, Way) else way)
            if any(region.calls < calls and decision.way == w for calls, w in self.spoilt):
                reasons.append(f"{decision.way}: the whole model's error grew by it")
                continue
            try:
                fragment = Fragment(region, decision.way, env)
                verdict = expected.judge(fragment)
                if verdict:
                    fragment.arrive(self.training)
                    ready[decision.way or PLAIN] = (fragment, verdict.error)
                else:
                    reasons.append(f"{decision.way}: {verdict.reason}")
            except FAILURES as problem_:
                reasons.append(f"{decision.way}: {first_line(problem_)}")
        if not ready:
            return refused(region, "; ".join(reasons) or "nothing here can run it", None)
        calls: dict[str, list[Callable[[], Any]]] = {
            "before": [self._step(before, list(values))],
            **{name: [self._step(f.function, f.values)] for name, (f, _) in ready.items()},
        }
        samples = raced(calls, self.device)
        rows = {}
        for name, (fragment, error) in ready.items():
            candidate = next(iter(fragment.function.sites.chosen.values()), name)
            shown = candidate if name == CHOSEN else name
            rows[name] = evidence(region, name, shown, error, samples[name])
        best = min(ready, key=lambda n: (-len(samples[n].values[n]), samples[n].median(n)))
        limit = 1.03 if region.exact else LEAST_GAIN
        if slowness(rows[best]) > limit:
            return Decision(None, (), replace(rows[best], refused="does not pay"))
        paying = {name: row for name, row in rows.items() if slowness(row) <= limit}
        return Decision(best, tuple(ready), replace(rows[best]), paying)

    def _step(self, function: Function, values: Sequence[Any]) -> Callable[[], Any]:
        if not self.training:
            return lambda: function.run(*values)
        names = [n.removeprefix("port_") for n in function.inputs]
        leaves = [v if self._buffer(n) else _leaf(v) for n, v in zip(names, values, strict=True)]
        return stepping(lambda *given: function.run(*given), leaves)

    def _buffer(self, name: str) -> bool:
        """True for buffers and frozen parameters, which no gradient reaches."""
        found = self.trace.state.get(name)
        return found is not None and not found[1].requires_grad

    def _ways(self, region: Region, env: Mapping[str, Any]) -> Iterator[Way | str]:
        """Implementations worth trying: a composite's plain form and ways; an op's plan, or its candidates one by one."""
        node = region.node
        assert node is not None
        yield PLAIN if isinstance(node.target, Composite) else CHOSEN
        examples = full(node, lambda n: n.meta["val"])
        for way in ways_of(node.target):
            if self.training and not way.training:
                continue
            if self.writes and way.layout:
                continue  # another layout may copy where the graph writes into a view
            if way.supports(examples) is None:
                yield way
        candidate_loading.ready(self.device.type)
        found = self._keyed(region, env)
        if found is None:
            return
        for candidate, jobs in precompile.rivals(*found, self.device):
            if compile_pool.there(jobs) or time.perf_counter() < self.deadline:
                yield candidate.id


def stepping(run: Callable[..., Any], leaves: Sequence[Any]) -> Callable[[], Any]:
    """One run, with the backward pass that training adds for leaves that want gradients."""
    wrt = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]

    def forward() -> list[Tensor]:
        with torch.enable_grad():
            outs = tensor_tree.flat_values(run(*leaves))
            return [o for o in outs if isinstance(o, Tensor) and o.requires_grad]

    seeds = [torch.ones_like(o) for o in forward()] if wrt else []
    if not seeds:
        return lambda: run(*leaves)
    return lambda: torch.autograd.grad(forward(), wrt, seeds, allow_unused=True)


def raced(
    calls: dict[str, list[Callable[[], Any]]], device: torch.device
) -> dict[str, timer.Samples]:
    """way -> times of it and of what was before; on a CPU, where running them takes the time, losers leave early."""
    share = SHARE_S.get(device.type, USUAL_SHARE_S)
    if device.type != "cpu":
        return dict.fromkeys(calls, timer.device_samples(calls, device, share * len(calls)))
    return timer.elimination_rounds(calls, device, share, HEATS, CLOSE, "before")


@dataclass
class Expected:
    """The original's own outputs (names, nested as they like) and those in higher precision, with nothing dropped out."""

    nodes: Sequence[fx.Node]
    inputs: Sequence[str]
    outputs: Any
    values: Sequence[Any]
    owner: torch.nn.Module

    def __post_init__(self) -> None:
        names = self.inputs
        plain = {
            n: v.clone() if isinstance(v, Tensor) else v
            for n, v in zip(names, self.values, strict=True)
        }
        dtype = widening.wide_dtype(list(self.values))
        wide = {n: widening.widen(v, dtype) for n, v in zip(names, self.values, strict=True)}
        equivalence.evaluate(self.nodes, plain, self.owner)
        equivalence.evaluate(self.nodes, wide, self.owner, dtype)
        self.plain, self.wide = (
            pytree.tree_map(env.__getitem__, self.outputs) for env in (plain, wide)
        )

    def judge(self, fragment: Fragment) -> Verdict:
        """Compare what a replacement gives."""
        return equivalence.compare(fragment.run_checked(), self.plain, self.wide)


def _signature(region: Region, env: Mapping[str, Any], trace: Trace) -> Any:
    assert region.node is not None

    def of(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (tuple(value.shape), value.stride(), NAMES.get(value.dtype), value.requires_grad)
        return repr(value)

    return tuple(of(value_of(a, env)) for a in region.node.args)


def _leaf(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().clone().requires_grad_()
    return value
