"""What tests of Triton's kernels share: the device or the interpreter, inputs, comparisons with float64, layouts and configurations."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from tensorlogic.core.candidate import Candidate
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.kernels import register
from tensorlogic.kernels.row_access.strided import Lines
from tensorlogic.measure import verification

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TORCH = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
TOLERANCE = {"f16": 1.5e-3, "bf16": 1.2e-2, "f32": 2e-6}
Config = dict[str, Any]
GUARD = 64  # elements before and behind an output that no kernel may write
_guarded: list[tuple[torch.Tensor, int]] = []
REDUCE = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "max": lambda x: x.amax(1),
    "min": lambda x: x.amin(1),
}
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
TOLERANCE_OF_LARGEST = {"f16": 1.5e-3, "f32": 3e-6}


@pytest.fixture(autouse=True)
def default_device() -> Iterator[None]:
    """Tensors on the device, and at the end nothing written beside the outputs that `poisoned` made."""
    _guarded.clear()
    with torch.device(DEVICE):
        yield
    for whole, count in _guarded:
        beside = torch.cat([whole[:GUARD], whole[GUARD + count :]])
        assert torch.equal(beside, torch.full_like(beside, 777.0)), "written beside an output"


def rand(*shape: int, dtype: str = "f32", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed + sum(shape))
    values = torch.randn(*shape, generator=generator, device="cpu") * scale
    return values.to(DEVICE, TORCH[dtype])


def close(got: torch.Tensor, want: torch.Tensor, dtype: str, scale: float = 1.0) -> None:
    got = got.double()
    want = want.double()
    assert torch.equal(got.isnan(), want.isnan()), (got, want)
    same = (got == want) | want.isnan()
    error = torch.where(same, 0.0, (got - want).abs() / want.abs().clamp(min=scale))
    assert error.max() <= TOLERANCE[dtype], f"error {error.max():.2e} at {error.argmax().item()}"


def poisoned(*shape: int, dtype: str = "f32") -> torch.Tensor:
    count = math.prod(shape)
    whole = torch.full((count + 2 * GUARD,), 777.0).to(TORCH[dtype])
    _guarded.append((whole, count))
    return whole[GUARD : GUARD + count].view(shape)


def randn(*shape: int, dtype: str = "f16") -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(TORCH[dtype])


def nan_filled(*shape: int, dtype: str = "f16") -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE, dtype=TORCH[dtype])


def close_to_largest(got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    scale = want.abs().max().clamp_min(1.0)
    error = ((got.double() - want).abs() / scale).max()
    assert error <= TOLERANCE_OF_LARGEST[dtype], f"off by {error:.2e} of the largest"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of so few multiprocessors that the interpreter runs as many programs as fill it."""
    monkeypatch.setattr(register, "cores", lambda: 3)


def offered_are_right(op: Op, served: Candidate, key: Key) -> int:
    """The first and the last configuration that the candidate offers for a key; how many there are."""
    assert served.unfit(key) is None
    checker, offered = verification.Checker(op, key, DEVICE), served.configs(key)
    for config in (offered[0], offered[-1]):
        verdict = checker._probe(served.bind(key, config, DEVICE), 0, 0)[1]
        assert verdict, (key.text, config, verdict.reason)
    return len(offered)


