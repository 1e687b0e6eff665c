"""Gradients of max and min: kernels against PyTorch's formula, special values, the candidate, what the compiler makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.triton import (
    DEVICE,
    EXTREME_CONFIGS,
    EXTREME_LARGE,
    EXTREME_NAMES,
    EXTREME_SHAPES,
    TORCH,
    close,
    extreme_input,
    extreme_lines,
    poisoned,
    rand,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.key import SIZES
from tensorlogic.dispatch import candidate_loading

from tensorlogic.measure import verification  # isort: skip
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS

from tensorlogic.core.candidate import Candidate  # isort: skip
from tensorlogic.kernels.reduce import extreme_grad as reduce_extreme_grad  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.kernels.row_access.strided import Lines  # isort: skip
from tensorlogic.ops.reduce import extreme_backward  # isort: skip

from ...support.compiled import nothing_spills  # isort: skip
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import small as small  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


def gradient(dy: Tensor, x: Tensor, y: Tensor, dtype: str, lies: Lines, config: Any) -> Tensor:
    """dx, from a poisoned output and poisoned counts, beside which nothing is written."""
    shape = (lies.outer, lies.length, lies.inner)
    dx = poisoned(*shape, dtype=dtype).as_strided(shape, lies.strides[1])
    whole = torch.full(
        (reduce_extreme_grad.extreme_space(lies, config) + 64,), 12345, dtype=torch.int32
    )
    start = reduce_extreme_grad.extreme_launcher(lies, dtype, config, DEVICE)
    assert start(dy, x, y, whole if len(whole) > 64 else dx, dx)
    assert (whole[-64:] == 12345).all(), "written beside the counts"
    return dx


@pytest.mark.parametrize("config", EXTREME_CONFIGS, ids=EXTREME_NAMES)
@pytest.mark.parametrize(
    ("dtype", "name"), [*itertools.product(("f16", "f32"), EXTREME_SHAPES), ("bf16", "columns")]
)
def test_ties_share_what_comes_in(dtype: str, name: str, config: dict[str, Any]) -> None:
    lies = Lines(*EXTREME_SHAPES[name])
    x = extreme_input(lies, dtype)
    dy = rand(lies.outer, lies.inner, dtype=dtype, seed=1)
    dy[-1, -1] = 0
    for y in (x.amax(1), x.amin(1)):
        want = extreme_backward(dy.double(), x.double(), y.double(), (1,), False)[0]
        got = gradient(dy, x, y, dtype, lies, config)
        close(got, want.to(TORCH[dtype]), dtype, 0.01)
        plain = extreme_backward(dy, x, y, (1,), False)[0]
        assert torch.equal(got.isnan(), plain.isnan())
        assert torch.equal(got.signbit() & (got == 0), plain.signbit() & (plain == 0))


@pytest.mark.parametrize("config", EXTREME_CONFIGS, ids=EXTREME_NAMES)
def test_what_comes_in_is_not_finite_or_nothing_is_the_extreme(config: dict[str, Any]) -> None:
    lies = Lines(1, 75, 6, ((0, 6, 1), (0, 6, 1)))
    x, dy = rand(1, 75, 6), torch.tensor([[torch.inf, torch.nan, -torch.inf, 0.0, 1.0, -2.0]])
    y = x.amax(1)
    y[0, 3:5] = torch.nan
    want = extreme_backward(dy, x, y, (1,), False)[0]
    assert want.isnan().sum(1).tolist() == [[74, 75, 74, 75, 75, 0]]
    close(gradient(dy, x, y, "f32", lies, config), want, "f32")


def test_the_same_bits_every_time_from_whatever_was_in_the_workspace() -> None:
    lies, config = Lines(*EXTREME_SHAPES["columns"]), EXTREME_CONFIGS[4]
    x, dy = extreme_input(lies, "f32"), rand(2, 5)
    first, second = (gradient(dy, x, x.amax(1), "f32", lies, config) for _ in range(2))
    assert torch.equal(first.nan_to_num(9.0), second.nan_to_num(9.0))


def test_offsets_beyond_32_bits() -> None:
    """A tensor that reaches there is too large for a test: a step that nothing takes asks for them, and changes nothing."""
    x, dy = rand(75), rand(1)
    for config in EXTREME_CONFIGS[1::2]:
        lies = Lines(1, 75, 1, ((0, 1, 2**31), (0, 1, 2**31)))
        got = gradient(dy.view(1, 1), x.view(1, 75, 1), x.amax(0).view(1, 1), "f32", lies, config)
        assert torch.equal(got.view(-1), dy * (x == x.max()))


def candidate() -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS["extreme_backward"].candidates["triton.spread"]


def key(x: Tensor, dim: tuple[int, ...], keepdim: bool = False) -> Any:
    y = torch.amax(x, dim, keepdim)
    return OPS["extreme_backward"].key([torch.empty_like(y), x, y, dim, keepdim], "backward")


def tensors() -> dict[str, tuple[Tensor, tuple[int, ...], bool]]:
    """Tensors, what is reduced, and whether its dimensions stay."""
    return {
        "rows": (torch.randn(33, 65), (1,), False),
        "few rows": (torch.randn(3, 2048), (1,), True),
        "long rows": (torch.randn(2, 20001), (1,), False),
        "columns": (torch.randn(33, 65), (0,), True),
        "long columns": (torch.randn(3000, 17), (0,), False),
        "in the middle": (torch.randn(2, 3, 6, 5), (1, 2), False),
        "one value": (torch.randn(33, 65), (0, 1), False),
        "one value of many": (torch.randn(25001), (0,), True),
        "rows with gaps": (torch.randn(9, 80)[:, :65], (1,), False),
        "columns with gaps": (torch.randn(40, 80)[:, :33], (0,), False),
        "two dimensions with gaps": (torch.randn(2, 3, 4, 8)[..., :6], (3,), True),
        "transposed rows": (torch.randn(65, 33).t(), (0,), False),
        "transposed columns": (torch.randn(65, 33).t(), (1,), False),
        "permuted": (torch.randn(2, 5, 4, 3).permute(0, 3, 1, 2), (2, 3), False),
        "one element a line": (torch.randn(5, 1, 4), (1,), False),
        "stepped rows": (torch.randn(33, 130)[:, ::2], (1,), False),
        "long stepped rows": (torch.randn(2, 15000)[:, ::3], (1,), True),
        "stepped columns": (torch.randn(40, 66)[:, ::2], (0,), False),
        "one value of steps": (torch.randn(3000)[::3], (0,), False),
        "rows of slices": (torch.randn(3, 8, 65)[:, :5], (2,), False),
        "columns of slices": (torch.randn(40, 3, 9)[..., :7], (0,), True),
        "rows in another order": (torch.randn(6, 5, 40).transpose(0, 1), (2,), False),
        "one element a repeated line": (torch.randn(33, 1).expand(33, 40), (1,), False),
        "one line repeated": (torch.randn(40).expand(33, 40), (1,), False),
        "repeated lines across": (torch.randn(40).expand(33, 40), (0,), True),
        "repeated in the middle": (torch.randn(3, 1, 40).expand(3, 6, 40), (2,), False),
    }


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", tensors())
def test_every_layout_is_served(name: str) -> None:
    x, dim, keepdim = tensors()[name]
    if name in ("rows", "few rows", "permuted"):
        x = torch.empty_strided(x.shape, x.stride(), dtype=torch.float16).copy_(x)
    op, served, asked = OPS["extreme_backward"], candidate(), key(x, dim, keepdim)
    assert served.unfit(asked) is None
    checker = verification.Checker(op, asked, DEVICE)
    configs = served.configs(asked)
    assert 1 <= len(configs) <= reduce_extreme_grad.MOST_CONFIGS
    for config in {c["strategy"]: c for c in configs}.values():
        launch = served.bind(asked, config, DEVICE)
        for probe in (0, 2):  # with strides like PyTorch's, and with ties
            verdict = checker._probe(launch, probe, probe)[1]
            assert verdict, (asked.text, config, verdict.reason)


def test_the_same_work_in_other_dimensions_is_the_same_key() -> None:
    op, x = OPS["extreme_backward"], torch.randn(4, 8, 32)
    for first, second in (
        (key(x, (0, 1), True), key(x.view(1, 32, 32), (1,))),
        (key(x, (2,)), key(x.view(32, 32), (1,), True)),
    ):
        found = [op.normal(replace(asked, device="cuda")) for asked in (first, second)]
        assert found[0] == found[1] == op.normal(found[0])
        own = replace(first, device="cpu")
        assert op.normal(own) == own  # on CPUs plans are measured for what they are


def test_samples_agree_and_some_have_ties() -> None:
    for asked in (key(torch.randn(40, 30), (1,), True), key(torch.randn(40, 30).t(), (0, 1))):
        plain, _, tied = verification.Checker(OPS["extreme_backward"], asked, DEVICE).probes
        for inputs, ties in ((plain, False), (tied, True)):
            _, x, y = inputs.dynamic
            dim, keepdim = asked.flag("dim"), asked.flag("keepdim")
            assert torch.equal(torch.amax(x, dim, keepdim), y)
            assert bool(((x == torch.amax(x, dim, True)).sum(dim) > 1).any()) == ties


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", ["max", "min"])
@pytest.mark.parametrize(
    ("shape", "dim", "keepdim"), [((40, 65), 1, True), ((70, 20), 0, False), ((3, 40, 5), (1, 2), False), ((31, 33), None, False)]
)  # fmt: skip
def test_a_public_call_is_served(kind: str, shape: Any, dim: Any, keepdim: bool) -> None:
    """Incoming gradients of their own, expanded, and turned."""
    candidate()
    theirs = {"max": torch.amax, "min": torch.amin}[kind]
    x = (4 * rand(*shape)).round().requires_grad_()
    every = tuple(range(x.dim())) if dim is None else dim
    plain = x.detach().clone().requires_grad_()
    want = theirs(plain, every, keepdim)
    with tensorlogic.policy(tune="off", force={"extreme_backward": "triton.spread"}):
        y = getattr(tensorlogic, kind)(x, dim, keepdim)
        for dy in (torch.randn(y.shape), torch.ones(()).expand(y.shape), torch.randn(y.shape[::-1]).permute([*range(y.dim() - 1, -1, -1)])):  # fmt: skip
            (got,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            close(got, torch.autograd.grad(want, plain, dy, retain_graph=True)[0], "f32", 0.1)


@pytest.mark.usefixtures("small")
def test_windows_that_share_elements() -> None:
    """What no sample can be drawn for, and is only read; the gradient of all windows is dense, as PyTorch's."""
    x, served = (2 * torch.randn(50)).round().unfold(0, 31, 1), candidate()
    asked = key(x, (1,))
    dy, y = torch.randn(20), x.amax(1)
    want = extreme_backward(dy, x, y, (1,), False)[0]
    for config in served.configs(asked):
        made = served.bind(asked, config, DEVICE)(dy, x, y)
        assert made is not None
        assert isinstance(made[0], Tensor)
        close(made[0], want, "f32")
        assert made[0].stride() == want.stride()


