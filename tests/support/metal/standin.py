"""torch.mps.compile_shader for CPUs: shaders translated, compiled by g++ with `standin.h` and run on CPU memory."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from .translate import translate

HEADER = Path(__file__).with_name("standin.h")
HEADERS = "".join(p.read_text() for p in sorted(HEADER.parent.glob("*.h")))
FOLDER = Path(__file__).parents[3] / "build" / "metal"
SANITIZE = ("-O0", "-fsanitize=address,alignment", "-fno-sanitize-recover=all")
SANITIZED = os.environ.get("TENSORLOGIC_METAL_SANITIZED") == "1"
FLAGS = ("-std=c++17", "-g0", "-fPIC", "-w", *(SANITIZE if SANITIZED else ("-O1",)))
TOGETHER = 48  # sources in one translation unit
order = 0  # of threads and groups: 0 upwards, 1 downwards, others shuffled by that seed
launches = 0  # of kernels, for tests to count
_LOADED: dict[str, ctypes.CDLL] = {}
_ONE = threading.Lock()


class ShaderError(RuntimeError):
    """A shader did what a GPU would punish: raced, diverged, or read what nobody wrote."""


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which("g++")


def prepare(sources: Iterable[str]) -> None:
    """Compile these sources a few dozen at a time, which takes a fraction of the time; kept in build/ for the next run."""
    wanted = {name: s for s in sources if (name := _suffix(s)) not in _LOADED}
    if not wanted:
        return
    names = sorted(wanted)
    parts = [names[i : i + TOGETHER] for i in range(0, len(names), TOGETHER)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for part, library in zip(parts, pool.map(lambda p: _built(p, wanted), parts), strict=True):
            _LOADED.update(dict.fromkeys(part, library))


def _built(names: Sequence[str], sources: Mapping[str, str]) -> ctypes.CDLL:
    """The library of these sources, compiled unless it lies there from before."""
    code = "".join(_guarded(translate(sources[n], n)) for n in names)
    target = FOLDER / f"{_stamp(code)}.so"
    if not target.exists():
        _compile(code, target)
    return ctypes.CDLL(str(target))


def _stamp(code: str) -> str:
    return hashlib.sha256((code + HEADERS + repr(FLAGS)).encode()).hexdigest()[:16]


def _header() -> Path:
    """The stand-in's headers, which take most of a small shader's time, compiled beforehand under the name that `-include` looks for."""
    header = FOLDER / f"{_stamp('')}.h"
    compiled = header.with_suffix(".h.gch")
    with _ONE:
        if not compiled.exists():
            FOLDER.mkdir(parents=True, exist_ok=True)
            file, staged = (header.with_suffix(f".{os.getpid()}.{kind}") for kind in ("h", "gch"))
            file.write_text(f'#include "{HEADER}"\n')
            _gxx("-x", "c++-header", str(file), "-o", str(staged))
            file.replace(header)
            staged.replace(compiled)
    return header


def _guarded(code: str) -> str:
    return f"namespace metal_code {{ using namespace metal; {code} }}\n"


def _compile(code: str, target: Path) -> None:
    header = _header()
    file, staged = (target.with_suffix(f".{os.getpid()}.{kind}") for kind in ("cpp", "so"))
    file.write_text(code)
    try:
        _gxx("-shared", "-include", str(header), str(file), "-o", str(staged))
    finally:
        file.unlink()
    staged.replace(target)


def _gxx(*arguments: str) -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SyntaxError(f"Failed to create metal library, error: {done.stderr[:2000]}")


def _suffix(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


class Launch(ctypes.Structure):
    """What a kernel is started with; as in `standin.h`."""

    _fields_ = (
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("threads", ctypes.c_uint64 * 3),
        ("group", ctypes.c_uint64 * 3),
        ("order", ctypes.c_int),
        ("message", ctypes.c_char_p),
        ("room", ctypes.c_uint64),
    )


class Kernel:
    """One kernel of a library, called as PyTorch's are."""

    thread_execution_width = 32

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.run = getattr(library, name)
        self.max_threads_per_threadgroup = int(getattr(library, f"{name}_threads")())

    def __call__(self, *args: Any, threads: Sequence[int], group_size: Sequence[int]) -> None:
        """Tensors, numbers and lists of numbers in the order of the buffers; all threads run before it returns."""
        global launches
        launches += 1
        assert len(threads) == len(group_size)
        kept = [_argument(a) for a in args]
        pointers = (ctypes.c_void_p * len(kept))(*[p for p, _ in kept])
        message = ctypes.create_string_buffer(512)
        sizes = [(ctypes.c_uint64 * 3)(*n, *[1] * (3 - len(n))) for n in (threads, group_size)]
        text = ctypes.cast(message, ctypes.c_char_p)
        launch = Launch(pointers, *sizes, order, text, len(message))
        if self.run(ctypes.byref(launch)):
            raise ShaderError(message.value.decode())


def _argument(value: Any) -> tuple[int, Any]:
    """(address, what keeps it alive) as PyTorch binds it: ints as int64, floats as float, lists of either as arrays."""
    if isinstance(value, Tensor):
        return value.data_ptr(), value
    values = value if isinstance(value, (list, tuple)) else [value]
    if not values:
        raise RuntimeError("Empty list/tuple can not be an argument to metal kernel")
    if all(isinstance(v, float) for v in values):
        made: Any = (ctypes.c_float * len(values))(*values)
    elif all(isinstance(v, int) for v in values):
        made = (ctypes.c_int64 * len(values))(*values)
    else:
        raise RuntimeError("Unsupported argument type")
    return ctypes.addressof(made), made


class Library:
    """What compile_shader returns: kernels by name."""

    def __init__(self, source: str) -> None:
        self.suffix = _suffix(source)
        prepare([source])

    def __getattr__(self, name: str) -> Kernel:
        try:
            return Kernel(_LOADED[self.suffix], f"{name}_{self.suffix}")
        except AttributeError:
            raise RuntimeError(f"Failed to create function state object for: {name}") from None


def preload() -> str:
    """The library that a process must begin with where shaders are compiled with AddressSanitizer."""
    found = subprocess.run(
        ["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def compile_shader(source: str) -> Library:
    """As torch.mps.compile_shader; SyntaxError with the compiler's message where the source is wrong."""
    return Library(source)
