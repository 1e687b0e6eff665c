"""Scores behind a product and their gradients against float64: on a GPU, else in Triton's interpreter; as candidates, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core.op import OPS
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.measure.verification import Checker
from tensorlogic.system.compile_pool import CompileFailure

from ...support.triton import (
    DEVICE,
    close,
    poisoned,
    rand,
)

from tensorlogic.kernels.attention_scores import after_gemm as attention_scores_after_gemm  # isort: skip  (after the interpreter is asked for)
from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities

HELD = {"strategy": "registers", "BLOCK_R": 4, "BLOCK_C": 64, "num_warps": 4}
ONLINE = {"strategy": "online", "TILE": 16, "num_warps": 4}
CONFIGS = [HELD, {**HELD, "BLOCK_R": 1}, ONLINE, {**ONLINE, "TILE": 128}]


def given(mask: str, b: int, h: int, s: int, t: int) -> tuple[Any, torch.Tensor, tuple[Any, ...]]:
    """A mask, what is added for it, and its kind, dtype and strides."""
    if mask == "none":
        return None, torch.zeros(b, h, s, t, dtype=torch.float64), ("none", "f16", (0,) * 4)
    if mask == "bool":
        extra = rand(1, h, s, t) > 0
        extra[:, :, 5] = False  # a row that sees nothing
        added = torch.zeros(extra.shape, dtype=torch.float64).masked_fill(~extra, float("-inf"))
        return extra, added, ("bool", "bool", extra.expand(b, h, s, t).stride())
    extra = rand(b, 1, 1, t) * 2
    extra[0, 0, 0, 3] = float("-inf")
    return extra, extra.double(), ("float", "f32", extra.expand(b, h, s, t).stride())


def causal_mask(s: int, t: int) -> torch.Tensor:
    return torch.ones(s, t, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c['strategy']}-{c.get('BLOCK_R', c.get('TILE'))}")  # fmt: skip
@pytest.mark.parametrize("mask", ["none", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.3, -0.3])
def test_rows(config: dict[str, Any], mask: str, causal: bool, scale: float) -> None:
    for b, h, s, t in ((2, 2, 9, 45),) if scale > 0 else ((1, 2, 11, 16),):
        products = rand(b, h, s, t, dtype="f16") * 4
        extra, added, kind = given(mask, b, h, s, t)
        logits = products.double() * scale + added
        if causal:
            logits = logits.masked_fill(causal_mask(s, t), float("-inf"))
        y = poisoned(b, h, s, t, dtype="f16").copy_(products)
        run = attention_scores_after_gemm.scores_rows_launcher(
            (b, h, s, t), "f16", *kind, causal, config, DEVICE
        )
        assert run(y, y if extra is None else extra, scale)
        close(y, torch.softmax(logits, -1), "f16", 0.1)


@pytest.mark.parametrize("config", CONFIGS[1:3], ids=lambda c: c["strategy"])
@pytest.mark.parametrize("mask", ["none", "bool"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_rows(config: dict[str, Any], mask: str, causal: bool) -> None:
    b, h, s, t = 2, 2, 11, 45
    extra, added, kind = given(mask, b, h, s, t)
    hidden = (added != 0).expand(b, h, s, t)
    if causal:
        hidden = hidden | causal_mask(s, t)
    y = torch.softmax(rand(b, h, s, t).masked_fill(hidden, float("-inf")), -1).half()
    dy = rand(b, h, s, t, dtype="f16", seed=1)
    wide, dwide = y.double().nan_to_num(), dy.double()
    want = wide * (dwide - (wide * dwide).sum(-1, keepdim=True))
    lost = y.isnan().any(-1, keepdim=True) & ~hidden
    ds = poisoned(b, h, s, t, dtype="f16")
    run = attention_scores_after_gemm.scores_rows_backward_launcher(
        (b, h, s, t), "f16", *kind, causal, config, DEVICE
    )
    assert run(y, dy, y if extra is None else extra, ds)
    close(ds, want.masked_fill(hidden, 0.0).masked_fill(lost, float("nan")), "f16", 0.1)


def test_special_rows() -> None:
    """NaN and infinities, and a scale of 0."""
    for config in CONFIGS:
        y = rand(1, 1, 6, 40)
        y[0, 0, 0, 3], y[0, 0, 1, 7], y[0, 0, 2, 39], y[0, 0, 3] = (
            float("nan"), float("inf"), float("-inf"), float("-inf"),
        )  # fmt: skip
        want = torch.softmax(y, -1)
        run = attention_scores_after_gemm.scores_rows_launcher((1, 1, 6, 40), "f32", "none", "f32", (0,) * 4, False, config, DEVICE)  # fmt: skip
        assert run(y, y, 1.0)
        torch.testing.assert_close(y, want, equal_nan=True)
        y = rand(1, 1, 6, 40)
        assert run(y, y, 0.0)
        torch.testing.assert_close(y, torch.full_like(y, 1 / 40))


def test_rows_that_do_not_fit_are_refused() -> None:
    for launcher in (
        attention_scores_after_gemm.scores_rows_launcher,
        attention_scores_after_gemm.scores_rows_backward_launcher,
    ):
        with pytest.raises(CompileFailure, match="65 scores do not fit"):
            launcher((1, 1, 2, 65), "f16", "none", "f16", (0,) * 4, False, HELD, DEVICE)


FORMS: dict[str, tuple[Any, ...]] = {
    "heads": ((2, 3, 9, 8), (2, 3, 21, 8), None, False),
    "matrices": ((9, 8), (21, 8), None, True),
    "one k for all heads": ((2, 3, 9, 8), (2, 1, 21, 8), (2, 1, 1, 21), False),
    "three leading dimensions": ((2, 1, 3, 9, 8), (2, 1, 3, 21, 8), None, True),
    "a matrix by a batch": ((9, 8), (3, 21, 8), (21,), False),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_as_candidates(form: str, hides: bool, turned: bool) -> None:
    first, second, shape, causal = FORMS[form]
    q, k = rand(*first), rand(*second, seed=1)
    if turned:  # rows do not lie together
        q, k = q.mT.contiguous().mT, k.mT.contiguous().mT
    mask = None if shape is None else rand(*shape, seed=2)
    if mask is not None and hides:
        mask = mask > -1
    q.requires_grad_()
    k.requires_grad_()
    products = q.double() @ k.double().mT * 0.3
    if mask is not None:
        products = products.masked_fill(~mask, float("-inf")) if hides else products + mask
    if causal:
        products = products.masked_fill(causal_mask(*products.shape[-2:]), float("-inf"))
    want = torch.softmax(products, -1)
    dy = torch.randn_like(want)
    equal = q.shape[:-2] == k.shape[:-2]
    force = {"attention_scores": "triton.after_product"}
    if equal:
        force["attention_scores_backward"] = "triton.products"
    with tensorlogic.policy(tune="off", force=force):
        y = tensorlogic.attention_scores(q, k, 0.3, mask, causal)
        found = torch.autograd.grad(y, (q, k), dy.float())
    torch.testing.assert_close(y, want.float())
    for ours, ref in zip(found, torch.autograd.grad(want, (q, k), dy), strict=True):
        torch.testing.assert_close(ours, ref, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", ["none", "bool"])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_checked_on_scores_as_forward_makes_them(mask: str, causal: bool) -> None:
    """Of hidden scores, which are 0, nothing is read: inputs drawn at random would refuse what is right."""
    op = OPS["attention_scores_backward"]
    q, k = rand(2, 9, 8, dtype="f16"), rand(2, 21, 8, dtype="f16")
    seen = rand(9, 21) > -1 if mask == "bool" else None
    y = dy = rand(2, 9, 21, dtype="f16")
    key = op.key((dy, q, k, y, 0.3, seen, causal, "110"), "backward")
    checker, candidate = Checker(op, key, DEVICE), op.candidates["triton.products"]
    for config in candidate.configs(key)[::2]:
        assert checker.check(candidate.bind(key, config, DEVICE))
    made = checker.sets[0].tensors(op)["y"]
    hidden = causal_mask(9, 21).to(DEVICE) if causal else torch.zeros(9, 21, dtype=torch.bool, device=DEVICE)  # fmt: skip
    hidden = hidden if seen is None else hidden | ~checker.sets[0].tensors(op)["mask"]
    assert bool((made.masked_select(hidden) == 0).all())
    assert bool((made.masked_select(~hidden) > 0).all())
    seeing = (~hidden).any(-1).expand(2, 9)
    torch.testing.assert_close(made.float().sum(-1), seeing.float(), atol=4e-3, rtol=0)


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for t in (77, 500, 2048, 8192, 20000):
        kinds = (("none", "f16", (0,) * 4), ("bool", "bool", (t, 0, 0, 1)), ("float", "f16", (0, 0, t, 1)))  # fmt: skip
        for kind in kinds:
            for config in attention_scores_after_gemm.scores_rows_configs(t, "f16")[
                :: 2 if t < 8192 else 1
            ]:

                def build(kind: Any = kind, config: Any = config, t: int = t) -> object:
                    sizes, causal = (4, 16, t, t), kind[0] == "bool"
                    attention_scores_after_gemm.scores_rows_launcher(
                        sizes, "f16", *kind, causal, config, cuda
                    )
                    if kind[0] != "float":
                        attention_scores_after_gemm.scores_rows_backward_launcher(sizes, "f16", *kind, causal, config, cuda)  # fmt: skip
                    return None

                jobs += launch.collect(build, cuda)
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)
