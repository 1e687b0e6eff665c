"""Softmax whose lines are shared by several programs: kernels against float64, special parts, the candidate, what the compiler makes of it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

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

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.key import SIZES
from tensorlogic.dispatch import candidate_loading

from tensorlogic.measure import verification  # isort: skip
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS

from tensorlogic.core.candidate import Candidate  # isort: skip
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.softmax import strided_split as softmax_strided_split

from tensorlogic.kernels.row_access.strided import Lines  # isort: skip


from ...support.compiled import nothing_spills  # isort: skip
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import small as small  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
CONFIGS = (
    {"BLOCK_C": 8, "BLOCK_I": 4, "parts": 3, "num_warps": 4},
    {"BLOCK_C": 32, "BLOCK_I": 1, "parts": 2, "num_warps": 4},
    {"BLOCK_C": 16, "BLOCK_I": 8, "parts": 5, "num_warps": 8},
)
NAMED = [f"{c['parts']} parts of {c['BLOCK_I']} lines" for c in CONFIGS]
FIRST = 16  # elements of the smallest part


def softmax(x: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """y of x [outer, C, inner], from a poisoned output and poisoned partial results, beside which nothing is written."""
    y = poisoned(*x.shape, dtype=dtype)
    lies = Lines(*x.shape, (x.stride(), y.stride()))
    part = poisoned(softmax_strided_split.parts_space(lies, config))
    assert softmax_strided_split.parts_launcher(lies, dtype, config, DEVICE)(x, part, y)
    return y


def softmax_backward(dy: Tensor, y: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """dx, likewise."""
    dx = poisoned(*y.shape, dtype=dtype)
    lies = Lines(*y.shape, (dy.stride(), y.stride(), dx.stride()))
    part = poisoned(softmax_strided_split.parts_space(lies, config))
    assert softmax_strided_split.parts_launcher(lies, dtype, config, DEVICE)(dy, y, part, dx)
    return dx


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize(
    ("dtype", "layout"), [*itertools.product(("f16", "f32"), LAYOUTS), ("bf16", "plain")]
)
def test_softmax_in_parts(dtype: str, layout: str, config: dict[str, Any]) -> None:
    for shape in ((2, 75, 5), (2, 1, 3)) if layout == "plain" else ((2, 75, 5),):
        x = laid(special(rand(*shape, dtype=dtype, scale=4.0)), layout)
        want = torch.softmax(x.double(), 1).to(TORCH[dtype])
        close(softmax(x, dtype, config), want, dtype, 0.01)
        y = torch.softmax(rand(*shape, scale=4.0), 1).to(TORCH[dtype])
        dy = laid(rand(*shape, dtype=dtype, seed=1), layout)
        dy[1, 0, 1] = float("nan")
        p, g = y.double(), dy.double()
        want = (p * (g - (p * g).sum(1, keepdim=True))).to(TORCH[dtype])
        close(softmax_backward(dy, y, dtype, config), want, dtype, 0.5)


def test_the_same_bits_every_time() -> None:
    x, config = rand(1, 300, 5, scale=4.0), CONFIGS[0]
    y, dy = torch.softmax(x, 1), rand(1, 300, 5, seed=1)
    assert torch.equal(softmax(x, "f32", config), softmax(x, "f32", config))
    first, second = (softmax_backward(dy, y, "f32", config) for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_parts_without_a_finite_element(dtype: str, config: dict[str, Any]) -> None:
    """The first, the last, all but one; one with +inf or NaN beside others; a line of -inf alone."""
    x = rand(1, 75, 8, dtype=dtype)
    x[0, :50, 0] = float("-inf")
    x[0, FIRST:, 1] = float("-inf")
    x[0, :40, 2] = x[0, 41:, 2] = float("-inf")
    x[0, -1, 3] = float("inf")
    x[0, :50, 4], x[0, 60, 4] = float("-inf"), float("inf")
    x[0, :50, 5], x[0, 0, 5] = float("-inf"), float("nan")
    x[0, :, 6] = float("-inf")
    want = torch.softmax(x.double(), 1)
    assert want.isnan().any(1).tolist() == [[False, False, False, True, True, True, True, False]]
    close(softmax(x, dtype, config), want.to(TORCH[dtype]), dtype, 0.01)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_values_at_the_ends_of_the_range(dtype: str, config: dict[str, Any]) -> None:
    most = torch.finfo(TORCH[dtype]).max
    x = rand(1, 75, 6, dtype=dtype)
    x[0, 70, 0] = most
    x[0, 3, 1], x[0, 4, 1] = most, most
    x[0, :, 2] = -most
    x[0, :, 3] = most
    x[0, :30, 4], x[0, 30:, 4] = -most, most
    x[0, ::2, 5] = -most
    close(softmax(x, dtype, config), torch.softmax(x.double(), 1).to(TORCH[dtype]), dtype, 0.01)


def test_offsets_beyond_32_bits() -> None:
    """A tensor that reaches there is too large for a test: a step that nothing takes asks for them, and changes nothing."""
    x, y = rand(75, scale=4.0), poisoned(75)
    lies = Lines(1, 75, 1, ((0, 1, 2**31), (0, 1, 2**31)))
    part = poisoned(softmax_strided_split.parts_space(lies, CONFIGS[0]))
    assert softmax_strided_split.parts_launcher(lies, "f32", CONFIGS[0], DEVICE)(x, part, y)
    close(y, torch.softmax(x.double(), 0), "f32", 0.01)


def candidate(name: str) -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS[name].candidates["triton.parts"]


def tensors() -> list[tuple[Tensor, int]]:
    """Few, long lines of every layout, and the dimension."""
    return [
        (torch.randn(2, 8203), 1),
        (torch.randn(1163, 17), 0),
        (torch.randn(9001), 0),
        (torch.randn(2, 2051, 5), 1),
        (torch.randn(1031, 16).mT, -1),
        (torch.randn(2, 9000)[:, :8500], -1),
        (torch.randn(2, 16400)[:, ::2], -1),
        (torch.randn(2, 1, 2500, 3).transpose(0, 1), 2),
    ]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", range(8))
def test_every_layout_is_served(case: int) -> None:
    dtype = (torch.float32, torch.float16)[case % 2]
    x, dim = tensors()[case]
    x = in_dtype(x, dtype)
    for op, key in softmax_keys(x, dim % x.dim()):
        served = candidate(op.name)
        assert served.unfit(key) is None
        checker = verification.Checker(op, key, DEVICE)
        configs = served.configs(key)
        assert 1 <= len(configs) <= 7
        for config in (configs[0], configs[-1]):
            assert config["parts"] >= 2
            verdict = checker._probe(served.bind(key, config, DEVICE), 0, 0)[1]
            assert verdict, (key.text, config, verdict.reason)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("shape", "dim"), [((2, 8200), 1), ((1100, 10), 0)])
def test_a_public_call_is_served(shape: tuple[int, ...], dim: int) -> None:
    candidate("softmax")
    x, dy = rand(*shape, dtype="f16").requires_grad_(), rand(*shape, dtype="f16", seed=1)
    wide = x.detach().double().requires_grad_()
    torch.softmax(wide, dim).backward(dy.double())
    with tensorlogic.policy(tune="off", force={"softmax": "triton.parts", "softmax_backward": "triton.parts"}):  # fmt: skip
        y = tensorlogic.softmax(x, dim)
        y.backward(dy)
    close(y.detach(), torch.softmax(wide.detach(), dim), "f16", 0.1)
    assert x.grad is not None
    assert wide.grad is not None
    close(x.grad, wide.grad, "f16", 0.1)


@pytest.mark.usefixtures("small")
def test_a_configuration_of_another_key_is_refused_or_right() -> None:
    op, served = OPS["softmax"], candidate("softmax")
    keys = [op.key([x, dim % x.dim(), False], "inference") for x, dim in tensors()[:4]]
    brings = [*keys, op.key([torch.empty(10**6), 0, False], "inference")]
    configs = [served.configs(key)[0] for key in brings]
    for key, own in zip(keys, configs, strict=False):
        checker = verification.Checker(op, key, DEVICE)
        for config in configs:
            if config != own:
                verdict = checker._probe(served.bind(key, config, DEVICE), 0, 0)[1]
                assert verdict, (key.text, config, verdict.reason)


@pytest.mark.parametrize(
    "config",
    [
        {"BLOCK_C": 64, "BLOCK_I": 1, "parts": 257, "num_warps": 4},
        {"BLOCK_C": 64, "BLOCK_I": 64, "parts": 65, "num_warps": 4},
        {"BLOCK_C": 1, "BLOCK_I": 8, "parts": 2, "num_warps": 4},
    ],
)
def test_what_no_program_combines_or_sums_is_refused(config: dict[str, int]) -> None:
    lies = Lines(1, 10**6, 64, ((0, 64, 1), (0, 64, 1)))
    with pytest.raises(CompileFailure, match="does not fit lines of 1000000"):
        softmax_strided_split.parts_launcher(lies, "f32", config, DEVICE)


def test_what_is_left_to_others_is_named() -> None:
    said = candidate("softmax").supports
    for x, dim, reason in (
        (torch.empty(3, 4), 1, "too short"),
        (torch.empty(5, 8191), 1, "too short"),
        (torch.empty(1000, 64), 0, "too short"),
        (torch.empty(528, 8192), 1, "528 programs need no parts"),
        (torch.empty(1024, 528 * 8), 0, "528 programs need no parts"),
        (torch.empty(0, 8192), 1, "empty"),
        (torch.empty(()), 0, "zero-dimensional"),
        (torch.empty(8192, dtype=torch.float64), 0, "f64"),
        (torch.empty(2, 3, 4, 9000).permute(2, 1, 0, 3), 3, "more than two steps"),
    ):
        assert reason in str(said(OPS["softmax"].key([x, dim, False], "inference")))
    for x, dim in ((torch.empty(527, 8192), 1), (torch.empty(1024, 8), 0)):
        assert said(OPS["softmax"].key([x, dim, False], "inference")) is None
    key = OPS["softmax_backward"].key(
        [torch.empty(9000), torch.empty(9000, dtype=torch.float16), 0], "backward"
    )
    assert "mixed" in str(candidate("softmax_backward").supports(key))


SHAPES = {  # outer, C, inner, x's strides
    "columns": (1, 14932, 64, (0, 64, 1)),
    "few columns": (1, 250000, 2, (0, 2, 1)),
    "odd columns": (3, 33333, 77, (2566641, 77, 1)),
    "rows": (1, 250002, 8, (0, 1, 250002)),
    "one row": (1, 1000000, 1, (0, 1, 0)),
    "turned": (1, 20000, 64, (0, 1, 20000)),
    "steps": (1, 20480, 64, (0, 2, 40960)),
}


def lines_of(name: str, tensors: int) -> Lines:
    """x in its strides (all but the last of `tensors`), what is written as PyTorch would."""
    outer, c, inner, x = SHAPES[name]
    rows = name in ("rows", "one row", "steps")
    y = (0, 1, c) if rows else (c * inner, inner, 1)
    return Lines(outer, c, inner, (x,) * (tensors - 1) + (y,))


def test_configurations_fill_the_gpu_and_are_combined_at_once() -> None:
    for name in SHAPES:
        for dtype in ("f16", "f32"):
            for tensors in (2, 3):
                lies = lines_of(name, tensors)
                assert softmax_strided_split.refusal(lies, dtype, 132) is None
                configs = softmax_strided_split.parts_configs(lies, dtype)
                assert 1 <= len(configs) <= 7
                for config in configs:
                    groups = lies.outer * -(-lies.inner // config["BLOCK_I"])
                    assert 2 <= config["parts"] <= softmax_strided_split.MOST_PARTS
                    assert config["parts"] * config["BLOCK_I"] <= softmax_strided_split.COMBINED * config["num_warps"] // 8  # fmt: skip
                    assert 64 <= groups * config["parts"] <= 8 * 132
                    if name in ("columns", "odd columns", "turned"):  # whole sectors of neighbours
                        assert config["BLOCK_I"] * SIZES[dtype] % softmax_strided_split.SECTOR == 0
                spans = [softmax_strided_split.span_of(lies.length, c["parts"]) for c in configs]
                assert all(s * c["parts"] >= lies.length for s, c in zip(spans, configs, strict=True))  # fmt: skip


def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, name, dtype, tensors in (
        *itertools.product((90,), SHAPES, ("f16", "f32"), (2, 3)),
        *itertools.product((80, 100), ("columns", "rows"), ("f16",), (2, 3)),
    ):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        lies = lines_of(name, tensors)
        for config in softmax_strided_split.parts_configs(lies, dtype)[
            : 7 if sm == 90 and dtype == "f16" else 1
        ]:

            def build(lies: Lines = lies, dtype: str = dtype, config: Any = config) -> object:
                return softmax_strided_split.parts_launcher(lies, dtype, config, cuda)

            jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    nothing_spills(jobs)
