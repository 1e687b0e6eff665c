"""Products of cuBLASLt under precision policies: what depends on how operands lie is found once, a call allocates and starts."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..core.dtypes import NAMES
from ..kernels import register
from ..kernels.gemm import cublaslt as gemm_cublaslt
from ..kernels.gemm.spec import GemmSpec, Operand
from ..kernels.mixed_precision import split_planes
from ..kernels.triton_runtime import launch_plan
from ..system.compile_pool import CompileFailure
from . import number_formats

MOST = 1024  # ways in which operands lie that are known at once
ALIGN = 16  # bytes, of fresh memory
Run = Callable[[Tensor, Tensor], Tensor]
Multiply = Callable[[Tensor, Tensor, Tensor], None]  # of x and w to y


class Unserved(RuntimeError):
    """A product that the library does not take, such as one too small for a call to it."""


@dataclass(frozen=True)
class Step:
    """A part of a product's inner dimension, added to those before it."""

    start: int
    depth: int
    alpha: float = 1.0


def series(
    sizes: tuple[int, int], dtype: str, strides: tuple[int, int, int, int], steps: Sequence[Step],
    rank: int, device: torch.device, precision: str = "ieee", align: int = ALIGN,
) -> Multiply:  # fmt: skip
    """y [M, N] in float32 = the sum of alpha · x[:, part] · w[part] over all steps, on the current stream, for x and w of one dtype.

    Raises CompileFailure or Unserved where the library does not take them.
    """
    lib = gemm_cublaslt._library()
    if isinstance(lib, str):
        raise CompileFailure(lib)
    (m, n), item = sizes, gemm_cublaslt._SIZES[dtype]
    index = torch.cuda.current_device() if device.index is None else device.index
    entries, kept, most = [], [], 0
    with torch.cuda.device(index):
        handle = gemm_cublaslt._handle(lib, index)
        for i, step in enumerate(steps):
            at_x, at_w = step.start * strides[1] * item, step.start * strides[2] * item
            bits = align | at_x | at_w
            spec = GemmSpec(
                m, n, step.depth, Operand(dtype, *strides[:2]), Operand(dtype, *strides[2:]), Operand("f32", n, 1),
                precision=precision, align=bits & -bits,
                outer="residual" if i else "none", residual=Operand("f32", n, 1) if i else None,
            )  # fmt: skip
            if (reason := gemm_cublaslt.lt_refusal(spec)) is not None:
                raise Unserved(f"cuBLASLt: {reason}")
            product = gemm_cublaslt._Product(lib, spec, handle)
            found = _algorithm(product, rank)
            one, beta = ctypes.c_float(step.alpha), ctypes.c_float(1.0 if i else 0.0)
            most = max(most, found.workspace)
            kept.append((product, found, one, beta))
            entries.append(
                (
                    product.descriptor(), ctypes.addressof(one), at_w, product.a, at_x, product.b, ctypes.addressof(beta),
                    product.c, product.d, ctypes.addressof(found),
                )
            )  # fmt: skip
    several = torch.cuda.device_count() > 1
    made = launch_plan.series(lib, device, several, handle, entries, kept)
    run = _called(lib, index, handle, entries, most, kept) if made is None else made
    if made is not None and most:

        def with_space(x: Tensor, w: Tensor, y: Tensor) -> None:
            run(x, w, y, launch_plan.lasting(_space, index, most))

        return with_space
    if made is not None or not several:
        return run

    def run_there(x: Tensor, w: Tensor, y: Tensor) -> None:
        with torch.cuda.device(index):
            run(x, w, y)

    return run_there


def _space(index: int, size: int) -> Tensor:
    """Scratch memory of the current stream."""
    return gemm_cublaslt._workspace(index, torch._C._cuda_getCurrentRawStream(index), size)


def _called(
    lib: Any, index: int, handle: int, entries: Sequence[tuple[int, ...]], most: int, kept: Sequence[Any]
) -> Callable[..., Any]:  # fmt: skip
    """The same without the compiled calls."""

    def run(x: Tensor, w: Tensor, y: Tensor) -> None:
        queue = torch._C._cuda_getCurrentRawStream(index)
        memory = _space(index, most) if most else None
        scratch = None if memory is None else memory.data_ptr()
        at_x, at_w, to = x.data_ptr(), w.data_ptr(), y.data_ptr()
        for made, one, w_step, a, x_step, b, beta, c, d, algo in entries:
            status = lib.cublasLtMatmul(
                handle, made, one, at_w + w_step, a, at_x + x_step, b, beta, to, c, to, d, algo, scratch, most, queue
            )  # fmt: skip
            if status:
                spec = kept[0][0].spec
                raise RuntimeError(f"cublasLtMatmul failed with status {status} on {spec}")

    return run


def _algorithm(product: gemm_cublaslt._Product, rank: int) -> Any:
    """Of this rank, or the library's own choice: of other alignments it ranks fewer."""
    try:
        return product.algorithm(rank)
    except CompileFailure:
        return product.algorithm(0)


@dataclass
class Prepared:
    """product(a, b, rank) by what `make` gives for operands that lie like these; in float64 where the library does not take them."""

    make: Callable[[int, Tensor, Tensor], Run]
    runs: dict[Any, Run] = field(default_factory=dict)

    def __call__(self, a: Tensor, b: Tensor, rank: int = 0) -> Tensor:
        return self.run(a, b, rank)(a, b)

    def run(self, a: Tensor, b: Tensor, rank: int) -> Run:
        """What serves operands that lie like these; it only allocates and starts kernels, but in float64."""
        where = (
            rank, a.shape, b.shape, a.stride(), b.stride(), a.dtype, b.dtype, (a.data_ptr() | b.data_ptr()) & (ALIGN - 1),
            a.get_device(),
        )  # fmt: skip
        run = self.runs.get(where)
        if run is None:
            if len(self.runs) >= MOST:
                self.runs.clear()
            try:
                run = self.make(rank, a, b)
            except (CompileFailure, Unserved):
                run = _in_f64
            self.runs[where] = run
        return run


