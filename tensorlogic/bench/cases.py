"""What is measured: each operation of the benchmark, its inputs, our call, and PyTorch's ways to the same result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import reduce
from ..ops.attention_scores import attention_scores
from ..ops.dropout_linear import dropout_linear
from ..ops.gelu_linear import gelu_linear
from ..ops.layer_norm_linear import layer_norm_linear
from ..ops.linear import linear, linear_residual_relu
from ..ops.linear_batch_norm_relu import linear_batch_norm_relu
from ..ops.matmul import matmul
from ..ops.pointwise import add, add_relu, affine, gelu, mul, mul_relu, relu
from ..ops.softmax_cross_entropy import softmax_cross_entropy

Fn = Callable[..., Any]
# categories whose size is the side of a matrix; of "batch" it is a number of requests, of the
# others one of elements
SQUARE = ("matmul", "fusion")
CATEGORIES = ("matmul", "elementwise", "reduction", "activation", "transfer", "fusion", "batch")
DROP = 0.1  # of dropout_linear
HEADS, WIDTH = 4, 64  # of attention_scores
FEATURES = 1024  # of a request


class Maker:
    """Random inputs on one device, the same for the same seed."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype, self.device = dtype, device
        where = device if device.type == "cuda" else "cpu"
        self.generator = torch.Generator(where).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normally distributed, rounded from float32."""
        wide = torch.randn(shape, device=self.generator.device, generator=self.generator)
        return wide.mul_(scale).add_(mean).to(self.device, self.dtype)

    def weight(self, n: int, k: int) -> Tensor:
        """A parameter [N, K] whose products stay near 1."""
        return torch.nn.Parameter(self.normal(n, k, scale=k**-0.5), requires_grad=False)

    def positive(self, *shape: int) -> Tensor:
        """In [0.5, 1.5)."""
        wide = torch.rand(shape, device=self.generator.device, generator=self.generator)
        return wide.add_(0.5).to(self.device, self.dtype)

    def labels(self, classes: int, *shape: int) -> Tensor:
        """Class indices."""
        where = self.generator.device
        drawn = torch.randint(0, classes, shape, device=where, generator=self.generator)
        return drawn.to(self.device)


@dataclass(frozen=True)
class Recipe:
    """One operation: inputs for a size, our call, and PyTorch's calls, the literal one first; all take the inputs."""

    op: str
    category: str
    inputs: Callable[[int, Maker], tuple[Any, ...]]
    ours: Fn
    eager: Mapping[str, Fn]
    # PyTorch calls that only GPUs have, half precision only
    gpu: Mapping[str, Fn] = field(default_factory=dict)
    random: bool = False  # draws its own mask, so outputs of two calls differ

    def baselines(self, device: str, dtype: torch.dtype) -> dict[str, Fn]:
        """PyTorch's calls on this kind of device, the literal composition first."""
        half = dtype in (torch.float16, torch.bfloat16)
        return dict(self.eager) | (dict(self.gpu) if device == "cuda" and half else {})


def _linear_inputs(n: int, m: Maker) -> tuple[Any, ...]:
    return m.normal(n, n), m.weight(n, n), m.normal(n)


def _norm_inputs(n: int, m: Maker) -> tuple[Any, ...]:
    x, gamma, beta = m.normal(n, n), m.normal(n, scale=0.1, mean=1.0), m.normal(n, scale=0.1)
    return x, gamma, beta, m.weight(n, n), m.normal(n)


def _batch_norm_inputs(n: int, m: Maker) -> tuple[Any, ...]:
    mean, var = m.normal(n, scale=0.1), m.positive(n)
    gamma, beta = m.normal(n, scale=0.1, mean=1.0), m.normal(n, scale=0.1)
    return (*_linear_inputs(n, m), mean, var, gamma, beta)


def _attention_inputs(n: int, m: Maker) -> tuple[Any, ...]:
    return m.normal(1, HEADS, n, WIDTH), m.normal(1, HEADS, n, WIDTH), WIDTH**-0.5


def _pair(n: int, m: Maker) -> tuple[Any, ...]:
    return m.normal(n, n), m.normal(n, n)


def _two(n: int, m: Maker) -> tuple[Any, ...]:
    return m.normal(n), m.normal(n)


