"""optimize: never wrong, whatever the model does and whatever happens to it afterwards; the given model stays as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler import program_search
from tensorlogic.compiler.optimize import OptimizedModule

from ..support.graphs import close, served


class Block(nn.Module):
    """Attention and a feed-forward layer, with skip connections."""

    def __init__(self, d: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.scale = heads, 1.0
        self.ln1, self.qkv, self.out = nn.LayerNorm(d), nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.ln2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.scale * self.out(y.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


def convolutional() -> nn.Module:
    """Convolutions with batch norm whose statistics are not trivial, a skip connection and a head."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.BatchNorm2d(8),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 16, 5),
    )
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -1, 1)
            nn.init.uniform_(module.running_var, 0.5, 2)
            nn.init.uniform_(module.weight, 0.5, 2)
    return model.eval()


IMAGE = (2, 3, 8, 8)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_same_results(pays: None, dtype: torch.dtype) -> None:
    for model, shape in ((Block().eval(), (2, 7, 16)), (convolutional(), IMAGE)):
        model, x = model.to(dtype), torch.randn(shape).to(dtype)
        before = copy.deepcopy(model.state_dict())
        fast = tensorlogic.optimize(model, (x,))
        assert fast.report.outcome == "rewritten", fast.report.reason
        assert served(fast, x)
        y = torch.randn(shape).to(dtype)
        torch.testing.assert_close(
            fast(y),
            model(y),
            rtol=0.05 if dtype != torch.float32 else 1e-4,
            atol=0.05 if dtype != torch.float32 else 1e-4,
        )
        assert fast(y).stride() == model(y).stride()
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name])


@torch.no_grad()
def test_original_comes_back_where_nothing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_search, "MUST_GAIN", 0.0)
    model = Block().eval()
    fast = tensorlogic.optimize(model, (torch.randn(1, 3, 16),))
    assert fast is model
    assert "nothing pays" in fast.report.reason
    assert "nothing pays" in str(fast.report)
    assert "<table>" in fast.report._repr_html_()


@torch.no_grad()
def test_report_names_opportunities_and_what_came_of_those_taken(pays: None, allowed: None) -> None:
    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(6):
                x = x.double().float()
            return torch.relu(self.inner(x))

    x = torch.randn(4096, 64)  # a pause of the machine during the one watched call is less
    report = tensorlogic.optimize(Casting().eval(), x).report
    assert report.outcome == "rewritten", report.reason
    (conversions,) = [o for o in report.opportunities if "conversion" in o.cause]
    assert conversions.what == "12 conversions"
    assert report.before_us is not None
    assert 0 < conversions.above_us <= report.before_us
    assert "what else could be gained" in str(report)
    assert "12 conversions" in report._repr_html_()
    assert "expected: extra passes over memory" in str(
        report
    )  # the ReLU, which became part of the product
    assert not any("extra passes" in o.cause for o in report.opportunities)


@torch.no_grad()
def test_given_model_is_untouched(pays: None) -> None:
    model = convolutional()
    x = torch.randn(IMAGE)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    keys, seed = list(vars(model)), torch.get_rng_state()
    strides = [p.stride() for p in model.parameters()]
    fast = tensorlogic.optimize(model, (x,))
    assert torch.equal(torch.get_rng_state(), seed)
    assert list(vars(model)) == keys
    assert type(model) is nn.Sequential
    assert [p.stride() for p in model.parameters()] == strides
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    fast.train()
    assert not model.training
    assert not model[1].training


@torch.no_grad()
def test_parameters_and_class_are_the_models_own(pays: None) -> None:
    model = Block().eval()
    fast = tensorlogic.optimize(model, (torch.randn(1, 3, 16),))
    assert isinstance(fast, Block)
    assert isinstance(fast, OptimizedModule)
    assert list(fast.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fast.parameters(), model.parameters(), strict=True))
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert type(other) is Block
        x = torch.randn(1, 3, 16)
        close(other(x), model(x))


@torch.no_grad()
def test_changed_weights_are_never_stale(pays: None) -> None:
    model = convolutional()
    x = torch.randn(IMAGE)
    fast = tensorlogic.optimize(model, (x,))
    fast(x)

    def follows() -> None:
        close(fast(x), copy.deepcopy(fast)(x))
        assert not torch.allclose(fast(x), seen[-1], rtol=1e-3)
        seen.append(fast(x).clone())

    seen = [fast(x).clone()]
    fast[0].weight.mul_(1.5)
    follows()
    fast[1].running_var.mul_(3)
    follows()
    fast.load_state_dict({k: v * 0.9 for k, v in model.state_dict().items()})
    follows()
    fast[3].weight.data = torch.randn_like(fast[3].weight)
    follows()
    fast[7].weight = nn.Parameter(torch.randn_like(fast[7].weight))
    follows()
    fast[7] = nn.Linear(8 * 16, 5)
    follows()
    fast[1].eps = 0.5
    follows()
    fast[0].register_forward_hook(lambda m, a, out: out + 1)
    follows()
    del fast[2]
    follows()


