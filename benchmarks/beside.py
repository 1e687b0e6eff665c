"""One model of the zoo: through `tensorlogic.optimize`, checked against higher precision, timed beside eager and torch.compile."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.inductor.background_compile import Later
from tensorlogic.compiler.trace.model_copies import fresh
from tensorlogic.compiler.trace.widening import widen
from tensorlogic.core.tolerance import chance
from tensorlogic.guards.tensor_tree import tensors_in
from tensorlogic.measure import timer

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.float16 if CUDA else torch.float32
PEER = "reduce-overhead" if CUDA else "default"
WORST = 1.5  # times eager's own error
SLOWER = 0.97  # of eager's speed, below which a model has come back slower
SHARE_S = 0.5  # for one comparison
PAUSE_S = 0.02  # between two calls while nothing else is to be done

Inputs = dict[str, Any]
Call = Callable[[], Any]


def onto(given: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs on the device, floating ones in `dtype`."""
    for t in tensors_in(given):
        t.data = (widen(t, dtype) if t.is_floating_point() else t).to(DEVICE)
    return given


def example(given: Inputs) -> Any:
    """As `optimize` takes them."""
    return (given["x"],) if "x" in given else given


def outputs(model: nn.Module, given: Inputs, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Every tensor that a call gives, on inputs of its own."""
    args, kwargs = fresh((), given, dtype)
    if "x" in kwargs:
        args, kwargs = (kwargs.pop("x"),), kwargs
    return tensors_in(model(*args, **kwargs))


def errors(outs: list[Tensor], refs: list[Tensor]) -> list[float]:
    """Relative errors of the outputs, infinite where they are not of the same kind."""
    if [t.shape for t in outs] != [t.shape for t in refs]:
        return [float("inf")] * len(refs)
    found = []
    for out, ref in zip(outs, refs, strict=True):
        if not ref.is_floating_point():
            found.append(0.0 if torch.equal(out, ref) else float("inf"))
        else:
            gap = (out.double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-30)
            found.append(gap.item())
    return found


def growth(ours: list[float], plain: list[float], refs: list[Tensor]) -> float:
    """The largest error over the model's own; those of outputs with few elements each over its own, as far as chance makes two
    such errors differ."""
    least, worst = torch.finfo(DTYPE).eps / 4, 0.0
    many = [(a, b) for a, b, r in zip(ours, plain, refs, strict=True) if chance(r.numel()) == 1]
    for a, b, r in zip(ours, plain, refs, strict=True):
        if chance(r.numel()) > 1:
            worst = max(worst, a / max(b, least) / chance(r.numel()))
    if many:
        worst = max(worst, max(a for a, _ in many) / max(least, *(b for _, b in many)))
    return worst


def worst_error(model: nn.Module, fast: nn.Module, given: list[Inputs]) -> float:
    """Of the outputs for each of the inputs, one after the other, over that of the model itself, both against float64."""
    twin = copy.deepcopy(model).double()
    if hasattr(twin, "config"):
        twin.config._experts_implementation = "eager"  # grouped products know no float64
    found = []
    for each in given:
        ref = outputs(twin, each, torch.float64)
        plain = errors(outputs(model, each), ref)
        found.append(growth(errors(outputs(fast, each), ref), plain, ref))
    return max(found)


def calling(model: Callable[..., Any], given: Inputs) -> Call:
    """A call as a user makes it; objects such as a cache, which grows, are its own, their tensors are not."""
    if not all(isinstance(v, (Tensor, bool, int)) for v in given.values()):
        held = {id(t): t for t in tensors_in(given)}
        return lambda: model(**copy.deepcopy(given, dict(held)))
    if "x" in given:
        return lambda: model(given["x"])
    return lambda: model(**given)


@contextlib.contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """What is timed has the device to itself, among the processes that share the lock."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        if CUDA:
            torch.cuda.synchronize()


def compared(record: dict[str, Any], calls: Mapping[str, Call], ours: str = "ours") -> None:
    """Times of all in the same rounds, and by what `ours` is faster."""
    samples = timer.wall_samples(calls, DEVICE, SHARE_S)
    record |= {f"{name}_us": samples.median(name) for name in calls}
    record["speed"] = samples.ratio("eager", ours)[0]
    best = min((n for n in calls if not n.startswith("ours")), key=samples.median)
    record["over_peer"] = samples.ratio(ours, best)


def waiting(fast: nn.Module) -> list[Later]:
    """Programs of a model, or of its graphs, with which Inductor may still compete."""
    program = fast.__dict__.get("_program")
    found = [p for piece in getattr(program, "pieces", ()) for p in piece.programs.values()]
    return [p for p in (program, *found) if isinstance(p, Later)]


@contextlib.contextmanager
def steady(fast: nn.Module) -> Iterator[None]:
    """What serves goes on serving meanwhile: nothing is compared in the middle of what is timed."""
    held = [(later, later.look_at) for later in waiting(fast)]
    for later, _ in held:
        later.look_at = 1 << 62
    try:
        yield
    finally:
        for later, at in held:
            later.look_at = max(at, later.calls + 1)


def waited(fast: nn.Module, call: Call, seconds: float, lock: Path | None) -> float:
    """Call until what competes in the background has been compared; how long that took, or infinity."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        if not waiting(fast):
            return time.perf_counter() - begin
        with alone(lock):
            for _ in range(20):
                call()
        time.sleep(PAUSE_S)
    return float("inf")


@torch.no_grad()
def tried(
    model: nn.Module,
    first: Inputs,
    second: Inputs,
    compiling: bool = False,
    wait_s: float = 0.0,
    lock: Path | None = None,
) -> dict[str, Any]:
    """One model's record.

    `compiling`: beside torch.compile, too. `wait_s`: seconds of calls for what competes in the background; what serves
    then is timed again. `lock`: a file that lets one process at a time use the device.
    """
    torch._dynamo.reset()
    model = model.to(DEVICE, DTYPE).eval()
    first, second = onto(first, DTYPE), onto(second, DTYPE)
    with alone(lock):
        begin = time.perf_counter()
        fast = tensorlogic.optimize(model, example(first))
        outputs(fast, first)
        ready = time.perf_counter() - begin
        report = fast.report
        record: dict[str, Any] = {"outcome": report.outcome, "reason": report.reason}
        record |= {"notes": report.notes, "regions": sum(r.count for r in report.regions)}
        record |= {"ops": sorted({r.op for r in report.regions})}
        record |= {"error_over_eager": worst_error(model, fast, [first, second, first])}
        record |= {"ready_s": ready, "speed": 1.0}
        calls = {"eager": calling(model, first)}
        if fast is not model:
            calls["ours"] = calling(fast, first)
            with steady(fast):
                compared(record, calls)
    if compiling:
        begin = time.perf_counter()
        peer = calling(torch.compile(model, mode=PEER, dynamic=False), first)
        try:
            for _ in range(3):
                peer()
            calls["compile"] = peer
        except Exception as problem:  # it cannot compile every model
            record["compile_error"] = f"{type(problem).__name__}: {problem}"[:300]
        record["compile_s"] = time.perf_counter() - begin
        with alone(lock), steady(fast):
            compared(record, calls, "ours" if fast is not model else "eager")
    if wait_s and waiting(fast):
        record["waited_s"] = waited(fast, calls["ours"], wait_s, lock)
        later: dict[str, Any] = {"outcome": report.outcome, "notes": report.notes[-1:]}
        with alone(lock), steady(fast):
            later["error_over_eager"] = worst_error(model, fast, [first, second])
            compared(later, calls)
        record["later"] = later
    return record


def right(record: Mapping[str, Any]) -> bool:
    """Whether a record says faster or as it was, and never wrong."""
    each = [record, *([record["later"]] if "later" in record else [])]
    return all(r["error_over_eager"] <= WORST and r["speed"] >= SLOWER for r in each)


def machine() -> str:
    """What the records are of."""
    if not CUDA:
        return f"{platform.processor()} {platform.machine()}"
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return f"{torch.cuda.get_device_name()}, driver {driver[0] if driver else 'unknown'}"
