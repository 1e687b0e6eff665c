"""Where a program's time goes: every ATen call with its arguments, and what a launch and fresh memory cost on this machine."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...measure import timer
from ...plans.environment import environment
from .remedies import LARGE

MOST = 200  # entries that are kept


@dataclass
class Spent:
    """Calls of one operation with one kind of arguments."""

    op: str
    shapes: str
    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0  # of the outputs
    dtypes: list[str] = field(default_factory=list)


class Profile(TorchDispatchMode):
    """Times every ATen call; on a GPU each is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.spent: dict[tuple[str, str], Spent] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        begin = time.perf_counter()
        out = func(*args, **(kwargs or {}))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        name, shapes = func.overloadpacket._qualified_op_name, _shapes(args)
        entry = self.spent.get((name, shapes))
        if entry is None:
            dtypes = list(dict.fromkeys(dtype_name(a) for a in _tensors(args)))
            entry = self.spent[name, shapes] = Spent(name, shapes, dtypes=dtypes)
            entry.bytes = sum(t.numel() * t.element_size() for t in _tensors((out,)))
        entry.calls += 1
        entry.seconds += seconds
        return out


def _tensors(args: Any) -> list[Tensor]:
    parts = [a if isinstance(a, (list, tuple)) else (a,) for a in args]
    return [t for part in parts for t in part if isinstance(t, Tensor)]


def dtype_name(t: Tensor) -> str:
    return str(t.dtype).removeprefix("torch.")


def _shapes(args: Any) -> str:
    return ", ".join(f"{dtype_name(t)}[{'x'.join(map(str, t.shape))}]" for t in _tensors(args))


def device() -> torch.device:
    """The current GPU where the program has used one, else the CPU."""
    used = torch.cuda.is_initialized()
    return torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")


@functools.cache
def launch(where: torch.device) -> float:
    """Microseconds that the smallest call of PyTorch costs its caller."""
    a = torch.ones(1, device=where)
    return timer.host_samples({"add": [lambda: a + a]}, where, 0.02).median("add")


@functools.cache
def fresh() -> float:
    """Microseconds that a MiB of fresh CPU memory costs beside a MiB that is reused."""
    x = torch.ones(16 << 18)
    out = torch.empty_like(x)
    calls: dict[str, list[timer.Call]] = {"fresh": [lambda: x + 1], "reused": [lambda: torch.add(x, 1, out=out)]}  # fmt: skip
    samples = timer.device_samples(calls, torch.device("cpu"), 0.1, rounds=7)
    return max(0.0, samples.median("fresh") - samples.median("reused")) / 16


def summed(profile: Profile) -> dict[str, Any]:
    """What a profile has seen, with the costs of this machine, as plain data."""
    spent = sorted(profile.spent.values(), key=lambda s: -s.seconds)
    where = device()
    return {
        "operations": sum(s.calls for s in spent),
        "spent": [asdict(s) for s in spent[:MOST]],
        "launch_us": launch(where),
        "fresh": fresh() if where.type == "cpu" and any(s.bytes >= LARGE for s in spent) else 0.0,
        "quick_halves": where.type == "cuda" or _bfloat16(),
        "environment": environment(where).to_json(),
    }


def _bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware."""
    probe = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return probe is not None and torch.backends.mkldnn.is_available() and bool(probe())