@torch.no_grad()
def test_other_inputs_are_served_by_the_model(pays: None) -> None:
    model = Block().eval()
    x = torch.randn(2, 7, 16)
    fast = tensorlogic.optimize(model, (x,))
    others = [
        torch.randn(3, 7, 16),
        torch.randn(2, 5, 16),
        torch.randn(2, 16, 7).transpose(1, 2),
    ]
    for other in others:
        assert not served(fast, other)
        close(fast(other), model(other))
    mask = torch.zeros(7, 7)
    close(fast(x, mask=mask), model(x, mask=mask))
    with pytest.raises(RuntimeError):
        fast(x.double())
    with pytest.raises(TypeError):
        fast(x, nonsense=1)


def test_modes_of_the_caller(pays: None) -> None:
    model = Block().eval()
    x = torch.randn(2, 7, 16)
    fast = tensorlogic.optimize(model, (x,))
    out = fast(x)  # gradients are recorded here, which the program does not do
    out.sum().backward()
    assert model.qkv.weight.grad is not None
    with torch.inference_mode():
        close(fast(x.clone()), model(x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert fast(x).dtype == model(x).dtype
        assert not served(fast, x)
    fast.train()
    with torch.no_grad():
        assert not served(fast, x)
        close(fast(x), model(x))
    fast.eval()
    with torch.no_grad():
        assert served(fast, x)


def test_hooks_inside_are_respected() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    seen: list[int] = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        fast = tensorlogic.optimize(model, (torch.ones(1, 4),))
        assert "hooks" in fast.report.reason
        assert not seen
        fast(torch.ones(1, 4))
    assert seen


@torch.no_grad()
def test_hooks_of_the_whole_run(pays: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    fast = tensorlogic.optimize(model, (torch.ones(1, 4),))
    fast.register_forward_hook(lambda m, args, out: out + 100)
    assert fast(torch.ones(1, 4)).min() >= 100


@torch.no_grad()
def test_hooks_that_the_whole_has_before_run_once(pays: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    model.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    model.register_forward_hook(lambda m, args, out: out + 100)
    fast = tensorlogic.optimize(model, (torch.ones(1, 4),))
    assert fast.report.outcome != "original", fast.report
    for _ in range(3):
        close(fast(torch.ones(1, 4)), model(torch.ones(1, 4)))


@torch.no_grad()
def test_hooks_of_all_modules_leave_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda m, *_: seen.append(type(m).__name__)
    )
    try:
        fast = tensorlogic.optimize(model, torch.ones(1, 4))
        seen.clear()
        fast(torch.ones(1, 4))
    finally:
        handle.remove()
    assert seen == ["Linear", "ReLU", "Sequential"]


def test_bad_input_names_what_is_wrong() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="model is function"):
        tensorlogic.optimize(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="example_inputs is int"):
        tensorlogic.optimize(model, 3)
    with pytest.raises(ValueError, match="fails on the example inputs"):
        tensorlogic.optimize(model, torch.ones(2, 5))
    with pytest.raises(ValueError, match="fails on the example inputs"):
        tensorlogic.optimize(model, torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="device that it takes"):
        tensorlogic.optimize(model, torch.ones(2, 4, device="meta"))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        tensorlogic.optimize(model, torch.ones(2, 4), training=True)


def test_optimised_twice_and_under_modes(pays: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    x = torch.ones(2, 4)
    with torch.inference_mode():
        fast = tensorlogic.optimize(model, x)
        assert served(fast, x)
        close(fast(x), model(x))
    again = tensorlogic.optimize(fast, x)
    assert again is fast
    assert "already" in again.report.notes[-1]


@torch.no_grad()
def test_a_wrong_replacement_is_undone_and_named(
    pays: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlogic.core import rewrite_rule
    from tensorlogic.ops import attention

    def wrong(*args: Any) -> Tensor:
        return attention.attention(*args) * 1.01

    way = rewrite_rule.Way(
        "example.wrong", lambda args: None, lambda emit, args: emit(wrong, *args)
    )
    composite = rewrite_rule.Composite("attention", wrong, (way,))
    monkeypatch.setattr("tensorlogic.ops.attention.rewrite.ATTENTION", composite)
    model, x = Block().eval(), torch.randn(2, 7, 16)
    fast = tensorlogic.optimize(model, (x,), budget_s=60)
    refused = [r for r in fast.report.refused if r.op == "attention"]
    assert refused
    assert "wrong" in refused[0].refused
    close(fast(x), model(x))
