"""What the shaders are tried on: every Metal candidate, configuration, dtype and size, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tensorlogic.core import tolerance
from tensorlogic.core.candidate import EAGER, Candidate, Launcher, Outputs
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading
from tensorlogic.kernels.metal import launch as metal_launch
from tensorlogic.ops.pointwise import shapes

from . import standin as metal_standin

CPU = torch.device("cpu")
SIZES = (1, 17, 64, 129, 257)
RECTANGLES = (  # rows, columns, depth: every size in every place
    (17, 129, 64), (1, 257, 129), (64, 1, 257), (129, 17, 1), (257, 64, 17),
)  # fmt: skip
DTYPES = (torch.float16, torch.float32, torch.bfloat16)


def _registered() -> dict[str, dict[str, Candidate]]:
    """The Metal candidates of each op, by id; taken out again, so that other tests meet what a CPU has."""
    candidate_loading.load("mps")
    found: dict[str, dict[str, Candidate]] = {}
    for name, op in OPS.items():
        for id in [id for id in op.candidates if id.startswith("metal.")]:
            found.setdefault(name, {})[id] = op.candidates.pop(id)
    return found


KEPT = ("lse", "share")  # float32 whatever the dtype of the rest
CANDIDATES = _registered()
PAIRS = [(name, id) for name, found in CANDIDATES.items() for id in found]


@dataclass(frozen=True)
class Trial:
    """One launch: a candidate's configuration on arguments (in schema order) of an op."""

    op: Op
    candidate: Candidate
    config: Any
    key: Key
    args: tuple[Any, ...]
    order: int

    def __str__(self) -> str:
        return f"{self.candidate.id} {self.config} on {self.key.text}"

    def bind(self, device: torch.device = CPU) -> Launcher:
        """The launcher, over tensors in CPU memory unless said."""
        return self.candidate.bind(self.key, self.config, device)

    @property
    def dynamic(self) -> list[Any]:
        """What the launcher takes."""
        return [a for p, a in zip(self.op.params, self.args, strict=True) if p.is_dynamic]

    def launch(self, device: torch.device = CPU) -> Outputs:
        """Bind and run, on the stand-in unless said; outputs on the CPU."""
        metal_standin.order = self.order
        given = [_moved(a, device) if isinstance(a, Tensor) else a for a in self.dynamic]
        before = [a.clone() if isinstance(a, Tensor) else a for a in given]
        outs = self.bind(device)(*given)
        assert outs is not None, f"{self} declined"
        for a, b in zip(given, before, strict=True):
            same = not isinstance(a, Tensor) or torch.equal(a.nan_to_num(), b.nan_to_num())
            assert same, f"{self} wrote to an input"
        return tuple(o if o is None else o.cpu() for o in outs)

    def run(self, device: torch.device = CPU) -> tolerance.Verdict:
        """Judge all outputs against the float64 reference and eager PyTorch, as a user's Mac would."""
        outs = self.launch(device)
        plain = self.op.candidates[EAGER].bind(self.key, {}, CPU)(*self.dynamic)
        wide = [tolerance.wide(a) if isinstance(a, Tensor) else a for a in self.args]
        found = self.op.reference(*wide)
        return tolerance.judge(outs, plain or (), found if isinstance(found, tuple) else (found,))


def _moved(t: Tensor, device: torch.device) -> Tensor:
    """The same memory, strides and offset on a device."""
    if t.device == device:
        return t
    count = t.untyped_storage().nbytes() // t.element_size()
    there = t.as_strided((count,), (1,), 0).to(device)
    return there.as_strided(t.shape, t.stride(), t.storage_offset())


def trials(op: Op, id: str, dtype: torch.dtype, cases: bool = True) -> Iterator[Trial]:
    """Every trial of one candidate; the arguments are drawn from a fixed seed.

    The strategies of a product share everything but the sum, so one of them is tried on all of the op's cases.
    """
    torch.manual_seed(11)
    order = DTYPES.index(dtype)
    cases = cases and id not in ("metal.naive", "metal.simdgroup")
    for args in arguments(op, dtype, cases):
        direction = "backward" if op.internal else "forward" if args[-1] is True else "inference"
        key = replace(op.key(args, direction), device="mps")
        candidate = CANDIDATES[op.name][id]
        if candidate.supports(key) is None:
            wide = dtype is torch.float16 and all(
                n in (*SIZES, 2) for t in key.tensors if t for n in t.shape
            )
            for config in candidate.configs(key) if wide else candidate.configs(key)[:1]:
                yield Trial(op, candidate, config, key, tuple(args), order)


