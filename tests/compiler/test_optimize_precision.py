"""optimize under a precision policy: every product follows it, convolutions and gradients too, and nothing is silently not held."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.rewrite import precision_pass
from tensorlogic.core import policy as core_policy
from tensorlogic.mixed_precision import adaptive, number_formats


class Mixed(nn.Module):
    """Convolutions of every kind, attention, recurrence, products written out."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.point = nn.Conv2d(8, 8, 1)
        self.depth = nn.Conv2d(8, 8, 3, padding="same", groups=8)
        self.line = nn.Conv1d(8, 16, 3, padding=1)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.heads = nn.MultiheadAttention(16, 2, batch_first=True)
        self.gru = nn.GRU(16, 16, batch_first=True)
        self.w = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.depth(self.point(self.stem(x)))).flatten(2)
        z = self.block(torch.tanh(self.line(y)).mT)
        z = self.heads(z, z, z, need_weights=False)[0] + z @ self.w
        z = torch.einsum("bsd,de->bse", self.gru(z)[0], self.w)
        z = torch.baddbmm(z, torch.softmax(torch.bmm(z, z.mT), -1), z, alpha=0.5)
        out: Tensor = torch.addmm(self.w, z[0, :16].mT @ z[0, :16], self.w, beta=2.0)
        return out


def off(y: Tensor, want: Tensor) -> float:
    return float((y.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("mode", ["f32", "f16", "adaptive"])
def test_every_product_follows(mode: str) -> None:
    model, x = Mixed().eval(), torch.randn(2, 3, 12, 12)
    want = copy.deepcopy(model).double()(x.double()).detach()
    policy = tensorlogic.precision(mode, rtol=1e-2 if mode == "adaptive" else None)
    fast = tensorlogic.optimize(model, x, precision=policy)
    assert fast.report.outcome == "precise"
    with torch.no_grad():
        y = fast(x)
    assert off(y, want) < {"f32": 1e-5, "f16": 2e-2, "adaptive": 0.1}[mode]
    how = {(row.region, row.candidate) for row in fast.report.rows}
    assert {(n, repr(policy)) for n in ("conv1d", "conv2d", "linear", "addmm", "baddbmm")} <= how
    assert {(n, "float64") for n in ("conv2d", "gru", "einsum")} <= how  # of groups
    assert core_policy.current().precision is None


LAYERS = (
    (nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 0), dilation=2), (2, 4, 11, 9)),
    (nn.Conv2d(4, 6, 3, stride=2, groups=2), (2, 4, 11, 9)),
    (nn.Conv2d(4, 6, 1, stride=2), (4, 11, 9)),
    (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, bias=False), (2, 4, 11)),
    (nn.Conv1d(4, 6, 3), (4, 11)),
    (nn.Conv3d(4, 6, 2), (2, 4, 5, 4, 3)),
    (nn.ConvTranspose2d(4, 6, 2), (2, 4, 5, 4)),
)


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_convolutions_of_halves_are_rounded_once(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = copy.deepcopy(layer).half(), torch.randn(shape).half()
    want = copy.deepcopy(model).double()(x.double()).detach()
    with tensorlogic.precision("f32"):  # the policy around the call
        fast = tensorlogic.optimize(model, x)
    with torch.no_grad():
        assert off(fast(x), want) < 3e-4  # one rounding to float16


def test_gradients_follow_too() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 5))
    x = torch.randn(4, 3, 8, 8)
    wide = copy.deepcopy(model).double()
    wide(x.double()).square().sum().backward()
    fast = tensorlogic.optimize(model, x, training=True, precision="f32")
    fast(x).square().sum().backward()
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert off(p.grad, q.grad) < 1e-5


def test_data_are_looked_at_in_every_call() -> None:
    torch.manual_seed(0)
    model = nn.Linear(128, 64, bias=False).eval()
    fast = tensorlogic.optimize(
        model,
        torch.randn(64, 128),
        precision=tensorlogic.precision("adaptive", rtol=1e-2),
    )
    with torch.no_grad():
        model.weight[:, 64:] = model.weight[:, :64]
        easy = torch.randn(64, 128)
        hard = torch.cat((easy[:, :64] * 1e4, -easy[:, :64] * 1e4 + torch.randn(64, 64)), 1)
        for x in (easy, hard, easy):
            want = x.double() @ model.weight.double().t()
            assert ((fast(x) - want).norm(dim=1) / want.norm(dim=1)).max() < 1e-2
    assert adaptive.LAST


def test_what_cannot_be_held_is_said() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ x if float(x.sum()) > 0 else x

    with pytest.raises(ValueError, match=r"not one graph .*precision\('f32'\)"):
        tensorlogic.optimize(Branching(), torch.ones(3, 3), precision="f32")
    with pytest.raises(ValueError, match=r"not one graph .*sizes vary"):
        tensorlogic.optimize(nn.Linear(3, 3), torch.ones(3, 3), dynamic=True, precision="f32")
    fast = tensorlogic.optimize(nn.Linear(3, 3).eval(), torch.ones(3, 3), precision="f32")
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"optimised for precision\('f32'\)"):
        fast(torch.ones(4, 3))
    with pytest.raises(RuntimeError, match=r"training=True, or call it under torch.no_grad"):
        fast(torch.ones(3, 3))
    wrong: Any = 3
    with pytest.raises(TypeError, match="optimize: precision is 3"):
        tensorlogic.optimize(nn.Linear(3, 3), torch.ones(3, 3), precision=wrong)


def test_attention_is_pytorchs() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    mask = torch.rand(5, 7) > 0.5
    mask[2] = False
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for more in ({}, {"is_causal": True}, {"scale": 0.2}):
        mine = precision_pass.attention(q, k, v, enable_gqa=True, **more)  # type: ignore[arg-type]
        torch.testing.assert_close(mine, sdpa(q, k, v, enable_gqa=True, **more))  # type: ignore[arg-type]
    for given in (mask, torch.randn(5, 7)):
        k, v = torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
        torch.testing.assert_close(precision_pass.attention(q, k, v, given), sdpa(q, k, v, given))
    assert number_formats.result_dtype(q, v) == torch.float32