@pytest.mark.usefixtures("small")
def test_a_gradient_lies_as_pytorch_s_own() -> None:
    """Dense, in x's order, whatever gaps or steps x has."""
    for x, dim in (
        (torch.randn(9, 130)[:, ::2], 1),
        (torch.randn(9, 130)[:, ::2].t(), 0),
        (torch.randn(9, 130)[:, ::2], 0),
        (torch.randn(3, 8, 65)[:, :5], 2),
        (torch.randn(7).expand(9, 7), 0),
        (torch.randn(9, 1).expand(9, 7), 1),
    ):
        served, asked, leaf = candidate(), key(x, (dim,)), x.detach().requires_grad_()
        y = torch.amax(leaf, dim)
        (want,) = torch.autograd.grad(y, leaf, torch.ones_like(y))
        launch = served.bind(asked, served.configs(asked)[0], DEVICE)
        made = launch(torch.ones_like(y), x, y.detach())
        assert made is not None
        assert isinstance(made[0], Tensor)
        assert made[0].stride() == want.stride(), asked.text
        close(made[0], want, "f32")


def test_a_gradient_s_own_gradient_is_pytorch_s() -> None:
    candidate()
    found = []
    for fn in (tensorlogic.max, torch.amax):
        x = (2 * rand(6, 9)).round().requires_grad_()
        with tensorlogic.policy(tune="off", force={"extreme_backward": "triton.spread", "max": "torch.eager"}):  # fmt: skip
            first = torch.func.grad(lambda t, fn=fn: fn(t, 1).pow(3).sum())
            found.append(torch.func.grad(lambda t, first=first: first(t).square().sum())(x))
    close(found[0].detach(), found[1].detach(), "f32", 0.1)


