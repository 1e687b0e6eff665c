"""The kernels in Gluon on the stand-in: right against float64, and found wrong once a bug is planted in their source."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorlogic.core.dtypes import DTYPES, NAMES
from tensorlogic.kernels.attention_scores import hopper_register_store, hopper_resident_k
from tensorlogic.kernels.cross_entropy import fused_backward_smem
from tensorlogic.kernels.gemm.spec import Operand
from tensorlogic.kernels.mixed_precision import f64_gemm
from tensorlogic.kernels.softmax import smem
from tensorlogic.kernels.triton_runtime import launch

from ..support.gemm import COLUMNWISE, RING, check, specialised
from ..support.gluon import standin as gluon_standin
from ..support.triton import close, poisoned, rand

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there they run as they are")
CPU = torch.device("cpu")
Shape = tuple[int, int, int, int, int]


@pytest.fixture(autouse=True)
def instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers prepare their kernels on the stand-in."""
    monkeypatch.setattr(launch, "prepare", gluon_standin.prepare)


def products(ring: str = "two", part: int = 0, **options: Any) -> None:
    """A product at uneven sizes, of several tiles for each of three programs; they leave whole, or `part` columns at a time."""
    size = {"m": 136, "n": 200, "k": 200, "align": 16}
    config = specialised(RING[ring], 3) | ({"PART": part} if part else {})
    check(config, layouts=options.pop("layouts", "row column row"), **size | options)


@pytest.mark.parametrize("ring", RING)
def test_products(ring: str) -> None:
    products(ring, bias="f16", outer="residual", activation="relu", z="f16")
    products(ring, layouts="column row row", outer="gradient", kind="gelu_tanh")
    products(ring, layouts="padded padded padded", **dict.fromkeys(COLUMNWISE, "f32"))
    products(ring, m=5, n=8, k=8, activation="silu", z="f16", early_z=True, bias="f16")
    products(ring, n=201, bias="f16", outer="residual", activation="relu", z="f16")
    products(ring, n=67, layouts="row column padded", activation="silu", z="f16", early_z=True)
    products(ring, n=131, layouts="column column row", outer="gradient", kind="gelu_tanh")
    half_odd(ring, 201, 7)
    half_odd(ring, 200, 3)


@pytest.mark.parametrize(("ring", "part"), [("two", 64), ("two", 32), ("three", 32), ("one", 16)])
def test_products_in_parts(ring: str, part: int) -> None:
    in_parts(ring, part)


def in_parts(ring: str = "two", part: int = 32) -> None:
    products(ring, part, bias="f16", outer="residual", activation="relu", z="f16")
    products(ring, part, bias="f16", outer="residual", activation="silu")
    products(ring, part, layouts="column row row", outer="gradient", kind="gelu_tanh")
    products(ring, part, **dict.fromkeys(COLUMNWISE, "f32"), z="f16", activation="gelu")
    products(ring, part, m=5, n=8, k=8, activation="silu", z="f16", early_z=True, bias="f16")
    products(ring, part, n=201, outer="residual", z="f16")  # by threads: whole all the same


def half_odd(ring: str, n: int, pad: int) -> None:
    """An output and a residual of which one alone has rows that bulk copies reach, one program for all tiles."""
    check(specialised(RING[ring], 1), m=136, n=n, k=200, align=16, residual_pad=pad, outer="residual", z="f16", activation="silu")  # fmt: skip


SCORES = {  # configuration, sizes
    "direct": ({"num_warps": 4, "STAGES": 3}, (1, 2, 203, 640, 64)),
    "direct stays": ({"num_warps": 4, "STAGES": 2}, (1, 6, 64, 256, 32)),
    "kept": ({"CUBIC": 1, "HELD": 1}, (1, 6, 203, 512, 64)),
    "kept, none held": ({"CUBIC": 2, "HELD": 0}, (1, 2, 128, 512, 32)),
    "kept, three steps": ({"CUBIC": 2, "HELD": 1}, (1, 2, 128, 384, 32)),
}  # fmt: skip