def arguments(op: Op, dtype: torch.dtype, cases: bool) -> Iterator[list[Any]]:
    """Rectangles of all sizes and, with `cases`, the op's own; in other dtypes than float16 one rectangle."""
    half = dtype is torch.float16
    given = [c for r in (RECTANGLES if half else RECTANGLES[:1]) for c in _SIZED[op.name](*r)]
    more = [*map(list, op.cases()), *_MORE.get(op.name, list)()] if half and cases else []
    for turn, case in enumerate([*given, *more]):
        cast = [
            a.to(dtype)
            if isinstance(a, Tensor) and a.is_floating_point() and p.name not in KEPT
            else a
            for p, a in zip(op.params, case, strict=False)
        ]
        save = turn < len(given) or turn % 2 == 0  # half of the op's own cases keep nothing
        yield cast if op.gradient is None else [*cast, save]


def _linear(m: int, n: int, k: int) -> list[list[Any]]:
    x, w, b, r = torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n), torch.randn(m, n)
    return [[x, w, b, r, "gelu"], [x, w.t().contiguous().t(), b, None, "relu"]]


def _linear_backward(
    m: int, n: int, k: int, kind: str = "gelu", needs: str = "1111"
) -> list[list[Any]]:
    dy, x, w = torch.randn(m, n), torch.randn(m, k), torch.randn(n, k) * k**-0.5
    return [[dy, x, w, None if kind == "none" else torch.randn(m, n), kind, needs]]


def _activations() -> list[list[Any]]:
    given = (("none", "1100"), ("relu", "1111"), ("gelu_tanh", "1110"), ("silu", "0110"))
    return [case for kind, needs in given for case in _linear_backward(5, 33, 7, kind, needs)]


def _matmul(m: int, n: int, k: int) -> list[list[Any]]:
    b = torch.randn(k, n) * k**-0.5
    turned = b.t().contiguous().t()
    return [[torch.randn(m, k), b, "none"], [torch.randn(2, m, k), turned.expand(2, k, n), "silu"]]


def _gelu_linear(m: int, n: int, k: int) -> list[list[Any]]:
    w, b = torch.randn(n, k) * k**-0.5, torch.randn(n)
    return [[torch.randn(m, k), w, b, "tanh"], [torch.randn(k, m).t(), w, None, "none"]]


def _layer_norm_linear(m: int, n: int, k: int) -> list[list[Any]]:
    w, b = torch.randn(n, k) * k**-0.5, torch.randn(n)
    return [[torch.randn(m, k) + 3, 1 + 0.1 * torch.randn(k), torch.randn(k), w, b, 1e-5]]


def _batch_norm(m: int, n: int, k: int) -> list[list[Any]]:
    w, b = torch.randn(n, k) * k**-0.5, torch.randn(n)
    statistics = [torch.randn(n), 0.5 + torch.rand(n), 1 + 0.1 * torch.randn(n), torch.randn(n)]
    return [[torch.randn(m, k), w, b, *statistics, 1e-5, False, 0.1]]


def _pointwise(operands: int, *flags: Any) -> Any:
    def cases(m: int, n: int, k: int) -> list[list[Any]]:
        full = [torch.randn(m, n) for _ in range(operands)]
        return [[*full, *flags]]

    return cases


def _pointwise_backward(m: int, n: int, k: int) -> list[list[Any]]:
    return [[*(torch.randn(m, n) for _ in range(3)), None, None, "mul", "110"]]


def _kinds() -> list[list[Any]]:
    found = []
    for kind, (_, reads, _) in shapes.BACKWARD.items():
        given = [torch.randn(3, 5) if t in reads else None for t in ("a", "b", "c", "y")]
        if (
            kind == "mul_relu"
        ):  # which needs no output, since it has both factors; its reference does
            given[3] = torch.relu(given[0] * given[1])
        found.append([torch.randn(3, 5), *given, kind, "111"])
    return found


