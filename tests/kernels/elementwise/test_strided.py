"""Element-wise kernels on strided operands: values, where outputs lie, and configurations of other sizes; in the interpreter without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.triton import DEVICE, GUARD, TORCH, close, rand

from tensorlogic.dispatch import candidate_loading  # isort: skip  (after the interpreter is asked for)
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS

from tensorlogic.core.op import spec  # isort: skip
from tensorlogic.kernels.elementwise import elementwise as elementwise_elementwise  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch
from tensorlogic.kernels.triton_runtime import launch_plan

from tensorlogic.kernels import register  # isort: skip
from tensorlogic.ops.common import layouts as common_layouts
from tensorlogic.ops.pointwise import reference

from tensorlogic.ops.pointwise import shapes  # isort: skip
from ...support.compiled import resources  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
TILES = (
    {"strategy": "rows", "BLOCK_R": 2, "BLOCK_C": 16, "stream": False, "num_warps": 4},
    {"strategy": "rows", "BLOCK_R": 16, "BLOCK_C": 4, "stream": True, "num_warps": 4},
)
FLAT = {"strategy": "flat", "BLOCK": 64, "stream": False, "num_warps": 4}


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Outputs are poisoned, and nothing beside them may be written."""
    made: list[tuple[Tensor, int]] = []

    def empty(shape: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        count = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        whole = torch.full((count + 2 * GUARD,), 777.0, dtype=dtype)
        made.append((whole, count))
        return whole.as_strided(shape, stride, GUARD)

    candidate_loading.ready(DEVICE.type)
    monkeypatch.setattr(register, "empty", lambda device: empty)
    monkeypatch.setattr(launch_plan, "plan", lambda op, key, device, launch: launch)
    with torch.device(DEVICE):
        yield
    for whole, count in made:
        beside = torch.cat([whole[:GUARD], whole[GUARD + count :]])
        assert torch.equal(beside, torch.full_like(beside, 777.0)), "written beside an output"


def turned(dtype: str, *shape: int) -> Tensor:
    return rand(*shape[:-2], shape[-1], shape[-2], dtype=dtype).mT


def padded(dtype: str, *shape: int) -> Tensor:
    return rand(*shape[:-1], shape[-1] + 8, dtype=dtype)[..., : shape[-1]]


def second(dtype: str, *shape: int) -> Tensor:
    return rand(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def plain(dtype: str, *shape: int) -> Tensor:
    return rand(*shape, dtype=dtype, seed=1)


def repeated(dtype: str, *shape: int) -> Tensor:
    return rand(*shape[:-1], 1, dtype=dtype).expand(shape)


def permuted(dtype: str, *shape: int) -> Tensor:
    return rand(shape[-1], *shape[:-1], dtype=dtype).movedim(0, -1)


def heads(dtype: str, *shape: int) -> Tensor:
    return rand(shape[0], shape[2], shape[1], shape[3], dtype=dtype).transpose(1, 2)


LAYOUTS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], tuple[int, ...]]] = {
    "turned": (turned, plain, (21, 33)),
    "turned and padded": (padded, turned, (37, 9)),
    "both padded": (padded, padded, (5, 37)),
    "every second": (second, plain, (7, 19)),
    "every second of a line": (second, second, (131,)),
    "repeated": (plain, repeated, (6, 35)),
    "repeated and turned": (repeated, turned, (34, 5)),
    "three turned": (turned, plain, (3, 18, 7)),
    "three permuted": (permuted, padded, (4, 3, 17)),
    "heads": (heads, plain, (2, 3, 5, 8)),
    "few turned": (turned, plain, (40, 3)),
    "one row": (padded, padded, (1, 40)),
    "one column": (turned, second, (40, 1)),
}


def apart(configs: Iterable[Any]) -> list[Any]:
    """Those that differ in more than the interpreter sees."""
    seen = {tuple((k, v) for k, v in c.items() if k != "num_warps"): c for c in configs}
    return [*seen.values()]


