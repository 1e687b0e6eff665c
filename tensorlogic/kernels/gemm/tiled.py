"""Host side of the tiled product: which products it can be, its configurations and what they are expected to take."""

from __future__ import annotations

import math
from typing import Any

from .spec import Config, GemmSpec

DTYPES = ("f16", "bf16", "f32")


def gemm_refusal(spec: GemmSpec) -> str | None:
    """None, or why the family cannot serve `spec`."""
    for name, operand in (("x", spec.x), ("w", spec.w), ("y", spec.y)):
        if operand.dtype not in DTYPES:
            return f"{name} is {operand.dtype}; the kernel takes {', '.join(DTYPES)}"
    if spec.x.dtype != spec.w.dtype:
        return f"x is {spec.x.dtype} and w is {spec.w.dtype}; the kernel multiplies equal dtypes"
    if spec.batch != 1 and (
        spec.prologue in ("dropout", "layer_norm", "rms_norm")
        or spec.outer == "dropout"
        or spec.row_sum
    ):
        return f"batch {spec.batch} with a prologue or output that belongs to one matrix"
    if spec.row_sum and spec.prologue == "none":
        return "row sums of an x that is not transformed: Triton 3.6 miscompiles the product beside them"
    if max(spec.m, spec.n, spec.k) >= 2**31:
        return f"a side of {max(spec.m, spec.n, spec.k)}; the kernel counts rows and columns in 32 bits"
    return None


def gemm_arguments(spec: GemmSpec, config: Config) -> tuple[str, ...]:
    """Names of what the launcher takes, in order: tensors, outputs among them, then numbers."""
    found = described(spec, config, upcast=False)
    tiled = (name.removesuffix("_desc") for name in found.get("tiled", ()))
    tensors = (*tiled, *(name.removesuffix("_ptr") for name in found["pointers"]))
    return (*tensors, *found["floats"], *found["longs"])


def gemm_workspace(spec: GemmSpec, config: Config) -> tuple[int, int]:
    """(elements of float32 `space`, elements of int32 `counter`) the launcher needs; 0: none.

    `counter` must be zero before the first launch; every launch leaves it so. Streams may share
    neither.
    """
    if config["SPLIT"] == 1:
        return 0, 0
    tiles = _tiles(spec, config)
    return tiles * config["SPLIT"] * config["BLOCK_M"] * (config["BLOCK_N"] + 1), tiles


def _tiles(spec: GemmSpec, config: Config) -> int:
    block_m, block_n = int(config["BLOCK_M"]), int(config["BLOCK_N"])
    return math.ceil(spec.m / block_m) * math.ceil(spec.n / block_n) * spec.batch


