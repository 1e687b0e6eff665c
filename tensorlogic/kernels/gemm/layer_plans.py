"""Plans of layers around one product, y = x · weightᵀ + bias, and of their gradients.

What precedes the product lies inside its tiles (`layer` with a prologue) or is a pass of its own (`after`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

import torch

from ...core.key import Key, TensorSpec
from .. import register
from . import bind
from .bind import Kernel, Plan, Product, Start
from .spec import GemmSpec, Operand

# configurations of an element-wise pass that are tried beside the products' own
PASSES = 4
# multiply-adds up to which every tile may repeat what precedes or follows its elements
FUSED = 2**24


NOTHING: Mapping[str, str] = MappingProxyType({})


def dtype_of(t: TensorSpec | None) -> str | None:
    """The dtype of a tensor that is there."""
    return None if t is None else t.dtype


def asked(steps: Sequence[Product | Kernel], names: Sequence[str], needs: str) -> Plan | str:
    """The plan of a backward pass that returns, of `names`, those that are needed."""
    wanted = zip(names, needs, strict=True)
    returns = tuple(name if need == "1" else "None" for name, need in wanted)
    return Plan(tuple(steps), returns) if steps else "nothing to compute"


# forward -------------------------------------------------------------------------------------------------------------


def layer(
    key: Key,
    engine: str,
    given: Mapping[str, str] = NOTHING,
    rows: Operand | None = None,
    **about: Any,
) -> Plan | str:
    """y = x · weightᵀ + bias as one product, with what `about` adds to its GemmSpec; `given` adds to what it is passed, and may name
    another x, which lies as `rows`."""
    x, weight, bias = (key.spec(name) for name in ("x", "weight", "bias"))
    assert x is not None and weight is not None
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    (m, n, k, lies, w), shape = found, (*x.shape[:-1], weight.shape[0])
    y = Operand(x.dtype, n, 1)
    spec = GemmSpec(m, n, k, rows or lies, w, y, bias=dtype_of(bias), **about)
    made = {name: (name, shape, x.dtype) for name in ("y", "z")[: 2 if spec.z else 1]}
    given = {"x": "x", "w": "weight", "bias": "bias", **given}
    return Plan((Product(spec, given, made, engine),), tuple(made))


def after(key: Key, engine: str, first: Callable[[], Kernel], name: str) -> Plan | str:
    """The pass `first` over contiguous x, which makes `name`, then y = name · weightᵀ + bias."""
    x, weight = key.spec("x"), key.spec("weight")
    assert x is not None and weight is not None
    rows = flat(x, "x")
    if isinstance(rows, str) or 0 in weight.shape:
        return rows if isinstance(rows, str) else "weight is empty"
    found = layer(key, engine, {"x": name}, rows)
    if isinstance(found, str):
        return found
    return replace(found, products=(first(), *found.products))


def small(key: Key, found: Plan | str, what: str, few_rows: int = 0) -> Plan | str:
    """`found` where the product is small or has few rows; beyond that `what` is cheaper as a pass of its own."""
    first, weight = key.tensors[0], key.spec("weight")
    assert first is not None and weight is not None
    m = prod(first.shape[:-1])
    if isinstance(found, Plan) and m > few_rows and m * prod(weight.shape) > FUSED:
        return f"at this size the {what} is cheaper as a pass of its own"
    return found


# backward ------------------------------------------------------------------------------------------------------------


def tiled_gradients(
    key: Key,
    outer: Mapping[str, Any],
    prologue: Mapping[str, Any],
    given: Mapping[str, str] = NOTHING,
) -> Plan | str:
    """dx = outer(dy · weight) in the epilogue, dweightᵀ = prologue(x)ᵀ · dy in the prologue, dbias by a pass."""
    dy, x, weight = (key.spec(name) for name in ("dy", "x", "weight"))
    assert dy is not None and x is not None and weight is not None
    needs = key.flag("needs")
    if 0 in (*dy.shape, *weight.shape):
        return "empty"
    rows, other = bind.matrix(dy), bind.matrix(x)
    if rows is None or other is None:
        return "rows of dy or x are not evenly spaced"
    m, (n, k), db = prod(dy.shape[:-1]), weight.shape, "db"
    steps = list[Product | Kernel]()
    if needs[0] == "1":
        added: Any = {"residual": other} if outer["outer"] == "gradient" else {}
        dx = input_gradient("triton", "dy", rows, weight, m, x.shape, **outer, **added)
        steps.append(replace(dx, given={**dx.given, **given}))
    if needs[1] == "1":
        turned, dw = Operand(dy.dtype, other.columns, other.rows), Operand(dy.dtype, 1, k)
        spec = GemmSpec(k, n, m, turned, rows, dw, transposed=True, **prologue)
        made = {"y": ("dw", weight.shape, dy.dtype)}
        steps.append(Product(spec, {"x": "x", "w": "dy", **given}, made))
    if needs[2] == "1":
        step, db = bias_gradient(dy, n)
        steps += step
    return asked(steps, ("dx", "dw", db), needs)


def gradients_around(
    key: Key, engine: str, passes: Callable[[], Sequence[Kernel]], dx: str, x: str, **epilogue: Any
) -> Plan | str:
    """dx = dy · weight under the name `dx`, the passes, then dweight = dyᵀ · `x` and dbias, as far as needed; of contiguous dy and x."""
    dy, read, weight = (key.spec(name) for name in ("dy", "x", "weight"))
    assert dy is not None and read is not None and weight is not None
    needs = key.flag("needs")
    found = matrices(("dy", dy), ("x", read), ("weight", weight))
    if isinstance(found, str):
        return found
    if not (register.is_contiguous(read) and register.is_contiguous(dy)):
        return "x or dy is not contiguous"
    rows, m, (n, k), steps = found[0], prod(dy.shape[:-1]), weight.shape, list[Product | Kernel]()
    if epilogue:
        epilogue["residual"] = found[1]
    if needs[0] == "1":
        steps.append(input_gradient(engine, "dy", rows, weight, m, read.shape, dx, **epilogue))
    steps += passes()
    if needs[1] == "1":
        other = Operand(dy.dtype, k, 1)
        steps.append(weight_gradient(engine, "dy", rows, x, other, m, n, k))
    if needs[2] == "1":
        steps.append(column_sums("dy", dy.dtype, m, n))
    return asked(steps, ("dx", "dw", "db"), needs)


def gradients_after(
    key: Key,
    engine: str,
    passes: Sequence[Kernel],
    dz: str,
    rows: Operand,
    other: Operand,
    names: Sequence[str],
) -> Plan | str:
    """The passes, then dx = dz · weight and dweight = dzᵀ · x as far as needed; `rows` and `other` are dz and x as matrices."""
    dy, x, weight = (key.spec(name) for name in ("dy", "x", "weight"))
    assert dy is not None and x is not None and weight is not None
    (m, (n, k)), needs = (prod(dy.shape[:-1]), weight.shape), key.flag("needs")
    steps = list[Product | Kernel](passes)
    if needs[0] == "1":
        steps.append(input_gradient(engine, dz, rows, weight, m, x.shape))
    if needs[1] == "1":
        steps.append(weight_gradient(engine, dz, rows, "x", other, m, n, k))
    return asked(steps, names, needs)


def input_gradient(
    engine: str,
    dy: str,
    rows: Operand,
    weight: TensorSpec,
    m: int,
    shape: tuple[int, ...],
    name: str = "dx",
    **more: Any,
) -> Product:
    """dx [m, K] = dy [m, N] · weight [N, K]."""
    (n, k), dtype = weight.shape, rows.dtype
    w = Operand(weight.dtype, *weight.stride)
    spec = GemmSpec(m, k, n, rows, w, Operand(dtype, k, 1), **more)
    given = {"x": dy, "w": "weight", "residual": "x", "saved": "kept"}
    return Product(spec, given, {"y": (name, shape, dtype)}, engine)


def weight_gradient(
    engine: str, dy: str, rows: Operand, x: str, other: Operand, m: int, n: int, k: int, **more: Any
) -> Product:
    """dw [N, K] = dy [m, N]ᵀ · x [m, K]."""
    dtype = rows.dtype
    turned = Operand(dtype, rows.columns, rows.rows)
    spec = GemmSpec(n, k, m, turned, other, Operand(dtype, k, 1), **more)
    return Product(spec, {"x": dy, "w": x, "saved": "kept"}, {"y": ("dw", (n, k), dtype)}, engine)


# passes --------------------------------------------------------------------------------------------------------------


def pointwise(
    kind: str, dtype: str, given: tuple[str, ...], names: tuple[str, ...], shape: tuple[int, ...]
) -> Kernel:
    """The element-wise `kind` of contiguous tensors of one shape, into `names`."""
    from ..elementwise import elementwise

    dtypes, modes = [dtype] * (len(given) + len(names)), ("full",) * len(given)

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return elementwise.elementwise_launcher(
            kind, dtypes, 1, prod(shape), modes, config, device, align
        )

    configs = elementwise.elementwise_configs(dtypes, 1, prod(shape), modes)
    made = {name: (name, shape, dtype) for name in names}
    return Kernel((*given, *names), made, tuple(configs[:PASSES]), build)


# the name of a kernel's argument in the plan, and its dtype; None: absent
Role = tuple[str, str | None]


def roles(names: Mapping[str, str] = NOTHING, **given: TensorSpec | str | None) -> dict[str, Role]:
    """The arguments of a kernel, each a tensor or a dtype; in the plan they go by the same names or those in `names`."""
    return {
        role: (names.get(role, role), t.dtype if isinstance(t, TensorSpec) else t)
        for role, t in given.items()
    }


def pass_over(
    launch: Callable[..., Start],
    given: Mapping[str, Role],
    made: Mapping[str, tuple[int, ...]],
    choices: tuple[dict[str, Any], ...],
    numbers: Sequence[str] = (),
    space: Callable[[dict[str, Any]], tuple[int, int]] | None = None,
) -> Kernel:
    """A pass by `launch(dtypes, config, device, align)` over tensors in their `roles`, of which it makes some of a shape; then
    scratch where it needs `space`, then numbers."""
    dtypes = {role: dtype for role, (_, dtype) in given.items()}
    present = {name: dtype for name, dtype in given.values() if dtype is not None}
    names = [name for name, dtype in given.values() if dtype is not None]

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return launch(dtypes, config, device, align)

    outs = {name: (name, shape, present[name]) for name, shape in made.items()}
    if space is None:
        return Kernel((*names, *numbers), outs, choices, build)
    return Kernel((*names, "space", "counter", *numbers), outs, choices, build, space)


def gradient_with_sums(kind: str, dtype: str, shape: tuple[int, ...]) -> Kernel:
    """dz = dy · act'(kept) and db = the sums of its columns, in one pass over contiguous dy and kept."""
    from ..elementwise import column_passes

    m, n = prod(shape[:-1]), shape[-1]

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return column_passes.activation_backward_launcher(kind, m, n, dtype, config, device, align)

    made = {"dz": ("dz", shape, dtype), "db": ("db", (n,), dtype)}
    choices = column_passes.backward_configs(m, n, register.cores())
    space = partial(column_passes.backward_space, n, 1)
    return Kernel(("dy", "kept", "dz", "db", "space", "counter"), made, choices, build, space)


