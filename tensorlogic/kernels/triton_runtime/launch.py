"""Compiled Triton kernels started without the JIT wrapper; compile work for other processes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.errors import OutOfResources, TritonError

from tensorlogic.kernels.triton_runtime import config_check, occupancy
from tensorlogic.kernels.triton_runtime.kernel_start import Binary, integer_type, launcher, started
from tensorlogic.kernels.triton_runtime.tma_descriptors import Descriptors, Tiled
from tensorlogic.kernels.triton_runtime.toolchain import begin, own, warm
from tensorlogic.system import compile_pool
from tensorlogic.system.compile_pool import CompileFailure

Start = Callable[..., bool]

TYPES = {
    "f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "bool": "i1",
    "u8": "u8", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "e4m3": "fp8e4nv",
}  # fmt: skip
# widest vector access in bytes, and the largest divisor worth telling the compiler
MOST_HINT = 16
# the constant of kernels that wait for the kernels before them themselves: set from sm_90 on
DEPENDENT = "PDL"
MAX_GRID = (2**31 - 1, 65535, 65535)
# a block may have, by sm
SHARED_BYTES = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}

_binaries: dict[Any, Binary] = {}
_collecting: ContextVar[tuple[int, list[CompileJob]] | None] = ContextVar(
    "collecting", default=None
)
_loading = threading.Lock()
_driving = threading.Lock()


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes: registers and stack bytes (spills) a thread, shared bytes a block."""

    registers: int
    stack: int
    shared: int


@dataclass(frozen=True)
class CompileJob:
    """One kernel specialisation, to be compiled in any process; hashable and picklable."""

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constexprs: tuple[tuple[str, Any], ...]
    hinted: tuple[tuple[str, int], ...]  # argument, power of two that divides it
    num_warps: int
    num_stages: int
    sm: int
    registers: int = 0  # a thread's most; 0: the compiler's choice

    def run(self) -> None:
        """Compile into Triton's cache on disk; raises CompileFailure."""
        run_compile_job(self)

    @staticmethod
    def ahead() -> None:
        """Begin with what loading the first of them in this process takes, in threads; returns at once."""
        _ahead()