def launches(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[bool]:
    """Whether each launch of what `module.name` makes from here on served; where none did, something else would answer."""
    own, served = getattr(module, name), list[bool]()

    def make(*given: Any) -> Any:
        start = own(*given)

        def launch(*tensors: Tensor) -> bool:
            served.append(start(*tensors))
            return served[-1]

        return launch

    monkeypatch.setattr(module, name, make)
    return served


LAYOUTS = ("plain", "transposed", "padded", "steps")


def laid(x: Tensor, layout: str) -> Tensor:
    """x [outer, C, inner] in other strides."""
    outer, c, inner = x.shape
    if layout == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((outer, c, 2 * inner + 3), torch.nan, dtype=x.dtype)
    view = wide[..., : 2 * inner : 2] if layout == "steps" else wide[..., :inner]
    return view.copy_(x) if layout != "plain" else x


def special(x: Tensor) -> Tensor:
    """With lines of +inf and -inf, of -inf alone, with a NaN, with -inf in front and behind."""
    half = x.shape[1] // 2
    x[0, 0, 0] = float("inf")
    x[0, -1, 0] = float("-inf")
    x[0, :, 1] = float("-inf")
    x[0, half, 2] = float("nan")
    x[1, :half, 0] = float("-inf")
    x[1, half + 1 :, 1] = float("-inf")
    return x


EXTREME_CONFIGS = (
    {"strategy": "held", "BLOCK_C": 128, "BLOCK_I": 2, "parts": 1, "num_warps": 1},
    {"strategy": "held", "BLOCK_C": 128, "BLOCK_I": 8, "parts": 1, "num_warps": 4},
    {"strategy": "twice", "BLOCK_C": 16, "BLOCK_I": 4, "parts": 1, "num_warps": 1},
    {"strategy": "twice", "BLOCK_C": 128, "BLOCK_I": 1, "parts": 1, "num_warps": 4},
    {"strategy": "parts", "BLOCK_C": 8, "BLOCK_I": 4, "parts": 3, "num_warps": 1},
    {"strategy": "parts", "BLOCK_C": 16, "BLOCK_I": 1, "parts": 5, "num_warps": 1},
    {"strategy": "parts", "BLOCK_C": 32, "BLOCK_I": 8, "parts": 40, "num_warps": 4},
)
EXTREME_NAMES = [
    f"{c['strategy']} {c['BLOCK_C']} x {c['BLOCK_I']} in {c['parts']}" for c in EXTREME_CONFIGS
]
EXTREME_SHAPES = {  # outer, C, inner, strides of x and dx
    "columns": (2, 75, 5, ((375, 5, 1), (375, 5, 1))),
    "wide gaps": (2, 75, 5, ((700, 7, 1), (375, 5, 1))),
    "rows": (1, 75, 6, ((0, 1, 75), (0, 1, 75))),
    "rows with gaps": (1, 75, 6, ((0, 1, 80), (0, 1, 75))),
    "one value": (1, 101, 1, ((0, 1, 101), (0, 1, 101))),
    "one element a line": (2, 1, 5, ((5, 5, 1), (5, 5, 1))),
    "stepped rows": (1, 75, 6, ((0, 2, 160), (0, 1, 75))),
    "stepped columns": (2, 75, 5, ((1600, 20, 3), (375, 5, 1))),
    "rows in two steps": (2, 75, 5, ((600, 1, 80), (375, 1, 75))),
}


def special_rows(dtype: str) -> tuple[Tensor, Tensor]:
    """Rows of little that is finite, of infinities and NaN at ends and between, of -inf alone, of the range's ends; their softmax."""
    x, low, most = rand(14, 77, dtype=dtype), float("-inf"), torch.finfo(TORCH[dtype]).max
    x[0, :-1] = x[1, 1:] = x[2, :20] = x[2, 21:] = low
    x[3, 0], x[4, 30], x[5, -1] = float("inf"), float("inf"), float("inf")
    x[6, 0], x[7, 30], x[8, -1] = float("nan"), float("nan"), float("nan")
    x[9] = low
    x[10, 0] = x[11, -1] = x[12, 30] = most
    x[13] = -most
    want = torch.softmax(x.double(), 1)
    assert want.isnan().any(1).tolist() == [False] * 3 + [True] * 7 + [False] * 4
    return x, want.to(TORCH[dtype])


def in_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x, its strides kept."""
    if x.dtype == dtype:
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)


def softmax_keys(x: Tensor, dim: int) -> list[tuple[Op, Key]]:
    """Of softmax, and of its gradient."""
    ops, y = (OPS["softmax"], OPS["softmax_backward"]), torch.softmax(x, dim)
    keys = ops[0].key([x, dim, False], "inference"), ops[1].key([x, y, dim], "backward")
    return list(zip(ops, keys, strict=True))


def extreme_input(lies: Lines, dtype: str) -> Tensor:
    """x [outer, C, inner] in its strides: ties in every line, and NaN, infinities and zeros of both signs where there is room."""
    shape = (lies.outer, lies.length, lies.inner)
    places = 1 + sum((n - 1) * s for n, s in zip(shape, lies.strides[0], strict=True))
    x = rand(places, dtype=dtype).as_strided(shape, lies.strides[0])
    x.copy_((2 * x).round() / 2)
    if lies.length > 1 and lies.inner > 4:
        x[0, 3, 0] = torch.nan
        x[0, 5, 1] = x[0, -1, 1] = torch.inf
        x[0, :, 2] = -torch.inf
        x[0, :, 3] = -1
        x[0, 2:5, 3], x[0, -1, 3] = 0.0, -0.0
        x[0, :, 4] = 7
    return x


EXTREME_LARGE = {  # outer, C, inner, x's strides
    "many rows": (1, 1000, 8192, (0, 1, 1000)),
    "long rows": (1, 30000, 4096, (0, 1, 30000)),
    "short rows": (1, 24, 100000, (0, 1, 24)),
    "few rows": (1, 2048, 3, (0, 1, 2048)),
    "rows with gaps": (1, 4096, 512, (0, 1, 5000)),
    "one value": (1, 334000, 1, (0, 1, 334000)),
    "few columns": (1, 100000, 17, (0, 17, 1)),
    "columns": (1, 4096, 4096, (0, 4096, 1)),
    "short columns": (64, 49, 768, (37632, 768, 1)),
    "long columns of images": (32, 3136, 64, (200704, 64, 1)),
    "columns at odd places": (8, 108, 50257, (108 * 50257, 50257, 1)),
    "columns of hundreds": (1, 384, 100000, (0, 100000, 1)),
    "stepped rows": (1, 64, 1466381, (0, 2, 128)),
}


def extreme_lines(name: str) -> Lines:
    outer, c, inner, x = EXTREME_LARGE[name]
    rows = x[1] < x[2]
    return Lines(outer, c, inner, (x, (0, 1, c) if rows else (c * inner, inner, 1)))


def scores_inputs(shape: tuple[int, ...], dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """q with heads side by side in memory, k of one head for all."""
    b, h, s, t, d = shape
    q = rand(b, s, h, d, dtype=dtype).transpose(1, 2)
    return q, rand(b, 1, t, d, dtype=dtype, seed=1).expand(b, h, t, d)
