"""tune: run something once, measure every key it meets, forward and backward, and remember."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec

import torch

from ..core import policy
from ..core.key import Key
from ..core.op import Op
from ..guards.tensor_tree import leaves_of
from ..measure import timer
from ..plans import open_stores
from ..plans.plan import Plan
from ..system import capture_state, compile_pool
from . import config_queue, measure_key, pair_tuning, tuner
from .pair_tuning import Met

P = ParamSpec("P")
KEY_S = 2.0  # what a key is to take, kernels' compilers included


@dataclass
class Learned:
    """What one call of `tune` measured."""

    plans: list[Plan] = field(default_factory=list)
    known: int = 0  # keys whose plans were complete already
    unmeasured: list[str] = field(default_factory=list)  # keys that could not be measured
    seconds: float = 0.0
    keys: list[Key] = field(default_factory=list)  # all that were met

    @property
    def unfinished(self) -> list[str]:
        """Keys of which kernels were still being compiled: `tune` again, and they are measured."""
        return [plan.key.text for plan in self.plans if plan.incomplete]

    def __str__(self) -> str:
        changed = sum(p.eager != "torch.eager" or p.captured != "torch.eager" for p in self.plans)
        text = f"{len(self.plans)} keys measured in {self.seconds:.1f} s, {changed} of them served by another candidate than torch.eager"
        text += f"; {self.known} known already" if self.known else ""
        text += f"; {len(self.unmeasured)} could not be measured" if self.unmeasured else ""
        late = len(self.unfinished)
        return text + (f"; kernels of {late} were still being compiled" if late else "")


def tune(fn: Callable[P, object], *example_inputs: P.args, **keywords: P.kwargs) -> Learned:
    """Run `fn(*example_inputs, **keywords)` once, measure every key it meets, forward and backward, and remember the choices.

    A key takes about two seconds at most: kernels whose compilers need longer are left for the next call, and `unfinished` says of which keys.

    Args:
        fn: a function or a torch.nn.Module. A backward pass inside it is seen; when it returns a tensor that requires
            gradients and runs no backward itself, one is run to meet the backward keys, and every `.grad` is left as it was.
        example_inputs, keywords: its arguments.

    Returns:
        What was learned; printing it gives one line.

    Raises:
        TypeError: fn is not callable. RuntimeError: called while a CUDA graph is being captured, under a policy that measures nothing, or
            under a trace, transform or mode of PyTorch (a default device is none).

    Example:
        >>> import torch, tensorlogic
        >>> x = torch.randn(8, 8)
        >>> learned = tensorlogic.tune(tensorlogic.add_relu, x, x + 1)
        >>> learned.unmeasured
        []
    """
    return _learn(fn, example_inputs, keywords, tuner.PROMPT_S)


def whole(fn: Callable[..., Any], *example_inputs: Any, **keywords: Any) -> Learned:
    """As `tune`, but every kernel that may serve is waited for, however long its compiler takes."""
    return _learn(fn, example_inputs, keywords, math.inf)


@compile_pool.awaited()
def _learn(
    fn: Callable[..., Any], inputs: tuple[Any, ...], keywords: dict[str, Any], prompt_s: float
) -> Learned:
    if not callable(fn):
        raise TypeError(
            f"tune: fn is {type(fn).__name__}; a function or a torch.nn.Module is required, then its arguments"
        )
    if capture_state.any_thread():
        raise RuntimeError("tune: a CUDA graph is being captured; call tune before the capture")
    if policy.current().reproducible:
        raise RuntimeError(
            "tune: the policy is deterministic or has a lockfile, under which nothing is measured; call tune outside it"
        )
    if not capture_state.can_call_now(torch.device("cpu")):
        raise RuntimeError(
            "tune: called while a trace, a transform of torch.func or a mode of PyTorch is active, where nothing is measured; "
            "call tune outside it"
        )
    begin = time.perf_counter()
    if torch.cuda.is_initialized():
        compile_pool.prepare()  # while `fn` runs
    met: dict[tuple[str, str], tuple[Op, Key, torch.device]] = {}

    def observe(op: Op, key: Key, device: torch.device) -> None:
        met.setdefault((str(device), key.text), (op, key, device))

    watching = replace(policy.current(), tune="off", observer=observe, entries={})
    with policy.use(watching):
        out = fn(*inputs, **keywords)
        _backward(out)
    learned = Learned()
    learned.keys = [key for _, key, _ in met.values()]
    keys = [(*own, d) for op, k, d in met.values() for own in ((op, k), *op.twins(k))]
    for op, key, device in keys:
        if not measure_key.complete(op, open_stores.current(device).get(key), key):
            near = measure_key.neighbour(op, key, device) if device.type == "cuda" else None
            compile_pool.submit(config_queue.kernels(op, key, device, near))
    measuring = time.perf_counter()
    measured = [met for met in keys if _measure(*met, learned, prompt_s)]
    if not open_stores.distributed():  # whose ranks' clocks differ
        _once_more(measured, learned, measuring)
        _together(keys, measured, learned)
    for device in {device for _, _, device in met.values()}:
        open_stores.current(device).flush()
        timer.give_back(device)
    for drop in open_stores.ON_TUNE:  # who asks for plans wants them used
        drop()
    policy.forget_entries()
    learned.seconds = time.perf_counter() - begin
    return learned


def _backward(out: Any) -> None:
    """Meet the backward keys of an output that still has its graph, leaving every `.grad` alone."""
    recorded = isinstance(out, torch.Tensor) and out.grad_fn is not None and out.requires_grad
    if recorded and out.is_floating_point() and (leaves := leaves_of(out)):
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)


def _measure(op: Op, key: Key, device: torch.device, learned: Learned, prompt_s: float) -> bool:
    """Whether a plan was measured, which is the last of those learned then."""
    store = open_stores.current(device)
    if measure_key.complete(op, store.get(key), key):
        learned.known += 1
        return False
    if open_stores.distributed():
        plan = measure_key.agreed(op, key, device, prompt_s)
    else:
        plan = measure_key.measured(op, key, device, prompt_s=prompt_s)
    if plan is None:
        learned.unmeasured.append(key.text)
        return False
    learned.plans.append(plan)
    return True


def _once_more(measured: Sequence[Met], learned: Learned, begin: float) -> None:
    """Measure those again whose kernels were still being compiled, in what the other keys have left of their time."""
    until = begin + KEY_S * len(learned.plans)
    for i, ((op, key, device), plan) in enumerate(zip(measured, learned.plans, strict=True)):
        prompt_s = until - time.perf_counter() - (KEY_S - tuner.PROMPT_S)
        if plan.incomplete and prompt_s > 0:
            again = measure_key.measured(op, key, device, prompt_s=min(prompt_s, tuner.PROMPT_S))
            learned.plans[i] = again or plan


def _together(keys: Sequence[Met], measured: Sequence[Met], learned: Learned) -> None:
    """Time forward and backward behind one another, where one of them was measured now and graphs take what is chosen for them."""
    place = {(device, key.text): i for i, (_, key, device) in enumerate(measured)}
    free = set(place)
    for forward, backward in pair_tuning.pairs(met for met in keys if met[2].type == "cuda"):
        device = forward[2]
        mine = {(device, forward[1].text), (device, backward[1].text)}
        if mine & free:
            here = {text for of, text in free if of == device}
            for plan in pair_tuning.settle(forward, backward, here):
                learned.plans[place[device, plan.key.text]] = plan
        free -= mine
