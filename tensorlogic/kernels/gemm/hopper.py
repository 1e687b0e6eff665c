"""Host side of the warp-specialised product: which products it can be, its configurations, its launch."""

from __future__ import annotations

import math
from typing import Any

from .spec import Config, GemmSpec, Operand

ROWS = 64  # of x that a warpgroup multiplies
# columns at most that are finished and leave together, where a tile leaves in parts
PART = 64
MOST = 4  # configurations worth measuring
# elements from row to row that offsets inside a tile can have
MOST_STEP = 2**24
LEAST_WORK = 2**28  # multiply-adds below which plain tiles start sooner
# CONSUMERS, BLOCK_N, BLOCK_K, STAGES
_SHAPES = (
    (2, 256, 64, 3), (2, 128, 64, 5), (3, 128, 64, 4), (2, 64, 64, 8), (3, 64, 64, 6), (1, 128, 64, 4), (1, 256, 64, 4),
    (1, 64, 64, 6), (1, 32, 128, 4), (1, 32, 128, 8), (1, 16, 128, 8), (1, 64, 128, 6),
)  # fmt: skip
# a thread's, of each consumer but the first, which takes what is left
_REGISTERS = {1: 24, 2: 232, 3: 152}
_SHARED_PER_CORE = 227 * 1024


def specialised_refusal(spec: GemmSpec) -> str | None:
    """None, or why bulk copies and warpgroups cannot be `spec`."""
    if spec.prologue != "none" or spec.x_out or spec.row_sum or spec.batch != 1:
        return "a prologue, an output of it, or a batch"
    if spec.outer not in ("none", "residual", "gradient"):
        return f"outer {spec.outer!r}"
    if spec.z and spec.early_z and spec.outer != "none":
        return "what is kept before the vectors would lie where the residual does"
    matrices = [spec.x, spec.w, spec.y, *([spec.residual] if spec.residual else [])]
    if {o.dtype for o in matrices} | {spec.z or spec.x.dtype} not in ({"f16"}, {"bf16"}):
        return "matrices of one 16-bit dtype are required"
    if spec.y.columns != 1 or (spec.residual is not None and spec.residual.columns != 1):
        return "rows of the output or the residual do not lie together"
    read = ((spec.x, spec.m, spec.k), (spec.w, spec.k, spec.n))
    if spec.align < 16 or any(line(*matrix) is None for matrix in read):
        return "an operand whose lines do not lie apart and begin at multiples of 16 bytes"
    if any(line(o, spec.m, spec.n) is None and not 0 <= o.rows <= MOST_STEP for o in matrices[2:]):
        return "rows of the output or the residual lie too far apart"
    return None


