"""What tests of captured and optimised models share: stand-ins for CUDA graphs, what a model may ask PyTorch about its surroundings, models."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import tensorlogic
from tensorlogic.cuda_graphs import capture
from tensorlogic.cuda_graphs.captured_graph import CallTape
from tensorlogic.guards import errors

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
gradients = pytest.mark.skipif(not CUDA, reason="the graph of a backward pass is CUDA's")
ELSEWHERE = "cpu" if CUDA else "cuda"


class PythonTape:
    """Records a call, whose work counts as that of the first replay, if the same thread makes it; later ones make it again, into
    the same outputs."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.fn: Callable[[], Any] = lambda: None
        self.out: Any = None
        self.done: int | None = None  # the thread whose replay is yet to count what recording did

    def record(self, fn: Callable[[], Any]) -> Any:
        self.fn, self.grad, self.done = fn, torch.is_grad_enabled(), threading.get_ident()
        self.out = fn()
        return self.out

    def replay(self) -> None:
        done, self.done = self.done, None
        if done == threading.get_ident():
            return
        with torch.set_grad_enabled(self.grad):
            again = self.fn()
        with torch.no_grad():
            for old, new in zip(
                pytree.tree_leaves(self.out), pytree.tree_leaves(again), strict=True
            ):
                if isinstance(old, Tensor):
                    old.detach().copy_(new.detach())


class OpTape:
    """Replays ATen's operations on the memory that they were recorded on, as a graph does: no Python runs again."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.ops: list[Any] = []
        self.fresh = True  # recording has done the first replay's work

    def record(self, fn: Callable[[], Any]) -> Any:
        with _Recording(self.ops):
            return fn()

    def replay(self) -> None:
        if self.fresh:
            self.fresh = False
            return
        with torch.no_grad():
            for op, args, kwargs, outs in self.ops:
                for old, new in zip(outs, pytree.tree_leaves(op(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self, ops: list[Any]) -> None:
        super().__init__()
        self.ops = ops

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = fn(*args, **(kwargs or {}))
        with _disable_current_modes():  # the memory stays, whatever becomes of the tensors
            kept = pytree.tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, out))
        self.ops.append((fn, *kept[:2], pytree.tree_leaves(kept[2])))
        return out


class GradientTape(OpTape):
    """Replays all of what was recorded the first time, too, as what a backward pass is given was not known then."""

    def replay(self) -> None:
        self.fresh = False
        super().replay()


class Kernels(TorchDispatchMode):
    """Keeps every call of a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((fn, args, kwargs or {}, fn(*args, **(kwargs or {}))))
        return self.calls[-1][-1]


class KernelTape:
    """Stands for a CUDA graph: the kernels of a call with the arguments that they had, whatever Python would do today."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.calls: list[Any] = []
        self.done: int | None = None  # the thread whose replay is yet to count what recording did

    def record(self, fn: Callable[[], Any]) -> Any:
        with Kernels() as kernels:
            out = fn()
        self.calls, self.done = kernels.calls, threading.get_ident()
        return out

    @torch.no_grad()
    def replay(self) -> None:
        done, self.done = self.done, None
        again = [] if done == threading.get_ident() else self.calls
        for fn, args, kwargs, outs in again:
            new = pytree.tree_leaves(fn(*args, **kwargs))
            for old, value in zip(pytree.tree_leaves(outs), new, strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)


def captured(fn: Callable[..., Any], **options: Any) -> capture.Captured:
    made = tensorlogic.capture(fn, **options)
    made.tape = CallTape if CUDA else PythonTape
    return made


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).to(DEVICE)


def recorded(fn: Callable[..., Any], **options: Any) -> capture.Captured:
    made = tensorlogic.capture(fn, **options)
    made.tape = CallTape if CUDA else GradientTape
    return made


def optimized(model: nn.Module, *given: Any, training: bool = False) -> Any:
    with contextlib.nullcontext() if training else torch.no_grad():
        fast = tensorlogic.optimize(model, given, training=training)
    assert fast is not model, fast.report
    return fast


class Looking(nn.Module):
    """Looks at its own values, and asks what no graph foretells."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(x)))
        if x.abs().max() > 1e4:
            x = x.clamp(-1.0, 1.0)
        return x