def _in_f64(a: Tensor, b: Tensor) -> Tensor:
    return number_formats.in_f64(a, b).to(torch.float32)


def allocator(device: torch.device) -> Callable[[tuple[int, int], torch.dtype], Tensor]:
    """Memory for a contiguous matrix."""
    made = register.empty(device)
    return lambda shape, dtype: made(shape, (shape[1], 1), dtype)


def direct(precision: str, rank: int, a: Tensor, b: Tensor) -> Run:
    """a · b of one dtype as they lie."""
    size = (a.shape[0], b.shape[1])
    bits = split_planes.aligned(a, b)
    strides = (a.stride(0), a.stride(1), b.stride(0), b.stride(1))
    steps = [Step(0, a.shape[1])]
    multiply = series(size, NAMES[a.dtype], strides, steps, rank, a.device, precision, bits)  # fmt: skip
    empty = allocator(a.device)

    def run(a: Tensor, b: Tensor) -> Tensor:
        y = empty(size, torch.float32)
        multiply(a, b, y)
        return y

    return run


@dataclass(frozen=True)
class Made:
    """What makes planes of operands that lie like those it was made for: (x, w) as they lie in memory, whether transposed, the strides by
    which they are matrices, and bytes that they are aligned to."""

    make: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    turned: tuple[bool, bool]
    strides: tuple[int, int, int, int]
    align: int = ALIGN


@dataclass(frozen=True)
class Planes:
    """How operands are written as planes of a dtype: a's [M, count K] and b's [count K, N], both in one launch."""

    dtype: torch.dtype
    left: tuple[int, ...]
    right: tuple[int, ...]
    lift: int = 0

    def made(self, a: Tensor, b: Tensor) -> Made:
        """For operands that lie like these; one of this dtype is its only plane."""
        dtype, device, given = self.dtype, a.device, (a, b)
        several = len(self.left) > 1 or dtype not in (a.dtype, b.dtype)
        written = [i for i, t in enumerate(given) if several or t.dtype != dtype]
        laid = [split_planes._laid(t, p, d) for t, p, d in ((a, self.left, False), (b, self.right, True))]  # fmt: skip
        read = [given[i] for i in written]
        kinds, bits = (*split_planes.names(*read), NAMES[dtype]), split_planes.aligned(*read)
        start = split_planes._split(kinds, tuple(laid[i][1] for i in written), self.lift, bits, device)  # fmt: skip
        empty = allocator(device)
        a_shape, b_shape = laid[0][2], laid[1][2]

        def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            x, w = empty(a_shape, dtype), empty(b_shape, dtype)
            _started(start(a, b, x, w, flag(device)))
            return x, w

        def left(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            x = empty(a_shape, dtype)
            _started(start(a, x, flag(device)))
            return x, b

        def right(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            w = empty(b_shape, dtype)
            _started(start(b, w, flag(device)))
            return a, w

        make = both if len(written) == 2 else right if written == [1] else left
        turned = (0 in written and laid[0][0], 1 in written and laid[1][0])
        ends = [_ends(laid[i][0], laid[i][2]) if i in written else t.stride() for i, t in enumerate(given)]  # fmt: skip
        kept = [t for i, t in enumerate(given) if i not in written]
        align = split_planes.aligned(*kept) if kept else ALIGN
        (a_row, a_column), (b_row, b_column) = ends
        return Made(make, turned, (a_row, a_column, b_row, b_column), align)


def _ends(turned: bool, shape: tuple[int, int]) -> tuple[int, int]:
    """Strides of a matrix whose memory is a contiguous one of this shape."""
    return (1, shape[1]) if turned else (shape[1], 1)


def flag(device: torch.device) -> Tensor:
    """That of the current stream, in launchers that are noted, too."""
    return launch_plan.lasting(split_planes.flag, device)


def _started(good: bool) -> None:
    if not good:
        raise RuntimeError("split: the kernel refused tensors of the alignment it was built for")


def planes(how: Planes, steps: Callable[[int], Sequence[Step]], rank: int, a: Tensor, b: Tensor) -> Run:  # fmt: skip
    """The product of planes, by parts of their inner dimension that follow from that of a · b."""
    made, size = how.made(a, b), (a.shape[0], b.shape[1])
    make, parts = made.make, steps(a.shape[1])
    multiply = series(size, NAMES[how.dtype], made.strides, parts, rank, a.device, align=made.align)
    empty = allocator(a.device)

    def run(a: Tensor, b: Tensor) -> Tensor:
        x, w = make(a, b)
        y = empty(size, torch.float32)
        multiply(x, w, y)
        return y

    return run


def widened(rank: int, a: Tensor, b: Tensor) -> Run:
    """a · b in float64, both widened in one launch."""
    made = Planes(torch.float64, (0,), (0,)).made(a, b)
    make, (a_turned, b_turned) = made.make, made.turned

    def run(a: Tensor, b: Tensor) -> Tensor:
        x, w = make(a, b)
        return torch.mm(x.t() if a_turned else x, w.t() if b_turned else w)

    return run
