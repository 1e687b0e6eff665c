"""Softmax over lines that do not lie together: kernels against float64, the candidate on every layout, what the compiler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.dispatch import candidate_loading

from ...support.triton import (
    DEVICE,
    LAYOUTS,
    TORCH,
    close,
    in_dtype,
    laid,
    poisoned,
    rand,
    softmax_keys,
    special,
)

from tensorlogic.measure import verification  # isort: skip  (after the interpreter is asked for)
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.softmax import strided as softmax_strided

from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.kernels.row_access.strided import Lines  # isort: skip

from ...support.compiled import nothing_spills  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
CONFIGS = (
    {"strategy": "held", "BLOCK_C": 16, "BLOCK_I": 8, "num_warps": 4},
    {"strategy": "held", "BLOCK_C": 64, "BLOCK_I": 2, "num_warps": 4},
    {"strategy": "swept", "BLOCK_C": 8, "BLOCK_I": 4, "num_warps": 4},
    {"strategy": "swept", "BLOCK_C": 16, "BLOCK_I": 1, "num_warps": 4},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c['strategy']} {c['BLOCK_I']}")
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_softmax_of_lines(dtype: str, config: dict[str, Any], layout: str) -> None:
    for length, inner in ((1, 3), (29, 9), (64, 4)) if dtype != "bf16" else ((29, 9),):
        shape = (2, length, inner)
        x, y = laid(special(rand(*shape, dtype=dtype, scale=4.0)), layout), poisoned(*shape, dtype=dtype)  # fmt: skip
        lies = Lines(*shape, (x.stride(), y.stride()))
        assert softmax_strided.lines_launcher(lies, dtype, config, DEVICE)(x, y)
        close(y, torch.softmax(x.double(), 1).to(TORCH[dtype]), dtype, 0.01)
        y = torch.softmax(rand(*shape, scale=4.0), 1).to(TORCH[dtype])
        dy, dx = laid(rand(*shape, dtype=dtype, seed=1), layout), poisoned(*shape, dtype=dtype)
        dy[1, 0, 1] = float("nan")
        lies = Lines(*shape, (dy.stride(), y.stride(), dx.stride()))
        assert softmax_strided.lines_launcher(lies, dtype, config, DEVICE)(dy, y, dx)
        p, g = y.double(), dy.double()
        close(dx, (p * (g - (p * g).sum(1, keepdim=True))).to(TORCH[dtype]), dtype, 0.5)


def tensors() -> list[tuple[Tensor, int]]:
    """Of every layout, and the dimension."""
    x = torch.randn(2, 3, 5, 7)
    return [
        (torch.randn(33, 65), 0),
        (torch.randn(2, 70, 9), 1),
        (torch.randn(40, 6).mT, -1),
        (torch.randn(6, 48)[:, :40], -1),
        (torch.randn(6, 80)[:, ::2], -1),
        (torch.randn(300)[::3], 0),
        (torch.randn(1, 70, 1, 3), 1),
        (x.mT, -1),
        (x.to(memory_format=torch.channels_last), 1),
    ]


@pytest.mark.parametrize("case", range(9))
def test_every_layout_is_served(case: int) -> None:
    dtype = (torch.float32, torch.float16)[case % 2]
    candidate_loading.ready(DEVICE.type)
    x, dim = tensors()[case]
    x = in_dtype(x, dtype)
    for op, key in softmax_keys(x, dim % x.dim()):
        candidate = op.candidates["triton.lines"]
        assert candidate.unfit(key) is None
        checker = verification.Checker(op, key, DEVICE)
        for config in candidate.configs(key)[:: 2 if x.numel() > 2000 else 1]:
            verdict = checker._probe(candidate.bind(key, config, DEVICE), 0, 0)[1]
            assert verdict, (key.text, config, verdict.reason)


def test_elements_that_share_memory() -> None:
    candidate_loading.ready(DEVICE.type)
    op = OPS["softmax"]
    for x in (rand(1, 37).expand(4, 37), rand(4, 1).expand(4, 37)):
        key = op.key([x, 1, False], "inference")
        for config in op.candidates["triton.lines"].configs(key):
            outs = op.candidates["triton.lines"].bind(key, config, DEVICE)(x)
            assert outs is not None
            close(outs[0], torch.softmax(x.double(), 1), "f32", 0.01)


def test_what_is_left_to_others_is_named() -> None:
    candidate_loading.ready(DEVICE.type)
    said = OPS["softmax"].candidates["triton.lines"].supports
    for x, dim, reason in (
        (torch.randn(3, 4), 1, "rows that lie together"),
        (torch.randn(3, 0), 1, "empty"),
        (torch.randn(3, 4).double(), 0, "f64"),
        (torch.randn(2, 3, 4, 5).permute(2, 1, 0, 3), 3, "more than two steps"),
    ):
        assert reason in str(said(OPS["softmax"].key([x, dim, False], "inference")))


def test_lines_that_no_registers_hold_are_refused() -> None:
    with pytest.raises(CompileFailure, match="does not fit lines of 5000"):
        softmax_strided.lines_launcher(Lines(1, 5000, 8, ((0, 8, 1), (0, 8, 1))), "f32", dict(CONFIGS[0]), DEVICE)  # fmt: skip


def test_offsets_beyond_32_bits() -> None:
    """A tensor that reaches there is too large for a test: the constant is set, and changes nothing."""
    x, y = rand(1, 20, 4), poisoned(1, 20, 4)
    for held in ({}, {"TILES": 2}):
        kernel = softmax_strided.softmax_fwd_held if held else softmax_strided.softmax_fwd_swept
        strides = {"x_o": 0, "x_c": 4, "x_i": 1, "y_o": 0, "y_c": 4, "y_i": 1}
        run = triton_runtime_launch.prepare(
            kernel, grid=(2, 1, 1), pointers={"x_ptr": "f32", "y_ptr": "f32"}, integers={"C": 20, "N": 4, **strides}, floats=(),
            constexprs={**held, "WIDE": True, "BLOCK_C": 16, "BLOCK_I": 2}, num_warps=4, num_stages=1, device=DEVICE,
        )  # fmt: skip
        assert run(x, y.fill_(777.0))
        close(y, torch.softmax(x.double(), 1), "f32", 0.01)


SHAPES = {  # outer, C, inner, x's strides
    "columns": (2, 2271, 10000, (22710000, 10000, 1)),
    "odd columns": (3, 333, 77, (25641, 77, 1)),
    "transposed": (1, 2048, 84, (0, 84, 1)),
    "padded": (1, 2048, 84, (0, 1, 2056)),
    "steps": (1, 2048, 84, (0, 2, 4096)),
    "long": (1, 100000, 4096, (0, 4096, 1)),
}


@pytest.mark.slow
def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm in (90, 80, 100):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for name, (outer, c, inner, x) in SHAPES.items():
            y = (c * inner, inner, 1) if x[2] == 1 and name != "transposed" else (0, 1, c)
            for dtype in ("f16", "f32"):
                for strides in ((x, y), (x, y, y)):
                    lies = Lines(outer, c, inner, strides)
                    for config in softmax_strided.lines_configs(lies, dtype)[
                        : 7 if sm == 90 else 1
                    ]:

                        def build(lies: Lines = lies, dtype: str = dtype, config: Any = config) -> object:  # fmt: skip
                            return softmax_strided.lines_launcher(lies, dtype, config, cuda)

                        jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    nothing_spills(jobs)
