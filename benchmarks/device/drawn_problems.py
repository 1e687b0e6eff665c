"""What `drawn_beside.py` draws: problems of every public op at sizes of models, ours and the composition one writes in PyTorch."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic as tl

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")
ATTEMPTS = 10_000  # at lengths that keep the limits
ROWS = (1, 2, 5, 8, 17, 32, 64, 100, 128, 200, 333, 512, 640, 1000, 1536, 3000, 5000)
FEATURES = (64, 80, 320, 512, 640, 768, 1000, 1024, 1280, 1600, 2048, 2304, 3072, 5120, 8000, 11008)
ODD, VOCABULARY = (333, 1001), 50257
HEADS, DEPTHS = (1, 4, 8, 12, 16), (16, 32, 64, 80, 96, 128, 192, 256)
LENGTHS = (16, 64, 77, 128, 196, 197, 256, 384, 500, 512, 640, 768, 1000, 1024, 1536, 2048, 4096)
TOKENS = (8, 64, 512, 1000, 2048, 4096, 8192, 16384)
CLASSES = (10, 100, 1000, 4000, 10000, 32000, 32768, 50257, 100000, 128256, 151936, 250002)
F16_SUM = 3e4  # that a sum of losses stays below in float16
Args = tuple[Any, ...]
Maker = Callable[[torch.device], Args]


@dataclass(frozen=True)
class Limits:
    """How large problems get: multiply-adds of a product, elements, bytes of scores and of logits."""

    work: float
    elements: float
    scores: float
    logits: float


SIZES = {
    "large": Limits(2e11, 1e8, 3e8, 2.2e9),  # for a GPU
    "medium": Limits(1e9, 4e6, 3e7, 1.3e8),  # for a CPU
    "small": Limits(1e7, 1e5, 4e5, 4e5),  # to try the script
}


@dataclass(frozen=True)
class Problem:
    """A call of ours, PyTorch's, and what makes arguments of both; gradients of the arguments `leaves`, if there are any."""

    index: int
    family: str
    op: str
    form: str
    dtype: torch.dtype
    make: Maker
    ours: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    leaves: tuple[int, ...] = ()
    checked: bool = True

    @property
    def text(self) -> str:
        """In words, with the shapes of the arguments; a star marks those that are not contiguous."""
        tensors = [a for a in self.make(torch.device("meta")) if isinstance(a, Tensor)]
        shapes = [f"{list(t.shape)}{'' if t.is_contiguous() else '*'}" for t in tensors]
        way = "fwd+bwd" if self.leaves else "fwd"
        name = str(self.dtype).removeprefix("torch.").replace("float", "f")
        parts = (self.op, self.form, name, way, *shapes)
        return " ".join(p for p in parts if p).replace(", ", ",")


@dataclass(frozen=True)
class Form:
    """What an op's draw gives: how it is called, and which arguments have gradients."""

    form: str
    make: Maker
    ours: Callable[..., Tensor]
    eager: Callable[..., Tensor]
    leaves: tuple[int, ...] = ()
    checked: bool = True


