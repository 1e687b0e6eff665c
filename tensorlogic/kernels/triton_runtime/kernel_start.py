"""The start of a loaded Triton kernel: in C where the compiled calls are built, else one generated frame around Triton's launcher."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import triton
from triton.runtime.errors import OutOfResources

from tensorlogic.kernels.triton_runtime import launch_plan
from tensorlogic.native import cuda_driver

Start = Callable[..., bool]


@dataclass(frozen=True)
class Binary:
    """A kernel loaded on one device."""

    launch: Callable[..., None]  # Triton's C launcher
    function: int
    metadata: tuple[int, int, int]
    flags: tuple[bool, bool]  # cooperative grid, programmatic dependent launch
    scratch: int  # bytes of global scratch per block
    tiles: tuple[Mapping[str, Any], ...]  # how each tiled matrix's tiles lie in shared memory
    described: tuple[Any, Any] | None  # the arguments, for Triton 3.7's launcher


@dataclass(frozen=True)
class Launcher:
    """What starts a loaded kernel, past Triton's Python."""

    launch: Callable[..., None]
    function: int
    described: tuple[Any, Any] | None


def launcher(compiled: Any, index: int) -> Launcher:
    """Load a compiled kernel of Triton's on device `index`, the current one. Raises what Triton does where it needs too much.

    Triton 3.6 has a C compiler build a launcher for every signature, 0.3 s; where kernels are started in C by us, that waits until
    it is called.
    """
    utils = triton.runtime.driver.active.utils
    device = torch.device("cuda", index)
    if hasattr(utils, "launch") or cuda_driver.driver(device) is None:
        compiled._init_handles()
        made, described = compiled.run, None
        if hasattr(made, "kernel_signature"):
            described = (made.arg_annotations, made.kernel_signature)
        return Launcher(made.launch, compiled.function, described)
    shared, most = compiled.metadata.shared, utils.get_device_properties(index)["max_shared_mem"]
    if shared > most:
        raise OutOfResources(shared, most, "shared memory")
    _, function, _, _, threads = utils.load_binary(compiled.name, compiled.kernel, shared, index)
    if 32 * compiled.metadata.num_warps > threads:
        raise OutOfResources(32 * compiled.metadata.num_warps, threads, "threads")
    return Launcher(Later(compiled), function, None)


class Later:
    """Triton's launcher of a kernel, built when it is first called."""

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.made = compiled, cast(Callable[..., None] | None, None)

    def __call__(self, *args: Any) -> None:
        if self.made is None:
            make = triton.runtime.driver.active.launcher_cls
            self.made = make(self.compiled.src, self.compiled.metadata).launch
        assert self.made is not None
        self.made(*args)


def integer_type(value: int) -> str:
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def started(
    binary: Binary,
    grid: tuple[int, int, int],
    index: int,
    mask: int,
    integers: Mapping[str, int],
    matrices: Sequence[tuple[Any, int, int, int]],
    pointers: int,
    floats: int,
    longs: int,
) -> Start:
    """The start of a loaded kernel; `integers` without those that are baked into it, `matrices` as (maps, rows, columns, stride)."""
    several = torch.cuda.device_count() > 1
    scratch = binary.scratch * grid[0] * grid[1] * grid[2] * binary.metadata[1]
    make = closure(
        len(matrices),
        pointers,
        len(integers),
        floats + longs,
        mask > 0,
        several,
        scratch > 0,
        binary.described is None,
    )
    passed = tuple(integers.values())
    usual = make(binary, grid, index, mask, scratch, passed, tuple(itertools.chain(*matrices)))
    letters = ["L" if integer_type(value) == "i64" else "i" for value in passed]
    return launch_plan.start(
        usual, torch.device("cuda", index), function=binary.function, metadata=binary.metadata, grid=grid, flags=binary.flags,
        mask=mask, scratch=scratch, several=several, maps=[m[0] for m in matrices],
        layout="miiLL" * len(matrices) + "p" * pointers + "".join(letters) + "f" * floats + "l" * longs,
        constants=[*itertools.chain(*((*m[1:], 1) for m in matrices)), *passed],
    )  # fmt: skip


@functools.cache
def closure(
    tiled: int,
    pointers: int,
    integers: int,
    numbers: int,
    checked: bool,
    switch: bool,
    scratched: bool,
    flat: bool,
) -> Callable[..., Start]:
    """make(binary, grid, index, mask, scratch, integers, matrices) -> start, one frame for this arity.

    Pointers go to the C launcher as Python integers, which it takes without asking the driver about
    each. `flat`: the calling convention of Triton 3.6; otherwise 3.7's, where the kernel's
    arguments are a tuple.
    """
    p = [f"p{i}" for i in range(tiled + pointers)]
    a = [f"a{i}" for i in range(tiled + pointers)]
    t = [f"t{i}, h{i}, w{i}, s{i}" for i in range(tiled)]  # descriptors, rows, columns, stride
    d = [f"t{i}[a{i}], h{i}, w{i}, s{i}, 1" for i in range(tiled)]
    n = [f"n{i}" for i in range(integers)]
    f = [f"f{i}" for i in range(numbers)]
    memory = "space.data_ptr()" if scratched else "None"
    head = "gx, gy, gz, stream(index), function, cooperative, dependent"
    kernel_args = ", ".join([*d, *a[tiled:], *n, *f])
    if flat:
        call = f"launch({head}, {memory}, None, metadata, None, None, None, {kernel_args})"
    else:
        tail = f"annotations, types, ({kernel_args},)"
        call = f"launch({head}, metadata, None, None, None, {memory}, None, {tail})"
    body = [f"{ai} = {pi}.data_ptr()" for ai, pi in zip(a, p, strict=True)]
    if checked and a:
        body += [f"if ({' | '.join(a)}) & mask:", "    return False"]
    run = [call]
    if scratched:
        run.insert(0, "space = empty(scratch, dtype=uint8, device=device)")
    if switch:
        inner = ["    " + line for line in run]
        body += [
            "if current() == index:",
            *inner,
            "else:",
            "    with on(index):",
            *("    " + line for line in inner),
        ]
    else:
        body += run
    lines = [
        "def make(binary, grid, index, mask, scratch, integers, matrices):",
        "    launch, function, metadata = binary.launch, binary.function, binary.metadata",
        "    cooperative, dependent = binary.flags",
        "    annotations, types = binary.described or (None, None)",
        "    gx, gy, gz = grid",
        "    device = torch.device('cuda', index)",
        *([f"    {', '.join(n)}, = integers"] if n else []),
        *([f"    {', '.join(t)}, = matrices"] if t else []),
        f"    def start({', '.join(itertools.chain(p, f))}):",
        *("        " + line for line in body),
        "        return True",
        "    return start",
    ]
    scope: dict[str, Any] = {
        "torch": torch, "empty": torch.empty, "uint8": torch.uint8, "on": torch.cuda.device,
        "stream": getattr(torch._C, "_cuda_getCurrentRawStream", None),
        "current": getattr(torch._C, "_cuda_getDevice", None),
    }  # fmt: skip
    exec(compile("\n".join(lines), "<tensorlogic launch>", "exec"), scope)
    return cast(Callable[..., Start], scope["make"])
