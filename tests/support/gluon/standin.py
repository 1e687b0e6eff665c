"""Kernels in Gluon on the CPU: their own source, with tiles as tensors, warp groups as threads, and copies that may be early or late.

Triton's interpreter does not know Gluon. Here a bulk copy spoils where it goes at once and delivers when its barrier is waited for;
a store reads its shared memory when it is waited for, a product its operands; what was never waited for never happens. A reader
that is too early, a writer that reuses memory too early, an address outside of its tensor, and threads that wait for each other
for ever are noticed.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .language import Copies, Language, Mbarrier, converted
from .machine import Matrix, Pointer, Product, Program

ANNOTATIONS = __import__("__future__").annotations.compiler_flag
KERNELS = "tensorlogic.kernels."
HOST = tuple(f"{KERNELS}triton_runtime.{n}" for n in ("launch", "kernel_start", "tma_descriptors"))


class Plain(ast.NodeTransformer):
    """Kernels' source as Python that runs here: no decorators, no assignments in place, `to` and `range` of ours."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = []
        self.generic_visit(node)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        assert isinstance(node.target, ast.Name)
        before = ast.Name(node.target.id, ast.Load())
        value = ast.BinOp(before, node.op, node.value)
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], value), node))

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            own = ast.Name("_converted", ast.Load())
            return ast.copy_location(
                ast.Call(own, [node.func.value, *node.args], node.keywords), node
            )
        return node


@functools.cache
def text_of(module: str) -> str:
    return inspect.getsource(importlib.import_module(module))


@functools.cache
def source(module: str, text: str) -> tuple[list[tuple[bool, Any]], dict[str, list[str]]]:
    """The functions and constants of a module of kernels with this text, and what it takes from others."""
    tree = ast.parse(text)
    tree.body = [n for n in tree.body if not isinstance(n, ast.FunctionDef) or n.decorator_list]
    tree = Plain().visit(tree)
    flags = ANNOTATIONS
    own: list[tuple[bool, Any]] = []
    taken: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.Assign)):
            alone = ast.fix_missing_locations(ast.Module([node], []))
            code = compile(alone, module, "exec", flags=flags, dont_inherit=True)
            own.append((isinstance(node, ast.Assign), code))
        elif isinstance(node, ast.ImportFrom):
            theirs = "." * node.level + (node.module or "")
            theirs = importlib.util.resolve_name(theirs, module.rpartition(".")[0])
            if theirs.startswith(KERNELS) and theirs not in HOST:
                taken.setdefault(theirs, []).extend(alias.name for alias in node.names)
    return own, taken


def namespace(module: str, program: Program, edit: Callable[[str, str], str]) -> dict[str, Any]:
    """What `module` defines, for one program."""
    language, copies = Language(program), Copies(program)
    group = program.group

    def under_way(x: Any, w: Any, acc: Any, use_acc: bool = True, is_async: bool = False) -> Any:
        product = Product(x, w, acc)
        group.products.append(product)
        return product

    def waited(left: int, deps: tuple[Any, ...]) -> Any:
        while len(group.products) > left:
            group.products.popleft().finish()
        done = [d.value if isinstance(d, Product) and d.value is not None else d for d in deps]
        return done[0] if len(done) == 1 else tuple(done)

    def counted(*bounds: Any) -> Any:
        return (torch.tensor(i) for i in range(*(int(b) for b in bounds)))

    scope: dict[str, Any] = {
        "gl": language, "tl": language, "tma": copies, "async_copy": copies, "mbarrier": Mbarrier(program),
        "fence_async_shared": lambda: None, "gdc_wait": lambda: None, "gdc_launch_dependents": lambda: None,
        "warpgroup_mma": under_way, "warpgroup_mma_wait": waited, "mma_v2": lambda x, w, acc: acc + x @ w, "range": counted, "_converted": converted,
    }  # fmt: skip
    own, taken = source(module, edit(module, text_of(module)))
    for theirs, names in taken.items():
        found = namespace(theirs, program, edit)
        scope |= {name: found[name] for name in names if name in found}
    for constant, code in own:
        try:
            exec(code, scope)
        except (AttributeError, NameError, TypeError, KeyError):
            assert constant, code  # a table for the host
    if "activate" in scope:  # pairs of halves are computed by instructions that only a GPU has
        scope["shaped"] = lambda x, kind, into: scope["activate"](x, kind)
        scope["slope"] = lambda dy, saved, kind, into: scope["activation_grad"](dy, saved, kind)
    return scope


def unedited(module: str, text: str) -> str:
    return text


def prepare(
    kernel: Any, *, grid: tuple[int, int, int], pointers: Mapping[str, str], integers: Mapping[str, int],
    floats: Sequence[str] = (), constexprs: Mapping[str, Any], num_warps: int, num_stages: int = 1, device: torch.device,
    align: int = 16, longs: Sequence[str] = (), tiled: Mapping[str, Any] | None = None, registers: int = 0,
    edit: Callable[[str, str], str] = unedited,
) -> Callable[..., bool]:  # fmt: skip
    """As `triton_launch.prepare`: a start that runs the kernel's source here, program after program."""
    module, name = kernel.fn.__module__, kernel.fn.__name__
    parameters = list(kernel.arg_names)
    matrices = dict(tiled or {})

    def start(*args: Any) -> bool:
        tensors, numbers = (
            args[: len(matrices) + len(pointers)],
            args[len(matrices) + len(pointers) :],
        )
        given: dict[str, Any] = dict.fromkeys(parameters)
        for (key, lies), tensor in zip(matrices.items(), tensors, strict=False):
            given[key] = Matrix(tensor, lies)
        for key, tensor in zip(pointers, tensors[len(matrices) :], strict=True):
            given[key] = Pointer.to(tensor)
        given |= {key: torch.tensor(value) for key, value in integers.items()}
        given |= dict(zip((*floats, *longs), numbers, strict=True)) | dict(constexprs)
        if "PDL" in parameters:
            given["PDL"] = True
        for number in range(math.prod(grid)):
            program = Program(number, grid[0], num_warps)
            with program.turn:
                namespace(module, program, edit)[name](**given)
                assert not program.group.stores, "a store that nobody waited for"
        return True

    return start