def scores(name: str, dtype: str = "f16") -> None:
    """Scores with a late maximum, far above the first tile's, in half of the heads, in two others for one row, beyond float32 and
    beyond float16, and a row of NaN."""
    config, (b, h, s, t, d) = SCORES[name]
    q, k = rand(b, s, h, d, dtype=dtype).transpose(1, 2), rand(b, h, t, d, dtype=dtype, seed=1)
    k[:, ::2, t // 2] *= 60
    for head, column, octaves in ((3, -1, 180), (5, -t // 4 - 1, 30)):
        if head < h:  # of one row alone: no other row's sum betrays it
            q[:, head, 0] *= 8
            row = q[0, head, 0].float()
            peak = (k[0, head, :64].float() @ row).max() + octaves / 0.3 / 1.44
            k[0, head, column] = (row * peak / row.square().sum()).to(k.dtype)
    lies = q.stride()[:3], k.stride()[:3]
    if name.startswith("kept"):
        assert config in hopper_resident_k.kept_configs(s, t, d)
        run = hopper_resident_k.kept_launcher((b, h, s, t, d), dtype, *lies, config, CPU)
    else:
        assert config in hopper_register_store.direct_configs(s, t, d)
        run = hopper_register_store.direct_launcher((b, h, s, t, d), dtype, *lies, config, CPU)
    y = poisoned(b, h, s, t, dtype=dtype)
    assert run(q, k, y, 0.3)
    close(y, torch.softmax(q.double() @ k.double().mT * 0.3, -1), dtype, 0.1)
    q[-1, -1, 5, 0] = float("nan")
    assert run(q, k, y, 0.3)
    assert torch.equal(y.isnan().any(-1), q.isnan().any(-1))


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str, dtype: str) -> None:
    scores(name, dtype)


def products_widened(
    shape: f64_gemm.Shape = (64, 64, 2, 2), turned: tuple[bool, bool] = (False, True), dtypes: str = "f16 f32"
) -> None:  # fmt: skip
    """Operands of two dtypes at uneven sizes, several tiles for either program, against float64."""
    sizes = m, n, k = 136, 72, 200
    x, w = (
        torch.randn(*s, dtype=torch.float64).to(DTYPES[d])
        for s, d in zip(((m, k), (k, n)), dtypes.split(), strict=True)
    )
    x, w = (t.t().contiguous().t() if turn else t for t, turn in zip((x, w), turned, strict=True))
    y = torch.full((m, n), torch.nan, dtype=torch.float64 if "f64" in dtypes else torch.float32)
    lies = [Operand(NAMES[t.dtype], t.stride(0), t.stride(1)) for t in (x, w, y)]
    found = f64_gemm.described(sizes, *lies, shape, 2)
    assert found is not None
    assert gluon_standin.prepare(f64_gemm.f64_gemm_kernel.gemm_widened, device=CPU, **found)(
        x, w, y
    )
    torch.testing.assert_close(y, (x.double() @ w.double()).to(y.dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtypes", ["f16 f32", "bf16 f64", "f32 bf16"])
@pytest.mark.parametrize("turned", [(False, True), (True, False)])
def test_widened(dtypes: str, turned: tuple[bool, bool]) -> None:
    products_widened((64, 64, 2, 2), turned, dtypes)
    products_widened((16, 32, 1, 4), turned, dtypes)


LOSSES = {  # dtype, columns (a ragged last tile or none), tiles in registers and to a tile's sum, reduction, guess
    "held": ("f16", 1000, 2, 2, "mean", 1.0),
    "late": ("bf16", 1280, 1, 5, "sum", 512.0),
    "wide": ("f32", 504, 1, 1, "mean", 0.5),
    "odd": ("f16", 1001, 2, 2, "mean", 1.0),
    "odd, late": ("bf16", 1285, 2, 5, "sum", 512.0),
    "odd, wide": ("f32", 1281, 3, 1, "mean", 0.5),
}


def losses(name: str, missed: int = 0) -> None:
    """Losses and their prepared gradient, rows shared by two programs; one row is ignored, one target there is not."""
    dtype, columns, kept, ahead, reduction, guess = LOSSES[name]
    config, rows = {"LANES": 32, "num_warps": 1, "per": 1, "KEPT": kept, "AHEAD": ahead}, 7
    what = (rows, columns, dtype, reduction, -100, config)
    run = fused_backward_smem.held_launcher(*what, CPU, 2)
    x, t = rand(rows, columns, dtype=dtype, scale=3.0), torch.arange(rows) * 37 % columns
    t[2], t[5] = -100, columns
    x[6] = torch.finfo(x.dtype).min
    bits = torch.tensor(guess).view(torch.int32) ^ torch.tensor(1.0).view(torch.int32)
    cell, used = (
        torch.stack([bits, torch.tensor(missed)]).int(),
        torch.full((2,), 7, dtype=torch.int32),
    )
    part, lse, share, y = poisoned(rows), poisoned(2 * rows), poisoned(1), poisoned(1, dtype=dtype)
    dx = poisoned(rows, columns, dtype=dtype)
    assert run(x, t, part, lse, y, share, torch.zeros(1, dtype=torch.int64), cell, used, dx)
    assert used.tolist() == [torch.tensor(guess).view(torch.int32), not missed]
    assert y.isnan().all()
    wide = x.double().requires_grad_()
    t[5] = 0
    want = F.cross_entropy(wide, t, reduction="none")
    factor = guess / 6 if reduction == "mean" else guess
    (grad,) = torch.autograd.grad(want.sum() * factor, wide)
    want[5], grad[5] = float("nan"), float("nan")
    close(part, want.detach(), "f32", 1.0)
    close(dx, torch.full_like(grad, 777.0) if missed else grad, dtype, 0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    losses(name)
    losses(name, missed=1)


def softmax_rows(name: str) -> None:
    """Softmax of rows shared by two programs: one with a NaN, one of -inf alone, one with inf, one whose largest comes late."""
    dtype, columns, kept, ahead, _, _ = LOSSES[name]
    config, rows = {"LANES": 32, "num_warps": 1, "per": 1, "KEPT": kept, "AHEAD": ahead}, 7
    run = smem.softmax_held_launcher(rows, columns, dtype, config, CPU, 2)
    x, y = rand(rows, columns, dtype=dtype, scale=3.0), poisoned(rows, columns, dtype=dtype)
    x[1, 3], x[2], x[4, -1], x[5, -1] = float("nan"), float("-inf"), float("inf"), 60.0
    x[6], x[0, -2] = torch.finfo(x.dtype).min, torch.finfo(x.dtype).max
    assert run(x, y)
    bad = torch.tensor([False, True, True, False, True, False, False])
    assert torch.equal(y.isnan().any(1), bad)
    assert torch.equal(y.isnan().all(1), bad)
    close(y[~bad], torch.softmax(x[~bad].double(), -1), dtype, 0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_softmax_of_rows_that_are_held(name: str) -> None:
    softmax_rows(name)


def softmax_gradients(name: str) -> None:
    """Its gradient, of rows shared by two programs, one with a NaN."""
    dtype, columns, kept, ahead, _, _ = LOSSES[name]
    config, rows = {"LANES": 32, "num_warps": 1, "per": 1, "KEPT": kept, "AHEAD": ahead}, 7
    run = smem.softmax_held_launcher(rows, columns, dtype, config, CPU, 2, backward=True)
    y = torch.softmax(rand(rows, columns, dtype="f32", scale=3.0), -1).to(DTYPES[dtype])
    dy, dx = rand(rows, columns, dtype=dtype, seed=1), poisoned(rows, columns, dtype=dtype)
    dy[2, 5] = float("nan")
    assert run(y, dy, dx)
    wide = y.double()
    want = wide * (dy.double() - (wide * dy.double()).sum(1, keepdim=True))
    bad = torch.arange(rows) == 2
    assert dx[bad].isnan().all()
    close(dx[~bad], want[~bad], dtype, 0.1)


@pytest.mark.parametrize("name", LOSSES)
def test_softmax_gradients_of_rows_that_are_held(name: str) -> None:
    softmax_gradients(name)


KERNELS = "tensorlogic.kernels."
OTHERS = {"bias": "f16", "outer": "residual", "activation": "relu", "z": "f16"}
PLANTED: dict[str, tuple[str, str, str, Callable[[], None]]] = {  # module, its text, a wrong one, what must notice
    "product: one step of K too few": ("gemm.hopper_kernel", "steps = gl.cdiv(K, BLOCK_K)", "steps = gl.cdiv(K - 64, BLOCK_K)", products),
    "product: a tile of rows too few": ("gemm.hopper_kernel", "tiles = gl.cdiv(M, BLOCK_M)", "tiles = gl.cdiv(M - 8, BLOCK_M)", products),
    "product: columns one off": ("gemm.hopper_kernel", "rn = at_n + gl", "rn = 1 + at_n + gl", partial(products, bias="f16")),
    "product: rows of a neighbour": ("gemm.hopper_kernel", "tile_m * BLOCK_M + me * ROWS,", "tile_m * BLOCK_M + me * ROWS + 1,", products),
    "product: a stage freed too early": ("gemm.hopper_kernel", "(done + STAGES - 1) % STAGES), count=1, pred", "done % STAGES), count=1, pred", products),
    "product: not waited for": ("gemm.hopper_kernel", "acc = warpgroup_mma_wait(0, deps=(acc,))", "acc = acc", products),
    "product: a stage too many": ("gemm.hopper_kernel", "at = done % STAGES\n            k = ", "at = done % (STAGES + 1)\n            k = ", products),
    "product: the wrong phase": ("gemm.hopper_kernel", "(done // STAGES & 1) ^ 1", "done // STAGES & 1", products),
    "product: bytes of one tile too few": ("gemm.hopper_kernel", "(BLOCK_M + BLOCK_N) * BLOCK_K", "(BLOCK_M + BLOCK_N - 1) * BLOCK_K", products),
    "product: a store not waited for": ("gemm.hopper_kernel", "    tma.store_wait(0)\n\n\n@gluon.jit\ndef gemm", "\n\n@gluon.jit\ndef gemm", products),
    "product: outputs overwritten early": ("gemm.hopper_kernel", "tma.store_wait(PARTS - 1)", "pass", partial(products, **OTHERS)),
    "product: a part overwritten one early": ("gemm.hopper_kernel", "tma.store_wait(PARTS - 1)", "tma.store_wait(PARTS)", in_parts),
    "product: parts share memory": ("gemm.hopper_kernel", "mine = staged.index(me * PARTS + i)", "mine = staged.index(me * PARTS)", in_parts),
    "product: another part's residual": ("gemm.hopper_kernel", "tile_n * BLOCK_N + j * PART", "tile_n * BLOCK_N + (j ^ 1) * PART", in_parts),
    "product: a part's columns one off": ("gemm.hopper_kernel", "y_ptr, at_m, at_n + i * PART", "y_ptr, at_m, at_n + i * PART + 1", in_parts),
    "product: the residual's memory free too early": ("gemm.hopper_kernel", "            tma.store_wait(0)\n            mbarrier.arrive(free", "            mbarrier.arrive(free", in_parts),
    "product: parts over what leaves still": ("gemm.hopper_kernel", "        if OUTER == \"none\":\n            tma.store_wait(0)", "        if OUTER == \"none\":\n            pass", in_parts),
    "product: bytes of one part alone": ("gemm.hopper_kernel", "ready, BLOCK_M * BLOCK_N *", "ready, BLOCK_M * PART *", in_parts),
    "product: all that is kept in the first columns": ("gemm.hopper_kernel", "z_ptr, at_m, at_n + i * PART", "z_ptr, at_m, at_n", in_parts),
    "product: what is kept early through one part's memory": ("gemm.hopper_kernel", "put(staged.index(me * PARTS + i), z", "put(staged.index(me * PARTS), z", in_parts),
    "product: parts in another order": ("gemm.hopper_kernel", "parts(first, PARTS // 2) + parts(second, PARTS // 2)", "parts(second, PARTS // 2) + parts(first, PARTS // 2)", in_parts),
    "product: a row by threads too few": ("gemm.hopper_kernel", "(m + row < M)", "(m + row < M - 1)", partial(products, n=201)),
    "product: rows by threads one off": ("gemm.hopper_kernel", "mine.slice(i * FEW, FEW).load", "mine.slice((i ^ 1) * FEW, FEW).load", partial(products, n=201)),
    "product: the residual's rows one off": ("gemm.hopper_kernel", "mine.slice(i * FEW, FEW).store", "mine.slice((i ^ 1) * FEW, FEW).store", partial(products, n=201, outer="residual")),
    "product: what is stored is overwritten by the residual": ("gemm.hopper_kernel", "            tma.store_wait(0)\n            fetch(", "            fetch(", partial(half_odd, "two", 200, 3)),
    "product: the residual's tile early": ("gemm.hopper_kernel", "mbarrier.wait(ready, turn & 1)", "pass", partial(products, **OTHERS)),
    "widened: one step of K too few": ("mixed_precision.f64_gemm_kernel", "for _ in range(gl.cdiv(K, BLOCK_K)):", "for _ in range(gl.cdiv(K, BLOCK_K) - 1):", products_widened),
    "widened: rows one off": ("mixed_precision.f64_gemm_kernel", "rm = tile_m *", "rm = 1 + tile_m *", products_widened),
    "widened: a store beyond the edge": ("mixed_precision.f64_gemm_kernel", "(rm < M)", "(rm < M + 1)", products_widened),
    "widened: a stage read early": ("mixed_precision.f64_gemm_kernel", "            mbarrier.wait(full.index(at), done // STAGES & 1)\n", "", products_widened),
    "widened: bytes of one tile too few": ("mixed_precision.f64_gemm_kernel", "BYTES * BLOCK_K", "BYTES * BLOCK_K - 1", products_widened),
    "direct: a step of k too few": ("attention_scores.hopper_register_store", "for step in range(laps):\n        if STAYS", "for step in range(laps - 1):\n        if STAYS", partial(scores, "direct")),
    "direct: columns in another order": ("attention_scores.hopper_register_store", "((row & 6) << 2) | ((row & 24) >> 2)", "((row & 6) << 1) | ((row & 24) >> 2)", partial(scores, "direct")),
    "direct: the last rows one off": ("attention_scores.hopper_register_store", "% groups * M, S - M)", "% groups * M, S - M + 1)", partial(scores, "direct")),
    "direct: k not waited for": ("attention_scores.hopper_register_store", "            async_copy.wait_group(STAGES - 2)\n            fence_async_shared()\n        left = begin(q, ks.index(step", "            fence_async_shared()\n        left = begin(q, ks.index(step", partial(scores, "direct")),
    "direct: recounted one step short": ("attention_scores.hopper_register_store", "for step in range(steps):\n        k = ", "for step in range(steps - 1):\n        k = ", partial(scores, "direct")),
    "loss: a row too few": ("cross_entropy.fused_backward_smem_kernel", "range(pid - programs, R, programs)", "range(pid - programs, R - 1, programs)", partial(losses, "held")),
    "loss: a tile not waited for": ("row_access.shared_memory", "async_copy.wait_group(min(k, SHARED - 1) - (k - AHEAD))", "pass", partial(losses, "held")),
    "loss: waits for a tile less": ("row_access.shared_memory", "min(k, SHARED - 1) - (k - AHEAD)", "min(k, SHARED - 1) - (k - AHEAD) + 1", partial(losses, "late")),
    "loss: written past a row": ("row_access.shared_memory", "left = C - k", "left = C + 8 - k", partial(losses, "held")),
    "loss: summed past a row": ("row_access.shared_memory", "piece < W - (k - AHEAD) * TILE", "piece < W + 1 - (k - AHEAD) * TILE", partial(losses, "wide")),
    "loss: another tile's gradient": ("row_access.shared_memory", "v = xs.index(k).load(IN)\n                put", "v = xs.index((k + 1) % SHARED).load(IN)\n                put", partial(losses, "held")),
    "loss: the next row's target early": ("cross_entropy.fused_backward_smem_kernel", "t = gl.load(t_ptr + after, mask=more", "t = gl.load(t_ptr + row, mask=begun", partial(losses, "held")),
    "loss: a target of C": ("cross_entropy.fused_backward_smem_kernel", "(t >= 0) & (t < C)", "(t >= 0) & (t <= C)", partial(losses, "late")),
    "softmax: a row too few": ("softmax.smem_kernel", "range(pid - programs, R, programs)", "range(pid - programs, R - 1, programs)", partial(softmax_rows, "held")),
    "softmax: a row that is not there": ("softmax.smem_kernel", "after < R", "after <= R", partial(softmax_rows, "held")),
    "softmax: sums of one row are the next one's": ("softmax.smem_kernel", "        norm = gl.zeros([LANES], gl.float32, SIDE)\n        if ODD", "        if ODD", partial(softmax_rows, "late")),
    "softmax: rows one element on": ("softmax.smem_kernel", "row.to(gl.int64) * C", "row.to(gl.int64) * C + 1", partial(softmax_rows, "wide")),
    "softmax's gradient: a row too few": ("softmax.smem_kernel", "range(pid - programs, R, programs)", "range(pid - programs, R - 1, programs)", partial(softmax_gradients, "held")),
    "softmax's gradient: a tile not waited for": ("softmax.smem_kernel", "async_copy.wait_group(min(k, SHARED - 1) - (k - AHEAD))", "pass", partial(softmax_gradients, "held")),
    "softmax's gradient: waits for a tile less": ("softmax.smem_kernel", "min(k, SHARED - 1) - (k - AHEAD)", "min(k, SHARED - 1) - (k - AHEAD) + 1", partial(softmax_gradients, "late")),
    "softmax's gradient: sums of one row are the next one's": ("softmax.smem_kernel", "        along = gl.zeros([LANES], gl.float32, SIDE)\n        if ODD", "        if ODD", partial(softmax_gradients, "held")),
    "softmax's gradient: written past a row": ("softmax.smem_kernel", "left = size - k", "left = size + 8 - k", partial(softmax_gradients, "held")),
    "softmax's gradient: another tile's dy": ("softmax.smem_kernel", "y, dy = ys.index(k).load(IN), ds.index(k).load(IN)", "y, dy = ys.index(k).load(IN), ds.index((k + 1) % SHARED).load(IN)", partial(softmax_gradients, "held")),
    "loss: ends of the next row": ("cross_entropy.fused_backward_smem_kernel", "parts_held(after.to(gl.int64)", "parts_held(row.to(gl.int64)", partial(losses, "odd")),
    "loss: ends are not summed": ("cross_entropy.fused_backward_smem_kernel", "total += gl.sum(exponential(ends", "total += 0 * gl.sum(exponential(ends", partial(losses, "odd")),
    "loss: the last but one tile is whole": ("row_access.shared_memory", "k - AHEAD < TILES - 1 - ODD", "k - AHEAD < TILES - 1", partial(losses, "odd, wide")),
    "loss: an end too few": ("row_access.shared_memory", "gl.minimum(first, C), C)", "gl.minimum(first, C), C - 1)", partial(losses, "odd")),
    "softmax: ends scaled twice": ("softmax.smem_kernel", "y = gradient(ends, base, scale, kind)", "y = gradient(ends, base, scale * 2, kind)", partial(softmax_rows, "odd")),
    "softmax: groups one element on": ("softmax.smem_kernel", "to = y_ptr + begin\n", "to = y_ptr + begin + 1\n", partial(softmax_rows, "odd")),
    "softmax: the largest at an end is not seen": ("softmax.smem_kernel", "based(gl.max(ends, 0), kind)", "based(gl.min(ends, 0), kind)", partial(softmax_rows, "odd")),
    "softmax's gradient: ends are not summed": ("softmax.smem_kernel", "dot += gl.sum(y_e * d_e, 0)", "pass", partial(softmax_gradients, "odd")),
    "softmax's gradient: the last but one tile is whole": ("softmax.smem_kernel", "EVEN or k < TILES - 1 - ODD", "EVEN or k < TILES - 1", partial(softmax_gradients, "odd, wide")),
    "softmax: a tile not waited for": ("row_access.shared_memory", "async_copy.wait_group(min(k, SHARED - 1) - (k - AHEAD))", "pass", partial(softmax_rows, "held")),
    "direct stays: rows once more from one step": ("attention_scores.hopper_register_store", "step if STAYS else 0", "0", partial(scores, "direct stays")),
    "direct: what stays is not waited for": ("attention_scores.hopper_register_store", "                async_copy.wait_group(0)\n", "                pass\n", partial(scores, "direct stays")),
    "kept: the last step's columns": ("attention_scores.hopper_resident_k", "y_ptr + LAST * (2 * N), at", "y_ptr + LAST * (2 * N) + 1, at", partial(scores, "kept")),
    "kept: one step not written": ("attention_scores.hopper_resident_k", "for step in range(laps + more):", "for step in range(laps + more - 1):", partial(scores, "kept")),
    "kept: the last step is not waited for": ("attention_scores.hopper_resident_k", "    if AGAIN == 1:\n        async_copy.wait_group(0)\n", "    if AGAIN == 1:\n", partial(scores, "kept, three steps")),
    "kept: another step is held": ("attention_scores.hopper_resident_k", "y_ptr + (AGAIN + i) * (2 * N)", "y_ptr + (AGAIN + i) * (2 * N) + N", partial(scores, "kept")),
    "kept: sums beyond what is held": ("attention_scores.hopper_resident_k", "6e4 if dtype", "1e38 if dtype", partial(scores, "kept")),
    "kept: what has left float16 is not made again": ("attention_scores.hopper_resident_k", "more = HELD", "more = 0", partial(scores, "kept")),
    "kept: powers beyond float32": ("attention_scores.hopper_resident_k", "tl.clamp(x, -127.0, 127.0", "tl.clamp(x, -127.0, 1e6", partial(scores, "kept", "bf16")),
}  # fmt: skip


PASSED: set[str] = set()  # what notices plants, and has passed without one


def passes(notices: Callable[[], None]) -> None:
    """Without a plant, once a process."""
    called = notices if isinstance(notices, partial) else partial(notices)
    name = f"{called.func.__name__} {called.args} {called.keywords}"
    if name not in PASSED:
        notices()
        PASSED.add(name)


@pytest.mark.parametrize("name", PLANTED)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right, wrong, notices = PLANTED[name]

    def edit(where: str, text: str) -> str:
        if where != KERNELS + module:
            return text
        if right not in text:
            raise ValueError(f"nothing to plant in {module}: {right}")
        return text.replace(right, wrong)

    passes(notices)
    monkeypatch.setattr(launch, "prepare", partial(gluon_standin.prepare, edit=edit))
    monkeypatch.setattr(gluon_standin, "prepare", launch.prepare)
    with pytest.raises(AssertionError):
        notices()