def prepare(
    kernel: Any,
    *,
    grid: tuple[int, int, int],
    pointers: Mapping[str, str],
    integers: Mapping[str, int],
    floats: Sequence[str] = (),
    constexprs: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 1,
    device: torch.device,
    align: int = 16,
    longs: Sequence[str] = (),
    tiled: Mapping[str, Tiled] = MappingProxyType({}),
    registers: int = 0,
) -> Start:
    """Compile and load `kernel` for `device`; returns `start(*tensors, *floats, *longs) -> bool`.

    `kernel`: a `triton.jit` or `gluon.jit` function whose parameters are, in order, tiled matrices,
    pointers, integers, floats, longs and constexprs; one that is not named here is absent: the kernel sees None, a constant it
    may test, and `start` does not take it. `pointers`: parameter name -> dtype name of what it
    points to. `tiled`: matrices that Hopper's bulk copies read and write, given as tensors like the
    pointers and before them. `registers`: a thread's most, 0 leaves it to the compiler. `integers` are baked into `start`, the kernel specialised for those equal to 1 and
    for divisors up to 16; `floats` (float32) and `longs` (int64) are given with every start.
    `align`: bytes (a power of two) every pointer is aligned to; the kernel relies on it, and where
    it does not hold `start` returns False, launching nothing. `start` uses the current stream of
    `device`. Under Triton's interpreter the kernel runs on CPU tensors. Raises CompileFailure, also
    for a grid that cannot be launched and for constants that do not cover the problem (config_check.py).

        start = prepare(
            scale, grid=(8, 1, 1), pointers={"x_ptr": "f16", "y_ptr": "f16"}, integers={"N": 1000},
            floats=("factor",), constexprs={"BLOCK": 128}, num_warps=4, device=device,
        )
        start(x, y, 0.5)
    """
    _check_grid(kernel, grid)
    config_check.check(kernel.__name__, integers, constexprs)
    wanted = _collecting.get()
    sm = (
        wanted[0]
        if wanted
        else 0
        if interpreted(kernel) or device.type != "cuda"
        else _capability(device)
    )
    job = compile_job(
        kernel, grid=grid, pointers=pointers, integers=integers, floats=floats, constexprs=constexprs,
        num_warps=num_warps, num_stages=num_stages, sm=sm, align=align, longs=longs, tiled=tiled, registers=registers,
    )  # fmt: skip
    if wanted:
        wanted[1].append(job)
        return lambda *args: False
    mask = min(align, MOST_HINT) - 1
    if tiled and mask != MOST_HINT - 1:
        raise CompileFailure(f"{job.kernel}: bulk copies need {MOST_HINT}-byte alignment")
    if interpreted(kernel):
        fixed = dict(job.constexprs) | dict(integers) | dict(constexprs)
        return _interpreted(kernel, grid, tuple(pointers), (*floats, *longs), fixed, mask)
    if device.type != "cuda":
        raise CompileFailure(
            f"{job.kernel}: device {device} needs TRITON_INTERPRET=1, set before Triton is imported"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    binary = occupancy.spread(_load(job, index), math.prod(grid), torch.device("cuda", index))
    specialised = dict(job.constexprs)
    passed = {name: value for name, value in integers.items() if name not in specialised}
    matrices = [
        (Descriptors(matrix, laid), *matrix.shape, matrix.stride)
        for matrix, laid in zip(tiled.values(), binary.tiles, strict=True)
    ]
    return started(
        binary, grid, index, mask, passed, matrices, len(pointers), len(floats), len(longs)
    )


def compile_job(
    kernel: Any,
    *,
    grid: tuple[int, int, int] = (1, 1, 1),
    pointers: Mapping[str, str],
    integers: Mapping[str, int],
    floats: Sequence[str] = (),
    constexprs: Mapping[str, Any],
    num_warps: int,
    num_stages: int = 1,
    sm: int,
    align: int = 16,
    longs: Sequence[str] = (),
    tiled: Mapping[str, Tiled] = MappingProxyType({}),
    registers: int = 0,
) -> CompileJob:
    """What `prepare` would compile with the same arguments for compute capability `sm` (90: Hopper)."""
    # not part of a binary; taken so that both functions accept the same arguments
    del grid
    names = list(kernel.arg_names)
    if DEPENDENT in names:
        constexprs = {**constexprs, DEPENDENT: sm >= 90}
    given = [*tiled, *pointers, *integers, *floats, *longs, *constexprs]
    dynamic = given[: len(given) - len(constexprs)]
    if dynamic != [name for name in names if name in dynamic] or set(given) - set(names):
        raise ValueError(
            f"kernel {kernel.fn.__name__} has parameters {names}; given, in order: {given}"
        )
    types = {name: matrix.type for name, matrix in tiled.items()}
    types |= {name: "*" + TYPES[dtype] for name, dtype in pointers.items()}
    types |= {name: integer_type(value) for name, value in integers.items() if value != 1}
    types |= dict.fromkeys(floats, "fp32") | dict.fromkeys(longs, "i64")
    constants = {name: 1 for name, value in integers.items() if value == 1} | dict(constexprs)
    factors = dict.fromkeys(pointers, min(align, MOST_HINT))
    factors |= {
        name: math.gcd(value, MOST_HINT) for name, value in integers.items() if name in types
    }
    return CompileJob(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        signature=tuple((name, types.get(name, "constexpr")) for name in names),
        constexprs=tuple((name, constants.get(name)) for name in names if name not in types),
        hinted=tuple((name, factor) for name, factor in factors.items() if factor > 1),
        num_warps=num_warps,
        num_stages=num_stages,
        sm=sm,
        registers=registers,
    )


def collect(build: Callable[[], object], device: torch.device) -> list[CompileJob]:
    """The compile jobs of everything that `build()` prepares for `device`; nothing is compiled, loaded or started."""
    jobs: list[CompileJob] = []
    token = _collecting.set((_capability(device), jobs))
    try:
        build()
    finally:
        _collecting.reset(token)
    return jobs


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def interpreted(kernel: Any) -> bool:
    """Whether `kernel` runs in Triton's interpreter (TRITON_INTERPRET=1 when it was defined)."""
    return not isinstance(kernel, triton.JITFunction)


def run_compile_job(job: CompileJob) -> Any:
    """Compile `job` into Triton's cache on disk (no GPU needed); returns Triton's compiled kernel."""
    kernel = getattr(importlib.import_module(job.module), job.kernel)
    if interpreted(kernel):
        raise CompileFailure(
            f"{job.kernel}: cannot compile under TRITON_INTERPRET=1; unset it there"
        )
    names = list(kernel.arg_names)
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        kernel,
        dict(job.signature),
        {(names.index(name),): value for name, value in job.constexprs},
        {(names.index(name),): [["tt.divisibility", factor]] for name, factor in job.hinted},
    )
    warm()
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    if dict(job.constexprs).get(DEPENDENT):
        options["launch_pdl"] = True
    if job.registers:
        options["maxnreg"] = job.registers
    try:
        with own:
            compiled = triton.compile(source, target=GPUTarget("cuda", job.sm, 32), options=options)
    except (TritonError, RuntimeError) as error:
        raise CompileFailure(
            f"{job.kernel} for sm_{job.sm}: {type(error).__name__}: {error}"
        ) from error
    limit = SHARED_BYTES.get(job.sm)
    if limit is not None and compiled.metadata.shared > limit:
        need = compiled.metadata.shared
        raise CompileFailure(
            f"{job.kernel} for sm_{job.sm}: needs {need} bytes of shared memory, a block may have {limit}"
        )
    return compiled


