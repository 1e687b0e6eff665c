"""What a float32 product of 1024 could take on this x86 CPU, by its clock: fused multiply-adds alone, with a product's loads, and the products.

python benchmarks/product_floor.py [--n 1024] [--text PATH]

The clock of a core depends on what it runs. Loops of inline assembly, as many threads as PyTorch has, give the rate of multiply-adds on
registers, and with the loads of an R x V tile (R broadcasts and V vectors of the first cache for R x V multiply-adds), which no product
is without. Then PyTorch's product and ours, in turns, as shares of those rates. Variables that limit the CPU (`MKL_ENABLE_INSTRUCTIONS=AVX2`) are shown.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import torch

import tensorlogic
from tensorlogic.bench.machine_info import limits
from tensorlogic.measure import timer
from tensorlogic.native import cpu_library
from tensorlogic.plans.environment import environment

CPU = torch.device("cpu")
TILES = {"zmm": ((14, 2), (9, 3), (6, 4), (5, 5)), "ymm": ((6, 2), (4, 3))}
LANES, REGISTERS = {"zmm": 16, "ymm": 8}, {"zmm": 32, "ymm": 16}
FLAGS = {"zmm": "avx512f", "ymm": "fma"}
STEPS, TIMES = 4, 1000000  # steps of the inner dimension a loop, loops a timing
ROUNDS = 25


def body(vector: str, rows: int, vectors: int) -> list[str]:
    """STEPS steps of a tile of rows x vectors sums; without loads where `vectors` is 0."""
    last = REGISTERS[vector] - 1
    name = f"%%{vector}"
    if not vectors:
        return [
            f"vfmadd231ps {name}{last}, {name}{last - 1}, {name}{i}"
            for i in [*range(last - 1)] * STEPS
        ]
    sums, lines = rows * vectors, []
    for k in range(STEPS):
        lines += [f"vmovups {2048 + 64 * (k * vectors + v)}(%0), {name}{sums + v}" for v in range(vectors)]  # fmt: skip
        for r in range(rows):
            left = sums + vectors + (r % 2 if sums + vectors < last else 0)
            lines.append(f"vbroadcastss {4 * (r + rows * k)}(%0), {name}{left}")
            lines += [f"vfmadd231ps {name}{sums + v}, {name}{left}, {name}{r * vectors + v}" for v in range(vectors)]  # fmt: skip
    return lines


def source(bodies: dict[str, list[str]], vector: str) -> str:
    """C functions, each a loop."""
    clobbered = ", ".join(f'"{vector.replace("y", "x").replace("z", "x")}{i}"' for i in range(16))
    zero = (
        "vpxord" if vector == "zmm" else "vpxor"
    )  # what a register holds may be a denormal, which is slow
    cleared = [
        f"{zero} {r}, {r}, {r}" for r in (f"%%{vector}{i}" for i in range(REGISTERS[vector]))
    ]
    loops = {
        name: "\\n".join([*cleared, "1:", *lines, "dec %1", "jnz 1b"])
        for name, lines in bodies.items()
    }
    return "\n".join(
        f'void {name}(const float *m, long n) {{ __asm__ volatile("{loop}" : "+r"(m), "+r"(n) : : "memory", "cc", {clobbered}); }}'
        for name, loop in loops.items()
    )


def rate(loop: ctypes._CFuncPtr, flops: int) -> float:
    """GFLOP/s of all threads together, each in a loop of its own."""
    memory = [torch.zeros(1 << 14) for _ in range(torch.get_num_threads())]

    def run() -> None:
        threads = [threading.Thread(target=loop, args=(m.data_ptr(), TIMES)) for m in memory]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    best = min(timer.once(run, CPU) for _ in range(ROUNDS))
    return flops * TIMES * len(memory) / best * 1e-3


def rates(vector: str) -> dict[str, float]:
    """Name -> GFLOP/s of the multiply-adds of each loop."""
    bodies, counts = {"registers": body(vector, 0, 0)}, {"registers": (REGISTERS[vector] - 2) * STEPS}  # fmt: skip
    for rows, vectors in TILES[vector]:
        bodies[f"tile_{rows}x{vectors}"] = body(vector, rows, vectors)
        counts[f"tile_{rows}x{vectors}"] = rows * vectors * STEPS
    cxx = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if cxx is None:
        sys.exit("product_floor: no C compiler found: install gcc or clang")
    with tempfile.TemporaryDirectory() as folder:
        c, library = Path(folder, "loops.c"), Path(folder, "loops.so")
        c.write_text(source(bodies, vector))
        subprocess.run([cxx, "-O2", "-shared", "-fPIC", f"-m{FLAGS[vector]}", str(c), "-o", str(library)], check=True)  # fmt: skip
        loaded = ctypes.CDLL(str(library))
        found = {}
        for name, count in counts.items():
            loop = loaded[name]
            loop.argtypes = [ctypes.c_void_p, ctypes.c_long]
            found[name] = rate(loop, 2 * LANES[vector] * count)
    return found


def products(n: int) -> tuple[float, float]:
    """Microseconds of PyTorch's product and of ours, as those of the loops: the fastest of ROUNDS in turns."""
    a, b = torch.randn(n, n), torch.randn(n, n)
    matmul, out = cpu_library.op("matmul"), torch.empty(n, n)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        times[0].append(timer.once(lambda: torch.mm(a, b, out=out), CPU))
        times[1].append(timer.once(lambda: matmul(a, b), CPU))
    return min(times[0]), min(times[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--text", type=Path)
    given = parser.parse_args()
    if cpu_library.available() or "avx2" not in cpu_library.op("features")():
        sys.exit(f"product_floor: {cpu_library.available() or 'needs an x86 processor with AVX2'}")
    wide = "avx512" in cpu_library.op("features")()
    lines = [
        f"float32 product of {given.n}: {environment(CPU).device}, {torch.get_num_threads()} threads, PyTorch {torch.__version__}, {datetime.date.today()}",
        f"limited to: {' '.join(f'{k}={v}' for k, v in limits().items()) or 'nothing'}; tensorlogic {tensorlogic.__version__}, {cpu_library.isa()}",
    ]
    work = 2 * given.n**3 * 1e-3  # FLOP / 1000, so that GFLOP/s = work / us
    theirs, ours = products(given.n)
    for vector in ("ymm", "zmm") if wide else ("ymm",):
        for name, gflops in rates(vector).items():
            lines.append(
                f"{LANES[vector] * 32} bits, {name:<10} {gflops:7.1f} GFLOP/s, so {work / gflops:8.1f} us, {work / gflops / theirs:.2f} of PyTorch's time"
            )
    for who, us in (("PyTorch", theirs), ("ours", ours)):
        lines.append(f"{who:<7} {us:8.1f} us, {work / us:6.1f} GFLOP/s, {us / theirs:.2f}")
    print("\n".join(lines))
    if given.text is not None:
        with given.text.open("a") as file:
            file.write("\n".join(lines) + "\n\n")


if __name__ == "__main__":
    main()
