"""Reductions of any strides: right whatever lies between the elements, with any neighbour's configuration, compiled without spills."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.triton import (
    DEVICE,
    TORCH,
    close,
    poisoned,
    rand,
)

from tensorlogic.dispatch import candidate_loading  # isort: skip  (after the interpreter is asked for)
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.kernels.reduce import strided as reduce_strided  # isort: skip
from tensorlogic.core.key import Key
from tensorlogic.ops.reduce import shapes, triton

from tensorlogic.core.key import TensorSpec  # isort: skip
from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
candidate_loading.ready(DEVICE.type)
KINDS = ("sum", "mean", "max", "min")
SCALE = 10.0  # of sums of small tests, whose errors are those of float32 and of rounding once
View = tuple[Callable[[Tensor], Tensor], tuple[int, ...], tuple[int, ...]]


def among(x: Tensor, made: Callable[[Tensor], Tensor]) -> Tensor:
    """The view `made` of x, NaN wherever x has elements that do not belong to it."""
    inside = made(torch.zeros_like(x).bool())
    whole = inside._base if inside._base is not None else inside
    inside.fill_(True)
    return made(torch.where(whole.view(x.shape), x, torch.nan))


def described(kind: str, x: Tensor, dim: tuple[int, ...]) -> shapes.Shape:
    found = shapes.describe_any(OPS[kind].key([x, dim, False, False], "inference"))
    assert isinstance(found, shapes.Shape), found
    return found


def check(kind: str, x: Tensor, dim: tuple[int, ...], config: dict[str, Any]) -> None:
    """Right, twice on the same counters."""
    s, dtype = described(kind, x, dim), str(x.dtype)
    name = next(n for n, t in TORCH.items() if t == x.dtype)
    start, (partials, count), *_ = triton.blocks(s, config, DEVICE)
    partial = torch.full((max(partials, 1),), float("nan"))
    counter = torch.zeros(max(count, 1), dtype=torch.int32)
    want = OPS[kind].reference(x.double(), dim, False, False)[0]
    for _ in range(2):
        y = poisoned(*s.out, dtype=name)
        assert start(x, y, partial, counter), (dtype, config)
        close(y, want.to(x.dtype), name, SCALE)
        assert counter.eq(0).all()


VIEWS: dict[str, View] = {
    "rows padded": (lambda x: x[:, :61], (9, 69), (1,)),
    "rows padded, aligned": (lambda x: x[:, :56], (9, 64), (1,)),
    "rows padded, aligned, uneven": (lambda x: x[:, :59], (9, 64), (1,)),
    "every second of rows": (lambda x: x[:, ::2], (9, 64), (1,)),
    "every fourth of rows": (lambda x: x[:, 1::4], (9, 64), (1,)),
    "every third of rows": (lambda x: x[:, ::3], (9, 64), (1,)),
    "every second of rows, uneven": (lambda x: x[:, ::2], (9, 33), (1,)),
    "columns padded": (lambda x: x[:, :61], (9, 69), (0,)),
    "columns padded, aligned, uneven": (lambda x: x[:, :59], (9, 64), (0,)),
    "every second column": (lambda x: x[:, ::2], (9, 64), (0,)),
    "every fourth column": (lambda x: x[:, 1::4], (9, 64), (0,)),
    "every second row": (lambda x: x[::2], (9, 40), (0,)),
    "middle padded": (lambda x: x[:, :, :12], (3, 7, 20), (1,)),
    "middle of few columns": (lambda x: x[:, :, :2], (3, 33, 10), (1,)),
    "first and last": (lambda x: x, (5, 3, 24), (0, 2)),
    "all of rows that are padded": (lambda x: x[:, :19], (7, 24), (0, 1)),
    "leading, apart": (lambda x: x[:, :5], (3, 9, 12), (0, 1)),
    "output in another order": (lambda x: x.permute(2, 1, 0), (5, 7, 6), (1,)),
    "three that are kept": (lambda x: x[:, :3, :, :10], (2, 4, 5, 16), (2,)),
    "three that are kept, along": (lambda x: x[:, :3, :4, :10], (2, 4, 5, 16), (3,)),
    "expanded rows": (lambda x: x[:1].expand(5, 12), (1, 12), (0,)),
    "expanded columns": (lambda x: x[:, :1].expand(12, 5), (12, 1), (1,)),
    "expanded everywhere": (lambda x: x[:1, :1].expand(4, 5), (1, 1), (1,)),
    "expanded and kept": (lambda x: x[:, None, :20].expand(3, 4, 20), (3, 24), (2,)),
    "windows that overlap": (lambda x: x.view(-1).unfold(0, 6, 1), (1, 20), (1,)),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_any_strides(name: str, dtype: str) -> None:
    made, shape, dim = VIEWS[name]
    x = rand(*shape, dtype=dtype)
    x = made(x) if "expanded" in name or "overlap" in name else among(x, made)
    kinds = {"f16": KINDS, "bf16": ("max",), "f32": ("sum",)}[dtype]
    small = {"strategy": "across", "parts": 3, "BLOCK_R": 2, "BLOCK_C": 8, "num_warps": 4}
    along = {"strategy": "along", "parts": 3, "BLOCK_K": 2, "BLOCK_R": 8, "num_warps": 4}
    for kind, known in zip(kinds, itertools.cycle((True, False))):
        s = described(kind, x, dim)
        assert s.view is not None
        several = along if s.view.along else small
        check(kind, x, dim, triton.blocks_configs(s)[0] if known else several)


@pytest.mark.parametrize("kind", ["max", "min", "sum"])
@pytest.mark.parametrize("name", ["every second of rows", "columns padded, aligned, uneven"])
def test_nan_and_infinity_win(kind: str, name: str) -> None:
    made, shape, dim = VIEWS[name]
    for special in (float("nan"), float("inf"), float("-inf")):
        x = among(rand(*shape, dtype="f16"), made)
        x[-1, -1] = x[2, 0] = special
        for config in triton.blocks_configs(described(kind, x, dim))[:2]:
            check(kind, x, dim, config)


def test_views_at_random() -> None:
    chance = random.Random(7)
    for turn in range(50):
        dims = chance.choice((2, 3))
        shape = [chance.choice((1, 2, 3, 8, 17)) for _ in range(dims)]
        x = rand(*shape, dtype=chance.choice(("f16", "f32")), seed=turn)
        x = x.permute(*chance.sample(range(dims), dims))
        cuts = [slice(chance.randint(0, 1) if n > 2 else 0, None, chance.choice((1, 1, 2, 4))) for n in x.shape]  # fmt: skip
        x = x[tuple(cuts)]
        dim = tuple(sorted(chance.sample(range(dims), chance.randint(1, dims))))
        kind, keep = chance.choice(KINDS), chance.random() < 0.5
        key = OPS[kind].key([x, dim, keep, False], "inference")
        blocks = OPS[kind].candidates["triton.blocks"]
        if blocks.supports(key) is not None:
            assert dims == len(dim) == 3, key.text  # that lie apart, all of them
            continue
        got = blocks.bind(key, blocks.configs(key)[0], DEVICE)(x)
        want = OPS[kind].reference(x.double(), dim, keep, False)[0]
        assert got is not None
        assert got[0] is not None
        assert got[0].shape == want.shape
        assert got[0].is_contiguous()
        close(got[0], want.to(x.dtype), "f16" if x.dtype == torch.float16 else "f32", SCALE)


def test_dense_memory_is_seen_as_contiguous_in_whatever_order() -> None:
    x = rand(3, 5, 8)

    def sizes(x: Tensor, *dim: int) -> tuple[int, int, int]:
        s = described("sum", x, dim)
        assert s.view is None
        return s.outer, s.reduce, s.inner

    assert sizes(x, 1) == (3, 5, 8)
    assert sizes(x.mT, 1) == (15, 8, 1)
    assert sizes(x.mT, 2) == (3, 5, 8)
    assert sizes(x[0].T, 0) == (5, 8, 1)
    assert sizes(x.permute(2, 0, 1), 0) == (15, 8, 1)
    assert sizes(x.permute(1, 0, 2), 0) == (3, 5, 8)
    assert sizes(x.permute(2, 0, 1), 0, 1, 2) == (1, 120, 1)
    assert sizes(x.permute(2, 0, 1), 0, 2) == (3, 40, 1)
    assert sizes(x[:, :1], 1) == sizes(x[:, 0][:, None], 1) if x[:, :1].is_contiguous() else True
    view = described("sum", x.permute(2, 1, 0), (1,)).view
    assert view == shapes.View(((8, 1), (3, 40)), ((5, 8),))  # the output is in another order
    assert described("sum", x[..., ::2], (2,)).view == shapes.View(((15, 8),), ((4, 2),))
    five = x.as_strided((2, 2, 2, 2, 2), (64, 31, 13, 5, 2))
    key = OPS["sum"].key([five, (0, 2, 4), False, False], "inference")
    assert "two dimensions to reduce" in str(shapes.describe_any(key))


SMALL, LARGE = ((3, 40), (2, 9, 12)), ((70, 300), (3, 70, 100))
PAIRS = 8  # of layouts and borrowed configurations that are tried


def layouts(shape: tuple[int, ...]) -> dict[str, Tensor]:
    wide, whole = rand(*shape[:-1], 2 * shape[-1], dtype="f16"), rand(*shape, dtype="f16")
    return {"whole": whole, "turned": whole.mT, "padded": wide[..., : shape[-1]], "second": wide[..., ::2]}  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("which", [0, 1])
def test_a_configuration_of_another_size_is_right_or_refused(which: int, dim: int) -> None:
    """Plans lend their configurations to neighbours: whatever was best for smaller or larger tensors, of any layout."""
    blocks, here, refused = OPS["max"].candidates["triton.blocks"], layouts(SMALL[which]), 0
    if dim > which + 1:
        pytest.skip("no such dimension")
    lent: dict[str, dict[str, Any]] = {}
    for lenders in (layouts(SMALL[1 - which]), layouts(LARGE[which])):
        for x, d in itertools.product(lenders.values(), (0, 1)):
            key = OPS["max"].key([x, (d,), False, False], "inference")
            for config in (blocks.configs(key)[0], blocks.configs(key)[-1]):
                lent[repr(sorted(config.items()))] = dict(config)
    pairs = list(itertools.product(here.values(), lent.values()))
    for x, config in random.Random(dim).sample(pairs, PAIRS):
        key = OPS["max"].key([x, (dim,), False, False], "inference")
        try:
            launch = blocks.bind(key, config, DEVICE)
        except CompileFailure:
            refused += 1
            continue
        got = launch(x)
        assert got is not None
        assert torch.equal(got[0], x.amax(dim)), (key.text, config)
    assert refused


def test_a_configuration_of_polled_or_spun_reductions_of_another_size() -> None:
    for count, other in ((20001, 16400), (16384, 70000)):
        x = rand(count, dtype="f16")
        for id in ("triton.blocks", "triton.spins"):
            candidate = OPS["min"].candidates[id]
            key, lender = (
                OPS["min"].key([t, (0,), False, False], "inference")
                for t in (x, torch.empty(other, dtype=torch.float16))
            )
            for config in candidate.configs(lender)[:1]:
                if config.get("parts", 0) > 160:  # seconds in the interpreter
                    continue
                got = candidate.bind(key, config, DEVICE)(x)
                assert got is not None
                assert torch.equal(got[0], x.amin()), (id, config)
    s = described("sum", torch.empty(2**20, dtype=torch.float16), (0,))
    few = {"BLOCK": 512, "num_warps": 4}  # more parts than it has
    assert triton.build(triton.whole, s, few, DEVICE)


@pytest.mark.parametrize("strategy", ["polled", "split", "rows", "along", "across"])
def test_what_does_not_fit_is_refused(strategy: str) -> None:
    config = {"strategy": strategy, "parts": 1, "last": False, "num_warps": 4, "BLOCK": 64, "BLOCK_R": 4, "BLOCK_C": 64, "BLOCK_K": 4}  # fmt: skip
    s = described("sum", rand(6, 40), (0,))
    with pytest.raises(CompileFailure):
        triton.build(triton.blocks, s, config, DEVICE)
    s = described("sum", rand(6, 40)[:, :30], (0,))
    if strategy != "across":
        with pytest.raises(CompileFailure, match="'across' is required"):
            triton.build(triton.blocks, s, config, DEVICE)


def spec(shape: tuple[int, ...], dtype: str, pad: int, step: int) -> TensorSpec:
    whole = [*shape[:-1], shape[-1] * step + pad]
    stride, n = [step], 1
    for size in reversed(whole[1:]):
        n *= size
        stride.insert(0, n)
    return TensorSpec(dtype, shape, tuple(stride))


COMPILED = (
    ("max", (0,), "f16", (2930, 332), 8, 1),
    ("min", (0,), "bf16", (7, 5120), 0, 2),
    ("mean", (1,), "f32", (2, 338, 1000), 8, 1),
    ("sum", (1,), "f16", (32, 59, 50257), 8, 1),
    ("mean", (1,), "bf16", (1922, 1000), 0, 2),
    ("max", (1,), "f32", (1922, 1001), 7, 1),
    ("sum", (0, 2), "f16", (64, 32, 3136), 0, 1),
    ("max", (1,), "f16", (32, 6, 226070), 0, 1),
    ("min", (1,), "f16", (32, 234, 1024), 0, 1),
    ("mean", (1,), "f16", (32, 5120), 0, 1),
)


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), dict[Any, Any]()
    for at, (kind, dim, dtype, shape, pad, step) in enumerate(COMPILED):
        flags = (("dim", dim), ("keepdim", False))
        key = Key(kind, (spec(shape, dtype, pad, step),), ("x",), flags, "cuda", "inference")
        s = shapes.describe_any(key)
        assert isinstance(s, shapes.Shape)
        own = triton.blocks_configs(s)
        for sm in (80, 90, 100) if at < 2 or at == 4 else (90,):
            monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device, sm=sm: sm)
            for config in own if sm == 90 else own[:2]:
                made = triton_runtime_launch.collect(
                    lambda: triton.build(triton.blocks, s, config, cuda),  # noqa: B023  (called at once)
                    cuda,
                )
                jobs |= dict.fromkeys(made, (key.text, config))
    kernels = {job.kernel for job in jobs}
    assert kernels >= {"reduce_along", "reduce_across", "reduce_columns", "reduce_rows"}
    for job, answer in zip(jobs, resources(list(jobs)), strict=True):
        assert isinstance(answer, triton_runtime_launch.Resources), answer
        assert answer.stack == 0, (jobs[job], job.sm, answer)


def test_accesses_are_as_wide_as_lines_allow() -> None:
    def width(stride: int, length: int, step: int = 1, align: int = 16) -> tuple[int, int]:
        form = reduce_strided.lay(((8, stride),), ((length, step),), True, "f16", align)
        return form.width, form.step

    assert width(64, 60) == (8, 1)
    assert width(60, 40) == (4, 1)
    assert width(61, 40) == (1, 1)
    assert width(64, 32, 2) == (8, 2)
    assert width(66, 32, 2) == (1, 1)  # a word holds one that counts
    assert width(64, 20, 3) == (1, 1)
    assert width(64, 60, align=4) == (2, 1)


def test_sums_over_columns_are_no_longer_chains_than_stay_exact() -> None:
    """Of what is offered beside the first: tiles that a program adds up, one after the other. Two launches where these are few."""
    for rows, columns, dtype in itertools.product(
        (24, 5183, 2**20, 2**27), (2, 48, 320, 9779), ("f16", "f32")
    ):
        tiles = reduce_strided.column_tiles(1, rows, columns, dtype)
        twice = triton._twice(shapes.Shape("sum", dtype, 1, rows, columns, (columns,), 16), 132)
        chains = [rows / (c["parts"] * c["BLOCK_R"]) for c in (*tiles[1:], *twice)]
        assert max(chains, default=0) <= reduce_strided.CHAIN, (rows, columns, dtype, tiles, twice)
    s = shapes.Shape("sum", "f16", 1, 5183, 320, (320,), 16)
    assert {c["parts"] for c in triton.blocks_configs(s) if not c["last"]} == {41, 26}
    for small in ((31, 2), (24, 3), (200, 17)):
        known = triton.blocks_configs(shapes.Shape("sum", "f16", 1, *small, small[1:], 16))
        assert all(c not in known[:i] for i, c in enumerate(known))
    for dtype, line in (("f16", 128), ("f32", 64)):  # of many columns also by lines of 256 bytes
        s = shapes.Shape("sum", dtype, 8, 2045, 24 * line, (24 * line,), 16)
        wide = {"strategy": "columns", "parts": 2, "last": False, "BLOCK_R": 64, "BLOCK_C": line}
        assert {**wide, "num_warps": 4} in triton.blocks_configs(s)
