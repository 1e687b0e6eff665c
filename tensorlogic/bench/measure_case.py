"""Measuring one case: tune its key, check every implementation against float64, then time them side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..autotune import config_queue, measure_key, tune
from ..autotune.tune import Learned
from ..core import candidate_errors, dtypes, policy, tolerance
from ..core.candidate import EAGER
from ..core.key import Key
from ..core.op import Op
from ..dispatch import selector as dispatch_selector
from ..measure import timer
from ..plans import open_stores
from .cases import DROP, RECIPES, Case, Maker, Recipe, dropout_error, nbytes, shapes, transfer
from .result_file import OURS, Row, rounded

# inputs of more bytes than this exceed every cache, so one set of them is enough
ALONE = 1 << 28
Calls = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Effort:
    """How long a row is measured."""

    rounds: int
    budget_s: float


QUICK, FULL = Effort(11, 0.2), Effort(21, 0.5)


def meet(
    fn: Callable[..., Any], args: tuple[Any, ...], captured: bool = False
) -> list[tuple[Op, Key, torch.device]]:
    """The keys that one call meets, by making it; `captured`: as a CUDA graph records it."""
    met: list[tuple[Op, Key, torch.device]] = []
    seen = lambda *found: met.append(found)  # noqa: E731
    with policy.use(replace(policy.current(), tune="off", observer=seen, entries={})):
        if not captured:
            fn(*args)
            return met
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            fn(*args)
    return met


def inputs(case: Case, device: torch.device) -> list[tuple[Any, ...]]:
    """Sets of inputs that the calls walk through."""
    recipe, dtype = RECIPES[case.op], dtypes.DTYPES[case.dtype]
    first = recipe.inputs(case.size, Maker(dtype, device, case.seed))
    size = nbytes(first)
    seeds = range(case.seed + 1, case.seed + (1 if size > ALONE else timer.cold_sets(size, device)))
    return [first, *(recipe.inputs(case.size, Maker(dtype, device, seed)) for seed in seeds)]


@torch.no_grad()
def measured(case: Case, device: torch.device, effort: Effort) -> Row:
    """The row of a case; what cannot run here leaves its reason instead of times."""
    row = Row(case.id, case.category, case.op, case.detail, case.size, case.dtype)
    fill = _transfer if case.category == "transfer" else _operation
    try:
        fill(row, case, device, effort)
    except torch.OutOfMemoryError as problem:
        row.status, row.reason = "failed", f"out of memory: {_brief(problem)}"
        torch.cuda.empty_cache()  # does nothing where no GPU was used
    except candidate_errors.BIND_ERRORS as problem:
        row.status, row.reason = "failed", f"{type(problem).__name__}: {_brief(problem)}"
    return row


def _transfer(row: Row, case: Case, device: torch.device, effort: Effort) -> None:
    call, source = transfer(case, Maker(dtypes.DTYPES[case.dtype], device, case.seed))
    row.shapes, row.baselines = [list(source.shape)], ["eager"]
    moved = source.numel() * source.element_size()
    # over a bus once; in memory read and written
    row.bytes = float(moved if device.type != "cpu" else 2 * moved)
    if not torch.equal(call().cpu(), source.cpu()):
        row.status, row.reason = "refused", "wrong: the destination differs from the source"
        return
    row.candidate, row.error = "torch.eager", 0.0
    host = torch.device("cpu")  # the clock, for each is waited for
    times = timer.device_samples({"eager": [call]}, host, effort.budget_s, effort.rounds)
    row.device_us = rounded(times.values)


def _operation(row: Row, case: Case, device: torch.device, effort: Effort) -> None:
    recipe, sets = RECIPES[case.op], inputs(case, device)
    row.shapes = shapes(sets[0])
    tune.whole(recipe.ours, *sets[0])
    _choice(row, recipe, sets[0])
    calls = _right(row, recipe, recipe.baselines(device.type, dtypes.DTYPES[case.dtype]), sets[0])
    if row.status != "ok":
        return
    bound: dict[str, list[timer.Call]] = {name: [partial(fn, *args) for args in sets] for name, fn in calls.items()}  # fmt: skip
    times = timer.device_samples(bound, device, effort.budget_s, effort.rounds)
    row.device_us = rounded(times.values)
    if device.type == "cuda":
        times = timer.host_samples(bound, device, effort.budget_s / 2, effort.rounds)
        row.host_us = rounded(times.values)


@torch.no_grad()
def tuned(case: Case, device: torch.device) -> Learned | None:
    """Measure the keys of a case; None when its inputs do not fit (its row will say so)."""
    try:
        return tune.whole(RECIPES[case.op].ours, *inputs(case, device)[0])
    except torch.OutOfMemoryError:
        return None


def _choice(row: Row, recipe: Recipe, args: tuple[Any, ...]) -> None:
    """What serves the row's key, and everything known about it."""
    op, key, device = meet(recipe.ours, args)[0]
    decision = dispatch_selector.decide(op, key, device, policy.current())
    plan = open_stores.current(device).get(key)
    row.key, row.flops, row.bytes = key.text, op.flops(key), op.traffic(key)
    row.candidate, row.source = decision.eager[0], decision.source
    gpu = device.type == "cuda"
    row.captured = EAGER if gpu else ""  # a call that meets no key of ours is PyTorch's alone
    for met, its_key, _ in meet(recipe.ours, args, captured=gpu)[:1]:
        its = dispatch_selector.decide(met, its_key, device, policy.current()).captured[0]
        row.captured = its if met is op else f"{met.name} by {its}"
    row.evidence = [asdict(e) for e in plan.evidence] if plan else []