def described(spec: GemmSpec, config: Config, upcast: bool) -> dict[str, Any]:
    """What `prepare` and `compile_job` both want to know; absent operands are left out."""
    if "CONSUMERS" in config:
        from . import hopper

        return hopper.described(spec, config)
    norm = spec.prologue in ("layer_norm", "rms_norm")
    statistics = "f32" if norm and (not spec.inline or spec.save_statistics) else None
    split = config["SPLIT"] > 1
    drops = "dropout" in (spec.prologue, spec.outer)
    pointers = {
        "x": spec.x.dtype, "w": spec.w.dtype, "saved": spec.saved.dtype if spec.saved else None,
        "seed": "i64" if drops and not spec.seeded else None,
        "row_mean": statistics if spec.prologue == "layer_norm" else None, "row_rstd": statistics,
        "gamma": spec.gamma, "beta": spec.beta, "bias": spec.bias,
        "mean": spec.mean, "var": spec.var, "scale": spec.scale, "shift": spec.shift,
        "residual": spec.residual.dtype if spec.residual else None, "y": spec.y.dtype, "z": spec.z,
        "x_out": spec.x_out, "row_sum": spec.row_sum,
        "space": "f32" if split else None, "counter": "i32" if split else None,
    }  # fmt: skip
    integers = {"M": spec.m, "N": spec.n, "K": spec.k}
    for letter, operand, names in (
        ("x", spec.x, "mk"), ("w", spec.w, "kn"),
        ("s", spec.saved, "mk"), ("r", spec.residual, "mn"), ("y", spec.y, "mn"),
    ):  # fmt: skip
        if operand is not None:
            batch = {f"stride_{letter}b": operand.batch} if spec.batch > 1 else {}
            integers |= batch | {
                f"stride_{letter}{names[0]}": operand.rows,
                f"stride_{letter}{names[1]}": operand.columns,
            }
    return {
        "grid": (_tiles(spec, config) * config["SPLIT"], 1, 1),
        "pointers": {f"{name}_ptr": dtype for name, dtype in pointers.items() if dtype is not None},
        "integers": integers,
        "floats": ("p",) * drops + ("eps",) * (spec.inline or spec.var is not None),
        "longs": ("seed_value", "offset_value") if drops and spec.seeded else (),
        "constexprs": {
            "PROLOGUE": spec.prologue, "KIND": spec.kind, "TRANSPOSED": spec.transposed,
            "INLINE": spec.inline, "STATISTICS": _statistics_block(spec, config), "ACTIVATION": spec.activation, "OUTER": spec.outer,
            "EARLY": spec.early_z, "AHEAD": _ahead(spec, config), "PRECISION": spec.precision, "UPCAST": upcast,
            "EVEN_M": spec.m % config["BLOCK_M"] == 0, "EVEN_N": spec.n % config["BLOCK_N"] == 0,
            "EVEN_K": spec.k % config["BLOCK_K"] == 0,
            "FETCH": 0, "STREAM": False, "X_ACROSS": spec.x.columns == 1, "W_DOWN": spec.w.columns != 1,
            "R_ACROSS": spec.residual is None or spec.residual.columns == 1,
            "WIDE": _wide(spec), "BATCHED": spec.batch > 1,
            **{name: value for name, value in config.items() if name.isupper()},
        },
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
        "align": spec.align,
    }  # fmt: skip


def _ahead(spec: GemmSpec, config: Config) -> bool:
    """Whether each program may hold what its epilogue reads from the start, with registers to spare."""
    vectors = sum(v is not None for v in (spec.mean, spec.var, spec.scale, spec.shift))
    most = (32 if vectors else 64) * 32 * int(config["num_warps"])
    return bool(config["SPLIT"] == 1 and config["BLOCK_M"] * config["BLOCK_N"] <= most)


def _statistics_block(spec: GemmSpec, config: Config) -> int:
    """Columns that inline row statistics take at a time: whole rows, as far as 64 elements a thread go."""
    if not spec.inline:
        return 0
    most = 64 * 32 * int(config["num_warps"]) // int(config["BLOCK_M"])
    return max(16, min(most, 1 << (spec.k - 1).bit_length()))


