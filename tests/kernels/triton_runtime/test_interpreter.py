"""Triton's interpreter, quickened for tests (`interpreting.py`), computes what it computes as it comes, and leaves the language as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from ...support.triton import REDUCE, close, rand

from tensorlogic.system import hardware  # isort: skip  (after the interpreter is asked for)
from tensorlogic.kernels.reduce import contiguous  # isort: skip

if not hardware.interpreting():
    pytest.skip("needs Triton's interpreter, and no GPU", allow_module_level=True)

from triton import language as tl
from triton.runtime import interpreter

from ...support.interpreting import known

pytestmark = pytest.mark.skipif(not known(), reason="an interpreter that is left as it comes")

CPU = torch.device("cpu")
COLUMNS = {"strategy": "columns", "parts": 3, "last": True, "BLOCK_R": 4, "BLOCK_C": 8, "num_warps": 4}  # fmt: skip


def reduced(dtype: str, kind: str = "sum") -> torch.Tensor:
    """A reduction whose kernel calls functions of ours, of Triton's, and those others."""
    x = rand(2, 50, 9, dtype=dtype)
    x[0, 7, 2] = float("nan")
    run = contiguous.reduce_launcher(kind, dtype, "f32", 2, 50, 9, COLUMNS, CPU)
    partials, counters = contiguous.reduce_workspace(2, 50, 9, COLUMNS)
    y = torch.full((2, 9), torch.nan)
    assert run(x, y, torch.empty(partials), torch.zeros(counters, dtype=torch.int32))
    close(y, REDUCE[kind](x.double()), "f32")
    return y


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the interpreter has looked through for functions to replace."""
    seen: list[Any] = []
    plain = interpreter._patch_builtin
    monkeypatch.setattr(
        interpreter, "_patch_builtin", lambda pkg, *rest: (seen.append(pkg), plain(pkg, *rest))
    )
    yield seen
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.tensor.__add__)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_results_are_those_of_the_plain_interpreter(
    dtype: str, kind: str, looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick, few = reduced(dtype, kind), len(looks)
    assert few < 20  # the launch's language, and once that of Triton's own functions
    for name in ("_patch_lang", "_get_np_dtype"):
        monkeypatch.setattr(interpreter, name, getattr(interpreter, name).__wrapped__)
    ops = interpreter.ReduceOps
    monkeypatch.setattr(ops, "generic_reduce", ops.generic_reduce.__wrapped__)
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=True)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    assert same(reduced(dtype, kind), quick)
    assert len(looks) > 10 * few


def test_a_launch_that_fails_leaves_the_language_as_it_was(
    looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*given: Any) -> Any:
        raise RuntimeError("no such memory")

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_masked_load", fails)
        with pytest.raises(interpreter.InterpreterError, match="no such memory"):
            reduced("f32")
    assert tl.core.is_builtin(tl.load)
    assert looks
    reduced("f32")
