"""`placement`: CPU or GPU for tensors that lie on the CPU, by what transfers and runs have taken here."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core import policy as core_policy
from ..core import weight_cache
from ..core.op import Op
from ..dispatch import call_cache as dispatch_call_cache
from ..dispatch import dispatcher
from ..memory import transfer
from ..memory.unified import Unified
from ..plans import open_stores
from ..system import capture_state
from . import link_speed
from .timing_history import Trial

LOG = logging.getLogger("tensorlogic")
SMALL = 1 << 21  # operations below which no transfer pays
# a side that is expected to take so many times the other's time is not tried
HOPELESS = 3.0
MOST = 8192  # keys whose times are kept
_SAID: set[str] = set()
_TRIALS: dict[tuple[Any, ...], Trial] = {}


@core_policy.outside_of_graphs
def placement(device: str | torch.device | None = "auto") -> core_policy.Block:
    """Run our functions on the GPU or the CPU, whichever takes less time for tensors on the CPU, transfers included.

    "auto" expects times from this machine's transfers and plans, and then goes by what either side has taken for the same
    shapes, in three calls of each that has a chance. Both are timed again later on, within 5 % of the time spent there, and
    ever less often; never where a policy asks for reproducible results. Results come back to the CPU; `unified` tensors, parameters and
    declared constants stay on the device, so that a chain pays for them once (but those whose memory a NumPy array shares). Tensors on a GPU are computed there. Where no
    GPU is, or it runs out of memory, the CPU serves.

    Args:
        device: "auto", a device such as "cpu" or "cuda", or None to leave tensors where they are.

    Raises:
        ValueError: no such device on this machine.

    Example:
        >>> import torch, tensorlogic
        >>> with tensorlogic.placement("auto"):
        ...     y = tensorlogic.matmul(torch.ones(4, 4), torch.ones(4, 4))
        >>> y.device
        device(type='cpu')
    """
    chosen = None if device is None else str(device)
    if chosen is not None and chosen != "auto":
        try:
            place = torch.device(chosen)
        except RuntimeError as problem:
            raise ValueError(
                f"placement: device is {device!r}; 'auto', None or a device such as 'cuda' is required"
            ) from problem
        if not transfer.available(place.type):
            raise ValueError(
                f"placement: device is {device!r}, which is not there; use 'auto', or 'cpu'"
            )
    return core_policy.Block({"placement": chosen})


def call(op: Op, public: Callable[..., Any], given: Sequence[Any], where: Any = None) -> Any:
    """Serve a public call where it takes the least time; a unified argument makes the result unified.

    A call that stays on the CPU for good is made warm under `where`: the next one comes here no more.
    """
    policy = core_policy.current()
    inside = replace(policy, placement=None, entries={})
    if policy.observer is None:  # else it is made for this call alone
        inside = core_policy.interned(inside)
    together = any(isinstance(g, Unified) for g in given)

    def run(place: torch.device) -> Any:
        with core_policy.use(inside):
            return public(*[_moved(g, place) for g in given])

    plain = [g for g in given if isinstance(g, Tensor)]
    if any(t.device.type != "cpu" for t in plain):
        device = next(t.device for t in plain if t.device.type != "cpu")
        return Unified(run(device), made=True) if together else run(device)
    place, trial = _choose(op, policy.placement or "auto", given)
    if place.type == "cpu":
        out = trial.timed("cpu", lambda: run(place))
        if not together and trial.place is not None:
            _stay(policy, inside, where, plain, trial)
        return Unified(out, made=True) if together else out

    def there() -> Any:
        out = run(place)
        return out if together else _home(out)

    try:
        out = trial.timed("cuda", there)
    except (torch.OutOfMemoryError, torch.AcceleratorError) as problem:
        trial.note("cuda", math.inf)
        _say(
            f"tensorlogic: {op.name} could not run on {place} ({type(problem).__name__}); the CPU serves it"
        )
        out = run(torch.device("cpu"))
    return Unified(out, made=True) if together else out


def _stay(
    policy: core_policy.Policy,
    inside: core_policy.Policy,
    where: Any,
    tensors: Sequence[Tensor],
    trial: Trial,
) -> None:
    """Let calls like this one come by here no more, until both sides are due to be timed again."""
    known = [check for check, _ in policy.entries.get(where, ())]
    for check, run in inside.entries.get(where, ()):
        if not any(check is k for k in known) and check(*tensors):
            counted = run if trial.left == math.inf else _counted(run, policy, where, trial)
            dispatch_call_cache.keep(policy, where, check, counted)
            return


def _counted(
    run: Callable[..., Any], policy: core_policy.Policy, where: Any, trial: Trial
) -> Callable[..., Any]:
    def serve(*dynamic: Any) -> Any:
        trial.left -= 1
        if trial.left < 1:
            policy.entries.pop(where, None)
        return run(*dynamic)

    return serve


def _home(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.to("cpu") if out.requires_grad else transfer.to(out, "cpu")
    return out


def _moved(g: Any, place: torch.device) -> Any:
    """An argument on the device; copies of parameters and constants are kept while those do not change."""
    if isinstance(g, Unified):
        return g.on(place)
    if not isinstance(g, Tensor) or g.device.type == place.type:
        return g
    if g.requires_grad and torch.is_grad_enabled():
        return g.to(place)
    if _kept(g):
        return weight_cache.CACHE.get(
            g,
            f"on {place}",
            lambda t: transfer.to(t, place),
            lambda t: t.numel() * t.element_size(),
        )
    return transfer.to(g, place)


def _kept(g: Tensor) -> bool:
    """Whether copies of it on a device are kept: not where a NumPy array shares its memory, and may be written to."""
    return weight_cache.is_constant(g) and not transfer.shared(g)


def _choose(op: Op, asked: str, given: Sequence[Any]) -> tuple[torch.device, Trial]:
    """Where a call runs, and what that is to tell of the time it takes."""
    if asked != "auto":
        place = torch.device(asked)
        return place, Trial(place, math.inf)
    if capture_state.any_thread():
        return torch.device("cpu"), Trial()  # and nothing is learned of it
    key = _key(op, given)
    policy = core_policy.current()
    trial = _TRIALS.get(key)
    if trial is None:
        if len(_TRIALS) >= MOST:  # shapes without end: start again rather than grow
            _TRIALS.clear()
        trial = _TRIALS[key] = Trial()
    if trial.place is not None and policy.observer is None and not trial.due():
        return trial.place, trial
    place, final = _weighed(op, given, trial)
    if final and trial.place is None:
        trial.settle(place, policy.reproducible)
    return place, trial


def _weighed(op: Op, given: Sequence[Any], trial: Trial) -> tuple[torch.device, bool]:
    """Where a call runs, and whether enough were timed to stay there."""
    cpu = torch.device("cpu")
    if not torch.cuda.is_available() or op.mutates or op.baseline is not None:
        return cpu, True
    device = torch.device("cuda", torch.cuda.current_device())
    args = [g._copies[g._home][0] if isinstance(g, Unified) else g for g in given]
    work = _work(op, args)
    if work < SMALL and not any(isinstance(g, Unified) and g.has(device) for g in given):
        return cpu, True
    here, there, text = _expected(op, given, work, device)
    taken, trial.here, trial.work = trial.taken, here, work
    trial.likely = (
        math.inf if _columns(op, [a for a in args if isinstance(a, Tensor)]) is None else here
    )
    order = ("cuda", "cpu") if there < here else ("cpu", "cuda")
    near = trial.both or max(here, there) < HOPELESS * min(here, there)
    for side in order:
        if not trial.enough(side) and (
            side == order[0] or near or _disappointing(taken, here, there)
        ):
            _show(text, side, "expected" if side == order[0] else "to be timed")
            return (device if side == "cuda" else cpu), False
    best = min(taken, key=lambda side: min(taken[side]))
    times = ", ".join(f"{side} {min(t) * 1e6:.0f} us" for side, t in taken.items())
    _show(text, best, f"timed {times}")
    return (device if best == "cuda" else cpu), True


def _disappointing(taken: dict[str, list[float]], here: float, there: float) -> bool:
    """Whether the side that was tried took so long that the other one has a chance after all."""
    others = {"cpu": there, "cuda": here}
    return any(min(t) > others[side] / HOPELESS for side, t in taken.items())


def _work(op: Op, args: Sequence[Any]) -> float:
    """Operations of a call, roughly: twice the product of the first operand's elements and the columns of the result."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    columns = _columns(op, tensors)
    if columns is not None:
        return 2.0 * tensors[0].numel() * columns
    return float(sum(t.numel() for t in tensors))