def _wide(spec: GemmSpec) -> bool:
    """Whether an offset inside one matrix may not fit 32 bits."""
    m, n, k = spec.m, spec.n, spec.k
    sides = (
        (spec.x, m, k), (spec.saved, m, k), (spec.w, k, n), (spec.y, m, n), (spec.residual, m, n),
    )  # fmt: skip
    return any(
        o is not None and (m - 1) * o.rows + (n - 1) * o.columns >= 2**31 for o, m, n in sides
    )


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages: what sweeps on an H200 found best somewhere
_HALF = (
    (16, 16, 64, 4, 4), (16, 32, 128, 4, 5), (16, 32, 256, 4, 6), (16, 64, 128, 4, 8), (16, 64, 256, 4, 5),
    (32, 32, 128, 4, 4), (32, 64, 128, 4, 6), (64, 32, 128, 4, 3), (64, 32, 128, 4, 5), (64, 32, 256, 4, 3),
    (64, 64, 64, 4, 6), (64, 64, 128, 4, 3), (64, 64, 128, 4, 4), (64, 128, 64, 4, 5), (64, 128, 128, 4, 4),
    (128, 64, 64, 4, 4), (128, 64, 128, 4, 3), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 4),
)  # fmt: skip
_SINGLE = (
    (16, 16, 64, 4, 3), (16, 32, 64, 4, 3), (16, 64, 32, 4, 3), (32, 32, 32, 4, 3),
    (32, 64, 32, 4, 3), (64, 64, 16, 4, 3), (64, 64, 32, 4, 3), (64, 64, 32, 8, 3),
    (64, 128, 16, 8, 3), (128, 64, 16, 8, 3), (128, 128, 16, 8, 3),
)  # fmt: skip
_ROWS = ((8, 512, 4), (4, 1024, 4), (16, 512, 8))  # BLOCK_N, BLOCK_K, num_warps of BLOCK_M < 16
_SHARED_PER_CORE = 227 * 1024
FEW_COLUMNS = 4  # of a float32 product, that are summed by lanes
# as _HALF, with SPLIT and columns of K asked ahead: the best of 200 for few rows by 4096 × 4096 and 4096 × 14336 weights on an H200
_DEEP = (
    (16, 32, 256, 4, 6, 1, 512), (16, 64, 256, 4, 5, 1, 0), (16, 32, 512, 4, 4, 1, 512),
    (64, 64, 128, 4, 5, 2, 0), (64, 32, 128, 4, 8, 1, 0),
)  # fmt: skip
MOST_CONFIGS = 6
MOST_ROWS = 64  # of products that _DEEP is for
LEAST_WEIGHTS = 2**23  # below them programs end before a deep pipeline is full
# multiply-adds up to which all that a program reads first is asked for ahead
FETCHED = 2**27
# weights of a few rows' product up to which they are asked for ahead
MOST_STREAMED = 2**25


def gemm_configs(
    m: int, n: int, k: int, dtype_size: int, sm_count: int = 132, most: int = MOST_CONFIGS
) -> list[dict[str, Any]]:
    """Configurations worth measuring on `sm_count` multiprocessors, best guess first: at most `most`, then those of _DEEP."""
    table = _HALF if dtype_size == 2 else _SINGLE
    scored: list[tuple[float, int, dict[str, Any]]] = []
    for bm, bn, bk, warps, stages in table:
        if (bm > 16 and bm >= 2 * m) or (bn > 16 and bn >= 2 * n) or (bk > 64 and bk >= 2 * k):
            continue
        if bm == 16 and min(m, n) > 128:
            continue
        tiles, steps = math.ceil(m / bm) * math.ceil(n / bn), math.ceil(k / bk)
        for split in (1, 2, 4, 8, 16):
            if split > 1 and (
                tiles * split > 4 * sm_count or steps < 2 * split or bm * bn > 2048 * warps
            ):
                # programs enough, too little K for each, or sums too many for registers
                break
            config = _config(bm, bn, bk, warps, stages, split) | _ahead_of_time(
                m, n, k, bn, bk, split
            )
            time = _estimate(m, n, k, config, dtype_size, sm_count)
            scored.append((time, len(scored), config))
    chosen = [config for _, _, config in sorted(scored, key=lambda entry: entry[:2])]
    best = [*chosen[:2], *_few_rows(m, n, k, sm_count), *chosen[2:]][:most]
    return best + [config for config in _deep(m, n, k, dtype_size) if config not in best]


