"""Plants a spill and an off-by-one in every GPU kernel, in a copy of the sources, and says which tests notice.

    python tools/planted.py                    # all kernels: a table, 20 minutes on two cores
    python tools/planted.py reduce_spun        # these

Needs no GPU: kernels run in Triton's interpreter or on the stand-in for Gluon (`tests/support/gluon/`), and are compiled for sm_90. The off-by-one
is one row, column, step or element too few or too many, in the kernel or in a function that it calls. The spill is 65,536 numbers that
come to be in the kernel's first line and are used in its last: 512 registers a thread of 4 warps. What must fail are the tests of TESTS, whose
first failure is named; all of them pass unedited, which is checked first. Ends with 1 where a plant is not noticed.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNELS = "tensorlogic/kernels"
SPILL = 65536  # numbers that live from the first line to the last

ROWS, ROWS_COMPILE = "test_row_kernels.py::test", "test_row_kernels_compile.py"
COLUMNS, LOSS = "elementwise/test_column_passes.py", "cross_entropy/test_fused_backward.py"
PLANES = "mixed_precision/test_planes_and_guards.py"
GLUON = "test_gluon_standin.py::test"
TESTS: dict[str, tuple[str, str]] = {  # what a module's kernels run in, and what compiles them
    "attention_scores/after_gemm": ("attention_scores/test_after_gemm.py",) * 2,
    "attention_scores/hopper_register_store": (
        f"{GLUON}_scores",
        "attention_scores/test_register_store.py",
    ),
    "attention_scores/hopper_resident_k": (
        f"{GLUON}_scores",
        "attention_scores/test_resident_k.py",
    ),
    "attention_scores/recompute": ("attention_scores/test_recompute.py", ROWS_COMPILE),
    "cross_entropy/fused_backward": (LOSS, LOSS),
    "cross_entropy/fused_backward_smem_kernel": (f"{GLUON}_losses", LOSS),
    "cross_entropy/prefetch": ("cross_entropy/test_prefetch.py",) * 2,
    "cross_entropy/rows": (
        f"{ROWS}_cross_entropy {ROWS}_cross_entropy_of_special_rows",
        ROWS_COMPILE,
    ),
    "elementwise/broadcast_grad": (
        "elementwise/test_broadcast_grad.py::test_gradients",
        "elementwise/test_broadcast_grad.py",
    ),
    "elementwise/column_passes": (COLUMNS, ROWS_COMPILE),
    "elementwise/dropout": (f"{COLUMNS}::test_dropout_alone", ROWS_COMPILE),
    "elementwise/elementwise": (
        f"{ROWS}_elementwise_forward {ROWS}_elementwise_backward",
        ROWS_COMPILE,
    ),
    "elementwise/epilogue_pass": ("gemm/test_backward_products.py", ROWS_COMPILE),
    "elementwise/relu_mask": ("elementwise/test_relu_mask.py",) * 2,
    "gemm/gemv_kernel": ("gemm/test_gemv.py",) * 2,
    "gemm/hopper_kernel": (f"{GLUON}_products", "gemm/test_hopper.py"),
    "gemm/padding_kernel": ("gemm/test_padded.py",) * 2,
    "gemm/tiled_kernel": ("gemm/test_tiled.py", "gemm/test_tiled_compile.py"),
    "mixed_precision/f64_gemm_kernel": (f"{GLUON}_widened", "mixed_precision/test_f64_gemm.py"),
    "mixed_precision/guard_recompute": ("mixed_precision/test_guard_recompute.py", PLANES),
    "mixed_precision/line_max": (PLANES, PLANES),
    "mixed_precision/scaled_f16": (PLANES, PLANES),
    "mixed_precision/split_planes": (PLANES, PLANES),
    "norm/batch_norm": ("norm/test_batch_norm.py",) * 2,
    "norm/group_norm": ("norm/test_group_norm.py",) * 2,
    "norm/layer_norm": (f"{ROWS}_layer_norm", ROWS_COMPILE),
    "reduce/contiguous": (
        f"{ROWS}_reduce {ROWS}_reduce_product_of_columns {COLUMNS}",
        ROWS_COMPILE,
    ),
    "reduce/extreme_grad": ("reduce/test_extreme_grad.py",) * 2,
    "reduce/extreme_index": ("reduce/test_extreme_index.py",) * 2,
    "reduce/one_wave": ("reduce/test_one_wave.py",) * 2,
    "reduce/packed_rows": ("reduce/test_packed_rows.py",) * 2,
    "reduce/ragged": ("reduce/test_ragged.py",) * 2,
    "reduce/split": ("reduce/test_split.py",) * 2,
    "reduce/strided": ("reduce/test_strided.py",) * 2,
    "softmax/ragged": ("softmax/test_ragged.py",) * 2,
    "softmax/rows": (f"{ROWS}_softmax", ROWS_COMPILE),
    "softmax/smem_kernel": (
        f"{GLUON}_softmax_of_rows_that_are_held {GLUON}_softmax_gradients_of_rows_that_are_held",
        "softmax/test_smem.py",
    ),
    "softmax/split": ("softmax/test_split.py",) * 2,
    "softmax/strided": ("softmax/test_strided.py",) * 2,
    "softmax/strided_split": ("softmax/test_strided_split.py",) * 2,
}


@dataclass(frozen=True)
class Off:
    """An off-by-one: the first `right` in a function becomes `wrong`."""

    right: str
    wrong: str
    where: str = ""  # the kernel itself


OFF_BY_ONE = {
    "batch_norm_relu_fwd_tiled": Off("live = col < N", "live = col < N - 1"),
    "activation_bwd_columns": Off("(row < M)", "(row < M - 1)"),
    "batch_norm_relu_bwd_columns": Off("(row < M)", "(row < M + 1)"),
    "cross_entropy_fwd_online": Off("(t < C)", "(t < C - 1)"),
    "cross_entropy_fwd_registers": Off("(col < C)", "(col < C - 1)"),
    "cross_entropy_reduce": Off("start + lane < R", "start + lane < R - 1"),
    "cross_entropy_bwd_tiled": Off("(lane < C)", "(lane < C - 1)"),
    "cross_entropy_ahead": Off("piece < W - k * TILE", "piece < W + 1 - k * TILE"),
    "cross_entropy_total": Off("inside = start + lane < R", "inside = start + lane < R - 1"),
    "cross_entropy_held": Off("after < R", "after < R - 1"),
    "cross_entropy_together": Off("W - k * TILE", "W - k * TILE - 1"),
    "cross_entropy_share": Off("count_valid(t_ptr, R,", "count_valid(t_ptr, R - 1,"),
    "cross_entropy_settle": Off("(R + zero)", "(R - 1 + zero)"),
    "dropout_flat": Off("element_ty), at < N", "element_ty), at < N - 1"),
    "elementwise_flat": Off("lane < N - base", "lane < N - base + 1", "flat_tile"),
    "elementwise_rows": Off("row < R - r", "row < R - r - 1"),
    "extreme_bwd_held": Off("mask=inside(0, C, live", "mask=inside(0, C - 1, live"),
    "extreme_bwd_twice": Off("ties_of(x_ptr, x_at, y, x_c, C,", "ties_of(x_ptr, x_at, y, x_c, C - 1,"),
    "extreme_bwd_counted": Off("x_c, length, live", "x_c, length - 1, live"),
    "extreme_bwd_shared": Off("mask=p < PARTS", "mask=p < PARTS - 1"),
    "extreme_fwd_placed": Off("v = c < length - start,", "v = c < length - start - 1,"),
    "extreme_fwd_joined": Off("mask=p < PARTS, other=worst", "mask=p < PARTS - 1, other=worst"),
    "extreme_bwd_placed": Off("mask=inside(0, C, live", "mask=inside(0, C - 1, live"),
    "relu_fwd_marked": Off("live = (N - base)", "live = (N - base - 1)"),
    "relu_bwd_marked": Off("live = (N - base)", "live = (N - base - 1)"),
    "gemm_tiled": Off("rm, M, rk, K, EVEN_M", "rm, M, rk, K - 1, EVEN_M"),
    "gemm_one_row": Off("(rk < K - at)", "(rk < K - at - 1)"),
    "group_norm_parts": Off("tl.where(at < end,", "tl.where(at < end - 1,"),
    "group_norm_apply": Off("live = at < end", "live = at < end - 1"),
    "halve_lines": Off("(along < C)", "(along < C - 1)"),
    "halve_whole_lines": Off("(along < C)", "(along < C - 1)"),
    "halve_strips": Off("(k < C)", "(k < C - 1)"),
    "scale_back": Off("mask=j < N", "mask=j < N - 1"),
    "layer_norm_fwd_registers": Off("(col < N)", "(col < N - 1)"),
    "layer_norm_fwd_looped": Off("start + col < N", "start + col < N - 1"),
    "layer_norm_bwd_registers": Off("live = col < N", "live = col < N - 1"),
    "layer_norm_bwd_dx_looped": Off("start + col < N", "start + col < N - 1"),
    "layer_norm_bwd_params_tiled": Off("(row < R)", "(row < R - 1)"),
    "line_peaks": Off("(along < C)", "(along < C - 1)"),
    "note_infinite": Off("at < TOTAL", "at < TOTAL - 1"),
    "mend_product": Off("mask=i < M", "mask=i < M - 1"),
    "gemm_widened": Off("rm = tile_m *", "rm = 1 + tile_m *", "multiply_widened"),
    "reduce_split": Off("mask=at < N", "mask=at < N - 1"),
    "reduce_polled": Off("mask=at < N", "mask=at < N - 1"),
    "reduce_rows": Off("whole + col < N", "whole + col < N - 1"),
    "reduce_columns": Off("(row < R)", "(row < R - 1)"),
    "batch_norm_relu_fwd_held": Off("live = col < N", "live = col < N - 1"),
    "batch_norm_relu_fwd_trained": Off("live = col < N", "live = col < N - 1"),
    "batch_statistics_columns": Off("(row < M)", "(row < M - 1)"),
    "batch_norm_relu_bwd_held": Off("(row < M)", "(row < M - 1)"),
    "batch_norm_relu_bwd_sums": Off("(row < M)", "(row < M - 1)"),
    "batch_norm_relu_bwd_tiled": Off("live = col < N", "live = col < N - 1"),
    "copy_padded": Off("(col < N)", "(col < N - 1)"),
    "finish_tiled": Off("(col < N)", "(col < N - 1)"),
    "reduce_abreast": Off("(R - lines * ABREAST) * C", "(R - lines * ABREAST) * C - 1"),
    "reduce_groups": Off("lane < length - k", "lane < length - 1 - k"),
    "reduce_shares": Off("lane < length - whole", "lane < length - 1 - whole"),
    "reduce_groups_swept": Off("lane < length - start", "lane < length - 1 - start"),
    "reduce_along": Off("(j < whole)", "(j < whole - 1)"),
    "reduce_across": Off("(row < R)", "(row < R - 1)", "tile_across"),
    "shared_gradients": Off("inside = moved < most", "inside = moved < most - 1"),
    "softmax_fwd_registers": Off("(col < C)", "(col < C + 1)"),
    "softmax_fwd_online": Off("start + lane < C", "start + lane < C + 1"),
    "softmax_bwd_registers": Off("(col < C)", "(col < C - 1)"),
    "softmax_bwd_looped": Off("start + lane < C", "start + lane < C - 1"),
    "scores_rows_fwd_registers": Off("(col < T)", "(col < T - 1)"),
    "scores_rows_fwd_online": Off("mask=col < end", "mask=col < end - 1"),
    "scores_rows_bwd_registers": Off("(col < T)", "(col < T - 1)"),
    "scores_rows_bwd_looped": Off("mask=col < end", "mask=col < end - 1"),
    "softmax_fwd_held": Off("BLOCK_I) < N", "BLOCK_I) < N - 1"),
    "softmax_fwd_swept": Off("(start + c < C)", "(start + c < C + 1)"),
    "softmax_bwd_held": Off("BLOCK_I) < N", "BLOCK_I) < N + 1"),
    "softmax_bwd_swept": Off("(start + c < C)", "(start + c < C - 1)"),
    "softmax_fwd_groups": Off("lane < length - k", "lane < length - 1 - k"),
    "softmax_fwd_groups_swept": Off("start + lane < length", "start + lane < length - 1"),
    "softmax_bwd_groups": Off("lane < length - k", "lane < length - 1 - k"),
    "softmax_bwd_groups_swept": Off("WIDTH) < length", "WIDTH) < length - 1"),
    "softmax_fwd_shares": Off("begin, length, False", "begin, length - 1, False"),
    "softmax_fwd_shared": Off("mask=lane < left)", "mask=lane < left - 1)"),
    "softmax_bwd_shares": Off("lane < length - start", "lane < length - 1 - start"),
    "softmax_bwd_shared": Off("mask=lane < left)", "mask=lane < left - 1)"),
    "softmax_held": Off("after < R", "after < R - 1"),
    "softmax_backward_held": Off("after < R", "after < R - 1"),
    "softmax_fwd_parts": Off("part_of(C, SPAN)", "part_of(C - 1, SPAN)"),
    "softmax_fwd_joined": Off("mask=p < PARTS", "mask=p < PARTS - 1"),
    "softmax_bwd_parts": Off("first + i < N", "first + i < N - 1"),
    "softmax_bwd_joined": Off("part_of(C, SPAN)", "part_of(C + 1, SPAN)"),
    "attention_scores_fwd": Off("keep = (col < T)", "keep = (col < T - 1)", "score_tile"),
    "attention_scores_direct": Off("% groups * M, S - M)", "% groups * M, S - M + 1)", "placed"),
    "attention_scores_kept": Off("y_ptr + LAST * (2 * N)", "y_ptr + LAST * (2 * N) + 1"),
    "gemm_specialised": Off("rn = at_n +", "rn = 1 + at_n +", "multiply"),
    "reduce_spun": Off("left < N", "left < N - 1"),
    "split_planes": Off("(cols < C)", "(cols < C - 1)", "write_planes"),
    "look_at": Off("inside = i < M", "inside = i < M - 1"),
}  # fmt: skip
WORKERS = {  # where warp groups of a kernel do their work
    "gemm_widened": "multiply_widened",
    "gemm_specialised": "multiply",
}


def jit(node: ast.stmt) -> bool:
    """Whether a function is compiled by Triton or Gluon."""
    if not isinstance(node, ast.FunctionDef):
        return False
    found = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
    return any(isinstance(d, ast.Attribute) and d.attr == "jit" for d in found)


def kernels(root: Path = ROOT) -> dict[str, str]:
    """The kernels that are launched, which no other calls: their names and modules, as TESTS names these."""
    defined: dict[str, str] = {}
    called: set[str] = set()
    folder = root / KERNELS
    for path in sorted(folder.rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if jit(node):
                assert isinstance(node, ast.FunctionDef)
                defined[node.name] = str(path.relative_to(folder).with_suffix(""))
                called |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - {node.name}
    return {name: module for name, module in defined.items() if name not in called}


def function(text: str, name: str) -> tuple[ast.FunctionDef, int, int]:
    """A function of a module, and the lines that it begins and ends at."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node, node.lineno - 1, node.end_lineno or 0
    raise ValueError(f"there is no function {name}")


