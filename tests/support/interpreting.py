"""Triton's interpreter without what it does in vain: most tests of kernels take half as long, and compute the same.

Fused multiply-adds of float32 round once, as GPUs' do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from triton import language as tl
from triton.runtime import interpreter


def patched_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The interpreter puts its functions into `triton.language` for a launch, and looks through the whole language again at every
    call of a function that the kernel calls. There is nothing to be found then."""

    @functools.wraps(plain)
    def patch(fn: Callable[..., Any]) -> Any:
        seen = [m for m in fn.__globals__.values() if m is tl or m is tl.core]
        first = (tl.tensor.__add__, *(m.load for m in seen))
        if not seen or any(tl.core.is_builtin(f) for f in first):
            return plain(fn)
        return interpreter._LangPatchScope()

    return patch


def looked_up(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The numpy dtype of a Triton type, for which the interpreter makes a table of all of them at every look."""
    known: dict[str, Any] = {}

    @functools.wraps(plain)
    def found(type: Any) -> Any:
        element = type.element_ty if isinstance(type, tl.block_type) else type
        if element.name not in known:
            known[element.name] = plain(element)
        return known[element.name]

    return found


def folded(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Reductions by a function of ours as a tree of whole halves, as GPUs do them; the interpreter combines number by number."""

    @functools.wraps(plain)
    def fold(self: Any, input: tuple[Any, ...]) -> Any:
        if len(input) != 1 or self.axis is None or self.keep_dims:
            return plain(self, input)
        data, dtype = input[0].handle.data, input[0].dtype
        while data.shape[self.axis] > 1:
            halves = np.split(data, 2, self.axis)  # lengths are powers of two
            made = self.combine_fn.fn(*(self.to_tensor(h, dtype) for h in halves))
            data = made.handle.data
        return [self.to_tensor(data.squeeze(self.axis), dtype)]

    return fold


def rounded_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A multiply-add of float32 whose product is exact; the interpreter rounds that, too."""

    @functools.wraps(plain)
    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        if not all(each.data.dtype == np.float32 for each in (x, y, z)):
            return plain(self, x, y, z)
        exact = x.data.astype(np.float64) * y.data + z.data
        return interpreter.TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    return fused


def shaped_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """tensor.__init__, which wraps every size anew, with one shape for all tensors of the same."""
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @functools.wraps(plain)
    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        found = shapes.get(sizes)
        if found is None:
            plain(self, handle, type)
            shapes[sizes] = self.shape, self.numel
            return
        self.shape, self.numel = found
        self.handle, self.type, self.dtype = handle, type, type.scalar

    return init


def typed_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """block_type.__init__, which checks and prints every shape anew, with what it found for that shape before."""
    known: dict[tuple[str, tuple[int, ...]], tuple[Any, ...]] = {}

    @functools.wraps(plain)
    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(n, "value", n) for n in shape)
        found = known.get((element_ty.name, sizes))
        if found is None:
            plain(self, element_ty, shape)
            known[element_ty.name, sizes] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = found

    return init


def as_they_are(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Two blocks of one shape need no broadcasting, which the interpreter finds out size by size."""

    @functools.wraps(plain)
    def broadcast(lhs: Any, rhs: Any) -> Any:
        if lhs.shape is rhs.shape:
            return lhs, rhs
        return plain(lhs, rhs)

    return broadcast


def alike(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Two tensors of one type are promoted to none, which the interpreter finds out from Triton's rules for all types."""

    @functools.wraps(plain)
    def checked(lhs: Any, rhs: Any, *rules: Any, **named: Any) -> Any:
        both = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor) and lhs.dtype is rhs.dtype
        usual = (
            len(rules) < 4 and not named
        )  # the fourth is about quotients, whose halves are promoted
        if both and usual and not lhs.dtype.is_ptr():
            return interpreter.interpreter_semantic.broadcast_impl_value(lhs, rhs)
        return plain(lhs, rhs, *rules, **named)

    return checked


def called_at_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the language as it is called in a kernel, without the two that wrap it."""

    @functools.wraps(plain)
    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", None)
        if inner is None:
            plain(obj, name, member, builder, scope)
            return

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, called)

    return patch


def known() -> bool:
    """Whether this Triton has what is replaced here, which is nobody's interface."""
    names = (
        "_patch_attr",
        "_patch_lang",
        "_get_np_dtype",
        "_LangPatchScope",
        "interpreter_builder",
        "TensorHandle",
        "interpreter_semantic",
    )
    inner = (
        ("ReduceOps", "generic_reduce"),
        ("InterpreterBuilder", "create_fma"),
        ("interpreter_semantic", "binary_op_type_checking_impl"),
        ("interpreter_semantic", "broadcast_impl_value"),
    )
    return all(hasattr(interpreter, name) for name in names) and all(
        hasattr(getattr(interpreter, owner, None), name) for owner, name in inner
    )


def quicken() -> None:
    """Of this process, once; another Triton is left as it comes."""
    if not known():
        return
    interpreter._patch_lang = patched_once(interpreter._patch_lang)
    interpreter._get_np_dtype = looked_up(interpreter._get_np_dtype)
    builder = interpreter.InterpreterBuilder
    builder.create_fma = rounded_once(builder.create_fma)
    interpreter.ReduceOps.generic_reduce = folded(interpreter.ReduceOps.generic_reduce)
    semantic: Any = interpreter.interpreter_semantic
    interpreter._patch_attr = called_at_once(interpreter._patch_attr)
    semantic.binary_op_type_checking_impl = alike(semantic.binary_op_type_checking_impl)
    semantic.broadcast_impl_value = as_they_are(semantic.broadcast_impl_value)
    tensor, block_type = (vars(tl.core)[name] for name in ("tensor", "block_type"))
    tensor.__init__ = shaped_once(tensor.__init__)
    block_type.__init__ = typed_once(block_type.__init__)
    options = interpreter.interpreter_builder.options
    if not options.debug:  # sums and products of integers are computed twice to see an overflow, which is not said then
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
