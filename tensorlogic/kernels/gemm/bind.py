"""From the plan of an op to its launcher, which allocates the outputs and starts the kernels of the plan's products."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, cast

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...core.op import Op
from ...system.compile_pool import CompileFailure
from .. import register
from ..triton_runtime import launch_plan, scratch
from . import tiled
from .cublaslt import lt_arguments, lt_configs, lt_launcher, lt_refusal
from .hopper import specialised_configs, specialised_refusal
from .spec import GemmSpec, Operand

Start = Callable[..., bool]
CHAINED = 16  # rows of a tile from which they are not


@dataclass(frozen=True)
class Product:
    """One launch of the family: which product, what is passed (kernel argument -> expression over the op's parameters and
    earlier outputs), what it allocates (kernel argument -> name, shape and dtype), and whose kernel: "triton" or "cublaslt"."""

    spec: GemmSpec
    given: Mapping[str, str]
    made: Mapping[str, tuple[str, tuple[int, ...], str]]
    engine: str = "triton"
    # bytes that all it takes is aligned to, where known, whatever the key's other tensors are
    least: int = 0

    def aligned(self, align: int) -> Product:
        """The same for tensors of the caller's that share this alignment in bytes."""
        return replace(self, spec=replace(self.spec, align=max(align, self.least)))

    @property
    def library(self) -> bool:
        """Whether the kernel is cuBLASLt's."""
        return self.engine == "cublaslt"

    def refusal(self) -> str | None:
        """None, or why the engine cannot serve it."""
        return (lt_refusal if self.library else tiled.gemm_refusal)(self.spec)

    def configs(self) -> list[dict[str, Any]]:
        """Configurations, best guess first."""
        if self.library:
            return lt_configs(self.spec)
        specialised = (
            specialised_configs(self.spec, register.cores()) if register.bulk_copies() else []
        )
        return [*specialised, *self._tiled(tiled.MOST_CONFIGS - len(specialised) // 2)]

    def _few_columns(self) -> bool:
        spec = self.spec
        return spec.x.dtype == "f32" and spec.n <= tiled.FEW_COLUMNS and spec.precision == "ieee"

    def _tiled(self, most: int = tiled.MOST_CONFIGS) -> list[dict[str, Any]]:
        spec, size = self.spec, DTYPES[self.spec.x.dtype].itemsize
        if self._few_columns():
            return tiled.few_columns(spec.m * spec.batch, spec.n, spec.k, register.cores())
        return tiled.gemm_configs(spec.m * spec.batch, spec.n, spec.k, size, register.cores(), most)

    def _fitting(self, config: Config) -> Config:
        """`config`, which may come from a neighbour; the engine's best guess where it is one of another launch, the best plain tiles
        where it needs bulk copies that cannot be had here, or adds K in one chain for few columns of float32."""
        if self.library:
            known = self.configs()
            return config if dict(config) in known else known[0]
        if not {"BLOCK_M", "SPLIT"} <= config.keys():
            return self._tiled()[0]
        chained = self._few_columns() and config["BLOCK_M"] >= CHAINED
        unable = "CONSUMERS" in config and not (
            register.bulk_copies() and specialised_refusal(self.spec) is None
        )
        return self._tiled()[0] if chained or unable else config

    def arguments(self, config: Config) -> tuple[str, ...]:
        """Expressions of what the launcher takes, in order."""
        wanted = (
            lt_arguments(self.spec)
            if self.library
            else tiled.gemm_arguments(self.spec, self._fitting(config))
        )
        names = {
            **self.given,
            **{a: made[0] for a, made in self.made.items()},
            "space": "space",
            "counter": "counter",
        }
        return tuple(names[a] for a in wanted)

    def workspace(self, config: Config) -> tuple[int, int]:
        """Elements of float32 scratch and of counters that are zero between launches."""
        if self.library:
            return 0, 0
        return tiled.gemm_workspace(self.spec, self._fitting(config))

    def start(self, config: Config, device: torch.device) -> Start:
        """The launcher over `arguments`."""
        if self.library:
            made = lt_launcher(self.spec, self._fitting(config), device)
            return launch_plan.step(made)
        return gemm_launcher(self.spec, self._fitting(config), device)


@dataclass(frozen=True)
class Kernel:
    """Another launch among an op's products: the expressions it takes, what it allocates (by name), its configurations,
    and how it is built for one of them, a device and an alignment. A configuration that is none of these, as a neighbour's may
    be, gives way to the first."""

    given: tuple[str, ...]
    made: Mapping[str, tuple[str, tuple[int, ...], str]]
    choices: tuple[dict[str, Any], ...]
    build: Callable[[dict[str, Any], torch.device, int], Start]
    space: Callable[[dict[str, Any]], tuple[int, int]] = lambda config: (0, 0)
    align: int = 16

    def aligned(self, align: int) -> Kernel:
        """The same for pointers that share this alignment in bytes."""
        return replace(self, align=align)

    def refusal(self) -> str | None:
        """Whatever its builder was made for, it serves."""
        return None

    def configs(self) -> list[dict[str, Any]]:
        """Configurations, best guess first."""
        return list(self.choices)

    def _fitting(self, config: Config) -> dict[str, Any]:
        """`config`, if it is among the choices; else the first of them."""
        return dict(config if dict(config) in self.choices else self.choices[0])

    def arguments(self, config: Config) -> tuple[str, ...]:
        """Expressions of what the launcher takes, in order."""
        return self.given

    def workspace(self, config: Config) -> tuple[int, int]:
        """Elements of float32 scratch and of counters that are zero between launches."""
        return self.space(self._fitting(config))

    def start(self, config: Config, device: torch.device) -> Start:
        """The launcher over `arguments`."""
        return self.build(self._fitting(config), device, self.align)


@dataclass(frozen=True)
class Plan:
    """The launches that make up an op, in order, and the expressions of its outputs."""

    products: tuple[Product | Kernel, ...]
    returns: tuple[str, ...]


def matrix(spec: TensorSpec) -> Operand | None:
    """A tensor [..., rows, columns] as one matrix of prod(...) * rows rows; None when its rows are not evenly spaced."""
    if not spec.shape:
        return None
    dims = [(n, s) for n, s in zip(spec.shape[:-1], spec.stride[:-1], strict=True) if n != 1]
    for (_, outer), (n, inner) in itertools.pairwise(dims):
        if outer != n * inner:
            return None
    return Operand(spec.dtype, dims[-1][1] if dims else spec.shape[-1], spec.stride[-1])


def gemm_launcher(spec: GemmSpec, config: Config, device: torch.device) -> Start:
    """A callable that writes y (and z, x_out, row_sum, ...), taking what `gemm_arguments` names.

    The full order, of which only what `spec` has is passed, positionally: x, w, saved, seed,
    row_mean, row_rstd, gamma, beta, bias, mean, var, scale, shift, residual, y, z, x_out, row_sum,
    space, counter, then the numbers p, eps, seed_value, offset_value. Nothing is allocated.
    Returns False, launching nothing, when a pointer is less aligned than `spec.align` says. Raises
    CompileFailure when the configuration does not compile or does not fit the device.

        f16 = lambda rows, columns: Operand("f16", rows, columns)
        spec = GemmSpec(m, n, k, f16(k, 1), f16(1, k), f16(n, 1), bias="f16", activation="relu")
        run = gemm_launcher(spec, gemm_configs(m, n, k, 2)[0], device)
        run(x, weight, bias, y)
    """
    from ..triton_runtime.launch import interpreted, prepare

    kernel = _kernel(config)
    upcast = spec.x.dtype == "bf16" and interpreted(kernel)
    return prepare(kernel, device=device, **tiled.described(spec, config, upcast))


def gemm_jobs(spec: GemmSpec, config: Config, sm: int) -> tuple[Any, ...]:
    """The compile work behind `gemm_launcher`, for compute capability `sm` (90: Hopper)."""
    from ..triton_runtime.launch import compile_job

    return (compile_job(_kernel(config), sm=sm, **tiled.described(spec, config, upcast=False)),)


def _kernel(config: Config) -> Any:
    """The kernel that a configuration is for."""
    if "CONSUMERS" in config:
        from .hopper_kernel import gemm_specialised

        return gemm_specialised
    from .tiled_kernel import gemm_tiled

    return gemm_tiled


def launcher(op: Op, plan: Plan, config: Config, device: torch.device) -> Launcher:
    """Allocate the outputs and workspaces, start the kernels, return the outputs: one generated frame."""
    configs = config["products"]  # one of each launch
    if len(configs) != len(plan.products):
        raise CompileFailure(f"{len(configs)} configurations for {len(plan.products)} launches")
    scope: dict[str, Any] = {
        "empty": register.empty(device),
        "counters": scratch.counters,
        "device": device,
        "f32": torch.float32,
    }
    body = []
    for i, (step, chosen) in enumerate(zip(plan.products, configs, strict=True)):
        scope[f"start{i}"] = step.start(chosen, device)
        space, count = step.workspace(chosen)
        for name, shape, dtype in step.made.values():
            scope |= {
                f"{name}_shape": shape,
                f"{name}_stride": register.contiguous(shape),
                f"{name}_dtype": DTYPES[dtype],
            }
            body.append(f"{name} = empty({name}_shape, {name}_stride, {name}_dtype)")
        if space:
            body.append(f"space = empty(({space},), (1,), f32)")
        if count:
            body.append(f"counter = counters(device, {count})")
        body += [f"if not start{i}({', '.join(step.arguments(chosen))}):", "    return None"]
    body.append(f"return ({', '.join(plan.returns)},)")
    source = f"def launch({', '.join(p.name for p in op.dynamic)}):\n" + "".join(
        f"    {line}\n" for line in body
    )
    exec(compile(source, f"<tensorlogic {op.name} gemm>", "exec"), scope)
    return cast(Launcher, scope["launch"])


def configurations(plan: Plan) -> list[dict[str, Any]]:
    """The i-th best guess of every launch together; one with fewer guesses repeats its best."""
    lists = [p.configs() for p in plan.products]
    return [
        {"products": [c[i] if i < len(c) else c[0] for c in lists]}
        for i in range(max(map(len, lists)))
    ]


_VECTORS = ("bias", "mean", "var", "scale", "shift", "gamma", "beta")


def strided(key: Key, given: Any) -> str | None:
    """Why a vector that a product is given cannot be read as one that lies together, or None."""
    for role in _VECTORS if isinstance(given, Mapping) else ():
        name = given.get(role)
        t = key.spec(name) if name in key.names else None
        if name is not None and t is not None and prod(t.shape) > 1 and t.stride[-1] != 1:
            return f"{name} is strided"
    return None


def product_of(x: TensorSpec, weight: TensorSpec) -> tuple[int, int, int, Operand, Operand] | str:
    """(M, N, K, x, w) of x [..., K] with weight [N, K], or why it is no plain product."""
    rows = matrix(x)
    if rows is None:
        return "x's rows are not evenly spaced"
    m, (n, k) = prod(x.shape[:-1]), weight.shape
    if 0 in (m, n, k):
        return "empty"
    return m, n, k, rows, Operand(weight.dtype, weight.stride[1], weight.stride[0])