def _right(
    row: Row, recipe: Recipe, baselines: Calls, args: tuple[Any, ...]
) -> dict[str, Callable[..., Any]]:
    """Our call and PyTorch's, those whose results match; the row is refused when ours does not."""
    calls = {OURS: recipe.ours, **baselines}
    row.baselines = list(baselines)
    check = _masked if recipe.random else _compared
    for name, (reason, error) in check(calls, row.baselines[0], args).items():
        if name == OURS:
            row.error = error
            if reason is not None:
                row.status, row.reason = "refused", reason
        elif reason is not None:
            row.excluded[name] = reason
        elif row.eager_error is None or error < row.eager_error:
            row.eager_error = error
    row.baselines = [b for b in row.baselines if b not in row.excluded]
    return {name: fn for name, fn in calls.items() if name == OURS or name in row.baselines}


Checked = dict[str, tuple[str | None, float]]


def _compared(calls: Calls, literal: str, args: tuple[Any, ...]) -> Checked:
    """Each output against the literal composition in float64 and in the dtype itself, every element."""
    reference = calls[literal](*[tolerance.wide(a) if isinstance(a, Tensor) else a for a in args])
    plain = calls[literal](*args)
    found: Checked = {}
    for name, fn in calls.items():
        out = fn(*args)
        reason = tolerance.judge([out], [plain], [reference]).reason if name != literal else None
        found[name] = (reason, float(f"{tolerance.relative_error(out, reference):.3g}"))
    return found


def _masked(calls: Calls, literal: str, args: tuple[Any, ...]) -> Checked:
    """Dropout draws anew at each call, so it is looked at through a weight that changes nothing."""
    x, weight, bias = args
    unit = torch.eye(*weight.shape, dtype=weight.dtype, device=weight.device)
    through = torch.nn.Parameter(unit, requires_grad=False)
    found: Checked = {}
    for name, fn in calls.items():
        error, reason = dropout_error(fn(x, through, torch.zeros_like(bias)), x, DROP)
        found[name] = (reason, float(f"{error:.3g}"))
    return found


def kernels(cases: Sequence[Case], device: torch.device) -> list[Any]:
    """Compile jobs of all candidates that may serve these cases, for workers to begin with."""
    jobs: list[Any] = []
    for case in cases:
        if case.category == "transfer":
            continue
        recipe, maker = RECIPES[case.op], Maker(dtypes.DTYPES[case.dtype], device, case.seed)
        for op, key, where in meet(recipe.ours, recipe.inputs(case.size, maker)):
            if not measure_key.complete(op, open_stores.current(where).get(key), key):
                jobs += config_queue.kernels(op, key, where)
    return jobs


def _brief(problem: BaseException) -> str:
    return " ".join(str(problem).split())[:300]