class Draw:
    """Random choices and lengths of one problem."""

    def __init__(
        self, rng: random.Random, dtype: torch.dtype, training: bool, limits: Limits
    ) -> None:
        self.rng, self.dtype, self.training, self.limits = rng, dtype, training, limits

    def sometimes(self, share: float) -> bool:
        return self.rng.random() < share

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def until(self, draw: Callable[[], Any], fits: Callable[[Any], bool]) -> Any:
        """The first draw that fits."""
        for _ in range(ATTEMPTS):
            if fits(found := draw()):
                return found
        raise RuntimeError(f"nothing fits in {ATTEMPTS} draws")

    def product(self, least: int = 1, flat: bool = False) -> tuple[tuple[int, ...], int, int]:
        """Leading dimensions of x, K and N: now and then odd, or the vocabulary's."""

        def draw() -> tuple[int, int, int]:
            m, k, n = self.pick(*ROWS), self.pick(*FEATURES), self.pick(*FEATURES)
            if self.sometimes(0.12):
                k, n = self.pick((self.pick(*ODD), n), (k, self.pick(*ODD)), (k, VOCABULARY))
            return m, k, n

        m, k, n = self.until(draw, lambda s: s[0] >= least and math.prod(s) <= self.limits.work)
        if not flat and m >= 8 and self.sometimes(0.3):
            batch = self.pick(2, 4, 8)
            return (batch, m // batch), k, n
        return (m,), k, n

    def size(self) -> int:
        """A number of elements."""
        return int(10 ** self.rng.uniform(3, math.log10(self.limits.elements)))

    def matrix(self) -> tuple[int, int]:
        """Rows and columns of about that many elements."""
        count = self.size()
        known = [n for n in (*FEATURES, *ODD, *CLASSES[:8]) if n <= count]
        drawn = max(1, int(10 ** self.rng.uniform(0, math.log10(count))))
        columns = self.rng.choice(known) if known and self.sometimes(0.7) else drawn
        return max(1, count // columns), columns

    def normal(self, *shape: int, scale: float = 1.0) -> Callable[[torch.device], Tensor]:
        """A maker of normal values."""
        dtype = self.dtype
        return lambda device: torch.randn(shape, device=device, dtype=dtype).mul_(scale)

    def laid(self, *shape: int) -> Callable[[torch.device], Tensor]:
        """Likewise; in one case of five transposed, with padded rows or with steps."""
        kind = self.pick("transposed", "padded", "steps") if self.sometimes(0.2) else "plain"
        if kind == "transposed" and len(shape) > 1:
            wide = self.normal(*shape[:-2], shape[-1], shape[-2])
            return lambda device: wide(device).mT
        if kind == "padded":
            wide = self.normal(*shape[:-1], shape[-1] + 8)
            return lambda device: wide(device)[..., : shape[-1]]
        if kind == "steps":
            wide = self.normal(*shape[:-1], 2 * shape[-1])
            return lambda device: wide(device)[..., ::2]
        return self.normal(*shape)


def together(*makers: Callable[[torch.device], Tensor] | None) -> Maker:
    """Makes all arguments; None stays."""
    return lambda device: tuple(None if make is None else make(device) for make in makers)


def present(makers: Sequence[Any], *never: int) -> tuple[int, ...]:
    """Which arguments have gradients: those that are there."""
    return tuple(i for i, make in enumerate(makers) if make is not None and i not in never)


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda y: y,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "silu": F.silu,
}


def linear(d: Draw) -> Form:
    lead, k, n = d.product()
    act = d.pick(None, "relu", "gelu", "gelu_tanh", "silu")
    bias = d.normal(n) if d.sometimes(0.7) else None
    residual = d.normal(*lead, n) if d.sometimes(0.3) else None
    made = (d.normal(*lead, k), d.normal(n, k, scale=k**-0.5), bias, residual)
    activate = ACTIVATIONS[act]

    def plain(x: Tensor, w: Tensor, b: Tensor | None, r: Tensor | None) -> Tensor:
        y = F.linear(x, w, b)
        return activate(y if r is None else y + r)

    words = (act or "", "bias" if bias else "", "residual" if residual else "")
    return Form(
        " ".join(word for word in words if word),
        together(*made),
        lambda x, w, b, r: tl.linear(x, w, b, r, act),
        plain,
        present(made),
    )


def linear_residual_relu(d: Draw) -> Form:
    lead, k, n = d.product()
    made = (d.normal(*lead, k), d.normal(n, k, scale=k**-0.5), d.normal(n), d.normal(*lead, n))
    return Form(
        "",
        together(*made),
        lambda x, w, b, r: tl.linear_residual_relu(x, w, b, r),
        lambda x, w, b, r: torch.relu(F.linear(x, w, b) + r),
        present(made),
    )


def gelu_linear(d: Draw) -> Form:
    lead, k, n = d.product()
    way = d.pick("tanh", "tanh", "none")
    bias = d.normal(n) if d.sometimes(0.8) else None
    made = (d.normal(*lead, k), d.normal(n, k, scale=k**-0.5), bias)
    return Form(
        way,
        together(*made),
        lambda x, w, b: tl.gelu_linear(x, w, b, way),
        lambda x, w, b: F.linear(F.gelu(x, approximate=way), w, b),
        present(made),
    )


def layer_norm_linear(d: Draw) -> Form:
    lead, k, n = d.product()
    bias = d.normal(n) if d.sometimes(0.8) else None
    made = (d.normal(*lead, k), d.normal(k), d.normal(k), d.normal(n, k, scale=k**-0.5), bias)
    return Form(
        "",
        together(*made),
        lambda x, g, be, w, b: tl.layer_norm_linear(x, g, be, w, b, 1e-5),
        lambda x, g, be, w, b: F.linear(F.layer_norm(x, x.shape[-1:], g, be, 1e-5), w, b),
        present(made),
    )


def linear_batch_norm_relu(d: Draw) -> Form:
    training = d.sometimes(0.6 if d.training else 0.2)
    lead, k, n = d.product(least=8 if training else 1, flat=True)
    var = d.normal(n)
    made = (
        *(d.normal(*lead, k), d.normal(n, k, scale=k**-0.5), d.normal(n), d.normal(n)),
        *(lambda device: var(device).abs() + 0.5, d.normal(n), d.normal(n)),
    )
    never = (2, 3, 4) if training else (3, 4)  # statistics; a bias before them has no gradient
    return Form(
        "training" if training else "",
        together(*made),
        lambda x, w, b, m, v, g, be: tl.linear_batch_norm_relu(
            x, w, b, m, v, g, be, 1e-5, training
        ),
        lambda x, w, b, m, v, g, be: torch.relu(
            F.batch_norm(F.linear(x, w, b), m, v, g, be, training, 0.1, 1e-5)
        ),
        present(made, *never),
    )


def dropout_linear(d: Draw) -> Form:
    lead, k, n = d.product()
    p = d.pick(0.1, 0.5)
    made = (d.normal(*lead, k), d.normal(n, k, scale=k**-0.5), d.normal(n))
    return Form(
        f"p={p}",
        together(*made),
        lambda x, w, b: tl.dropout_linear(x, w, b, p, True),
        lambda x, w, b: F.linear(F.dropout(x, p, True), w, b),
        present(made),
        checked=False,  # other elements are dropped
    )


def matmul(d: Draw) -> Form:
    lead, k, n = d.product()
    kind = d.pick("b", "b.t()", "batched", "batched b.mT")
    if kind.startswith("batched") and len(lead) == 1:  # a batch of the same work
        batch = d.pick(*(b for b in (1, 2, 4, 8, 12, 16) if b <= lead[0]))
        lead = (batch, lead[0] // batch)
    if kind.startswith("batched") and lead[0] * n * k > 2 * d.limits.elements:
        kind = "b"
    turned = kind in ("b.t()", "batched b.mT")
    before = lead[:1] if kind.startswith("batched") else ()
    b = d.normal(*before, *((n, k) if turned else (k, n)), scale=k**-0.5)
    make = together(d.normal(*lead, k), (lambda device: b(device).mT) if turned else b)
    return Form(kind, make, tl.matmul, torch.matmul, (0, 1))


def attention_scores(d: Draw) -> Form:
    def draw() -> tuple[int, int, int, int, int]:
        s = d.pick(*LENGTHS)
        t = d.pick(*LENGTHS) if d.sometimes(0.2) else s
        return d.rng.randint(1, 4), d.pick(*HEADS), s, t, d.pick(*DEPTHS)

    most = d.limits.scores / d.dtype.itemsize
    b, h, s, t, depth = d.until(draw, lambda x: math.prod(x[:4]) <= most)
    causal = s == t and d.sometimes(0.4)
    mask = d.pick("bool", "float") if d.sometimes(0.2 if causal else 0.4) else None
    shape = d.pick((s, t), (b, 1, 1, t))
    scale, values = depth**-0.5, d.normal(*shape)

    def allowed(device: torch.device) -> Tensor:
        found = torch.rand(shape, device=device) < 0.8
        found[..., 0] = True  # no row without any
        return found

    def hidden(device: torch.device) -> Tensor:
        return torch.ones(s, t, device=device, dtype=torch.bool).triu(1)

    def plain(q: Tensor, k: Tensor, mask: Tensor | None, upper: Tensor | None) -> Tensor:
        scores = (q @ k.transpose(-1, -2)) * scale
        if upper is not None:
            scores = scores.masked_fill(upper, float("-inf"))
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        return torch.softmax(scores, -1)

    make = together(
        d.normal(b, h, s, depth),
        d.normal(b, h, t, depth),
        {"bool": allowed, "float": values, None: None}[mask],
        hidden if causal else None,
    )
    return Form(
        " ".join([*(["causal"] if causal else []), *([f"{mask} mask"] if mask else [])]),
        make,
        lambda q, k, mask, upper: tl.attention_scores(q, k, scale, mask, causal),
        plain,
        (0, 1),
    )


def softmax_cross_entropy(d: Draw) -> Form:
    rows, classes = d.until(
        lambda: (d.pick(*TOKENS), d.pick(*CLASSES)),
        lambda x: math.prod(x) * d.dtype.itemsize <= d.limits.logits / (2 if d.training else 1),
    )
    smoothing, ignored = d.pick(0.0, 0.0, 0.1), d.sometimes(0.3)
    reduction = d.pick("mean", "mean", "mean", "sum", "none")
    if d.dtype == torch.float16 and rows * (math.log(classes) + 1) > F16_SUM:
        reduction = "none" if reduction == "none" else "mean"
    logits = d.normal(rows, classes)

    def make(device: torch.device) -> Args:
        target = torch.randint(classes, (rows,), device=device)
        if ignored:
            target[::7] = -100
        return logits(device), target

    words = [f"smoothing={smoothing}"] if smoothing else []
    return Form(
        " ".join([reduction, *words, *(["ignored"] if ignored else [])]),
        make,
        lambda x, t: tl.softmax_cross_entropy(x, t, -100, smoothing, reduction),
        lambda x, t: F.cross_entropy(x, t, reduction=reduction, label_smoothing=smoothing),
        (0,),
    )


def softmax(d: Draw) -> Form:
    rows, columns = d.matrix()
    shape: tuple[int, ...] = (rows, columns)
    dim = -1
    if d.sometimes(0.25):
        parts = d.pick(2, 4, 16)
        shape, dim = d.pick(((rows, columns), 0), ((parts, max(1, rows // parts), columns), 1))
    make = together(d.laid(*shape))
    return Form(
        f"dim={dim}", make, lambda x: tl.softmax(x, dim), lambda x: torch.softmax(x, dim), (0,)
    )


def apart(make: Callable[[torch.device], Tensor], away: float) -> Callable[[torch.device], Tensor]:
    """Makes positive values, none nearer to 0 than `away`."""
    return lambda device: make(device).abs_().add_(away)


def pointwise(ours: Any, eager: Any, operands: int, away: float = 0.0) -> Callable[[Draw], Form]:
    """An element-wise op; further operands of the same shape, one row, one column or one number, as far `away` from 0 as a divisor has to be."""

    def form(d: Draw) -> Form:
        rows, columns = d.matrix()
        shared = (
            d.pick("row", "row", "column", "number") if operands > 1 and d.sometimes(0.4) else ""
        )
        first = d.laid(rows, columns) if d.sometimes(0.8) else d.normal(rows * columns + 1)
        flat = first(torch.device("meta")).shape
        shape = {"": flat, "row": flat[-1:], "column": (*flat[:-1], 1), "number": ()}[shared]
        rest = [d.normal(*shape) for _ in range(operands - 1)]
        if away:
            rest = [apart(make, away) for make in rest]
        leaves = tuple(range(operands))
        return Form(shared, together(first, *rest), ours, eager, leaves)

    return form


def gelu(d: Draw) -> Form:
    way = d.pick("none", "tanh")

    def ours(x: Tensor) -> Tensor:
        return tl.gelu(x, approximate=way)

    found = pointwise(ours, lambda x: F.gelu(x, approximate=way), 1)(d)
    return Form(way, found.make, ours, found.eager, found.leaves)


def reduction(ours: Any, eager: Any, whole: Any) -> Callable[[Draw], Form]:
    """Over everything, the last dimension, the first, or the middle one of three."""

    def form(d: Draw) -> Form:
        rows, columns = d.matrix()
        kind = d.pick("all", "last", "first", "middle")
        if kind == "all":
            shape = d.pick((rows, columns), (rows * columns,))
            make = together(d.laid(*shape))
            return Form("all", make, lambda x: ours(x), lambda x: whole(x), (0,))
        parts = (d.pick(2, 8, 32),) if kind == "middle" else ()
        shape = (*parts, max(1, rows // math.prod(parts)), columns)
        dim = {"last": -1, "first": 0, "middle": 1}[kind]
        make = together(d.laid(*shape))
        return Form(kind, make, lambda x: ours(x, dim), lambda x: eager(x, dim), (0,))

    return form


OPS: dict[str, Callable[[Draw], Form]] = {
    "linear": linear,
    "linear_residual_relu": linear_residual_relu,
    "gelu_linear": gelu_linear,
    "layer_norm_linear": layer_norm_linear,
    "linear_batch_norm_relu": linear_batch_norm_relu,
    "dropout_linear": dropout_linear,
    "matmul": matmul,
    "attention_scores": attention_scores,
    "softmax_cross_entropy": softmax_cross_entropy,
    "softmax": softmax,
    "relu": pointwise(tl.relu, torch.relu, 1),
    "gelu": gelu,
    "silu": pointwise(tl.silu, F.silu, 1),
    "add": pointwise(tl.add, lambda a, b: a + b, 2),
    "sub": pointwise(tl.sub, lambda a, b: a - b, 2),
    "mul": pointwise(tl.mul, lambda a, b: a * b, 2),
    "div": pointwise(tl.div, lambda a, b: a / b, 2, away=0.5),
    "add_relu": pointwise(tl.add_relu, lambda a, b: torch.relu(a + b), 2),
    "mul_relu": pointwise(tl.mul_relu, lambda a, b: torch.relu(a * b), 2),
    "affine": pointwise(tl.affine, lambda x, s, b: x * s + b, 3),
    "sum": reduction(tl.sum, torch.sum, torch.sum),
    "mean": reduction(tl.mean, torch.mean, torch.mean),
    "max": reduction(tl.max, torch.amax, torch.max),
    "min": reduction(tl.min, torch.amin, torch.min),
}


TWICE = ("linear", "linear", "matmul")  # as likely again as the others
PRODUCTS = (*list(OPS)[:6], *TWICE)
FAMILIES: dict[str, tuple[str, ...]] = {
    "linear": ("matmul", *PRODUCTS),
    "scores": ("attention_scores",),
    "loss": ("softmax_cross_entropy",),
    "elements": ("softmax", *list(OPS)[9:20]),
    "training": (*PRODUCTS, "dropout_linear", "attention_scores", "softmax", "gelu"),
    "reductions": ("sum", "mean", "max", "min"),
    "gradients": (*list(OPS)[9:20], *list(OPS)[10:20], "sum", "mean", "max", "min"),
}
RECORDED = ("training", "gradients")  # with gradients; of losses every other one, too
ROUND = ("linear", "scores", "loss", "linear", "elements", "training", "reductions", "gradients")
DTYPES = (*["float16"] * 3, *["bfloat16"] * 2, "float32")


@dataclass(frozen=True)
class Wanted:
    """Of which ops, dtypes and sizes problems are."""

    ops: Sequence[str] = tuple(OPS)
    dtypes: Sequence[str] = DTYPES  # each as likely as it is often here
    limits: Limits = SIZES["large" if CUDA else "small"]
    families: Sequence[str] = ROUND


def problem(seed: int, index: int, wanted: Wanted) -> Problem:
    """Problem `index` of a seed: of the families that have a wanted op, each in its turn."""
    turns = [
        f for f in ROUND if f in wanted.families and not set(wanted.ops).isdisjoint(FAMILIES[f])
    ]
    rng, family = random.Random(f"{seed}:{index}"), turns[index % len(turns)]
    op = rng.choice([name for name in FAMILIES[family] if name in wanted.ops])
    training = family in RECORDED or (family == "loss" and rng.random() < 0.5)
    dtype = getattr(torch, rng.choice(wanted.dtypes))
    form = OPS[op](Draw(rng, dtype, training, wanted.limits))
    leaves = form.leaves if training else ()
    return Problem(index, family, op, form.form, dtype, form.make, form.ours, form.eager, leaves, form.checked)  # fmt: skip


def drawn(seed: int, first: int, count: int, wanted: Wanted) -> Iterator[Problem]:
    """Problems of a seed; always the same ones."""
    for index in range(first, first + count):
        yield problem(seed, index, wanted)