def check(op: str, args: list[Tensor], *flags: Any) -> None:
    """Every configuration against float64, and where PyTorch's output lies."""
    key = OPS[op].key([*args, *flags, False], "inference")
    candidate = OPS[op].candidates["triton.flat"]
    assert candidate.supports(key) is None
    (usual,) = OPS[op].reference(*args, *flags, False)
    (want,) = OPS[op].reference(*(a.double() for a in args), *flags, False)
    dtype = key.tensors[0].dtype  # type: ignore[union-attr]
    for config in (candidate.configs(key)[0], *TILES):
        (y,) = candidate.bind(key, config, DEVICE)(*args)  # type: ignore[misc]
        pairs = zip(y.shape, y.stride(), usual.stride(), strict=True)
        assert all(n == 1 or a == b for n, a, b in pairs), (y.stride(), usual.stride())
        close(y, want.to(TORCH[dtype]), dtype, 0.1)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_strided_forward(name: str, dtype: str) -> None:
    first, other, shape = LAYOUTS[name]
    a, b = first(dtype, *shape), other(dtype, *shape)
    a[(0,) * len(shape)] = float("nan")
    b[(-1,) * len(shape)] = float("inf")
    check("sub", [a, b])
    check("affine", [a, b, plain(dtype, *shape[-1:])])
    if dtype == "f16":
        check("mul_relu", [b, a])
        check("silu", [a])


@pytest.mark.parametrize("op", ["add", "mul", "div", "add_relu", "gelu"])
def test_strided_ops(op: str) -> None:
    a, b = padded("f32", 5, 23), turned("f32", 5, 23)
    check(op, [a, b][: len(OPS[op].dynamic)], *(["tanh"] if op == "gelu" else []))


def test_broadcast_in_several_ways() -> None:
    x = rand(2, 3, 4, 5)
    for other in ((2, 1, 4, 1), (3, 1, 5), (1, 3, 1, 1), (2, 1, 1, 5), (4, 1), (1,)):
        check("sub", [x, rand(*other, seed=2)])
        check("sub", [rand(*other, seed=2), x.transpose(1, 3).contiguous().transpose(1, 3)])
    check("sub", [rand(3, 1), rand(1, 7)])
    check("sub", [rand(2, 1, 3), rand(5, 1).expand(2, 5, 3)])


def test_numbers_at_edges() -> None:
    """Overlapping, single and scalar operands."""
    line = rand(40)
    check("add", [line.as_strided((6, 9), (3, 1)), rand(6, 9, seed=1)])
    check("add", [line[3:4], rand(1, 1, seed=1)])
    check("add", [rand(1)[0], second("f32", 4, 6)])
    check("silu", [line[:1].expand(70)])
    check("silu", [line[:3, None].expand(3, 70)])


BACKWARD = ("relu", "add_relu", "gelu", "gelu_tanh", "silu", "mul", "div", "mul_relu", "affine")


@pytest.mark.parametrize("kind", BACKWARD)
@pytest.mark.parametrize("name", ["turned", "both padded", "heads"])
def test_strided_backward(kind: str, name: str) -> None:
    first, other, shape = LAYOUTS[name]
    op = OPS["pointwise_backward"]
    candidate = op.candidates["triton.flat"]
    for dy, a, b in ((plain, first, other), (first, plain, first), (other, first, plain)):
        values = [dy("f32", *shape), a("f32", *shape), b("f32", *shape)]
        y = torch.relu(values[1] * values[2]) if kind == "mul_relu" else torch.relu(values[1])
        saved = [*values[1:], None, y if "relu" in kind else None]
        key = op.key([values[0], *saved, kind, "110"], "backward")
        usual = reference.backward(values[0], *saved[:2], saved[3], kind)
        assert candidate.supports(key) is None
        for config in (candidate.configs(key)[0], TILES[0]):
            try:
                grads = candidate.bind(key, config, DEVICE)(values[0], *saved)
            except CompileFailure:
                assert config["strategy"] == "flat"
                continue
            for got, want in zip(grads, usual, strict=True):  # type: ignore[arg-type]
                if want is not None and got is not None:
                    assert got.stride() == want.stride()
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_gradients_that_lie_apart_are_left_to_pytorch() -> None:
    op = OPS["pointwise_backward"]
    dy = torch.ones(()).expand(5, 6)
    key = op.key([dy, rand(5, 6), turned("f32", 5, 6), None, None, "mul", "110"], "backward")
    assert "lie alike" in str(op.candidates["triton.flat"].supports(key))


