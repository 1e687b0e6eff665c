"""Attention scores stored straight from registers: right on a Hopper GPU; anywhere, what they refuse, and compiled without spills."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...support.triton import (
    DEVICE,
    HOPPER,
    close,
    poisoned,
    rand,
    scores_inputs,
)

from tensorlogic.core.op import OPS  # isort: skip  (after the interpreter is asked for)
from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.kernels.attention_scores import (
    hopper_register_store as attention_scores_hopper_register_store,
)  # isort: skip

from ...support.compiled import resources  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

SHAPES = (
    (2, 3, 320, 512, 64),
    (1, 2, 64, 128, 128),
    (1, 1, 203, 256, 32),
    (1, 2, 192, 1536, 64),
    (1, 1, 128, 128, 64),
)
OFFERED = [(shape, i) for shape in SHAPES for i in range(len(attention_scores_hopper_register_store.direct_configs(*shape[2:])))]  # fmt: skip


def launcher(q: torch.Tensor, k: torch.Tensor, dtype: str, which: int, device: Any = DEVICE) -> Any:
    (b, h, s, d), t = q.shape, k.shape[2]
    config = attention_scores_hopper_register_store.direct_configs(s, t, d)[which]
    strides = q.stride()[:3], k.stride()[:3]
    return attention_scores_hopper_register_store.direct_launcher(
        (b, h, s, t, d), dtype, *strides, config, device
    )


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(("shape", "which"), OFFERED)
@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_scores(shape: tuple[int, ...], which: int, dtype: str) -> None:
    b, h, s, t, _ = shape
    q, k = scores_inputs(shape, dtype)
    shared = k[:, :1]  # the memory behind every head's
    run = launcher(q, k, dtype, which)
    for late in (1, 60):  # the second: a late maximum, far above the first tile's
        shared[:, :, t // 2 + 7] *= late
        y = poisoned(b, h, s, t, dtype=dtype)
        assert run(q, k, y, 0.3)
        close(y, torch.softmax(q.double() @ k.double().mT * 0.3, -1), dtype, 0.1)
    q[-1, -1, 5, 0] = float("nan")
    assert run(q, k, y, 0.3)
    assert torch.equal(y.isnan().any(-1), q.isnan().any(-1))
    assert torch.equal(y.isnan().all(-1), q.isnan().any(-1))


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "which", range(len(attention_scores_hopper_register_store.direct_configs(128, 512, 64)))
)
def test_what_is_not_finite_reaches_its_rows(which: int) -> None:
    for column in (0, 9, 27, 95, 511):
        q, k = (x.clone() for x in scores_inputs((1, 2, 128, 512, 64), "f16"))
        k[0, 1, column, 3] = float("nan")
        y = poisoned(1, 2, 128, 512, dtype="f16")
        assert launcher(q, k, "f16", which)(q, k, y, 0.3)
        assert not y[:, 0].isnan().any()
        assert y[:, 1].isnan().all()
    q, k = (x.clone() for x in scores_inputs((1, 1, 128, 512, 64), "f16"))
    k[..., 0], q[..., 0] = 100.0, -600.0  # scores near -6e4, all of them
    assert launcher(q, k, "f16", which)(q, k, y[:, :1], 1.0)
    want = torch.softmax(q.double() @ k.double().mT, -1)
    assert (y[:, :1].double() - want).norm() <= 1e-2 * want.norm()  # float32 has 1/256 there


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_a_scale_that_is_not_positive_is_declined() -> None:
    candidate_loading.ready("cuda")
    q, k = rand(1, 2, 64, 64, dtype="f16"), rand(1, 2, 128, 64, dtype="f16")
    candidate = OPS["attention_scores"].candidates["triton.direct"]
    key = OPS["attention_scores"].key([q, k, 1.0, None, False, False], "inference")
    launch = candidate.bind(key, candidate.configs(key)[0], DEVICE)
    assert launch(q, k, 1.0, None) is not None
    assert launch(q, k, -1.0, None) is None
    assert launch(q, k, 0.0, None) is None


def test_what_they_refuse_and_offer() -> None:
    fits: dict[str, Any] = {"s": 64, "t": 512, "d": 64, "dtype": "f16", "align": 16, "strides": (64,) * 6}  # fmt: skip
    assert attention_scores_hopper_register_store.direct_refusal(**fits) is None
    for wrong in ({"dtype": "f32"}, {"align": 8}, {"strides": (64, 0, 100, 64, 64, 64)}):
        assert "16-bit" in str(
            attention_scores_hopper_register_store.direct_refusal(**fits | wrong)
        )
    assert "apart" in str(
        attention_scores_hopper_register_store.direct_refusal(
            **fits | {"strides": (0, 0, 64, 0, 0, 2**24)}
        )
    )
    for wrong in ({"s": 63}, {"t": 576}, {"t": 0}, {"d": 48}):
        assert "multiples of 128" in str(
            attention_scores_hopper_register_store.direct_refusal(**fits | wrong)
        )
    for s, t, d in ((64, 128, 32), (128, 256, 128), (64, 640, 64), (4096, 65536, 128)):
        assert attention_scores_hopper_register_store.direct_configs(s, t, d)


def test_what_is_offered_fits_and_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device: 90)
    cuda, jobs = torch.device("cuda", 0), []
    for s, t, d in ((512, 128, 64), (512, 256, 64), (512, 512, 64), (2048, 2048, 64), (1024, 1024, 128)):  # fmt: skip
        q, k = (torch.empty(4, 16, n, d, device="meta") for n in (s, t))
        for which in range(len(attention_scores_hopper_register_store.direct_configs(s, t, d))):
            jobs += triton_runtime_launch.collect(lambda: launcher(q, k, "f16", which, cuda), cuda)  # noqa: B023  (called at once)
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, triton_runtime_launch.Resources), answer
        assert answer.stack == 0, (job, answer)
        assert answer.shared <= triton_runtime_launch.SHARED_BYTES[90]