def few_columns(m: int, n: int, k: int, sm_count: int) -> list[dict[str, Any]]:
    """Configurations of a float32 product with at most FEW_COLUMNS columns: sums by lanes, as for a few rows.

    A tile of 16 columns would be mostly padding, and adds K in one chain: of random layers of one column with a ReLU 7 in 100 had
    an element further off than it may be, of two columns with batch norm and ReLU 5; 1 in 100 by lanes (benchmarks/few_columns.py).
    """
    block_n, found = 1 << (n - 1).bit_length(), []
    for rows, lanes, warps in ((8, 512, 8), (4, 512, 4), (8, 1024, 8)):
        block_k = min(max(32, lanes // block_n), max(32, 1 << (k - 1).bit_length()))
        split = 1
        while math.ceil(m / rows) * split < sm_count and split < 8 and k >= 4 * split * block_k:
            split *= 2
        found.append(
            {"BLOCK_M": rows, "BLOCK_N": block_n, "BLOCK_K": block_k, "GROUP_M": 8, "SPLIT": split, "num_warps": warps, "num_stages": 1}
        )  # fmt: skip
    return found


def _config(bm: int, bn: int, bk: int, warps: int, stages: int, split: int) -> dict[str, Any]:
    return {
        "BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "GROUP_M": 8, "SPLIT": split,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip


def _ahead_of_time(m: int, n: int, k: int, bn: int, bk: int, split: int) -> dict[str, Any]:
    """What is asked into L2 ahead: for few rows 1024 columns of weights that fit there, for small products 512."""
    per = math.ceil(k / split)
    if m <= 16 and bn <= 32 and n * k <= MOST_STREAMED:
        return {"FETCH": max(1, 1024 // bk), "STREAM": per > 1024}
    if m * n * k > FETCHED or per < bk or bk > 512:
        return {}
    return {"FETCH": 1 << int(math.log2(min(512, per) // bk))}


def _few_rows(m: int, n: int, k: int, sm_count: int) -> list[dict[str, Any]]:
    """At most 4 rows: weights are used so little that ordinary products keep up with memory."""
    if m > 4:
        return []
    rows = 1 << (m - 1).bit_length() if m > 1 else 1
    found = []
    for bn, bk, warps in _ROWS:
        bk = max(32, bk // rows)
        split = 1
        while math.ceil(n / bn) * split < sm_count and split < 8 and math.ceil(k / bk) >= 4 * split:
            split *= 2
        found.append(
            _config(rows, bn, bk, warps, 1, split) | _ahead_of_time(m, n, k, bn, bk, split)
        )
    return found


def _deep(m: int, n: int, k: int, dtype_size: int) -> list[dict[str, Any]]:
    """Deeper pipelines, and little asked ahead, for a few rows by many 16-bit weights."""
    if not 1 < m <= MOST_ROWS or n * k < LEAST_WEIGHTS or dtype_size != 2:
        return []
    return [
        _config(bm, bn, bk, warps, stages, split)
        | ({"FETCH": ahead // bk, "STREAM": False} if ahead else {})
        for bm, bn, bk, warps, stages, split, ahead in _DEEP
        if (bm == 16) == (m <= 16)
    ]


def _estimate(m: int, n: int, k: int, config: Config, size: int, sm_count: int) -> float:
    """Rough nanoseconds: rounds of programs, each step of K the slowest of latency, arithmetic and reading, beside the
    time that memory takes.

    Constants were fitted to 2400 timings at 21 shapes on an H200 (f16): the best six by this estimate hold one within
    4 % of the best at all of them.
    """
    bm, bn, bk = config["BLOCK_M"], config["BLOCK_N"], config["BLOCK_K"]
    warps, stages, split = config["num_warps"], config["num_stages"], config["SPLIT"]
    steps = math.ceil(math.ceil(k / bk) / split)
    held = stages if bm >= 64 else stages - 1  # buffers of a pipeline with and without wgmma
    blocks = math.ceil(math.ceil(m / bm) * math.ceil(n / bn) * split / sm_count)
    resident = min(
        blocks,
        max(1, _SHARED_PER_CORE // (held * (bm + bn) * bk * size + 1024)),
        64 // warps,
        max(1, 65536 // (bm * bn * 2 + warps * 1280)),
    )
    rate = 4094 * min(1.0, bm * bn / 32768) ** 0.52 if size == 2 else 200
    arithmetic, reading = bm * bn * bk / rate, (min(bm, m) + bn) * bk * size / 89
    step = max(1168 / max(1, min(held - 1, steps)), resident * arithmetic, resident * reading) + 5
    body = math.ceil(blocks / resident) * (steps * step + 1224)
    memory = (n * k + m * k + 2 * m * n) * size / 4468
    finish = 1156 + bm * bn * (split + 1) * 4 / 46 if split > 1 else 0.0
    return float(653 + (body**1.565 + memory**1.565) ** (1 / 1.565) + finish)