def with_off_by_one(text: str, kernel: str) -> str:
    """A module's text with the kernel's off-by-one."""
    plant = OFF_BY_ONE[kernel]
    _, begin, end = function(text, plant.where or kernel)
    lines = text.splitlines(keepends=True)
    body = "".join(lines[begin:end])
    if plant.right not in body:
        raise ValueError(f"{kernel}: no longer says {plant.right!r}")
    return "".join([*lines[:begin], body.replace(plant.right, plant.wrong, 1), *lines[end:]])


def with_spill(text: str, kernel: str) -> str:
    """A module's text with numbers that the kernel keeps from its first line to its last."""
    node, _, end = function(text, WORKERS.get(kernel, kernel))
    first = node.body[1] if isinstance(node.body[0], ast.Expr) else node.body[0]
    gluon = "gluon.jit" in ast.unparse(node.decorator_list[0])
    language = "gl" if gluon else "tl"
    layout = ", gl.BlockedLayout([1], [32], [gl.num_warps()], [0])" if gluon else ""
    keep = '    ballast = {}.inline_asm_elementwise("{}", "=r,r", [{}], dtype={}.int32, is_pure=False, pack=1)\n'
    numbers = (
        f"{language}.arange(0, {SPILL}{layout})"  # volatile: nobody may move a store before a load
    )
    begun = keep.format(language, "ld.volatile.shared.b32 $0, [$1];", numbers, language)
    ended = keep.format(language, "st.volatile.shared.b32 [$1], $1; mov.b32 $0, $1;", "ballast", language)  # fmt: skip
    lines = text.splitlines(keepends=True)
    lines[end - 1 : end] = [lines[end - 1].rstrip("\n") + "\n", ended]
    lines.insert(first.lineno - 1, begun)
    return "".join(lines)


