"""Build the native library: `python tools/build_native.py` (g++ or clang++, about a minute on two idle cores).

    python tools/build_native.py              build what changed into tensorlogic/_native/
    python tools/build_native.py --force      build everything
    python tools/build_native.py --calls      build the compiled calls only, for a library that is there
    python tools/build_native.py --sanitize   build with AddressSanitizer and UndefinedBehaviorSanitizer into build/ and run
                                              the native tests on that build

The compiler is $CXX, else g++, clang++ or c++. A wheel built afterwards takes the libraries along (tools/wheel_hook.py).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

Library = Future[Path]  # of the native library that is being built

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "csrc"
OUTPUT = ROOT / "tensorlogic" / "_native"
LIBRARY = "libtensorlogic_native.so"
# These need one build per version of PyTorch, the latter of Python, too; the package works without.
HOOKS = "libtensorlogic_hooks-{version}.so"
CALLS = "tensorlogic_calls-{version}{suffix}"
BESIDE = {"hooks": ("hooks",), "calls": ("calls", "launch")}  # their folders in csrc/
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # PyTorch 2.11
COMMON = ("-std=c++17", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra")
# Kernels: error-free transformations must stay as written, so nothing is contracted behind their back.
KERNEL = (
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
    "-fno-exceptions",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",  # of GCC 12's own headers
)
AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c")
LEVELS = {
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx2_fixed_point": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": AVX512,
    "avx512_vnni": (*AVX512, "-mavx512vnni"),
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, "-mamx-tile", "-mamx-bf16"),
}
SANITIZE = (
    "-O1",  # half of the compiler's time, and accesses are where they are written
    "-fsanitize=address,undefined",
    "-fno-omit-frame-pointer",
    "-fno-sanitize-recover=undefined",
    "-g1",
)


class BuildError(RuntimeError):
    """The library cannot be built here; the message says why and what would help."""


def compiler() -> str:
    """The C++ compiler to use; raises BuildError where there is none."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    raise BuildError("no C++ compiler found: install g++ or clang++, or set CXX")


def torch_folder() -> Path:
    """Where PyTorch is installed, without importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("PyTorch is not installed: the library is built against its headers")
    return Path(spec.origin).parent


def levels(cxx: str) -> list[str]:
    """The instruction-set levels that are compiled for this processor family; AMX where the compiler knows it (GCC 11)."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    check = [cxx, *LEVELS["amx"], "-fsyntax-only", "-x", "c++", os.devnull]
    knows = subprocess.run(check, capture_output=True).returncode == 0
    return [level for level in LEVELS if level != "amx" or knows]


def commands(cxx: str, objects: Path, extra: Sequence[str]) -> dict[Path, list[str]]:
    """Object file -> the command that compiles it."""
    include = torch_folder() / "include"
    found, built = {}, levels(cxx)
    for level in built:
        target = objects / f"isa_{level}.o"
        source = SOURCES / "isa" / f"{level}.cpp"
        found[target] = [
            cxx,
            *COMMON,
            *KERNEL,
            *LEVELS[level],
            *extra,
            f"-I{SOURCES}",
            "-c",
            str(source),
            "-o",
            str(target),
        ]
    for source in sorted([*SOURCES.glob("*.cpp"), *(SOURCES / "ops").glob("*.cpp")]):
        target = objects / f"{source.parent.name}_{source.stem}.o"
        # PyTorch's headers are not ours to warn about.
        headers = [f"-I{SOURCES}", "-isystem", str(include)]
        found[target] = [
            cxx,
            *COMMON,
            *extra,
            *(["-DTENSORLOGIC_AMX"] if "amx" in built else []),
            STABLE_ABI,
            *headers,
            "-c",
            str(source),
            "-o",
            str(target),
        ]
    return found


