"""The suite `precision`: what every way to compute a product costs, conversions, transfers and memory included, and its error."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..autotune import tune
from ..core import dtypes, tolerance
from ..core.candidate import EAGER
from ..core.key import Key
from ..core.numeric_mode import Mode, PrecisionWarning
from ..core.op import OPS, Op
from ..core.precision_policy import precision
from ..device_placement.placement import placement
from ..measure import timer
from ..memory import pool
from ..memory import transfer as memory_transfer
from ..mixed_precision import adaptive as mixed_precision_adaptive
from ..mixed_precision import candidate_order
from ..ops.matmul import matmul
from ..system import heap_trim
from . import machine_info
from .result_file import write_text
from .text_table import aligned

FORMAT = "tensorlogic precision"
SIZES = {"cpu": (512, 1000, 2048), "cuda": (4096, 1024, 8192, 1000, 2048)}
BESIDE = (1000,)  # sizes of a CPU that stands beside a GPU
MIXED = {"cpu": (512, 1000, 2048), "cuda": (1024, 4096)}
QUICK = {"cpu": (256, 512), "cuda": (1024, 4096)}
BUDGETS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
TRANSFERS = (16 << 20, 64 << 20, 256 << 20)
PLACED = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
FORMS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32, "f64": torch.float64}  # fmt: skip
# of which float32 and few budgets are measured, for the time it takes
LARGEST = 8192
FEW_BUDGETS = (1e-1, 1e-3, 1e-5, 1e-6)
PEAKS = "a GPU's allocations; a CPU's resident memory, the heap given back before"
SAMPLE = 64  # rows of the float64 reference


@dataclass
class Operands:
    """One square problem: operands, and rows of their product in float64."""

    a: Tensor
    b: Tensor
    rows: Tensor

    def error(self, c: Tensor) -> float:
        """Relative 2-norm of the error of those rows."""
        step = max(1, self.a.shape[0] // SAMPLE)
        return tolerance.relative_error(c[::step].to(self.rows.device), self.rows)


@lru_cache(maxsize=1)
def operands(n: int, dtype: torch.dtype, device: torch.device) -> Operands:
    """Normal values, the same on every device."""
    generator = torch.Generator().manual_seed(n)
    a, b = (torch.randn(n, n, generator=generator).to(dtype).to(device) for _ in range(2))
    step = max(1, n // SAMPLE)
    return Operands(a, b, a[::step].double() @ b.double())


def run(
    devices: list[torch.device],
    quick: bool,
    tick: Callable[[str], None] = lambda _: None,
    keep: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Everything; a dictionary that can be written as JSON, given to `keep` after every step."""
    found: dict[str, Any] = {
        "format": FORMAT,
        "schema": 1,
        "machine": machine_info.describe(devices[-1]),
        "before": machine_info.state(devices[-1]),
        "peaks": PEAKS,
        "strategies": [],
        "adaptive": [],
        "mixed": [],
        "transfers": [],
        "placement": [],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrecisionWarning)
        if devices[-1].type == "cuda":
            for nbytes in TRANSFERS[: 1 if quick else None]:
                tick(f"transfer {nbytes >> 20} MiB")
                found["transfers"].append(transfer(nbytes, devices[-1]))
            for n in PLACED[: 5 if quick else None]:
                tick(f"placement {n}")
                found["placement"].append(placed(n))
                keep(found)
        for device in reversed(devices):
            sizes = (QUICK if quick else SIZES)[device.type]
            for n in sizes if device == devices[-1] or quick else BESIDE:
                for dtype in (torch.float64, torch.float32)[n >= LARGEST :]:
                    tick(f"{device.type} {dtypes.NAMES[dtype]} {n}")
                    found["strategies"] += strategies(n, dtype, device)
                    keep(found)
                    tick(f"{device.type} {dtypes.NAMES[dtype]} {n} within budgets")
                    found["adaptive"] += adaptive(n, dtype, device)
                    keep(found)
                if quick or n in MIXED[device.type]:
                    tick(f"{device.type} {n} mixed")
                    found["mixed"].append(mixed(n, device))
    found["after"] = machine_info.state(devices[-1])
    return found