@functools.cache
def _ahead() -> None:
    begin()
    if torch.cuda.is_available():
        threading.Thread(target=_begun, name="tensorlogic-driver", daemon=True).start()


def _begun() -> None:
    with contextlib.suppress(RuntimeError, OSError, subprocess.SubprocessError):  # said when needed
        _driver()


def _driver() -> None:
    """Triton's driver, whose C it builds where its cache has none: 1 s, which a kernel's compilation need not wait for."""
    with _driving, own:
        triton.runtime.driver.active.utils  # noqa: B018  (made when it is asked for)


def resources(job: CompileJob) -> Resources:
    """Compile `job` and read what it takes from the binary, with the cuobjdump in Triton's package."""
    compiled = run_compile_job(job)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(compiled.kernel)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", str(path)], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(rf"Function {re.escape(compiled.name)}:\s*REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage says nothing of {compiled.name}: {text!r}")
    return Resources(int(found[1]), int(found[2]), compiled.metadata.shared)


def resources_apart(jobs: Sequence[CompileJob]) -> list[Resources | str]:
    """`resources` of each job, or why it does not compile; from a process with the interpreter off."""
    path = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    child = subprocess.run(
        [sys.executable, "-c", f"import {__name__} as launch; launch.report_resources()"],
        input=pickle.dumps(list(jobs)), stdout=subprocess.PIPE, env=environment, check=True,
    )  # fmt: skip
    return cast("list[Resources | str]", pickle.loads(child.stdout))


def report_resources() -> None:
    """The other side of `resources_apart`: pickled jobs on stdin, answers on stdout."""
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a compiler that fails prints what it was given
    answers: list[Resources | str] = []
    for job in pickle.load(sys.stdin.buffer):
        try:
            answers.append(resources(job))
        except CompileFailure as failure:
            answers.append(str(failure))
    with results:
        results.write(pickle.dumps(answers))


def _check_grid(kernel: Any, grid: tuple[int, int, int]) -> None:
    """Triton's launcher multiplies the grid in 32 bits, and launches nothing if that is not positive."""
    blocks = grid[0] * grid[1] * grid[2]
    if any(size > limit for size, limit in zip(grid, MAX_GRID, strict=True)) or blocks >= 2**31:
        raise CompileFailure(
            f"{kernel.__name__}: a grid of {grid} blocks cannot be launched; use larger blocks"
        )


def _load(job: CompileJob, index: int) -> Binary:
    """The binary of `job`, for the sm of device `index`, compiled and loaded once per process."""
    key = (job, index)
    binary = _binaries.get(key)
    if binary is None:
        with _loading:
            binary = _binaries.get(key) or _loaded(job, index)
            _binaries[key] = binary
    return binary


def _loaded(job: CompileJob, index: int) -> Binary:
    compile_pool.settle(job)  # a worker process may be at it
    compiled = run_compile_job(job)
    # Triton builds a C launcher per signature: without constants fewer differ, and a call passes less
    types: dict[str, str] = {}
    for name, kind in job.signature:
        if kind.startswith("tensordesc"):  # passed as the launcher would pass it on
            parts = ("nvTmaDesc", "i32", "i32", "i64", "i64")
            types |= {f"{name}_{i}": part for i, part in enumerate(parts)}
        elif kind != "constexpr":
            types[name] = kind
    tiles = tuple(compiled.metadata.tensordesc_meta or ())
    compiled.metadata = compiled.metadata._replace(tensordesc_meta=None)
    compiled.src = _Signature(types, {})
    try:
        _driver()
        with torch.cuda.device(index), own:
            loaded = launcher(compiled, index)
    except (OutOfResources, RuntimeError) as error:
        raise CompileFailure(
            f"{job.kernel} on cuda:{index}: {type(error).__name__}: {error}"
        ) from error
    return Binary(
        launch=loaded.launch,
        function=loaded.function,
        metadata=tuple(compiled.packed_metadata),
        flags=(compiled.metadata.launch_cooperative_grid, compiled.metadata.launch_pdl),
        scratch=compiled.metadata.global_scratch_size,
        tiles=tiles,
        described=loaded.described,
    )


@dataclass(frozen=True)
class _Signature:
    """What Triton's launcher wants to know of a kernel's source."""

    signature: dict[str, str]
    constants: dict[Any, Any]


def _interpreted(
    kernel: Any,
    grid: tuple[int, int, int],
    pointers: Sequence[str],
    numbers: Sequence[str],
    fixed: dict[str, Any],
    mask: int,
) -> Start:
    """The same `start` through Triton's interpreter."""

    def start(*args: Any) -> bool:
        tensors = args[: len(pointers)]
        if functools.reduce(lambda bits, tensor: bits | tensor.data_ptr(), tensors, 0) & mask:
            return False
        if grid[0] * grid[1] * grid[2]:
            kernel[grid](**dict(zip((*pointers, *numbers), args, strict=True)), **fixed)
        return True

    return start
