"""Adapters for third-party packages: unseen without the package, and right around it; nothing of theirs runs unchecked."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tensorlogic
from tensorlogic.core import activations as core_activations
from tensorlogic.core.op import OPS
from tensorlogic.measure.verification import Checker
from tensorlogic.providers import liger, quack
from tensorlogic.providers.adapter import Package
from tests.support import provider_fakes as support_provider_fakes

from ..support.provider_fakes import (
    CPU,
    LABELS,
    half,
    key,
    of_an_adapter,
)
from ..support.provider_fakes import nothing_stays as nothing_stays  # a fixture

ROOT = Path(__file__).parents[2]
PROVIDERS = {"quack": quack, "liger": liger}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for QuACK that is found, and that may run on this machine's device."""
    support_provider_fakes.quack(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(Package, "available", lambda self, device: self.missing())
    quack.register(OPS)


def verdict(op: str, id: str, *args: Any) -> str | None:
    """None when the candidate may serve the key of `args` and passes the check every candidate must pass, else why not."""
    asked, candidate = key(op, *args), OPS[op].candidates[id]
    reason = candidate.unfit(asked)
    if reason is not None:
        return reason
    with torch.no_grad():
        return Checker(OPS[op], asked, CPU).check(candidate.bind(asked, {}, CPU)).reason


@pytest.mark.parametrize("name", PROVIDERS)
def test_without_the_package_nothing_appears_and_nothing_is_imported(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = {"quack": quack.QUACK, "liger": liger.LIGER}[name]

    def absent(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    PROVIDERS[name].register(OPS)
    assert not [id for op in OPS.values() for id in op.candidates if of_an_adapter(id)]
    reason = package.available("cuda")
    assert reason is not None
    assert f"{package.distribution} is not installed" in reason
    assert f"tensorlogic-engine[{package.extra}]" in reason


def test_metadata_without_the_module_counts_as_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support_provider_fakes.install(tmp_path / "site", "torn-kernels", "elsewhere", "1.0", {})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    torn = Package("torn-kernels", "torn_kernels", extra="torn", capability=9)
    assert torn.text == "torn-kernels 1.0"
    assert "torn-kernels is not installed" in str(torn.missing())


def test_they_appear_when_installed_and_are_imported_only_when_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support_provider_fakes.quack(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    quack.register(OPS)
    asked = key("softmax", half(4, 64), 1, False)
    candidate = OPS["softmax"].candidates["quack.softmax"]
    assert candidate.available("cpu") == "quack-kernels runs on CUDA devices"
    assert candidate.supports(asked) is None
    assert candidate.configs(asked)[0] == {}
    assert not candidate.trusted
    assert "quack" not in sys.modules
    candidate.bind(asked, {}, CPU)
    assert "quack.softmax" in sys.modules


def test_the_project_declares_its_adapters_as_third_parties_do() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    for name, module in PROVIDERS.items():
        assert declared["tensorlogic.candidates"][name] == f"{module.__name__}:register"


@pytest.mark.slow
def test_the_door_is_the_entry_point_and_import_costs_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site"
    support_provider_fakes.quack(site)
    support_provider_fakes.install(site, "somebodys-adapters", "somebodys_adapters", "1.0", {})
    points = f"[tensorlogic.candidates]\nquack-again = {quack.__name__}:register\n"
    (site / "somebodys_adapters-1.0.dist-info" / "entry_points.txt").write_text(points)
    code = (
        "import sys, tensorlogic\n"
        "before = 'tensorlogic.providers.quack' in sys.modules\n"
        "found = tensorlogic.candidates('softmax')\n"
        "print(before, found['quack.softmax'], 'quack' in sys.modules, sep=' | ')"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False | quack-kernels runs on CUDA devices | False"


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "missing", lambda self: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    assert quack.QUACK.available("cuda") == "quack-kernels is for sm_90 and newer, this is sm_86"
    assert liger.LIGER.available("cuda") is None


def test_another_version_is_another_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = []
    for version in ("0.6.5", "0.6.6"):
        support_provider_fakes.quack(tmp_path / version, version)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(tmp_path / version))
            quack.register(OPS)
            sources.append(OPS["softmax"].candidates["quack.softmax"].source)
        for op in OPS.values():
            for id in [i for i in op.candidates if of_an_adapter(i)]:
                del op.candidates[id]
    assert sources[0] != sources[1]


LOSSES = [
    (reduction, save, dtype)
    for reduction in ("mean", "sum", "none")
    for save in (False, True)
    for dtype in (torch.float16, torch.float32)
]


@pytest.mark.parametrize(("reduction", "save", "dtype"), LOSSES)
def test_cross_entropy(installed: None, reduction: str, save: bool, dtype: torch.dtype) -> None:
    x, t = torch.randn(2, 9, 64).to(dtype), torch.randint(64, (2, 9))
    args = (x, t, -100, 0.0, reduction, save)
    assert verdict("softmax_cross_entropy", "quack.cross_entropy", *args) is None
    dloss = torch.randn(t.shape if reduction == "none" else ()).to(dtype)
    back = (dloss, x, t, torch.zeros(18), torch.ones(1), -100, 0.0, reduction)
    assert verdict("softmax_cross_entropy_backward", "quack.cross_entropy", *back) is None


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_ignored_rows_and_gradients(installed: None, reduction: str, ignore_index: int) -> None:
    x = torch.randn(12, 32, requires_grad=True)
    t = torch.randint(32, (12,))
    t[::3] = ignore_index
    with tensorlogic.policy(
        force={
            "softmax_cross_entropy": "quack.cross_entropy",
            "softmax_cross_entropy_backward": "quack.cross_entropy",
        }
    ):
        loss = tensorlogic.softmax_cross_entropy(x, t, ignore_index, 0.0, reduction)
        (dx,) = torch.autograd.grad(loss.sum(), x)
    expected = F.cross_entropy(x, t, ignore_index=ignore_index, reduction=reduction)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(dx, torch.autograd.grad(expected.sum(), x)[0])


def test_targets_out_of_range_are_nan_and_read_nothing_astray(installed: None) -> None:
    x, t = torch.randn(4, 16), torch.tensor([1, 99, -7, -100])
    asked = key("softmax_cross_entropy", x, t, -100, 0.0, "none", False)
    candidate = OPS["softmax_cross_entropy"].candidates["quack.cross_entropy"]
    (loss,) = candidate.bind(asked, {}, CPU)(x, t)  # the stand-in raises where a GPU reads astray
    assert torch.isnan(loss).tolist() == [False, True, True, False]
    assert loss[3] == 0.0
    asked = key("softmax_cross_entropy", x, t, -100, 0.0, "mean", False)
    (mean,) = candidate.bind(asked, {}, CPU)(x, torch.full((4,), -100))
    assert torch.isnan(mean)  # as PyTorch: the mean over no rows


def test_softmax(installed: None) -> None:
    assert verdict("softmax", "quack.softmax", half(3, 5, 64), 2, False) is None
    assert verdict("softmax", "quack.softmax", torch.randn(7, 36), 1, True) is None
    assert verdict("softmax_backward", "quack.softmax", half(7, 64), half(7, 64), 1) is None


@pytest.mark.parametrize("beta", [True, False])
def test_layer_norm_linear(installed: None, beta: bool) -> None:
    gamma, shift = half(64), half(64) if beta else None
    args = (half(2, 9, 64), gamma, shift, half(24, 64), half(24), 1e-5, False)
    assert verdict("layer_norm_linear", "quack.layer_norm", *args) is None


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("save", [False, True])
def test_products(installed: None, activation: str, save: bool) -> None:
    x, w, wt = half(2, 16, 64), half(24, 64), half(64, 24).t()
    for args in (
        (x, w, half(24), half(2, 16, 24)),
        (x, wt, half(24), None),
        (x, w, None, half(2, 16, 24)),
        (x, w, None, None),
    ):
        assert verdict("linear", "quack.gemm_act", *args, activation, save) is None
    for b in (half(64, 24), half(24, 64).t()):
        assert verdict("matmul", "quack.gemm_act", x, b, activation, save) is None


def test_chosen_tiles_are_passed_on(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack, "_capability", lambda: 9)
    asked = key("linear", half(16, 64), half(24, 64), None, None, "relu", False)
    candidate = OPS["linear"].candidates["quack.gemm_act"]
    assert len(candidate.configs(asked)) == 4
    for config in candidate.configs(asked):
        assert (
            candidate.bind(asked, config, CPU)(half(16, 64), half(24, 64), None, None) is not None
        )


def less_aligned(t: torch.Tensor) -> torch.Tensor:
    """The same tensor, one element further on in memory."""
    return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)


def test_less_aligned_tensors_are_declined(installed: None) -> None:
    x, t, w = half(4, 64), torch.zeros(4, dtype=torch.int64), half(24, 64)
    lse, one = torch.zeros(4), torch.ones(1)
    for op, id, tensors, flags in (
        ("softmax", "quack.softmax", (x,), (1, False)),
        ("softmax_backward", "quack.softmax", (x, x), (1,)),
        ("softmax_cross_entropy", "quack.cross_entropy", (x, t), (-100, 0.0, "mean", False)),
        ("softmax_cross_entropy_backward", "quack.cross_entropy", (x[0, 0], x, t, lse, one), (-100, 0.0, "mean")),
        ("layer_norm_linear", "quack.layer_norm", (x, x[0], None, w, None), (1e-5, False)),
        ("linear", "quack.gemm_act", (x, w, None, None), ("relu", False)),
    ):  # fmt: skip
        launch = OPS[op].candidates[id].bind(key(op, *tensors, *flags), {}, CPU)
        assert launch(*tensors) is not None
        assert launch(*[less_aligned(a) if a is x else a for a in tensors]) is None, op


def test_activations_go_by_the_package_s_names(installed: None) -> None:
    import quack.gemm_interface as fake

    for ours, theirs in quack.ACTIVATIONS.items():
        asked = key("linear", half(4, 64), half(24, 64), None, None, ours, False)
        OPS["linear"].candidates["quack.gemm_act"].bind(asked, {}, CPU)
        assert fake.ASKED.pop() == theirs
    z = torch.linspace(-3, 3, 100, dtype=torch.float64)
    for ours, theirs in quack.ACTIVATIONS.items():
        torch.testing.assert_close(fake.ACT[theirs](z), core_activations.activate(z, ours))


REFUSED: list[tuple[str, str, tuple[Any, ...], str]] = [
    ("softmax_cross_entropy", "quack.cross_entropy", (half(4, 63), LABELS, -100, 0.0, "mean", False), "multiple of 16 bytes"),
    ("softmax_cross_entropy", "quack.cross_entropy", (half(4, 64), LABELS, -100, 0.1, "mean", False), "no label smoothing"),
    ("softmax_cross_entropy", "quack.cross_entropy", (half(64, 4).t(), LABELS, -100, 0.0, "mean", False), "not contiguous"),
    ("softmax_cross_entropy", "quack.cross_entropy", (half(4, 64).double(), LABELS, -100, 0.0, "mean", False), "not f64"),
    ("softmax_cross_entropy", "quack.cross_entropy", (half(0, 64), LABELS[:0], -100, 0.0, "mean", False), "empty"),
    ("softmax", "quack.softmax", (half(4, 64), 0, False), "not over the last dimension"),
    ("softmax", "quack.softmax", (half(4 * 64 + 1)[1:].view(4, 64), 1, False), "not aligned"),
    ("linear", "quack.gemm_act", (half(4, 64).float(), half(24, 64).float(), None, None, "relu", False), "f16 and bf16"),
    ("linear", "quack.gemm_act", (half(4, 60), half(24, 60), None, None, "relu", False), "multiple of 16 bytes"),
    ("linear", "quack.gemm_act", (half(4, 64), half(20, 64), None, None, "relu", False), "not a multiple of 8"),
    ("linear", "quack.gemm_act", (half(4, 64), half(24, 64), None, half(24).expand(4, 24), "relu", False), "residual is not contiguous"),
    ("linear", "quack.gemm_act", (half(4, 64), half(24, 128)[:, ::2], None, None, "relu", False), "rows or columns"),
    ("matmul", "quack.gemm_act", (half(2, 4, 64), half(2, 64, 24), "relu", False), "b of two"),
    ("layer_norm_linear", "quack.layer_norm", (half(4, 64), None, None, half(24, 64), None, 1e-5, False), "needs gamma"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "id", "args", "words"), REFUSED)
def test_what_the_package_does_not_do_is_refused(
    installed: None, op: str, id: str, args: tuple[Any, ...], words: str
) -> None:
    asked = key(op, *args)
    assert words in str(OPS[op].candidates[id].supports(asked))
    with pytest.raises(ValueError, match="does not serve"):
        OPS[op].candidates[id].bind(asked, {}, CPU)


def test_it_is_measured_and_explained_like_any_other(installed: None) -> None:
    x, t = torch.randn(64, 256), torch.randint(256, (64,))
    tensorlogic.tune(tensorlogic.softmax_cross_entropy, x, t)
    (explained,) = tensorlogic.explain(tensorlogic.softmax_cross_entropy, x, t)
    (row,) = [r for r in explained.rows if r[0] == "quack.cross_entropy"]
    assert "±" in row[1]


def test_a_wrong_package_is_refused_with_its_reason_and_never_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support_provider_fakes.quack(tmp_path / "site", fault="* 1.1")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(Package, "available", lambda self, device: self.missing())
    quack.register(OPS)
    x, t = torch.randn(64, 256), torch.randint(256, (64,))
    with (
        tensorlogic.policy(force="quack.cross_entropy"),
        pytest.raises(RuntimeError, match=r"quack\.cross_entropy .* is refused"),
    ):
        tensorlogic.softmax_cross_entropy(x, t)
    tensorlogic.tune(tensorlogic.softmax_cross_entropy, x, t)
    (explained,) = tensorlogic.explain(tensorlogic.softmax_cross_entropy, x, t)
    (row,) = [r for r in explained.rows if r[0] == "quack.cross_entropy"]
    assert row[5].startswith("refused: wrong")
    assert row[4] == ""


def test_a_package_that_cannot_be_imported_is_refused_by_name(
    installed: None, tmp_path: Path
) -> None:
    (tmp_path / "site" / "quack" / "cross_entropy.py").write_text("import cutlass_that_is_absent")
    x, t = torch.randn(64, 256), torch.randint(256, (64,))
    tensorlogic.tune(tensorlogic.softmax_cross_entropy, x, t)
    (explained,) = tensorlogic.explain(tensorlogic.softmax_cross_entropy, x, t)
    (row,) = [r for r in explained.rows if r[0] == "quack.cross_entropy"]
    assert "cutlass_that_is_absent" in row[5]


# Liger's own kernels in Triton's interpreter, where the package is installed ------------------------------------------