# configurations of other sizes --------------------------------------------------------------------------------------

SIZES = (((3, 5), plain, plain), ((4, 70), plain, plain), ((40, 3), turned, plain), ((2, 130), padded, plain),
         ((9,), second, plain), ((2, 3, 2, 4), heads, plain))  # fmt: skip


def test_configurations_of_other_sizes_are_right_or_refused() -> None:
    """What a neighbour's plan brings: every configuration, a third of them at each size."""
    op, cases = OPS["sub"], []
    for shape, first, other in SIZES:
        cases.append([first("f32", *shape), other("f32", *shape)])
    cases += [[rand(5, 37), rand(37)], [rand(70, 4), rand(70, 1)], [rand(2, 600), rand(600)]]
    keys = [op.key([*args, False], "inference") for args in cases]
    candidate = op.candidates["triton.flat"]
    every = apart(c for k in keys for c in candidate.configs(k))
    assert len(every) > 12
    refused = 0
    for i, (key, args) in enumerate(zip(keys, cases, strict=True)):
        for config in every[i % 3 :: 3]:
            try:
                (y,) = candidate.bind(key, config, DEVICE)(*args)  # type: ignore[misc]
            except CompileFailure:
                assert config["strategy"] == "flat"
                refused += 1
                continue
            assert torch.equal(y, args[0] - args[1]), (key.text, config)
    assert refused


@pytest.mark.parametrize(
    ("rows", "columns", "modes", "config", "fits"),
    [
        (2, 2**30, ("full", "row"), FLAT, True),
        (2, 2**30 + 8, ("full", "row"), FLAT, False),
        (2, 2**31 + 8, ("full", "column"), FLAT, False),
        (2, 2**31 + 8, ("full", "full"), FLAT, True),
        (2, 2**31 - 9, ("full", "row"), TILES[0], False),
        (2, 2**31 + 8, ("full", "row"), {**TILES[0], "BLOCK_C": 1024}, True),
        (2**31 - 1, 2, ("full", "column"), {**TILES[0], "BLOCK_R": 256}, False),
    ],
)
def test_sizes_that_kernels_cannot_count_are_refused(
    rows: int, columns: int, modes: tuple[str, str], config: dict[str, Any], fits: bool
) -> None:
    wide = {**config, "BLOCK": 4096} if config["strategy"] == "flat" else config

    def made() -> object:
        return elementwise_elementwise.elementwise_launcher("add", ["f16"] * 3, rows, columns, modes, wide, DEVICE)  # fmt: skip

    if fits:
        made()
    else:
        with pytest.raises(CompileFailure, match="32 bits"):
            made()


def test_offsets_take_64_bits_only_where_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {"a_r": 1, "a_c": 2**25, "y_r": 64}
    assert elementwise_elementwise._far(steps, {"BLOCK_R": 32, "BLOCK_C": 64})
    assert not elementwise_elementwise._far(steps, {"BLOCK_R": 32, "BLOCK_C": 32})
    assert elementwise_elementwise._far(
        {"a_r": 2**30, "a_c": 1, "y_r": 64}, {"BLOCK_R": 2, "BLOCK_C": 32}
    )
    assert elementwise_elementwise._far(
        {"a_r": 1, "a_c": 1, "y_r": 2**28}, {"BLOCK_R": 8, "BLOCK_C": 1}
    )
    a, b = rand(17, 9, seed=1).t(), rand(9, 17, seed=2)
    check("add", [a, b])
    monkeypatch.setattr(elementwise_elementwise, "_far", lambda steps, config: True)
    check("add", [a, b])


@pytest.mark.parametrize("columns", [5, 64, 65, 127, 1000])
@pytest.mark.parametrize("mode", ["row", "column"])
def test_flat_tiles_meet_ends_of_rows(columns: int, mode: str) -> None:
    """Tiles shorter than a row compare, longer ones divide."""
    x = rand(7, columns)
    other = rand(columns) if mode == "row" else rand(7, 1)
    y = torch.full_like(x, float("nan"))
    run = elementwise_elementwise.elementwise_launcher("sub", ["f32"] * 3, 7, columns, ("full", mode), FLAT, DEVICE)  # fmt: skip
    assert run(x, other, y)
    assert torch.equal(y, x - other)


