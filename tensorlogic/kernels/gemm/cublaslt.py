"""cuBLASLt called directly: a product with bias, residual and activation in one call that PyTorch does not offer."""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache
from typing import Any, cast

import torch

from ...system.compile_pool import CompileFailure
from .spec import GemmSpec, Operand

Config = Mapping[str, Any]

# multiplications; below, tiled kernels win, and the library's approximate tanh shows
LEAST = 1 << 15
# algorithms of the library's own ranking that are worth timing
RANKS = 8
# bytes an algorithm may ask for; what PyTorch gives it on Hopper
WORKSPACE = 32 << 20
_TYPES = {"f32": 0, "f16": 2, "bf16": 14}  # cudaDataType
_SIZES = {"f32": 4, "f16": 2, "bf16": 2}
_COMPUTE = {"ieee": 68, "tf32": 77}  # cublasComputeType_t
# (activation, bias, pre-activation kept) -> cublasLtEpilogue_t
_EPILOGUES = {
    ("none", False, False): 1,
    ("none", True, False): 4,
    ("relu", False, False): 2,
    ("relu", True, False): 6,
    ("gelu_tanh", False, False): 32,
    ("gelu_tanh", True, False): 36,
    ("gelu_tanh", False, True): 160,
    ("gelu_tanh", True, True): 164,
}
# attributes of a product, of a layout, of a preference
_TRANSA, _TRANSB, _EPILOGUE, _BIAS, _AUX, _AUX_LD, _AUX_BATCH = 3, 4, 7, 8, 11, 12, 13
_BATCH_COUNT, _BATCH_STRIDE = 5, 6
_MAX_WORKSPACE, _REDUCTION, _ALIGN_A = 1, 3, 5
# parts of a split K are added in float32, not in the output's dtype
_REDUCE_IN_F32 = 2


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int),
        ("waves", c_float), ("reserved", c_int * 4),
    )  # fmt: skip


@lru_cache
def _library() -> ctypes.PyDLL | str:
    """The library PyTorch has loaded, or why there is none. The interpreter's lock is kept: calls only enqueue."""
    if torch.version.cuda is None:
        return "this build of PyTorch has no CUDA"
    name = f"libcublasLt.so.{torch.version.cuda.split('.')[0]}"
    try:
        lib = ctypes.PyDLL(name)
    except OSError as problem:
        return f"{name} does not load: {problem}"
    lib.cublasLtMatmul.argtypes = [
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_size_t, c_void_p,
    ]  # fmt: skip
    lib.cublasLtMatmulDescSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
    return lib


def lt_available(device: str) -> str | None:
    """None where cuBLASLt can be called, else the reason."""
    if device != "cuda":
        return "cuBLASLt runs on CUDA devices"
    found = _library()
    return found if isinstance(found, str) else None


def _ld(operand: Operand, rows: int, columns: int) -> tuple[bool, int] | None:
    """(whether rows of the matrix are contiguous in memory, the leading dimension), or None."""
    if operand.columns == 1 and (rows == 1 or operand.rows >= columns):
        return True, max(operand.rows, columns)
    if operand.rows == 1 and (columns == 1 or operand.columns >= rows):
        return False, max(operand.columns, rows)
    return None