def stamp(cxx: str, extra: Sequence[str], part: str | None = None) -> str:
    """What a build depends on: compiler, flags, headers, this file; in a second line the sources."""
    rest = (cxx, tuple(extra), str(torch_folder()), platform.machine())
    digest = hashlib.sha256(repr(rest).encode() + Path(__file__).read_bytes())
    return f"{digest.hexdigest()}\n{sources(part)}\n"


def sources(part: str | None = None) -> str:
    """Of the library, or of a part beside it and the library; the library does not depend on what lies beside it."""
    others = {f for name, folders in BESIDE.items() if name != part for f in folders}
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h")]):
        if path.parent.name not in others:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def stale(output: Path = OUTPUT) -> list[str]:
    """What lies in `output` and was built from other sources than those that are here; 3 ms."""
    named = {LIBRARY: (output / "stamp", None)}
    for part, name in (("hooks", HOOKS), ("calls", CALLS)):
        for path in output.glob(name.format(version="*", suffix="*.so").replace("**", "*")):
            named[path.name] = (path.with_suffix(".stamp"), part)
    found = []
    for name, (note, part) in named.items():
        built = note.read_text().split() if note.exists() else []
        if SOURCES.exists() and len(built) == 2 and built[1] != sources(part):
            found.append(name)
    return found


def torch_version() -> str:
    """The public version of the installed PyTorch, without importing it."""
    return metadata.version("torch").partition("+")[0]


def build_hooks(
    output: Path = OUTPUT,
    force: bool = False,
    extra: Sequence[str] = (),
    library: Library | None = None,
) -> Path:
    """Compile and link the hooks for the installed PyTorch beside the library they need; raises BuildError.

    `library` is that of the library while it is being built, too: it is waited for before the hooks are linked to it.
    """
    target = output / HOOKS.format(version=torch_version())
    return _build_beside("hooks", target, force, extra, library)


def build_calls(
    output: Path = OUTPUT,
    force: bool = False,
    extra: Sequence[str] = (),
    library: Library | None = None,
) -> Path:
    """As `build_hooks`, the compiled calls for the installed PyTorch and the Python that runs this."""
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").exists():
        raise BuildError(f"{include} has no Python.h: install Python's headers (python3-dev)")
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    target = output / CALLS.format(version=torch_version(), suffix=suffix)
    return _build_beside("calls", target, force, extra, library, include, ("-ltorch_python",))


def _build_beside(
    part: str,
    target: Path,
    force: bool,
    extra: Sequence[str],
    library: Library | None,
    include: Path | None = None,
    libraries: Sequence[str] = (),
) -> Path:
    """A library of the folders of `part` for one version of PyTorch, linked to the native one that lies beside it."""
    cxx, folder = compiler(), torch_folder()
    note = target.with_suffix(".stamp")
    wanted = stamp(cxx, (*extra, target.name), part)
    if not force and target.exists() and note.exists() and note.read_text() == wanted:
        return target
    headers = [folder / "include", folder / "include" / "torch" / "csrc" / "api" / "include"]
    found = [f for h in (*headers, include) if h is not None for f in ("-isystem", str(h))]
    flags = [*COMMON, "-std=c++20", *extra, *found]
    with tempfile.TemporaryDirectory() as scratch:
        sources = sorted(s for f in BESIDE[part] for s in (SOURCES / f).glob("*.cpp"))
        objects = {s: str(Path(scratch) / f"{s.stem}.o") for s in sources}
        run_all([[cxx, *flags, "-c", str(s), "-o", o] for s, o in objects.items()])
        if library is not None:
            library.result()
        staged = target.with_name(f".{target.name}.{os.getpid()}")
        beside = [f"-L{target.parent}", "-ltensorlogic_native", f"-L{folder / 'lib'}"]
        run(
            [
                cxx,
                "-shared",
                *extra,
                *objects.values(),
                *beside,
                *libraries,
                "-ltorch_cpu",
                "-lc10",
                "-Wl,-rpath,$ORIGIN",
                "-o",
                str(staged),
            ]
        )
        staged.replace(target)
    note.write_text(wanted)
    return target


