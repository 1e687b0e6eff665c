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


def known() -> bool:
    """Whether this Triton has what is replaced here, which is nobody's interface."""
    names = (
        "_patch_lang",
        "_get_np_dtype",
        "_LangPatchScope",
        "interpreter_builder",
        "TensorHandle",
    )
    inner = (("ReduceOps", "generic_reduce"), ("InterpreterBuilder", "create_fma"))
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
    options = interpreter.interpreter_builder.options
    if not options.debug:  # sums and products of integers are computed twice to see an overflow, which is not said then
        interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