def lt_refusal(spec: GemmSpec) -> str | None:
    """None, or why one cuBLASLt call cannot be `spec`."""
    parts = (
        spec.mean, spec.var, spec.scale, spec.shift, spec.x_out, spec.gamma, spec.beta, spec.row_sum,
    )  # fmt: skip
    if spec.prologue != "none" or spec.early_z or any(part is not None for part in parts):
        return "cuBLASLt transforms neither its inputs nor columns; what else it can, a pass of its own does faster"
    if spec.outer not in ("none", "residual"):
        return f"cuBLASLt has no {spec.outer}, or one slower than a pass of its own"
    added = spec.residual is None or spec.residual.dtype == spec.y.dtype
    plain = spec.activation == "none" and spec.bias is None and added
    if spec.y.dtype != spec.x.dtype and (spec.y.dtype != "f32" or spec.z or not plain):
        return "an output of another dtype is float32, and nothing follows the product"
    if spec.precision != "ieee" and (spec.precision != "tf32" or spec.x.dtype != "f32"):
        return f"{spec.precision} products of {spec.x.dtype} are not offered"
    dtypes = {
        spec.x.dtype, spec.w.dtype, spec.bias or spec.x.dtype, spec.z or spec.x.dtype,
        spec.residual.dtype if spec.residual and spec.y.dtype == spec.x.dtype else spec.x.dtype,
    }  # fmt: skip
    if len(dtypes) != 1 or spec.x.dtype not in _TYPES:
        return f"one dtype of {', '.join(_TYPES)} is required"
    if spec.batch * spec.m * spec.n * spec.k < LEAST:
        return "too small for a library call"
    if _ld(spec.x, spec.m, spec.k) is None or _ld(spec.w, spec.k, spec.n) is None:
        return "an operand is contiguous along neither dimension"
    y = _ld(spec.y, spec.m, spec.n)
    other = (True, 0) if spec.residual is None else _ld(spec.residual, spec.m, spec.n)
    if y is None or not y[0] or other is None or not other[0]:
        return "rows of the output or the residual are not contiguous"
    if spec.align < _SIZES[spec.x.dtype] or max(spec.m, spec.n, spec.k) >= 2**31:
        return "a side is too long or an element unaligned"
    return _epilogue_refusal(spec)


def _epilogue_refusal(spec: GemmSpec) -> str | None:
    if spec.z is not None and (spec.x.dtype == "f32" or spec.n % 8 or spec.align < 16):
        return "a second matrix in the epilogue must be 16-bit, its rows multiples of 8, aligned to 16 bytes"
    if spec.activation == "gelu_tanh" and spec.x.dtype == "f32":
        return "its tanh gelu is an approximation, too coarse for float32"
    if (spec.activation, spec.bias is not None, spec.z is not None) not in _EPILOGUES:
        return "the epilogue has relu and tanh gelu only, and keeps the pre-activation of the latter only"
    return None


def lt_configs(spec: GemmSpec) -> list[dict[str, Any]]:
    """The library's ranking; the first is its own choice."""
    del spec
    return [{"rank": rank} for rank in range(RANKS)]


def lt_arguments(spec: GemmSpec) -> tuple[str, ...]:
    """Names of the tensors that the launcher takes, in order: `gemm_arguments`' for what cuBLASLt serves."""
    present = {
        "x": True, "w": True, "bias": spec.bias, "residual": spec.residual, "y": True, "z": spec.z,
    }  # fmt: skip
    return tuple(name for name, there in present.items() if there)


def lt_launcher(
    spec: GemmSpec, config: Config, device: torch.device, alpha: float = 1.0
) -> Callable[..., bool]:
    """A callable over the tensors that `lt_arguments` names; it writes y (and z) on the current stream.

    The row-major product is handed over transposed: D = yᵀ is column-major [N, M], A the weight, B = x, so that the
    bias runs along D's rows. The product is multiplied by `alpha`; the residual may be y itself. Descriptors hold the bias pointer, so concurrent calls use different ones. Returns
    False, doing nothing, when a pointer is less aligned than `spec.align`. Raises CompileFailure when the library has
    no algorithm of that rank, RuntimeError when it refuses a call.
    """
    lib = _library()
    if isinstance(lib, str):
        raise CompileFailure(lib)
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.cuda.device(index):
        product = _Product(lib, spec, _handle(lib, index))
        found = product.algorithm(int(config["rank"]))
    return _closure(lib, product, found, index, alpha)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with status {status}")


_HANDLES: dict[int, int] = {}
_LOCK = threading.Lock()


def _handle(lib: ctypes.PyDLL, index: int) -> int:
    with _LOCK:
        if index not in _HANDLES:
            handle = c_void_p()
            _check(lib.cublasLtCreate(byref(handle)), "cublasLtCreate")
            _HANDLES[index] = cast(int, handle.value)
        return _HANDLES[index]


