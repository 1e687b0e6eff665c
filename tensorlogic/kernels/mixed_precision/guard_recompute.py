"""A guard that nobody waits for: what `look_at` saw is judged on the GPU, and a product whose data have left what its error was
measured for is computed again there, in float64, before anything can read it.

The host learns of it by a word in its own memory, which the next call reads, and chooses again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core import dtypes
from ...core.key import SIZES
from ...system.compile_pool import CompileFailure
from .. import register
from ..triton_runtime import launch_plan
from ..triton_runtime.device_math import follow
from ..triton_runtime.launch import Start, prepare
from . import split_planes
from .data_statistics import DRIFT, FLOOR, SKETCH, Statistics

LOG = logging.getLogger("tensorlogic")
BLOCK_M, BLOCK_N = 32, 32
# of a program: what it nearly always does is to sum up a table, for which several would wait for
# each other
WARPS = 1
NOTED = 4096  # elements that a program looks at together
# four for every multiprocessor of a large GPU; each reads the whole table
PROGRAMS = 528


@triton.jit
def mend_product(
    left_ptr, right_ptr, out_ptr, found_ptr, spoilt_ptr, limits_ptr, said_ptr,
    M, N, K, left_r, left_c, right_r, right_c, out_r, out_c, ROWS, BLOCKS, SPOILT,
    TABLE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = left · right in float64, only where found [BLOCKS, 6], the first ROWS of them rows, is beyond the limits, or spoilt[SPOILT] is set.

    limits: what makes squares of cancellation of (norms of rows, norms of columns), the largest square of cancellation and
    the one below which the product may be left to what is faster, the least and the largest peak; the square of the budget, and
    that of the cancellation from which float64 may not keep it. said: whether the host is to choose again; whether even
    this result may be beyond the budget, for rounding to the dtype of out costs more of a part of a row or column, or sums cancel too far.
    """
    follow(PDL)
    p = tl.arange(0, TABLE)
    inside, row = p < BLOCKS, p < ROWS
    column = inside & (p >= ROWS)
    norms = tl.load(found_ptr + 6 * p, mask=inside, other=0.0)
    share = tl.load(found_ptr + 6 * p + 1, mask=inside, other=0.0)
    least = tl.min(tl.load(found_ptr + 6 * p + 3, mask=inside, other=float("inf")))
    most = tl.max(tl.load(found_ptr + 6 * p + 4, mask=inside, other=0.0))
    left = tl.sum(tl.where(row, norms, 0.0))
    right = tl.sum(tl.where(column, norms, 0.0))
    across = tl.max(tl.where(row, share, 0.0)) * right * tl.load(limits_ptr)
    down = tl.max(tl.where(column, share, 0.0)) * left * tl.load(limits_ptr + 1)
    cancels = tl.maximum(across, down)
    good = cancels <= tl.load(limits_ptr + 2)
    good &= (least >= tl.load(limits_ptr + 4)) & (most <= tl.load(limits_ptr + 5))
    blank = tl.sum(tl.load(found_ptr + 6 * p + 5, mask=inside, other=0.0))
    good &= blank == 0.0
    good &= (left - left == 0.0) & (right - right == 0.0) & (tl.load(spoilt_ptr + SPOILT) == 0.0)
    pid = tl.program_id(0)
    if (pid == 0) & ((cancels < tl.load(limits_ptr + 3)) | (good == 0)):
        tl.store(said_ptr, 1)
    if good == 0:
        across_n = tl.cdiv(N, BLOCK_N)
        for tile in range(pid, tl.cdiv(M, BLOCK_M) * across_n, tl.num_programs(0)):
            i = (tile // across_n * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
            j = (tile % across_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float64)
            a_at, b_at = left_ptr + i * left_r, right_ptr + j * right_c
            for _ in range(K):
                a = tl.load(a_at, mask=i < M, other=0.0).to(tl.float64)
                b = tl.load(b_at, mask=j < N, other=0.0).to(tl.float64)
                acc += a[:, None] * b[None, :]
                a_at += left_c
                b_at += right_r
            to = out_ptr + i[:, None] * out_r + j[None, :] * out_c
            rounded, there = acc.to(out_ptr.dtype.element_ty), (i < M)[:, None] & (j < N)[None, :]
            tl.store(to, rounded, mask=there)
            off, budget = acc - rounded.to(tl.float64), tl.load(limits_ptr + 6)
            # chosen, although 0 elsewhere: sums of bare products differ between lanes, which add their own unrounded
            off = tl.where(there, off * off, 0.0)
            size = tl.where(there, acc * acc * budget, 0.0)
            beyond = tl.max((tl.sum(off, 1) > tl.sum(size, 1)).to(tl.int32), 0)
            beyond |= tl.max((tl.sum(off, 0) > tl.sum(size, 0)).to(tl.int32), 0)
            if (beyond != 0) | (cancels > tl.load(limits_ptr + 7)):
                tl.store(said_ptr + 1, 1)


@triton.jit
def note_infinite(out_ptr, spoilt_ptr, TOTAL, SPOILT, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """spoilt[SPOILT] = 1 where one of the TOTAL elements of out is not finite: sketches of its rows need not meet the only one."""
    follow(PDL)
    bad = tl.zeros((BLOCK,), tl.int32)
    for n in range(tl.cdiv(TOTAL, tl.num_programs(0) * BLOCK)):
        at = (tl.program_id(0) + n * tl.num_programs(0)).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(out_ptr + at, mask=at < TOTAL, other=0.0).to(tl.float32)
        bad |= (x - x != 0.0).to(tl.int32)
    if tl.max(bad, 0) != 0:
        tl.store(spoilt_ptr + SPOILT, 1.0)


@dataclass(frozen=True)
class Seen:
    """How the tensors of one product lie in every call: M, N, K, strides of left, right and out, and element types."""

    sizes: tuple[int, int, int]
    strides: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, left: Tensor, right: Tensor, out: Tensor) -> Seen:
        """Of left [M, K] · right [K, N] = out [M, N]; on any device."""
        strides = (*left.stride(), *right.stride(), *out.stride())
        sizes = (left.shape[0], right.shape[1], left.shape[1])
        return cls(sizes, strides, split_planes.names(left, right, out))


class Watch:
    """What one candidate's products on one device are held to: limits there, and the word that is set where they were passed."""

    def __init__(
        self, then: Statistics, room: float, seen: Sequence[Seen], device: torch.device,
        rtol: float, drift: float = DRIFT,
    ) -> None:  # fmt: skip
        host = torch.zeros(2, dtype=torch.int32, device="cpu")
        self._word = host.pin_memory() if device.type == "cuda" else host
        self._said = self._word.numpy()
        self._device = device
        ends = _limits(then, room, rtol, drift)
        self._limits = [
            torch.tensor([*_shares(*s.sizes), *ends], dtype=torch.float64, device=device)
            for s in seen
        ]
        self._tables = [split_planes.blocks(*s.sizes[:2]) for s in seen]
        self._empty = register.empty(device)
        self._starts = []
        for s, (rows, blocks) in zip(seen, self._tables, strict=True):
            align = min(*(SIZES[name] for name in s.names), 4)
            about = (s.names, s.sizes, s.strides)
            look = split_planes._look(*about, align, device)
            table = (rows, blocks, 6 * self._tables[0][1])
            self._starts.append((look, _mend(*about, table, align, device)))
        self._notes = [_noting(s, ends[3], 6 * self._tables[0][1], device) for s in seen]
        self._streams: set[int] = set()  # that nobody has waited for since

    def passed(self) -> bool:
        """Whether a product has been mended since the last time one asked, as far as the GPU has come; waits for nothing."""
        return self._asked(0)

    def beyond(self) -> bool:
        """The same of products that even float64 may not have brought within the budget."""
        return self._asked(1)

    def _asked(self, word: int) -> bool:
        if not self._said[word]:
            return False
        self._said[word] = 0
        return True

    def wait(self) -> None:
        """Until the GPU has judged every product so far; nothing where a graph is captured."""
        cuda = self._device.type == "cuda"
        while self._streams and not (cuda and torch.cuda.is_current_stream_capturing()):
            number = self._streams.pop()
            if cuda:  # of number 0 PyTorch would make a stream of its own
                place = self._device
                own = torch.cuda.ExternalStream(number, place) if number else torch.cuda.default_stream(place)  # fmt: skip
                own.synchronize()

    def over(self, products: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """Look at (left, right, out) of every product and mend those that need it; waits for nothing.

        They lie as was said when this was made, whatever shapes the tensors have here.
        """
        self.judge(products)
        self.begun()

    def begun(self) -> None:
        """Know that the current stream has products to be judged."""
        if (number := split_planes.stream(self._device)) >= 0:
            self._streams.add(number)

    def judge(self, products: Sequence[tuple[Tensor, Tensor, Tensor]]) -> None:
        """`over` as a launcher, which plans may hold."""
        flag = launch_plan.lasting(split_planes.flag, self._device)
        word = launch_plan.lasting(self._host)
        tables = [self._empty((6 * blocks + 1,), (1,), torch.float64) for _, blocks in self._tables]
        good = True
        for (left, right, out), (look, _), found in zip(
            products, self._starts, tables, strict=True
        ):
            good &= look(left, right, out, found, flag)
        for (_, _, out), note in zip(products, self._notes, strict=True):
            good &= note is None or note(out, tables[0])
        for i, ((left, right, out), (_, mend), found) in enumerate(
            zip(products, self._starts, tables, strict=True)
        ):
            limits = launch_plan.lasting(self._limit, i)
            # the first to look has cleared the flag, and kept it behind its table
            good &= mend(left, right, out, found, tables[0], limits, word)
        if not good:
            raise RuntimeError("mend: a kernel refused tensors of the alignment of their elements")

    def _host(self) -> Tensor:
        return self._word

    def _limit(self, product: int) -> Tensor:
        return self._limits[product]


def _limits(then: Statistics, room: float, rtol: float, drift: float) -> tuple[float, ...]:
    """As `mend_product` reads them; float64 that leaves its range becomes infinite instead of an error."""
    beyond, easier = then.cancels * room, then.cancels / 64
    highest = math.inf if then.high > 1000 else 2.0 ** (then.high + DRIFT)
    hopeless = rtol / FLOOR
    ends = (2.0 ** (then.low - drift), highest, rtol * rtol, hopeless * hopeless)
    return beyond * beyond, easier * easier, *ends


def _noting(seen: Seen, highest: float, spoilt: int, device: torch.device) -> Start | None:
    """What notes elements that have left the result's range; None where none can, the largest of the operands being within limits."""
    (m, n, k), name = seen.sizes, seen.names[2]
    largest = torch.finfo(dtypes.DTYPES["f32" if name == "f64" else name]).max
    if 4 * k * highest * highest <= largest:  # as in error_statistics.py
        return None
    return _note(name, m * n, spoilt, SIZES[name], device)


@lru_cache
def works(device: torch.device) -> bool:
    """Whether this device leaves a product that is within its limits and mends one that is not: tried once, on small ones."""
    drawn = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=drawn).to(device) for size in ((70, 96), (96, 65)))
    want = (a.double() @ b.double()).float()
    near, wrong = want * (1 + 2.0**-12), want * 2
    try:
        watch = Watch(Statistics(20.0, 4.0, -8.0, 8.0), 1.0, [Seen.of(a, b, want)], device, 1e-3)
        watch.over([(a, b, near)])
        left = torch.equal(near, want * (1 + 2.0**-12)) and not watch.passed()
        watch.over([(a * 2.0**20, b, wrong)])
        mended = torch.allclose(wrong, want * 2.0**20, rtol=1e-6) and watch.passed()
    except (CompileFailure, RuntimeError) as problem:
        LOG.warning(
            "tensorlogic: %s cannot judge products itself, the host does: %s", device, problem
        )
        return False
    if not (left and mended):
        LOG.warning("tensorlogic: %s judges products wrongly, the host does it", device)
    return left and mended