def test_what_is_left_to_others_is_named() -> None:
    said = candidate().supports
    for x, dim, reason in (
        (torch.zeros(2, 3, 5), (0, 2), "more than [outer"),
        (torch.zeros(5, 6, 8)[..., :7], (1, 2), "more than [outer"),
        (torch.zeros(2, 6, 5, 4).transpose(1, 2), (3,), "more than [outer"),
        (torch.zeros(5, 6, 4).permute(2, 1, 0), (1,), "no program takes together"),
        (torch.zeros(5, 6, dtype=torch.float64), (1,), "f64"),
        (torch.zeros(0, 6), (1,), "nothing to reduce"),
    ):
        assert reason in str(said(key(x, dim))), (reason, said(key(x, dim)))
    asked = key(torch.zeros(5, 6), (1,))
    assert "nothing to reduce" in str(said(replace(asked, flags=(("dim", ()), ("keepdim", False)))))
    turned = replace(asked, tensors=(replace(asked.tensors[0], stride=(2,)), *asked.tensors[1:]))
    assert "not contiguous" in str(said(turned))


@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "held", "BLOCK_C": 64, "BLOCK_I": 1, "parts": 1, "num_warps": 4},
        {"strategy": "parts", "BLOCK_C": 64, "BLOCK_I": 1, "parts": 600, "num_warps": 4},
        {"strategy": "parts", "BLOCK_C": 64, "BLOCK_I": 64, "parts": 150, "num_warps": 4},
    ],
)
def test_what_no_program_holds_or_adds_up_is_refused(config: dict[str, Any]) -> None:
    lies = Lines(1, 10**6, 64, ((0, 64, 1), (0, 64, 1)))
    with pytest.raises(CompileFailure, match="does not fit lines of 1000000"):
        reduce_extreme_grad.extreme_launcher(lies, "f32", config, DEVICE)


