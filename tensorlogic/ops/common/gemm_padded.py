"""Products that read lines from odd places in memory, by copies whose lines begin at multiples of 16 bytes.

Neither bulk copies nor wide accesses can begin anywhere else. A copy lies along K, which ends in zeros at a multiple of 16 bytes, too;
so what follows the product meets the rows and columns that it would have met.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Op
from ...plans import Key
from ...registry import triton_missing
from . import gemm_wiring
from .gemm import Operand
from .gemm_wiring import Kernel, Plan, Product, Start

ACCESS = 16  # bytes
LEAST_WORK = 2**22  # multiply-adds below which a copy's launch costs more than it spares


def candidate(
    op: Op, id: str, describe: Callable[[Key], Plan | str], sources: tuple[Any, ...]
) -> None:
    """Register what `gemm_wiring.candidate` would, with copies, for keys that have such lines."""
    if triton_missing() is None:
        from . import triton_padding

        modules = (*sources, triton_padding, sys.modules[__name__])
        gemm_wiring.candidate(op, id, padded(describe), modules)


def padded(describe: Callable[[Key], Plan | str]) -> Callable[[Key], Plan | str]:
    """The plans of `describe` with copies of what their products would read from odd places, where there is any."""

    def described(key: Key) -> Plan | str:
        found = describe(key)
        if isinstance(found, str):
            return found
        named = zip(key.names, key.tensors, strict=True)
        return _Copies({name: t.align for name, t in named if t is not None}).plan(found)

    return described


class _Copies:
    """One plan's copies, each made once."""

    def __init__(self, aligns: dict[str, int]) -> None:
        self.aligns = (
            aligns  # of the caller's tensors, in bytes; what the plan makes itself begins at ACCESS
        )
        self.steps: list[Kernel | Product] = []
        self.names: dict[Any, str] = {}

    def plan(self, found: Plan) -> Plan | str:
        """`found` with copies, or why there are none."""
        work = 0
        for step in found.products:
            if isinstance(step, Product):
                work += step.spec.m * step.spec.n * step.spec.k * step.spec.batch
                step = self._product(step)
            self.steps.append(step)
        if not self.names:
            return "every line begins and ends at a multiple of 16 bytes"
        if work < LEAST_WORK:
            return "too small for copies"
        return Plan(tuple(self.steps), found.returns)

    def _product(self, p: Product) -> Product:
        """The product of copies, or as it is."""
        spec, given = p.spec, dict(p.given)
        if (
            spec.x.dtype not in DTYPES
            or spec.batch != 1
            or spec.prologue != "none"
            or spec.x_out
            or spec.row_sum
        ):
            return p
        w = Operand(spec.w.dtype, spec.w.columns, spec.w.rows)  # [N, K]
        odd_x = self._odd(spec.x, given["x"], spec.m, spec.k)
        odd_w = self._odd(w, given["w"], spec.n, spec.k)
        if not (odd_x or odd_w):
            return p
        side = ACCESS // DTYPES[spec.x.dtype].itemsize
        k, x = math.ceil(spec.k / side) * side, spec.x
        if odd_x or k != spec.k:
            given["x"], x = self._copy(given["x"], x, spec.m, spec.k, k)
        if odd_w or k != spec.k:
            given["w"], w = self._copy(given["w"], w, spec.n, spec.k, k)
        wide = replace(spec, k=k, x=x, w=replace(w, rows=w.columns, columns=w.rows))
        read = [name for role, name in given.items() if getattr(spec, role)]
        least = min(self.aligns.get(name, ACCESS) for name in read)
        return replace(p, spec=wide, given=given, least=least)

    def _odd(self, o: Operand, name: str, rows: int, columns: int) -> bool:
        """Whether some line of the matrix begins or ends between accesses."""
        if o.columns == 1 or o.rows != 1:
            lines, length, step, inner = rows, columns, o.rows, o.columns
        else:
            lines, length, step, inner = columns, rows, o.columns, o.rows
        size = DTYPES[o.dtype].itemsize
        apart = lines > 1 and step * size % ACCESS != 0
        unaligned = self.aligns.get(name, ACCESS) < ACCESS
        return apart or unaligned or inner != 1 or length * size % ACCESS != 0

    def _copy(
        self, name: str, o: Operand, rows: int, columns: int, wide: int
    ) -> tuple[str, Operand]:
        """The name of a copy [rows, wide] of the matrix `name` [rows, columns], and how it lies."""
        what = (name, o, rows, columns, wide)
        if what not in self.names:
            copy = self.names[what] = f"padded_{len(self.names)}"

            def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
                return triton_padding.copy_launcher(
                    rows, columns, wide, (o.rows, o.columns), o.dtype, config, device, align
                )

            from . import triton_padding

            made = {copy: (copy, (rows, wide), o.dtype)}
            configs = triton_padding.copy_configs(wide, o.columns == 1)
            self.steps.append(Kernel((name, copy), made, configs, build))
        return self.names[what], Operand(o.dtype, wide, 1)