def _columns(op: Op, tensors: Sequence[Any]) -> int | None:
    """Of a product's result: rows of a weight or of keys, columns of a second operand; None of anything else."""
    if len(tensors) < 2 or not (
        "matmul" in op.name or "linear" in op.name or op.name == "attention_scores"
    ):
        return None
    shape = tensors[1].shape
    if len(shape) < 2:
        return 1
    return int(shape[-1] if "matmul" in op.name else shape[-2])


def _expected(
    op: Op, given: Sequence[Any], work: float, device: torch.device
) -> tuple[float, float, str]:
    """Seconds on the CPU, seconds on the device with what must move, and the sum in words."""
    link = link_speed.link(device)
    moving = sum(_bytes_to_move(g, device) for g in given)
    out = 0 if any(isinstance(g, Unified) for g in given) else _out_bytes(op, given)
    here, run = work / link_speed.speed(torch.device("cpu")), work / link_speed.speed(device)
    there = link.seconds(moving) + run + link.seconds(out)
    text = (
        f"{op.name}: CPU {here * 1e6:.0f} us; {device} in {link.seconds(moving) * 1e6:.0f} + "
        f"run {run * 1e6:.0f} + out {link.seconds(out) * 1e6:.0f} us"
    )
    return here, there, text


def _bytes_to_move(g: Any, device: torch.device) -> int:
    if isinstance(g, Unified):
        return 0 if g.has(device) else g.shape.numel() * g.dtype.itemsize
    if not isinstance(g, Tensor):
        return 0
    kept = _kept(g) and weight_cache.CACHE.holds(g, f"on {device}")
    return 0 if kept else g.numel() * g.element_size()