def column_sums(dy: str, dtype: str, m: int, n: int) -> Kernel:
    """db [N] = the sums of the columns of contiguous dy [m, N]."""
    from ..reduce import contiguous

    configs = contiguous.reduce_configs(1, m, n, dtype, register.cores())
    choices = [c for c in configs if c["last"] or c["parts"] == 1]

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return contiguous.reduce_launcher("sum", dtype, dtype, 1, m, n, config, device, align)

    def space(config: dict[str, Any]) -> tuple[int, int]:
        partials, counters = contiguous.reduce_workspace(1, m, n, config)
        return max(partials, 1), max(counters, 1)

    given, made = (dy, "db", "space", "counter"), {"db": ("db", (n,), dtype)}
    return Kernel(given, made, tuple(choices[:PASSES]), build, space)


def bias_gradient(dy: TensorSpec, n: int) -> tuple[list[Kernel], str]:
    """db [N] of dy [..., N], as a launch where that is possible, and the expression for it."""
    if not register.is_contiguous(dy):
        return [], f"dy.reshape(-1, {n}).sum(0)"
    return [column_sums("dy", dy.dtype, prod(dy.shape[:-1]), n)], "db"


# how tensors lie -----------------------------------------------------------------------------------------------------


def flat(t: TensorSpec, name: str) -> Operand | str:
    """A contiguous [..., columns] tensor as a matrix, or why it is none."""
    if not t.shape or 0 in t.shape:
        return f"{name} is empty"
    if not register.is_contiguous(t):
        return f"{name} is not contiguous"
    return Operand(t.dtype, t.shape[-1], 1)


def matrices(*named: tuple[str, TensorSpec]) -> list[Operand] | str:
    """Each tensor as a matrix of evenly spaced rows, or why one is none."""
    found = []
    for name, t in named:
        if not t.shape or 0 in t.shape:
            return f"{name} is empty"
        operand = bind.matrix(t)
        if operand is None:
            return f"{name}'s rows are not evenly spaced"
        found.append(operand)
    return found