class Layers(nn.Module):
    """Several of one form: Dynamo makes one graph, and hands it each layer's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Looking() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-4)


def served(fast: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether the program, and not the model's own code, serves a call."""
    return fast._program(args, kwargs) is not errors.MISS


def some() -> Tensor:
    return torch.randn(4, 8, device=DEVICE)


def flagged() -> Tensor:
    x = some()
    x.flag = True  # type: ignore[attr-defined]
    return x


def with_gradient() -> Tensor:
    x = some()
    x.grad = torch.ones_like(x)
    return x


@torch.inference_mode()
def lasting() -> Tensor:
    return some()


@torch.enable_grad()
def inner() -> Tensor:
    return some().requires_grad_() * 1


@contextlib.contextmanager
def switched(change: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    change(value)
    try:
        yield
    finally:
        change(before)


def determined(on: bool) -> None:
    torch.use_deterministic_algorithms(on, warn_only=True)


def autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("cpu", dtype)


#: what a model asks, and a call in which the answer is another
QUESTIONS: dict[str, tuple[Callable[[Tensor], bool], Callable[[], Any], Callable[[], Tensor]]] = {
    "gradients are recorded": (lambda x: torch.is_grad_enabled(), torch.enable_grad, some),
    "inference mode": (lambda x: torch.is_inference_mode_enabled(), torch.inference_mode, some),
    "autocast elsewhere": (
        lambda x: torch.is_autocast_enabled(ELSEWHERE),
        lambda: switched(lambda on: torch.set_autocast_enabled(ELSEWHERE, on), True, False),
        some,
    ),
    "autocast's dtype": (
        lambda x: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: switched(autocast_dtype, torch.float16, torch.bfloat16),
        some,
    ),
    "default dtype": (
        lambda x: torch.get_default_dtype() is torch.float64,
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
        some,
    ),
    "deterministic": (
        lambda x: torch.are_deterministic_algorithms_enabled(),
        lambda: switched(determined, True, False),
        some,
    ),
    "cuDNN's switch": (
        lambda x: torch.backends.cudnn.deterministic,
        lambda: torch.backends.cudnn.flags(deterministic=True),
        some,
    ),
    "attention's switch": (
        lambda x: torch.backends.cuda.flash_sdp_enabled(),
        lambda: switched(torch.backends.cuda.enable_flash_sdp, False, True),
        some,
    ),
    "precision": (
        lambda x: torch.get_float32_matmul_precision() == "high",
        lambda: switched(torch.set_float32_matmul_precision, "high", "highest"),
        some,
    ),
    "default device": (
        lambda x: torch.get_default_device().type == "meta",
        lambda: torch.device("meta"),
        some,
    ),
    "device of what is made": (
        lambda x: torch.ones(1).device.type == "meta",
        lambda: torch.device("meta"),
        some,
    ),
    "threads": (
        lambda x: torch.get_num_threads() == 1,
        lambda: switched(torch.set_num_threads, 1, torch.get_num_threads()),
        some,
    ),
    "wants a gradient": (
        lambda x: x.requires_grad,
        contextlib.nullcontext,
        lambda: some().requires_grad_(),
    ),
    "has a gradient": (lambda x: x.grad is not None, contextlib.nullcontext, with_gradient),
    "a leaf": (lambda x: x.is_leaf, contextlib.nullcontext, inner),
    "of inference mode": (lambda x: x.is_inference(), torch.no_grad, lasting),
    "negative bit": (lambda x: x.is_neg(), contextlib.nullcontext, lambda: torch._neg_view(some())),
    "offset": (
        lambda x: x.storage_offset() == 8,
        contextlib.nullcontext,
        lambda: torch.randn(5, 8, device=DEVICE)[1:],
    ),
    "an attribute": (lambda x: getattr(x, "flag", False), contextlib.nullcontext, flagged),
}