def _out_bytes(op: Op, given: Sequence[Any]) -> int:
    tensors = [g for g in given if isinstance(g, (Tensor, Unified))]
    shape, size = tensors[0].shape, tensors[0].dtype.itemsize
    columns = _columns(op, tensors)
    return (shape.numel() if columns is None else shape[:-1].numel() * columns) * size


def _key(op: Op, given: Sequence[Any]) -> tuple[Any, ...]:
    """What the time depends on: operands, what is there already, and how products are to be computed."""
    policy = core_policy.current()
    parts: list[Any] = [op.name, policy.precision, policy.reproducible, torch.get_num_threads()]
    for g in given:
        if isinstance(g, Unified):
            parts.append((tuple(g.shape), g.dtype, tuple(d.type for d in g.devices)))
        elif isinstance(g, Tensor):
            parts.append((tuple(g.shape), g.stride(), g.dtype, _kept(g)))
        else:
            parts.append(g)
    return tuple(parts)


def _show(text: str, side: str, why: str) -> None:
    dispatcher.LAST_PLACEMENT.append(f"{text} -> {side} ({why})")
    del dispatcher.LAST_PLACEMENT[:-16]


def _say(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        LOG.warning(text)


def forget() -> None:
    """Forget what calls have taken, as a fresh process would."""
    _TRIALS.clear()


open_stores.ON_FORGET.append(forget)
dispatcher.PLACERS[Unified] = call