def _shares(m: int, n: int, k: int) -> tuple[float, float]:
    """What the sketch's norms are multiplied by: all elements over those seen, of operands and of the result."""
    seen = (k / min(k, SKETCH)) ** 2
    return seen / (n / min(n, SKETCH)), seen / (m / min(m, SKETCH))


@lru_cache(maxsize=1024)
def _mend(
    names: tuple[str, ...], sizes: tuple[int, int, int], strides: tuple[int, ...], table: tuple[int, int, int],
    align: int, device: torch.device,
) -> Start:  # fmt: skip
    m, n, k = sizes
    order = ("left_r", "left_c", "right_r", "right_c", "out_r", "out_c")
    return prepare(
        mend_product,
        grid=(min(PROGRAMS, math.ceil(m / BLOCK_M) * math.ceil(n / BLOCK_N)), 1, 1),
        pointers={
            "left_ptr": names[0], "right_ptr": names[1], "out_ptr": names[2], "found_ptr": "f64", "spoilt_ptr": "f64",
            "limits_ptr": "f64", "said_ptr": "i32",
        },
        integers={
            "M": m, "N": n, "K": k, **dict(zip(order, strides, strict=True)), "ROWS": table[0], "BLOCKS": table[1],
            "SPOILT": table[2],
        },
        constexprs={"TABLE": triton.next_power_of_2(table[1]), "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N},
        num_warps=WARPS, device=device, align=align,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _note(name: str, total: int, spoilt: int, align: int, device: torch.device) -> Start:
    return prepare(
        note_infinite,
        grid=(min(PROGRAMS, math.ceil(total / NOTED)), 1, 1),
        pointers={"out_ptr": name, "spoilt_ptr": "f64"},
        integers={"TOTAL": total, "SPOILT": spoilt},
        constexprs={"BLOCK": NOTED}, num_warps=4, device=device, align=align,
    )  # fmt: skip
