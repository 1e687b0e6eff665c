"""Products of one row: the weights are read once, by programs that have all their loads on the way before they wait for one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from ...numerics import DTYPES
from ...plans import Key
from . import wiring
from .gemm import GemmSpec, gemm_refusal
from .gemm_wiring import Plan, Product

LEAST = 256  # of K: below it a step of lanes is mostly padding


def lanes_refusal(spec: GemmSpec) -> str | None:
    """None, or why the product is not one row with weights whose K lies together."""
    if spec.m * spec.batch != 1:
        return "more than one row"
    if spec.w.rows != 1 or spec.x.columns != 1 or spec.k < LEAST:
        return f"x and weights that lie together along K of {LEAST} or more are required"
    return gemm_refusal(spec)


def lanes_configs(n: int, k: int, size: int, cores: int) -> list[dict[str, Any]]:
    """Configurations of a product of one row, best guess first: columns and steps of K of a program, all of a step asked for at once.

    An H200, 16-bit: 1x5120x5120 17.7 us (tiles 19.4), 1x3072x768 3.0 (4.2), 1x4096x14336 30.7 (30.9), 1x4096x4096 as tiles.
    """
    many = ((8, 2048, True), (8, 2048, False)) if n >= 16 * cores else ((2, 4096, False), (4, 2048, False))  # fmt: skip
    found = []
    for columns, step, ahead in many:
        step = min(step * 2 // size, 1 << (k - 1).bit_length())
        config = {"BLOCK_M": 1, "BLOCK_N": columns, "BLOCK_K": step, "GROUP_M": 8, "SPLIT": 1}
        config |= {"num_warps": 4, "num_stages": 1}
        found.append(config | ({"FETCH": 1, "STREAM": False} if ahead else {}))
    return found


@dataclass(frozen=True)
class OneRow(Product):
    """A product of one row by lanes."""

    def refusal(self) -> str | None:
        """None, or why it is not one row."""
        return lanes_refusal(self.spec)

    def configs(self) -> list[dict[str, Any]]:
        """Configurations, best guess first."""
        size = DTYPES[self.spec.x.dtype].itemsize
        return lanes_configs(self.spec.n, self.spec.k, size, wiring.cores())


def one_row(describe: Callable[[Key], Plan | str]) -> Callable[[Key], Plan | str]:
    """What `describe` says of a key, with its product as one of one row."""

    def found(key: Key) -> Plan | str:
        plan = describe(key)
        if isinstance(plan, str):
            return plan
        products = [p for p in plan.products if isinstance(p, Product)]
        if len(products) != 1 or len(plan.products) != 1:
            return "more than one launch"
        about = {f.name: getattr(products[0], f.name) for f in fields(Product)}
        return replace(plan, products=(OneRow(**about),))

    return found