def _one(n: int, m: Maker) -> tuple[Any, ...]:
    return (m.normal(n),)


def _tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _batch_norm(z: Tensor, mean: Tensor, var: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.batch_norm(z, mean, var, gamma, beta, False, 0.0, 1e-5)


def _addmm_relu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch._addmm_activation(b, x, w.t(), use_gelu=False)


PLAIN = (
    Recipe("matmul", "matmul", lambda n, m: (m.normal(n, n), m.normal(n, n, scale=n**-0.5)), matmul, {"eager": torch.matmul}),
    Recipe("add", "elementwise", _two, add, {"eager": torch.add}),
    Recipe("mul", "elementwise", _two, mul, {"eager": torch.mul}),
    Recipe("sum", "reduction", _one, reduce.sum, {"eager": torch.sum}),
    Recipe("relu", "activation", _one, relu, {"eager": torch.relu}),
    Recipe("gelu", "activation", _one, gelu, {"eager": F.gelu}),
)  # fmt: skip

FUSED = (
    Recipe("linear", "fusion", _linear_inputs, lambda x, w, b: linear(x, w, b, activation="relu"), {
        "separate": lambda x, w, b: torch.relu(torch.add(torch.matmul(x, w.t()), b)),
        "linear, relu": lambda x, w, b: torch.relu(F.linear(x, w, b)),
        "addmm, relu_": lambda x, w, b: torch.addmm(b, x, w.t()).relu_(),
    }, {"_addmm_activation": _addmm_relu}),
    Recipe("linear_residual_relu", "fusion", lambda n, m: (*_linear_inputs(n, m), m.normal(n, n)), linear_residual_relu, {
        "separate": lambda x, w, b, r: torch.relu(torch.add(torch.add(torch.matmul(x, w.t()), b), r)),
        "linear, add, relu": lambda x, w, b, r: torch.relu(F.linear(x, w, b) + r),
        "addmm, add_, relu_": lambda x, w, b, r: torch.addmm(b, x, w.t()).add_(r).relu_(),
    }),
    Recipe("gelu_linear", "fusion", _linear_inputs, gelu_linear, {
        "separate": lambda x, w, b: torch.add(torch.matmul(_tanh(x), w.t()), b),
        "gelu, linear": lambda x, w, b: F.linear(_tanh(x), w, b),
    }),
    Recipe("linear_batch_norm_relu", "fusion", _batch_norm_inputs, linear_batch_norm_relu, {
        "separate": lambda x, w, b, *s: torch.relu(_batch_norm(torch.add(torch.matmul(x, w.t()), b), *s)),
        "linear, batch_norm, relu_": lambda x, w, b, *s: _batch_norm(F.linear(x, w, b), *s).relu_(),
    }),
    Recipe("dropout_linear", "fusion", _linear_inputs, lambda x, w, b: dropout_linear(x, w, b, p=DROP), {
        "separate": lambda x, w, b: torch.add(torch.matmul(F.dropout(x, DROP), w.t()), b),
        "dropout, linear": lambda x, w, b: F.linear(F.dropout(x, DROP), w, b),
    }, random=True),
    Recipe("layer_norm_linear", "fusion", _norm_inputs, layer_norm_linear, {
        "separate": lambda x, g, s, w, b: torch.add(torch.matmul(F.layer_norm(x, x.shape[-1:], g, s), w.t()), b),
        "layer_norm, linear": lambda x, g, s, w, b: F.linear(F.layer_norm(x, x.shape[-1:], g, s), w, b),
    }),
    Recipe("softmax_cross_entropy", "fusion", lambda n, m: (m.normal(n, n), m.labels(n, n)), softmax_cross_entropy, {
        "separate": lambda x, t: F.nll_loss(torch.log_softmax(x, 1), t), "cross_entropy": F.cross_entropy,
    }),
    Recipe("attention_scores", "fusion", _attention_inputs, attention_scores, {
        "separate": lambda q, k, scale: torch.softmax(torch.mul(torch.matmul(q, k.mT), scale), -1),
        "matmul, mul_, softmax": lambda q, k, scale: torch.softmax(torch.matmul(q, k.mT).mul_(scale), -1),
        "mul, matmul, softmax": lambda q, k, scale: torch.softmax(torch.matmul(q * scale, k.mT), -1),
    }),
    Recipe("add_relu", "fusion", _pair, add_relu, {
        "separate": lambda a, b: torch.relu(torch.add(a, b)), "add, relu_": lambda a, b: torch.add(a, b).relu_(),
    }),
    Recipe("mul_relu", "fusion", _pair, mul_relu, {
        "separate": lambda a, b: torch.relu(torch.mul(a, b)), "mul, relu_": lambda a, b: torch.mul(a, b).relu_(),
    }),
    Recipe("affine", "fusion", lambda n, m: (m.normal(n, n), m.normal(n), m.normal(n)), affine, {
        "separate": lambda x, s, b: torch.add(torch.mul(x, s), b), "addcmul": lambda x, s, b: torch.addcmul(b, x, s),
    }),
)  # fmt: skip

REQUESTS = Recipe(
    "requests", "batch",
    lambda n, m: (m.normal(n, FEATURES), m.weight(FEATURES, FEATURES), m.normal(FEATURES)),
    FUSED[0].ours, {name: FUSED[0].eager[name] for name in ("separate", "linear, relu")},
)  # fmt: skip

RECIPES: dict[str, Recipe] = {r.op: r for r in (*PLAIN, *FUSED, REQUESTS)}
TRANSFERS = {  # detail of a transfer by kind of device
    "cpu": ("copy", "clone"),
    "cuda": ("to device, pageable", "to device, pinned", "to host, pageable", "to host, pinned"),
    "mps": ("to device, pageable", "to host, pageable"),
}


@dataclass(frozen=True)
class Case:
    """One row to measure."""

    category: str
    op: str
    size: int
    dtype: str
    device: str
    detail: str = ""

    @property
    def id(self) -> str:
        """What tells rows of a result file apart, and matches those of two files."""
        parts = (self.category, self.op, self.detail, str(self.size), self.dtype)
        return " ".join(filter(None, parts))

    @property
    def seed(self) -> int:
        """Of the inputs, the same in every run."""
        return sum(i * byte for i, byte in enumerate(self.id.encode(), 1)) & 0x7FFFFFFF


def transfer(case: Case, m: Maker) -> tuple[Callable[[], Tensor], Tensor]:
    """A transfer that is waited for and returns the destination, and its source."""
    source = m.normal(case.size)
    if case.detail == "clone":
        return source.clone, source
    if case.detail == "copy":
        return _moving(torch.empty_like(source), source), source
    pinned = case.detail.endswith("pinned")
    host = torch.empty(source.shape, dtype=source.dtype, pin_memory=pinned)
    if case.detail.startswith("to host"):
        return _moving(host, source), source
    return _moving(torch.empty_like(source), host.copy_(source)), host


def _moving(destination: Tensor, source: Tensor) -> Callable[[], Tensor]:
    devices = {destination.device.type, source.device.type}
    waits = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize}
    synchronize = next((wait for kind, wait in waits.items() if kind in devices), None)

    def call() -> Tensor:
        destination.copy_(source, non_blocking=True)
        if synchronize is not None:
            synchronize()
        return destination

    return call


def nbytes(args: tuple[Any, ...]) -> int:
    """Bytes of all tensors among the arguments."""
    return sum(a.numel() * a.element_size() for a in args if isinstance(a, Tensor))


def shapes(args: tuple[Any, ...]) -> list[list[int]]:
    """Of the tensors among the arguments."""
    return [list(a.shape) for a in args if isinstance(a, Tensor)]


def dropout_error(out: Tensor, x: Tensor, p: float) -> tuple[float, str | None]:
    """Of dropout(x) itself: each element must be 0 or x / (1 - p), the kept share 1 - p within five deviations."""
    wide, given = out.double(), x.double() / (1 - p)
    kept = wide != 0
    miss = torch.where(kept, wide - given, 0.0)
    error = (miss.norm() / given.norm()).item()
    share, slack = kept.double().mean().item(), 5 * math.sqrt(p * (1 - p) / x.numel()) + 1e-3
    if not math.isfinite(error) or error > 4 * torch.finfo(out.dtype).eps:
        return error, f"wrong: an element is neither 0 nor x / (1 - p) (relative error {error:.1e})"
    if abs(share - (1 - p)) > slack:
        return error, f"wrong: {share:.4f} of the elements are kept, {1 - p:.4f} expected"
    return error, None
