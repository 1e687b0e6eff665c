"""Bugs that shaders are given on purpose: each a piece of their text and what stands there instead."""

from __future__ import annotations

BUGS = {
    "tile edge, read": ("k < K && n < N ?", "k <= K && n < N ?"),
    "tile edge, written": ("if (m >= M || n >= N) return;", "if (m >= M || n > N) return;"),
    "missing barrier before a tile is read": (
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n#if ROW_SUM",
        "#if ROW_SUM",
    ),
    "missing barrier before a tile is overwritten": (
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n  }\n",
        "  }\n",
    ),
    "transposed stride": ("k * w_row + n * w_column", "n * w_row + k * w_column"),
    "barrier that some threads do not reach": (
        "#if ROW_SUM\n    if (group.x == 0",
        "if (m0 + index >= p.M) return;\n#if ROW_SUM\n    if (group.x == 0",
    ),
}


def planted(source: str, bug: str) -> str:
    """The source with that bug."""
    right, wrong = BUGS[bug]
    assert right in source, f"{right!r} is no longer in the shader"
    return source.replace(right, wrong)
