"""What products under a policy take beside their operands and their result; a GPU that is full."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.core.op import OPS
from tensorlogic.native import cpu_library


class Made(TorchDispatchMode):
    """Every tensor that operators make: its shape and dtype, by the operator's name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)]
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in given:
            self.found.append((func.name(), tuple(out.shape), out.dtype))
        return out


@pytest.mark.skipif(cpu_library.available() is not None, reason=str(cpu_library.available()))
@pytest.mark.parametrize("mode", ["f32", "f16"])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float16), (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64), (torch.float64, torch.float32)])  # fmt: skip
def test_products_of_any_operands_make_no_converted_copy(
    dtypes: tuple[torch.dtype, torch.dtype], mode: str
) -> None:
    m, k, n = 70, 130, 90
    op = OPS["matmul"].precise
    assert op is not None
    a, b = torch.randn(m, k).to(dtypes[0]), torch.randn(k, n).to(dtypes[1])
    guarded = mode == "f32"  # where a policy has no guard, float64 is looked at for float32's range
    key = op.key((a, b, "none", False), "inference", "adaptive" if guarded else mode)
    launch = op.candidates[f"cpu.{mode}"].bind(key, {}, torch.device("cpu"))
    with Made() as made:
        outs = launch(a, b)
    assert outs is not None
    shapes = [shape for _, shape, _ in made.found]
    results = 1 + (torch.promote_types(*dtypes) != torch.float32)
    assert shapes.count((m, n)) == results
    assert not {(m, k), (k, n)} & set(shapes)
    if guarded or torch.float64 not in dtypes:
        assert len(shapes) == results  # nothing was read but to multiply it


def test_a_gpu_that_is_full_leaves_the_call_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = sys.modules["tensorlogic.device_placement.placement"]
    tried: list[str] = []

    def moved(given: Any, place: torch.device) -> Any:
        tried.append(place.type)
        if place.type == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return given

    trial = module.Trial()
    monkeypatch.setattr(module, "_choose", lambda *_: (torch.device("cuda"), trial))
    monkeypatch.setattr(module, "_moved", moved)
    monkeypatch.setattr(module, "_SAID", set())
    a, b = torch.randn(5, 6), torch.randn(6, 7)
    with tensorlogic.placement("auto"):
        y = tensorlogic.matmul(a, b)
    torch.testing.assert_close(y, a @ b)
    assert tried[0] == "cuda"
    assert tried[-1] == "cpu"
    assert trial.taken["cuda"] == [math.inf]  # it is not asked again soon
    assert "could not run on cuda (OutOfMemoryError); the CPU serves it" in caplog.text