@functools.cache
def compilers() -> ThreadPoolExecutor:
    """Those that compile, for all that is built at the same time."""
    return ThreadPoolExecutor(os.cpu_count())


def run_all(commands: Iterable[Sequence[str]]) -> None:
    """Run compiler commands, as many at once as there are cores; the first that fails raises BuildError, and none is begun after it."""
    waiting = [compilers().submit(run, command) for command in commands]
    try:
        for one in waiting:
            one.result()
    finally:
        for one in waiting:
            one.cancel()
        wait(waiting)


def run(command: Sequence[str]) -> None:
    """Run one compiler command; its messages go into the error."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def build(output: Path = OUTPUT, force: bool = False, extra: Sequence[str] = ()) -> Path:
    """Compile and link the library into `output` unless it is up to date; returns its path, raises BuildError."""
    cxx = compiler()
    target, note = output / LIBRARY, output / "stamp"
    wanted = stamp(cxx, extra)
    if not force and target.exists() and note.exists() and note.read_text() == wanted:
        return target
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        objects = Path(folder)
        jobs = commands(cxx, objects, extra)
        run_all(jobs.values())
        linked = objects / LIBRARY
        libraries = torch_folder() / "lib"
        run(
            [
                cxx,
                "-shared",
                *extra,
                *map(str, jobs),
                f"-L{libraries}",
                "-ltorch_cpu",
                "-pthread",
                f"-Wl,-soname,{LIBRARY}",
                "-o",
                str(linked),
            ]
        )
        staged = output / f".{LIBRARY}.{os.getpid()}"
        shutil.copy2(linked, staged)
        staged.replace(target)
    note.write_text(wanted)
    return target


def build_all(
    output: Path = OUTPUT, force: bool = False, extra: Sequence[str] = (), optional: bool = False
) -> Path:
    """The library and what lies beside it, at once; raises BuildError, `optional`: of the library alone, and says what else failed."""
    with ThreadPoolExecutor(3) as builds:
        library = builds.submit(build, output, force, extra)
        rest = {
            what: builds.submit(make, output, force, extra, library)
            for what, make in (("hooks", build_hooks), ("compiled calls", build_calls))
        }
    target = library.result()
    for what, made in rest.items():
        try:
            path = made.result()
            if optional:
                print(path)
        except BuildError as error:
            if not optional:
                raise
            print(f"the {what} were not built: {error}", file=sys.stderr)
    return target


def sanitized_tests() -> int:
    """Build with the sanitizers and run the native tests on that build; returns their exit status."""
    output = ROOT / "build" / "sanitized"
    library = build_all(output, extra=SANITIZE)
    names = ("libasan.so", "libubsan.so")
    preload = [
        subprocess.check_output([compiler(), f"-print-file-name={name}"], text=True).strip()
        for name in names
    ]
    environment = {
        **os.environ,
        "TENSORLOGIC_NATIVE_LIBRARY": str(library),
        "LD_PRELOAD": ":".join(preload),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",  # Python itself leaks at exit
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    tests = [
        str(ROOT / "tests" / f"{name}.py")
        for name in (
            "native/test_cpu_library",
            "kernels/cpu/test_rows",
            "kernels/cpu/test_gemm",
            "kernels/cpu/test_amx_tiles",
            "native/test_call_extension",
            "kernels/triton_runtime/test_launch_plan",
            "dispatch/test_fast_path_c",
            "memory/test_pool",
            "device_placement/test_placement",
        )
    ]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *tests], env=environment, cwd=ROOT
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--force", action="store_true", help="rebuild even if nothing changed")
    parser.add_argument(
        "--sanitize", action="store_true", help="build with sanitizers and run the native tests"
    )
    parser.add_argument(
        "--calls",
        action="store_true",
        help="build the compiled calls only, the library being there",
    )
    options = parser.parse_args()
    try:
        if options.calls:
            print(build_calls(force=options.force))
            return 0
        if options.sanitize:
            return sanitized_tests()
        print(build_all(force=options.force, optional=True))
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