ALONE = """
def pytest_collection_finish(session):
    from tensorlogic.kernels.triton_runtime import launch as triton_launch

    measure = triton_launch.resources_apart

    def apart(jobs):
        mine = [job for job in jobs if job.kernel == {kernel!r}]
        found = iter(measure(mine))
        return [next(found) if job in mine else triton_launch.Resources(1, 0, 0) for job in jobs]

    triton_launch.resources_apart = apart
"""  # a plugin of pytest, for a planted copy: the compiler sees only the kernel that was edited


def noticed(root: Path, tests: str, only: str, kernel: str = "") -> tuple[bool, str, float]:
    """Whether tests fail in a copy of the sources, `kernel` alone being compiled where one is named; the first failure, with what
    it found spilt; seconds."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-k", only]  # fmt: skip
    command += [str(Path("tests/kernels", name)) for name in tests.split()]
    if kernel:
        (root / "alone.py").write_text(ALONE.format(kernel=kernel))
        command += ["-p", "alone"]
    done = subprocess.run(
        command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=False
    )  # fmt: skip
    found = re.search(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE)
    if done.returncode not in (0, 1) or (done.returncode == 1) != bool(found):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")  # fmt: skip
    stacks = [int(n) for n in re.findall(r"stack=(\d+)", done.stdout)]
    first = f"`{found[1].split('[')[0]}`" if found else ""
    first += f", {max(stacks)} bytes of stack" if any(stacks) else ""
    return done.returncode == 1, first, time.monotonic() - begun


PARTS = {  # of a kernel's tests: which are left out or taken, by -k
    "off by one": (0, "not planted and not spilling and not spills and not compile", with_off_by_one),
    "spill": (1, "spilling or spills or resources or registers", with_spill),
}  # fmt: skip


def main() -> int:
    """Plant, run, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernels", nargs="*", help="names; all of them where none is given")
    parser.add_argument("--plant", choices=list(PARTS), action="append", help="only these plants")
    parser.add_argument(
        "--trusted",
        action="store_true",
        help="do not run the tests on the sources as they are first",
    )
    asked = parser.parse_args()
    every = kernels()
    if unknown := set(asked.kernels) - set(every):
        parser.error(f"no kernels: {', '.join(sorted(unknown))}; there are {', '.join(every)}")
    chosen = {k: m for k, m in every.items() if not asked.kernels or k in asked.kernels}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for part in ("tensorlogic", "tests", "benchmarks", "tools"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        return table(root, chosen, asked.plant or list(PARTS), asked.trusted)


def table(root: Path, chosen: dict[str, str], plants: Sequence[str], trusted: bool) -> int:
    """A line for each kernel and plant; how many went unnoticed, at most 1."""
    missed = 0
    print("| kernel | plant | noticed by | s |\n|---|---|---|---|")
    sound: set[tuple[str, str]] = set()
    for plant in plants:
        which, only, edit = PARTS[plant]
        for kernel, module in chosen.items():
            tests = TESTS[module][which]
            if not trusted and (tests, only) not in sound:
                failed, first, _ = noticed(root, tests, only)
                if failed:
                    raise RuntimeError(f"{first} of {tests} fails before anything is planted")
                sound.add((tests, only))
            path = root / KERNELS / f"{module}.py"
            text = path.read_text()
            try:
                path.write_text(edit(text, kernel))
                found, first, seconds = noticed(root, tests, only, kernel if which else "")
            finally:
                path.write_text(text)
            missed += not found
            said = f"{first} ({tests})" if found else "**nobody**"
            print(f"| `{kernel}` | {plant} | {said} | {seconds:.0f} |", flush=True)
    print(f"{missed} of {len(chosen) * len(plants)} were not noticed")
    return min(missed, 1)


if __name__ == "__main__":
    sys.exit(main())