def _first(launch: Callable[..., Any], o: Operands) -> Any:
    return launch(o.a, o.b)[0]


def _ways(op: Op, o: Operands) -> Iterator[tuple[str, Callable[[], Any]]]:
    key = op.key((o.a, o.b, "none", False), "inference", "adaptive")
    for id, candidate in op.candidates.items():
        if candidate.unfit(key) is None:
            launch = candidate.bind(key, candidate.configs(key)[0], o.a.device)
            yield id, partial(_first, launch, o)


def strategies(n: int, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Every way on one problem, beside PyTorch's product in float32 and in float64."""
    o = operands(n, dtype, device)
    op = OPS["matmul"].precise
    assert op is not None
    single = (o.a.float(), o.b.float())
    double = (o.a.double(), o.b.double())
    calls: dict[str, Callable[[], Any]] = {
        "PyTorch f32": lambda: torch.matmul(*single),
        "PyTorch f64": lambda: torch.matmul(*double),
        **dict(_ways(op, o)),
    }
    rows = []
    errors, peaks = {}, {}
    for name, call in list(calls.items()):
        try:
            errors[name] = o.error(call())
            peaks[name] = _peak(call, device)
        except RuntimeError as problem:
            rows.append(_row(n, dtype, device, name, reason=str(problem)[:200]))
            del calls[name]
    times = timer.device_samples(
        {name: [call] for name, call in calls.items()}, device, 0.08 * len(calls), rounds=7
    )
    moved = _moved(o) if device.type == "cuda" else 0.0
    for name in calls:
        conversion = _conversion(name, o)
        us = times.median(name)
        rows.append(
            _row(
                n, dtype, device, name, us=us, spread=times.spread(name), conversion_us=conversion,
                transfer_us=moved, total_us=us + moved, peak_bytes=peaks[name], error=errors[name],
            )
        )  # fmt: skip
    return rows


def _row(
    n: int, dtype: torch.dtype, device: torch.device, name: str, **more: Any
) -> dict[str, Any]:
    about = {"size": n, "dtype": dtypes.NAMES[dtype], "device": device.type, "way": name}
    return about | {k: round(v, 9) if isinstance(v, float) else v for k, v in more.items()}


def _conversion(name: str, o: Operands) -> float:
    """Microseconds that PyTorch takes to convert both operands to the way's form: what a separate pass would cost."""
    form = "f64" if name == EAGER else name.split(".")[-1].split(" ")[-1].partition("_")[0]
    form = form.partition("x")[0]
    target = FORMS.get(form)
    if target is None or target == o.a.dtype or name.startswith("PyTorch"):
        return 0.0
    calls: dict[str, list[timer.Call]] = {"one": [lambda: (o.a.to(target), o.b.to(target))]}
    return timer.device_samples(calls, o.a.device, 0.03, rounds=5).median("one")


def _moved(o: Operands) -> float:
    """Microseconds to bring both operands from ordinary memory to the device, and the result back."""
    a, b = o.a.cpu(), o.b.cpu()

    def there() -> None:
        x, w = memory_transfer.to(a, o.a.device), memory_transfer.to(b, o.a.device)
        memory_transfer.to(x, "cpu")
        del w

    there()
    return min(timer.once(there, o.a.device) for _ in range(3))


def _peak(call: Callable[[], Any], device: torch.device) -> int:
    """Bytes that a call takes at most beside its operands, its result included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    pool.clear()
    # what C's heap keeps of earlier results would be taken again unseen
    heap_trim.give_back()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed
        return 0
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def adaptive(n: int, dtype: torch.dtype, device: torch.device) -> list[dict[str, Any]]:
    """Every budget: what it takes, device time beside PyTorch's own product, and what one who waits sees."""
    o = operands(n, dtype, device)
    op = OPS["matmul"].precise
    assert op is not None
    key = op.key((o.a, o.b, "none", False), "inference", "adaptive")
    with precision("adaptive", rtol=BUDGETS[0]):
        tune.whole(matmul, o.a, o.b)
    name = f"PyTorch {dtypes.NAMES[dtype]}"
    rows = []
    for rtol in BUDGETS if n < LARGEST else FEW_BUDGETS:
        with precision("adaptive", rtol=rtol):
            c = matmul(o.a, o.b)
            candidate = op.candidates[mixed_precision_adaptive.LAST[-1]]
            waited = timer.wall_samples(
                {name: lambda: torch.matmul(o.a, o.b), "ours": lambda: matmul(o.a, o.b)},
                device, 0.15, rounds=40,
            )  # fmt: skip
        chosen = dict(candidate_order.order(op, key, device, rtol))
        config = chosen.get(candidate) or candidate.configs(key)[0]
        launch = candidate.bind(key, config, device)
        calls: dict[str, list[timer.Call]] = {
            name: [lambda: torch.matmul(o.a, o.b)],
            "ours": [lambda: launch(o.a, o.b)],  # noqa: B023
        }
        watched = _watched(op, key, o, rtol)
        if watched is not None:
            calls["watched"] = [lambda: watched(o.a, o.b)]  # noqa: B023
        alone = timer.device_samples(calls, device, 0.05 * len(calls), rounds=7)
        rows.append(
            {
                "size": n, "dtype": dtypes.NAMES[dtype], "device": device.type, "rtol": rtol,
                "way": candidate.id, "error": o.error(c), "kept": o.error(c) <= rtol,
                "us": alone.median("ours"), "torch_us": alone.median(name),
                "speed": alone.ratio(name, "ours"),
                "wall_us": waited.median("ours"), "torch_wall_us": waited.median(name),
                "wall_speed": waited.ratio(name, "ours"),
            }
        )  # fmt: skip
        if watched is not None:
            rows[-1]["watched_us"] = alone.median("watched")
            rows[-1]["watched_speed"] = alone.ratio(name, "watched")
    return rows


def _watched(
    op: Op, key: Key, o: Operands, rtol: float
) -> mixed_precision_adaptive.Adaptive | None:
    """What serves such calls where the device itself looks at the data, so that it can be timed with the product."""
    made = mixed_precision_adaptive.Adaptive(op, key, o.a.device, rtol)
    made(o.a, o.b)
    return made if made.held is not None and made.held.watch is not None else None


def mixed(n: int, device: torch.device) -> dict[str, Any]:
    """float16 times float32 under "f32" and "f16", over the same product of operands converted before."""
    o = operands(n, torch.float32, device)
    half = o.a.half()
    wide = half.float()
    row: dict[str, Any] = {"size": n, "device": device.type}
    operands_of: dict[Mode, tuple[Tensor, Tensor]] = {"f32": (wide, o.b), "f16": (half, o.b.half())}
    for mode, ready in operands_of.items():
        with precision(mode):
            tune.whole(matmul, half, o.b)
            tune.whole(matmul, *ready)
            times = timer.device_samples(
                {
                    "mixed": [lambda: matmul(half, o.b)],
                    "ready": [lambda: matmul(*ready)],  # noqa: B023
                },
                device, 0.2, rounds=9,
            )  # fmt: skip
        row[mode] = times.ratio("mixed", "ready")
    return row


def transfer(nbytes: int, device: torch.device) -> dict[str, Any]:
    """GB/s of ordinary memory by `to` and by PyTorch, and of pinned memory, both ways: of the second of two transfers, and of one
    that comes after others, when threads are parked and caches hold something else."""
    host = torch.randint(0, 100, (nbytes // 4,), dtype=torch.int32).view(torch.float32)
    there, pinned = host.to(device), host.pin_memory()
    target = torch.empty_like(there)
    row: dict[str, Any] = {"bytes": nbytes}
    calls: dict[str, Callable[[], Any]] = {
        "up": lambda: memory_transfer.to(host, device),
        "up PyTorch": lambda: host.to(device),
        "up pinned": lambda: target.copy_(pinned, non_blocking=True),
        "down": lambda: memory_transfer.to(there, "cpu"),
        "down PyTorch": lambda: there.cpu(),
        "down pinned": lambda: pinned.copy_(there, non_blocking=True),
    }
    for suffix, again in (("", True), (" alone", False)):
        times = timer.wall_samples(calls, device, 2.0, rounds=15, again=again)
        for name in calls:
            if not suffix or name in ("up", "down"):
                row[name + suffix] = nbytes / times.median(name) / 1e3
    return row


def placed(n: int) -> dict[str, Any]:
    """Milliseconds of one float32 product of CPU tensors: placed, always here, always there; each after one of its own kind, for
    PyTorch's threads spin for a while after a product on the CPU, beside those that copy."""
    o = operands(n, torch.float32, torch.device("cpu"))

    def by(place: str) -> Callable[[], Any]:
        def call() -> Any:
            with placement(place):
                return matmul(o.a, o.b)

        return call

    calls = {"auto": by("auto"), "cpu": by("cpu"), "cuda": by("cuda")}
    for call in calls.values():
        for _ in range(8 if n <= 2048 else 4):
            call()
    rounds = 180 if n <= 2048 else 9  # a median of few wanders by more than what is asked
    times = timer.wall_samples(calls, torch.device("cuda"), 4.0, rounds=rounds, again=True)
    best = min(times.median("cpu"), times.median("cuda"))
    return {
        "size": n,
        **{k: times.median(k) / 1e3 for k in calls},
        "over_best": times.median("auto") / best,
    }


def table(found: dict[str, Any]) -> str:
    """The result as text."""
    blocks = []
    head = ["device", "size", "inputs", "way", "convert us", "transfer us", "run us", "total us", "peak MiB", "error"]  # fmt: skip
    lines = [
        [
            r["device"], r["size"], r["dtype"], r["way"], f"{r['conversion_us']:.1f}", f"{r['transfer_us']:.0f}",
            f"{r['us']:.1f}", f"{r['total_us']:.1f}", f"{r['peak_bytes'] / 2**20:.1f}", f"{r['error']:.1e}",
        ]
        for r in found["strategies"]
        if "us" in r
    ]  # fmt: skip
    blocks.append(_text(head, lines))
    head = ["device", "size", "inputs", "rtol", "way", "error", "us", "PyTorch us", "x PyTorch", "x, watched", "x, waiting"]  # fmt: skip
    lines = [
        [
            r["device"], r["size"], r["dtype"], f"{r['rtol']:.0e}", r["way"],
            f"{r['error']:.1e}" + ("" if r["kept"] else " beyond"), f"{r['us']:.1f}", f"{r['torch_us']:.1f}",
            f"{r['speed'][0]:.2f}", _ratio(r, "watched_speed"), f"{r['wall_speed'][0]:.2f}",
        ]
        for r in found["adaptive"]
    ]  # fmt: skip
    blocks.append(_text(head, lines))
    lines = [
        [r["device"], str(r["size"]), f"{r['f32'][0]:.2f}", f"{r['f16'][0]:.2f}"]
        for r in found["mixed"]
    ]
    blocks.append(_text(["device", "size", "f16 x f32 over converted, f32", "f16"], lines))
    if found["transfers"]:
        names = [k for k in found["transfers"][0] if k != "bytes"]
        lines = [
            [f"{r['bytes'] >> 20} MiB", *(f"{r[k]:.1f}" for k in names)] for r in found["transfers"]
        ]
        blocks.append(_text(["GB/s", *names], lines))
    if found["placement"]:
        lines = [
            [str(r["size"]), *(f"{r[k]:.3f}" for k in ("auto", "cpu", "cuda", "over_best"))]
            for r in found["placement"]
        ]
        blocks.append(_text(["placement, ms", "auto", "cpu", "cuda", "auto over best"], lines))
    return "\n\n".join(blocks)


def _ratio(row: dict[str, Any], name: str) -> str:
    return f"{row[name][0]:.2f}" if name in row else ""


def _text(head: list[str], lines: list[list[Any]]) -> str:
    cells = [head, *[[str(c) for c in line] for line in lines]]
    return aligned(cells, [name in ("device", "way", "inputs") for name in head])


def write(found: dict[str, Any], path: Path) -> None:
    """The result file."""
    write_text(path, json.dumps(found, indent=1) + "\n", "the result file")