@pytest.mark.parametrize("name", EXTREME_LARGE)
def test_configurations_fill_the_gpu(name: str) -> None:
    for dtype in ("f16", "f32"):
        lies = extreme_lines(name)
        configs = reduce_extreme_grad.extreme_configs(lies, dtype)
        assert 2 <= len(configs) <= reduce_extreme_grad.MOST_CONFIGS
        assert len({str(c) for c in configs}) == len(configs)
        programs = [reduce_extreme_grad.groups_of(lies, c["BLOCK_I"]) * c["parts"] for c in configs]
        assert programs[0] >= 96 or name == "few rows"
        # none that a neighbour's plan should not name
        assert min(programs) >= 16 or name == "few rows"
        for config, count in zip(configs, programs, strict=True):
            assert config["strategy"] != "held" or config["BLOCK_C"] >= lies.length
            if config["strategy"] == "parts":
                assert 2 <= config["parts"] <= reduce_extreme_grad.MOST_PARTS
                assert count <= 4 * 132 or config["parts"] == 2


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("length", [33, 108, 200, 384, 512])
def test_columns_of_hundreds_are_held_by_programs_that_take_turns(length: int, dtype: str) -> None:
    """Before they are swept; at least 64 bytes of neighbours wide, at most 32 elements a thread, so many registers that two programs fit."""
    n, size = 50257, SIZES[dtype]
    configs = reduce_extreme_grad.extreme_configs(
        Lines(8, length, n, ((length * n, n, 1),) * 2), dtype
    )
    held = list(itertools.takewhile(lambda c: c["strategy"] == "held", configs))
    assert len(held) >= 2
    assert held[0]["BLOCK_I"] * size >= 64
    assert max(c["BLOCK_I"] * size for c in held) >= (64 if length > 256 else 128)
    for config in held:
        threads = 32 * config["num_warps"]
        assert config["BLOCK_I"] * size >= reduce_extreme_grad.SECTOR
        assert config["BLOCK_C"] * config["BLOCK_I"] <= 32 * threads
        assert 2 * threads * config["registers"] <= 65536


def test_registers_and_the_order_of_threads_reach_the_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device: 90)
    cuda = torch.device("cuda", 0)

    def job(name: str, config: Any) -> Any:
        lies = extreme_lines(name)
        return triton_runtime_launch.collect(lambda: reduce_extreme_grad.extreme_launcher(lies, "f32", config, cuda), cuda)[0]  # fmt: skip

    for name, stepped in (("columns at odd places", False), ("stepped rows", True), ("short rows", False)):  # fmt: skip
        for config in reduce_extreme_grad.extreme_configs(extreme_lines(name), "f32"):
            if config["strategy"] == "held":
                made = job(name, config)
                assert made.registers == config.get("registers", 0)
                assert dict(made.constexprs)["STEPPED"] == stepped
    one = {"strategy": "held", "BLOCK_C": 64, "BLOCK_I": 1, "parts": 1, "num_warps": 1}
    assert not dict(job("stepped rows", one).constexprs)["STEPPED"]  # threads follow it anyway


@pytest.mark.slow
def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, name, dtype in (
        *itertools.product((90,), EXTREME_LARGE, ("f16", "f32")),
        *itertools.product((80, 100), ("many rows", "one value", "columns"), ("f16",)),
    ):
        monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device, sm=sm: sm)
        lies = extreme_lines(name)
        for config in reduce_extreme_grad.extreme_configs(lies, dtype)[: None if sm == 90 else 2]:

            def build(lies: Lines = lies, dtype: str = dtype, config: Any = config) -> object:
                return reduce_extreme_grad.extreme_launcher(lies, dtype, config, cuda)

            jobs += triton_runtime_launch.collect(build, cuda)
    nothing_spills(list(dict.fromkeys(jobs)))