# where outputs lie --------------------------------------------------------------------------------------------------


def test_outputs_lie_as_pytorch_lays_them() -> None:
    views = [rand(3, 4, 5), rand(3, 5, 4).mT, rand(3, 4, 1), rand(5, 4, 3).permute(2, 1, 0), rand(4, 5),
             rand(3, 4, 8)[..., :5], rand(3, 8, 5)[:, ::2], rand(4, 1, 3).permute(2, 0, 1), rand(4, 1).expand(3, 4, 5),
             rand(1, 1, 5), rand(4, 3, 1).transpose(0, 1), rand(1)[0], rand(5, 1, 3).permute(2, 1, 0)]  # fmt: skip
    for a, b in itertools.product(views, views):
        out, stride = common_layouts.iterated(
            (tuple(a.shape), a.stride()), (tuple(b.shape), b.stride())
        )
        y = a + b
        assert out == tuple(y.shape)
        assert all(n == 1 or s == t for n, s, t in zip(out, stride, y.stride(), strict=True))


def test_what_lies_alike_is_one_flat_pass() -> None:
    for args in (
        [rand(6, 5).mT],
        [rand(3, 6, 5).permute(2, 0, 1)],
        [rand(6, 5).mT, rand(6, 5).mT],
        [rand(6, 5).mT, rand(1)[0]],
    ):
        op = "silu" if len(args) == 1 else "add"
        shape = shapes.forward_shape(OPS[op].key([*args, False], "inference"))
        assert isinstance(shape, shapes.Shape)
        assert (shape.rows, shape.columns, shape.steps) == (1, args[0].numel(), ())
        assert shape.stride == args[0].stride()
    image = rand(2, 4, 3, 6).contiguous(memory_format=torch.channels_last)
    shape = shapes.forward_shape(OPS["add"].key([image, rand(4, 1, 1), False], "inference"))
    assert isinstance(shape, shapes.Shape)
    assert (shape.rows, shape.columns, shape.modes) == (36, 4, ("full", "row"))


def test_kernels_without_strides_refuse_them() -> None:
    key = OPS["silu"].key([padded("f32", 4, 5), False], "inference")
    found = shapes.forward_shape(key)
    assert isinstance(found, shapes.Shape)
    assert found.steps
    assert isinstance(shapes.unstrided(found), str)
    assert spec(padded("f32", 4, 5), "cpu") == key.tensors[0]


# what the compiler makes of them ------------------------------------------------------------------------------------


def test_every_strided_tile_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: dict[triton_runtime_launch.CompileJob, None] = {}

    def record(kernel: Any, *, device: torch.device, **options: Any) -> Any:
        for sm in (80, 90, 100):
            jobs[triton_runtime_launch.compile_job(kernel, sm=sm, **options)] = None
        return lambda *args: True

    monkeypatch.setattr(elementwise_elementwise, "prepare", record)
    any_ = torch.device("cuda", 0)
    y, back, wide = (0, 0, 1000, 1), (0, 0, 1, 1000), (0, 0, 1008, 1)
    for op, dtype in (
        ("add", "bf16"),
        ("gelu", "bf16"),
        ("affine", "f32"),
        ("mul_relu_bwd", "f16"),
    ):
        inputs, outputs = elementwise_elementwise.ELEMENTWISE[op]
        names, modes = [dtype] * (inputs + outputs), ["full"] * inputs
        for first, outer in ((back, (1, 1)), (wide, (1, 1)), ((1000, 0, 2000, 2), (2, 3))):
            steps = [first, *[y] * inputs]
            found = elementwise_elementwise.elementwise_configs(names, 1000, 1000, modes, steps)
            for config in found if (op, first) == ("add", back) else found[:1]:
                elementwise_elementwise.elementwise_launcher(
                    op, names, 1000, 1000, modes, config, any_, 16, outer, steps
                )
    bad = {}
    for job, answer in zip(jobs, resources(list(jobs)), strict=True):
        if isinstance(answer, str) or answer.stack:
            bad[f"{job.kernel} sm_{job.sm} {job.num_warps} warps {dict(job.constexprs)}"] = answer
    assert not bad, "\n".join(f"{job}: {answer}" for job, answer in bad.items())
