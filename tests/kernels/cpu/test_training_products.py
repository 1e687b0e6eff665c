"""In half precision no product of a fused op, forward or backward, is left to PyTorch alone on a CPU: it may have no arithmetic for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.native import cpu_library

pytestmark = pytest.mark.skipif(cpu_library.available() is not None, reason="no native library")


def normed(x: Tensor, w: Tensor, b: Tensor | None, training: bool) -> Tensor:
    n = len(w)
    stats = (torch.zeros(n), torch.ones(n), torch.ones(n), torch.zeros(n))  # float32, as AMP has it
    return tensorlogic.linear_batch_norm_relu(x, w, b, *stats, training=training)


# without dropout_linear: eager, which is forced here, keeps a mask where ours keep a seed
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "linear": tensorlogic.linear,
    "linear_residual_relu": lambda x, w, b: tensorlogic.linear_residual_relu(x, w, b, b),
    "gelu_linear": tensorlogic.gelu_linear,
    "batch_norm in training": lambda x, w, b: normed(x, w, b, True),
    "batch_norm without bias": lambda x, w, b: normed(x, w, None, True),
    "batch_norm in evaluation": lambda x, w, b: normed(x, w, b, False),
    "layer_norm_linear": lambda x, w, b: tensorlogic.layer_norm_linear(
        x, x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1]), w, b
    ),
    "matmul": lambda x, w, b: tensorlogic.matmul(x, w.mT),
    "attention_scores": lambda x, w, b: tensorlogic.attention_scores(x, w, 0.1),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_have_a_native_way_in_training(name: str, dtype: torch.dtype) -> None:
    met: dict[str, tuple[Op, Key]] = {}

    def observe(op: Op, key: Key, device: torch.device) -> None:
        met[key.text] = op, key

    leaves = [
        torch.randn(shape).to(dtype).requires_grad_() for shape in ((48, 64), (32, 64), (32,))
    ]
    plain = replace(policy.current(), tune="off", force=EAGER, observer=observe, entries={})
    with policy.use(plain):
        out = CALLS[name](*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out), allow_unused=True)
    assert {key.direction for _, key in met.values()} == {"forward", "backward"}
    for op, key in met.values():
        ours = [c for c in op.candidates.values() if c.id.startswith("cpu.")]
        assert any(c.unfit(key) is None for c in ours), key.text