def specialised_configs(spec: GemmSpec, sm_count: int, most: int = MOST) -> list[dict[str, Any]]:
    """Configurations worth measuring, best guess first; none where the product cannot be one of these or is too small."""
    if specialised_refusal(spec) is not None or spec.m * spec.n * spec.k < LEAST_WORK:
        return []
    vectors = any(v is not None for v in (spec.mean, spec.var, spec.scale, spec.shift))
    moved = [spec.residual, spec.y if spec.z or spec.residual else None]
    threads = any(o is not None and line(o, spec.m, spec.n) is None for o in moved)
    bare = spec.outer == "none" and spec.activation == "none" and spec.z is None
    scored: list[tuple[float, int, dict[str, Any]]] = []
    for consumers, block_n, block_k, stages in _SHAPES:
        if (vectors and consumers * block_n > 256) or (threads and block_n > 128):
            continue  # more than the registers hold beside the sums
        if spec.m <= ROWS * (consumers - 1) or spec.n <= block_n // 2:
            continue
        block_m = ROWS * consumers
        tiles = math.ceil(spec.m / block_m) * math.ceil(spec.n / block_n)
        resident = _resident(consumers, block_n, block_k, stages)
        config = {
            "CONSUMERS": consumers, "BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages,
            "GROUP_M": 8, "SPLIT": 1, "programs": min(tiles, sm_count * resident), "num_warps": 4, "num_stages": 1,
        }  # fmt: skip
        if block_n >= PART and _parts(spec) and not (bare and tiles > config["programs"]):
            # bare tiles leave beside the next one's products
            config["PART"] = min(PART, block_n // 2)
        scored.append((_estimate(spec, config, tiles, resident, sm_count), len(scored), config))
    return [config for _, _, config in sorted(scored, key=lambda entry: entry[:2])][:most]


def described(spec: GemmSpec, config: Config) -> dict[str, Any]:
    """What `prepare` and `compile_job` want to know."""
    consumers, block_n, block_k = config["CONSUMERS"], config["BLOCK_N"], config["BLOCK_K"]
    out = (ROWS, config.get("PART", block_n) if _parts(spec) else block_n)
    tiled = {
        "x_desc": _tiled(spec.x, spec.m, spec.k, (ROWS, block_k)),
        "w_desc": _tiled(_turned(spec.w), spec.n, spec.k, (block_n, block_k)),
    }
    pointers = {
        "bias": spec.bias, "mean": spec.mean, "var": spec.var, "scale": spec.scale, "shift": spec.shift,
    }  # fmt: skip
    integers = {"M": spec.m, "N": spec.n, "K": spec.k}
    for name, matrix in (
        ("residual", spec.residual),
        ("y", spec.y),
        ("z", spec.y if spec.z else None),
    ):
        if matrix is None:
            continue
        if line(matrix, spec.m, spec.n) is not None:
            tiled[f"{name}_desc"] = _tiled(matrix, spec.m, spec.n, out)
        else:
            # rows that begin at odd places, or the same one again and again
            pointers[name] = matrix.dtype
            integers["stride_r" if name == "residual" else "stride_y"] = matrix.rows
    return {
        "grid": (config["programs"], 1, 1),
        "tiled": tiled,
        "pointers": {f"{name}_ptr": kind for name, kind in pointers.items() if kind is not None},
        "integers": integers,
        "floats": ("eps",) if spec.var is not None else (),
        "longs": (),
        "constexprs": {
            "ACTIVATION": spec.activation, "OUTER": spec.outer, "KIND": spec.kind, "KEPT": spec.z is not None,
            "EARLY": spec.early_z, "X_ACROSS": spec.x.columns == 1, "W_DOWN": spec.w.columns != 1, "REGISTERS": _REGISTERS[consumers],
            **{name: value for name, value in config.items() if name.isupper() and name != "SPLIT"}, "PART": out[1],
        },
        "num_warps": 4,
        "num_stages": 1,
        "align": spec.align,
        "registers": _registers(consumers, block_n),
    }  # fmt: skip


def _parts(spec: GemmSpec) -> bool:
    """Whether a tile's columns can leave a part at a time: where bulk copies fetch and store them."""
    moved = [o for o in (spec.y, spec.residual) if o is not None]
    return all(line(o, spec.m, spec.n) is not None for o in moved)


def _tiled(o: Operand, rows: int, columns: int, tile: tuple[int, int]) -> Any:
    """The matrix as it lies: by tiles of it, or of its transpose where its columns do not lie together."""
    from ..triton_runtime.tma_descriptors import Tiled

    step = line(o, rows, columns)
    assert step is not None
    if o.columns == 1:
        return Tiled(o.dtype, (rows, columns), step, tile)
    return Tiled(o.dtype, (columns, rows), step, (tile[1], tile[0]))


def _turned(w: Operand) -> Operand:
    """w [K, N] as [N, K]; of one whose rows and columns both lie together, the same side counts as across."""
    return Operand(w.dtype, w.columns, 1 if w.columns != 1 else w.rows)


def line(o: Operand, rows: int, columns: int, unit: int = 8) -> int | None:
    """Elements from one line that lies together to the next; None where lines overlap or begin elsewhere than at multiples of `unit`."""
    if o.columns == 1:
        count, length, step = rows, columns, o.rows
    elif o.rows == 1:
        count, length, step = columns, rows, o.columns
    else:
        return None
    if count == 1:
        step = max(step, math.ceil(length / unit) * unit)
    return step if step >= length and step % unit == 0 else None


def _registers(consumers: int, block_n: int) -> int:
    """A thread's registers at entry: all warps', the loading one's three idle companions too, share 65536."""
    return {1: 240 if block_n > 128 else 128, 2: 168, 3: 128}[consumers]


def _resident(consumers: int, block_n: int, block_k: int, stages: int) -> int:
    """Programs that share a multiprocessor."""
    block_m = ROWS * consumers
    shared = 2 * (stages * (block_m + block_n) * block_k + block_m * block_n) + 1024
    threads = 128 * (consumers + 1)
    return max(
        1, min(_SHARED_PER_CORE // shared, 65536 // (threads * _registers(consumers, block_n)))
    )


def _estimate(spec: GemmSpec, config: Config, tiles: int, resident: int, sm_count: int) -> float:
    """Rough clocks: rounds of tiles, each step of K the slower of arithmetic and reading level 2."""
    block_m, block_n, block_k = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    rounds = math.ceil(tiles / (sm_count * resident))
    sharing = min(resident, math.ceil(tiles / sm_count))
    arithmetic = (
        block_m * block_n * block_k / (2048 if config["CONSUMERS"] > 1 or sharing > 1 else 1400)
    )
    reading = (min(block_m, spec.m) + block_n) * block_k * 2 / 64
    step = max(sharing * arithmetic, sharing * reading, 1000 / config["STAGES"])
    return float(rounds * (math.ceil(spec.k / block_k) * step + 1200))
