"""Products that read lines from odd places in memory, by copies whose lines begin at multiples of 16 bytes.

Neither bulk copies nor wide accesses can begin anywhere else. A copy lies as its matrix does, so that two products share it, and along K
ends in zeros at a multiple of 16 bytes, too; what follows the product meets the rows and columns that it would have met.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...core.dtypes import DTYPES
from ...core.key import Key
from .bind import Kernel, Plan, Product, Start
from .spec import Operand

ACCESS = 16  # bytes
# multiply-adds below which a copy's launch costs more than it spares
LEAST_WORK = 2**22


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
        # of the caller's tensors, in bytes; what the plan makes itself begins at ACCESS
        self.aligns = aligns
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
        left = {step.engine for step in self.steps if isinstance(step, Product)}
        asked = {step.engine for step in found.products if isinstance(step, Product)}
        if not left & asked:
            return "its rows are stored by another engine"
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
        k, x = spec.k, spec.x
        if _along(x) or _along(w):  # lines that K ends
            k = math.ceil(spec.k / side) * side
        if odd_x or k != spec.k:
            given["x"], x = self._copy(given["x"], x, spec.m, spec.k, k)
        if odd_w or k != spec.k:
            given["w"], w = self._copy(given["w"], w, spec.n, spec.k, k)
        wide = replace(spec, k=k, x=x, w=replace(w, rows=w.columns, columns=w.rows))
        read = [name for role, name in given.items() if getattr(spec, role)]
        least = min(self.aligns.get(name, ACCESS) for name in read)
        odd_y = spec.m > 1 and spec.y.rows % side != 0
        # by which such rows are stored several times as fast
        ours = odd_y and spec.x.dtype != "f32"
        engine = "triton" if ours else p.engine
        return replace(p, spec=wide, given=given, least=least, engine=engine)

    def _odd(self, o: Operand, name: str, rows: int, columns: int) -> bool:
        """Whether some line of the matrix begins or ends between accesses."""
        if _along(o):
            lines, length, step, inner = rows, columns, o.rows, o.columns
        else:
            lines, length, step, inner = columns, rows, o.columns, o.rows
        size = DTYPES[o.dtype].itemsize
        apart = lines > 1 and step * size % ACCESS != 0
        unaligned = self.aligns.get(name, ACCESS) < ACCESS
        return apart or unaligned or inner != 1 or length * size % ACCESS != 0

    def _copy(self, name: str, o: Operand, rows: int, columns: int, k: int) -> tuple[str, Operand]:
        """The name of a copy of the matrix `name` [rows, columns], its second dimension k long, and how it lies."""
        side = ACCESS // DTYPES[o.dtype].itemsize
        if _along(o):
            shape, into, strides = (rows, columns), (rows, k), (o.rows, o.columns)
        else:
            length = math.ceil(rows / side) * side
            shape, into, strides = (columns, rows), (k, length), (o.columns, o.rows)
        what = (name, shape, into, strides)
        if what not in self.names:
            copy = self.names[what] = f"padded_{len(self.names)}"

            def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
                return padding_kernel.copy_launcher(
                    shape, into, strides, o.dtype, config, device, align
                )

            from . import padding_kernel

            made = {copy: (copy, into, o.dtype)}
            configs = padding_kernel.copy_configs(into[1], strides[1] == 1)
            self.steps.append(Kernel((name, copy), made, configs, build))
        lies = Operand(o.dtype, into[1], 1) if _along(o) else Operand(o.dtype, 1, into[1])
        return self.names[what], lies


def _along(o: Operand) -> bool:
    """Whether the second dimension lies together, or neither does, and a copy's is to."""
    return o.columns == 1 or o.rows != 1