class _Product:
    """Layouts and the recipe of descriptors of one product; freed with it."""

    def __init__(self, lib: ctypes.PyDLL, spec: GemmSpec, handle: int) -> None:
        self.lib, self.spec, self.handle = lib, spec, handle
        self.owned: list[tuple[Any, int]] = []
        weakref.finalize(self, _release, self.owned)
        m, n, k = spec.m, spec.n, spec.k
        w, x = cast(tuple[bool, int], _ld(spec.w, k, n)), cast(tuple[bool, int], _ld(spec.x, m, k))
        # in column-major eyes: w [K, N] with contiguous rows is N x K as it lies; else K x N, to be transposed
        self.turns = (not w[0], not x[0])
        self.a = self._layout(*((n, k) if w[0] else (k, n)), w[1], spec.w.batch, spec.w.dtype)
        self.b = self._layout(*((k, m) if x[0] else (m, k)), x[1], spec.x.batch, spec.x.dtype)
        self.d = self._layout(n, m, max(spec.y.rows, n), spec.y.batch, spec.y.dtype)
        self.c = self.d
        if spec.outer == "residual" and spec.residual is not None:
            rows = max(spec.residual.rows, n)
            self.c = self._layout(n, m, rows, spec.residual.batch, spec.residual.dtype)

    def _layout(self, rows: int, columns: int, ld: int, batch: int, dtype: str) -> int:
        layout = c_void_p()
        lib, kind = self.lib, _TYPES[dtype]
        _check(
            lib.cublasLtMatrixLayoutCreate(
                byref(layout), kind, c_uint64(rows), c_uint64(columns), c_int64(ld)
            ),
            "cublasLtMatrixLayoutCreate",
        )
        self.owned.append((lib.cublasLtMatrixLayoutDestroy, cast(int, layout.value)))
        if self.spec.batch > 1:
            for attribute, value in (
                (_BATCH_COUNT, c_int32(self.spec.batch)),
                (_BATCH_STRIDE, c_int64(batch)),
            ):
                status = lib.cublasLtMatrixLayoutSetAttribute(
                    layout, attribute, byref(value), c_size_t(ctypes.sizeof(value))
                )
                _check(status, "cublasLtMatrixLayoutSetAttribute")
        return cast(int, layout.value)

    def descriptor(self) -> int:
        """A fresh operation descriptor; pointers are still to be set."""
        spec, lib, made = self.spec, self.lib, c_void_p()
        _check(
            lib.cublasLtMatmulDescCreate(byref(made), _COMPUTE[spec.precision], _TYPES["f32"]),
            "cublasLtMatmulDescCreate",
        )
        self.owned.append((lib.cublasLtMatmulDescDestroy, cast(int, made.value)))
        epilogue = _EPILOGUES[spec.activation, spec.bias is not None, spec.z is not None]
        values: list[tuple[int, Any]] = [
            (_TRANSA, c_int32(self.turns[0])), (_TRANSB, c_int32(self.turns[1])), (_EPILOGUE, c_uint32(epilogue)),
        ]  # fmt: skip
        if spec.bias is not None:
            # only its alignment counts for the ranking
            values.append((_BIAS, c_void_p(spec.align)))
        if spec.z is not None:
            values += [(_AUX, c_void_p(spec.align)), (_AUX_LD, c_int64(spec.y.rows))]
            if spec.batch > 1:
                values.append((_AUX_BATCH, c_int64(spec.y.batch)))
        for attribute, value in values:
            status = lib.cublasLtMatmulDescSetAttribute(
                made, attribute, ctypes.addressof(value), ctypes.sizeof(value)
            )
            _check(status, "cublasLtMatmulDescSetAttribute")
        return cast(int, made.value)

    def algorithm(self, rank: int) -> _Found:
        """The library's choice number `rank` for this product."""
        lib, preference = self.lib, c_void_p()
        _check(
            lib.cublasLtMatmulPreferenceCreate(byref(preference)), "cublasLtMatmulPreferenceCreate"
        )
        wishes: list[tuple[int, Any]] = [
            (_MAX_WORKSPACE, c_uint64(WORKSPACE)),
            (_REDUCTION, c_uint32(_REDUCE_IN_F32)),
        ]
        wishes += [(_ALIGN_A + i, c_uint32(self.spec.align)) for i in range(4)]
        for attribute, value in wishes:
            lib.cublasLtMatmulPreferenceSetAttribute(
                preference, attribute, byref(value), c_size_t(ctypes.sizeof(value))
            )
        results, count = (_Found * RANKS)(), c_int()
        status = lib.cublasLtMatmulAlgoGetHeuristic(
            c_void_p(self.handle), c_void_p(self.descriptor()), c_void_p(self.a), c_void_p(self.b), c_void_p(self.c),
            c_void_p(self.d), preference, RANKS, results, byref(count),
        )  # fmt: skip
        lib.cublasLtMatmulPreferenceDestroy(preference)
        if status or rank >= count.value or results[rank].state:
            raise CompileFailure(
                f"cuBLASLt offers {count.value} algorithms here (status {status}), none of rank {rank}"
            )
        return results[rank]


