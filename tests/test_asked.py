"""What a model asks PyTorch about the state around a call is asked again at every later one: never the answer of the example."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.program.graphs import CallTape, Replay

from .test_capture import CUDA, DEVICE, PythonTape


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


ELSEWHERE = "cpu" if CUDA else "cuda"


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


class Box:
    """Holds a tensor."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Asking(nn.Module):
    """Ten times as much where the answer is yes."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question
        self.lin = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, box: Box | None = None) -> Tensor:
        y = F.relu(self.lin(x))
        if QUESTIONS[self.question][0](x):
            y = y * 10
        if box is not None:
            box.rows = y + box.rows
        return y


def captured(model: nn.Module) -> Any:
    fast = tensorlogic.capture(model)
    fast.tape = CallTape if CUDA else KernelTape
    with torch.no_grad():
        for _ in range(4):
            fast(some())
    assert fast.graphs == 1
    return fast


def optimized(model: nn.Module, *given: Any, training: bool = False) -> Any:
    with contextlib.nullcontext() if training else torch.no_grad():
        fast = tensorlogic.optimize(model, given, training=training)
    assert fast is not model, fast.report
    return fast


def replayed(model: nn.Module) -> Any:
    """A program as it would be on a GPU: what is recorded is replayed, and calls find the short way there."""
    fast, x = optimized(model, some()), some()
    program = fast._program
    if not CUDA:
        program.replay = Replay(program.function.run, [x], x.device, tape=PythonTape)  # type: ignore[arg-type]
        program.pointers = program._where()
    assert program.replay is not None
    with torch.no_grad():
        fast(x)
    return fast


PATHS: dict[str, Callable[[nn.Module], Any]] = {
    "traced": lambda m: optimized(m, some()),
    "objects": lambda m: optimized(m, some(), Box(torch.ones(4, 8, device=DEVICE))),
    "training": lambda m: optimized(m.requires_grad_(True), some(), training=True),
    "replayed": replayed,
    "captured": captured,
}


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("question", list(QUESTIONS))
def test_the_answer_is_todays(question: str, path: str, pays: None) -> None:
    _, around, make = QUESTIONS[question]
    model = Asking(question).to(DEVICE).eval()
    plain = copy.deepcopy(model)
    fast = PATHS[path](model)

    def same(x: Tensor) -> None:
        ones = [torch.ones(4, 8, device=DEVICE) for _ in range(2)]
        boxes = [(Box(rows),) if path == "objects" else () for rows in ones]
        ours, theirs = fast(x, *boxes[0]), plain(x, *boxes[1])
        if theirs.is_meta:
            assert ours.is_meta
            return
        torch.testing.assert_close(ours, theirs)
        if boxes[0]:
            torch.testing.assert_close(boxes[0][0].rows, boxes[1][0].rows)

    recorded = contextlib.nullcontext if path == "training" else torch.no_grad
    with recorded():
        for _ in range(3):
            same(some())
        x = make()
        for _ in range(4):  # as often as a new graph takes
            with around():
                same(x)
        same(some())


class Traced(nn.Module):
    """Does something else while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.lin(x))
        return y * 10 if torch.compiler.is_compiling() else y


@torch.no_grad()
@pytest.mark.parametrize("precision", [None, "f32"])
def test_who_asks_whether_it_is_traced_comes_back_as_it_was(
    precision: str | None, pays: None
) -> None:
    model, x = Traced().to(DEVICE).eval(), some()
    expected = model(x)
    if precision is not None:
        with pytest.raises(ValueError, match="not the model's"):
            tensorlogic.optimize(model, x, precision=precision)
        return
    fast = tensorlogic.optimize(model, x)
    assert fast.report.reason == "the graph's outputs are not the model's"
    assert torch.equal(fast(x), expected)


def test_nothing_is_asked_of_models_that_ask_nothing(pays: None) -> None:
    fast = optimized(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).requires_grad_(False).eval(), some()
    )
    assert fast._program.asks is None
    assert not fast._program.asked.looks
    assert fast._program((some(),), {}) is not tensorlogic.program.short.MISS  # recorded or not


@torch.no_grad()
def test_a_model_that_reads_a_gradient_comes_back_as_it_was_or_in_pieces(pays: None) -> None:
    model, x = Asking("has a gradient").to(DEVICE).eval(), with_gradient()
    fast = tensorlogic.optimize(model, x)
    for given in (x, some(), with_gradient()):
        torch.testing.assert_close(fast(given), Asking.forward(model, given))


class Scaled(nn.Module):
    """A weight that carries its scale, as quantised ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.lin.weight.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        scale: float = self.lin.weight.scale  # type: ignore[attr-defined]
        return F.relu(self.lin(x)) * scale


@torch.no_grad()
def test_attributes_of_weights_are_followed(pays: None) -> None:
    model, x = Scaled().to(DEVICE).eval(), some()
    for fast in (tensorlogic.optimize(model, x), captured(model)):
        for scale in (2.0, 3.0, 3):
            model.lin.weight.scale = scale  # type: ignore[assignment]
            torch.testing.assert_close(fast(x), Scaled.forward(model, x))


@torch.no_grad()
def test_advice_to_compilers_is_no_attribute(pays: None) -> None:
    fast, x = optimized(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).eval(), some()), some()
    x._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    assert fast._program((x,), {}) is not tensorlogic.program.short.MISS
    assert fast._program((flagged(),), {}) is tensorlogic.program.short.MISS


@torch.no_grad()
def test_precision_set_in_pytorchs_two_ways(pays: None) -> None:
    """PyTorch's own question raises then."""
    before = torch._C._get_fp32_precision_getter("cuda", "matmul")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        optimized(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).eval(), some())
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