def _broadcasts() -> list[list[Any]]:
    columns, row, number = torch.randn(6, 1), torch.randn(8), torch.randn(())
    return [[torch.randn(6, 8), row], [columns, torch.randn(6, 8)], [torch.randn(6, 8), number],
            [torch.randn(9, 6).t(), torch.randn(9, 6).t()], [torch.randn(7)[1:], torch.randn(6)]]  # fmt: skip


def _reduce(m: int, n: int, k: int) -> list[list[Any]]:
    return [[torch.randn(m, n), (1,), False], [torch.randn(m, n), (0,), True]]


def _long() -> list[list[Any]]:
    some = torch.randn(3, 40)
    some[1, 7] = float("nan")
    few = [[torch.randn(3, 4100), (1,), False], [torch.randn(4200, 5), (0,), False]]
    return [
        *few,
        [some, (1,), False],
        [torch.randn(2, 3, 5), (1,), True],
        [some.t().contiguous(), (0,), False],
    ]


def _cross_entropy(m: int, n: int, k: int) -> list[list[Any]]:
    target = torch.randint(0, n, (m,))
    target[::3] = -100
    target[-1] = 0
    return [
        [3 * torch.randn(m, n), target, -100, 0.1, "mean"],
        [1000 + torch.randn(m, n), target, -100, 0.2, "none"],
    ]


def _cross_entropy_backward(m: int, n: int, k: int) -> list[list[Any]]:
    x, target, ignored, smoothing, reduction = _cross_entropy(m, n, k)[0]
    x = x.bfloat16().float()  # numbers that every dtype holds: the log-sum-exp is theirs
    lse, share = torch.logsumexp(x, 1), torch.tensor([1 / (target >= 0).sum().item()])
    return [[torch.randn(()), x, target, lse, share, ignored, smoothing, reduction]]


def _scores(m: int, n: int, k: int) -> list[list[Any]]:
    d = min(k, 129)
    q, key = torch.randn(2, m, d), torch.randn(2, n, d)
    return [[q, key, d**-0.5, None, True], [q, key, d**-0.5, torch.randn(m, n), False]]


_SIZED: dict[str, Any] = {
    "linear": _linear,
    "linear_backward": _linear_backward,
    "matmul": _matmul,
    "gelu_linear": _gelu_linear,
    "layer_norm_linear": _layer_norm_linear,
    "linear_batch_norm_relu": _batch_norm,
    **{name: _pointwise(1) for name in ("relu", "silu")},
    "gelu": _pointwise(1, "tanh"),
    **{name: _pointwise(2) for name in ("add", "sub", "mul", "div", "add_relu", "mul_relu")},
    "affine": _pointwise(3),
    "pointwise_backward": _pointwise_backward,
    **dict.fromkeys(("sum", "mean", "max", "min"), _reduce),
    "softmax_cross_entropy": _cross_entropy,
    "softmax_cross_entropy_backward": _cross_entropy_backward,
    "attention_scores": _scores,
}
# beside their own cases, which ops that only others call do not have
_MORE: dict[str, Any] = {
    "linear_backward": _activations,
    "pointwise_backward": _kinds,
    "add": _broadcasts,
    **dict.fromkeys(("sum", "max"), _long),
}


def prepare(dtypes: Sequence[torch.dtype] = DTYPES, cases: bool = True) -> None:
    """Compile every shader that these trials will ask for, many at a time."""
    asked: dict[str, None] = {}
    compile_shader, torch.mps.compile_shader = torch.mps.compile_shader, lambda s: _Noted(asked, s)
    metal_launch.library.cache_clear()
    try:
        for name, id in PAIRS:
            for dtype in dtypes:
                for trial in trials(OPS[name], id, dtype, cases):
                    trial.bind()
    finally:
        torch.mps.compile_shader = compile_shader
        metal_launch.library.cache_clear()
    metal_standin.prepare(asked)


class _Noted:
    """Stands for a library whose source is only written down."""

    max_threads_per_threadgroup, thread_execution_width = 1024, 32

    def __init__(self, asked: dict[str, None], source: str) -> None:
        asked[source] = None

    def __getattr__(self, name: str) -> Any:
        return self