def _release(owned: list[tuple[Any, int]]) -> None:
    for destroy, pointer in owned:
        destroy(c_void_p(pointer))


_SPACES: dict[tuple[int, int], torch.Tensor] = {}


def _workspace(index: int, stream: int, size: int) -> torch.Tensor:
    """Scratch memory of this stream; inside a capture, of the graph."""
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=f"cuda:{index}")
    found = _SPACES.get((index, stream))
    if found is None or found.numel() < size:
        found = _SPACES[index, stream] = torch.empty(
            size, dtype=torch.uint8, device=f"cuda:{index}"
        )
    return found


def _closure(
    lib: ctypes.PyDLL, product: _Product, found: _Found, index: int, alpha: float
) -> Callable[..., bool]:
    """`start(*tensors) -> bool`, one generated frame; argument names as `lt_arguments`."""
    spec = product.spec
    names = lt_arguments(spec)
    pointed = [(_BIAS, "bias")] * (spec.bias is not None) + [(_AUX, "z")] * (spec.z is not None)
    c = "p_residual" if spec.outer == "residual" else "p_y"
    lines = [f"p_{name} = {name}.data_ptr()" for name in names]
    lines += [f"if ({' | '.join(f'p_{name}' for name in names)}) & mask:", "    return False"]
    lines += ["try:", "    held = spare.pop()", "except IndexError:", "    held = fresh()"]
    for i, (attribute, name) in enumerate(pointed):
        lines += [
            f"held[{2 * i + 1}].value = p_{name}",
            f"set_attribute(held[0], {attribute}, held[{2 * i + 2}], 8)",
        ]
    lines += ["queue = stream(index)"]
    size = found.workspace
    if size:
        lines += [f"memory = workspace(index, queue, {size})", "scratch = memory.data_ptr()"]
    call = (
        f"matmul(handle, held[0], one, p_w, {product.a}, p_x, {product.b}, beta, {c}, {product.c}, p_y, {product.d}, algo, "
        f"{'scratch' if size else 'None'}, {size}, queue)"
    )
    if torch.cuda.device_count() > 1:
        lines += ["with on(index):", f"    status = {call}"]
    else:
        lines += [f"status = {call}"]
    lines += ["spare.append(held)", "if status:", "    refused(status)", "return True"]
    one, beta = c_float(alpha), c_float(1.0 if spec.outer == "residual" else 0.0)

    def fresh() -> tuple[Any, ...]:
        slots = [c_void_p() for _ in pointed]
        return (
            product.descriptor(),
            *itertools.chain.from_iterable((s, ctypes.addressof(s)) for s in slots),
        )

    def refused(status: int) -> None:
        raise RuntimeError(f"cublasLtMatmul failed with status {status} on {spec}")

    scope: dict[str, Any] = {
        "matmul": lib.cublasLtMatmul, "set_attribute": lib.cublasLtMatmulDescSetAttribute, "handle": product.handle,
        "one": ctypes.addressof(one), "beta": ctypes.addressof(beta), "algo": ctypes.addressof(found), "index": index,
        "mask": min(spec.align, 16) - 1, "spare": [fresh()], "fresh": fresh, "refused": refused, "on": torch.cuda.device,
        "stream": torch._C._cuda_getCurrentRawStream, "workspace": _workspace, "alive": (product, found, one, beta),
    }  # fmt: skip
    source = f"def start({', '.join(names)}):\n" + "".join(f"    {line}\n" for line in lines)
    exec(compile(source, "<tensorlogic cublaslt>", "exec"), scope)
    return cast(Callable[..., bool], scope["start"])
