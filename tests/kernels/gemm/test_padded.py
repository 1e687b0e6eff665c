"""Products by copies of what begins at odd places: which keys, right results and gradients; on a GPU, else in the interpreter."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic

from ...support.triton import DEVICE
from ...support.triton import close_to_largest as close
from ...support.triton import nan_filled as poisoned
from ...support.triton import randn as rand

from tensorlogic.dispatch import candidate_loading  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.gemm.bind import Product  # isort: skip
from tensorlogic.ops.linear import triton

from tensorlogic.ops.matmul import cublaslt as matmul_cublaslt  # isort: skip
from tensorlogic.kernels.gemm import padded
from tensorlogic.kernels.triton_runtime import launch

from tensorlogic.kernels.gemm import padding_kernel  # isort: skip

from ...support.compiled import nothing_spills  # isort: skip

candidate_loading.ready(DEVICE.type)
CONFIG = {"BLOCK_R": 4, "BLOCK_C": 16, "num_warps": 4}


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("layout", ["rows", "columns", "steps"])
def test_a_copy_ends_in_zeros(dtype: str, layout: str) -> None:
    for rows, columns, wide in ((1, 5, 8), (7, 33, 40), (9, 16, 16), (5, 1, 8)):
        x = {
            "rows": rand(rows, columns + 3, dtype=dtype)[:, 1 : columns + 1],
            "columns": rand(columns, rows, dtype=dtype).t(),
            "steps": rand(rows, columns * 2, dtype=dtype)[:, ::2],
        }[layout]
        for tall in (rows, rows + 6):
            y = poisoned(tall + 1, wide, dtype=dtype)
            run = padding_kernel.copy_launcher(
                (rows, columns), (tall, wide), x.stride(), dtype, CONFIG, DEVICE, x.element_size()
            )
            assert run(x, y)
            assert torch.equal(y[:rows, :columns], x)
            assert not y[:rows, columns:].any()
            assert not y[rows:tall].any()
            assert y[tall].isnan().all()


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padded, "LEAST_WORK", 0)


def odd(layout: str, rows: int, columns: int) -> Tensor:
    """[rows, columns] with lines that begin at odd places, along either dimension, or with gaps."""
    if layout == "turned":
        return rand(columns, rows, dtype="f32").t()
    if layout == "gaps":
        return rand(rows, columns * 2, dtype="f32")[:, ::2]
    return rand(rows, columns, dtype="f32")


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("left", ["plain", "turned", "gaps"])
@pytest.mark.parametrize("right", ["plain", "turned", "gaps"])
def test_matmul_and_its_gradients(left: str, right: str) -> None:
    for m, k, n in ((9, 21, 33), (8, 32, 33), (16, 21, 16), (9, 16, 33)):
        a, b = odd(left, m, k).requires_grad_(), odd(right, k, n).requires_grad_()
        wide = [t.detach().double().requires_grad_() for t in (a, b)]
        dy = rand(m, n, dtype="f32")
        served = {"matmul": "triton.padded", "matmul_backward": "triton.padded"}
        with tensorlogic.policy(tune="off", force=served):
            y = tensorlogic.matmul(a, b, "gelu")
            found = torch.autograd.grad(y, (a, b), dy)
        z = torch.nn.functional.gelu(wide[0] @ wide[1])
        close(y.detach(), z.detach(), "f32")
        for ours, exact in zip(found, torch.autograd.grad(z, wide, dy.double()), strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-4)


FAMILY: dict[str, tuple[str, Any]] = {
    "linear": ("x w b", lambda x, w, b: tensorlogic.linear(x, w, b, activation="silu")),
    "gelu_linear": ("x w b", lambda x, w, b: tensorlogic.gelu_linear(x, w, b)),
    "layer_norm_linear": ("x g h w b", lambda x, g, h, w, b: tensorlogic.layer_norm_linear(x, g, h, w, b)),
    "dropout_linear": ("x w b", lambda x, w, b: tensorlogic.dropout_linear(x, w, b, 0.0, True)),
}  # fmt: skip


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("name", FAMILY)
def test_the_family_and_its_gradients(name: str) -> None:
    letters, fn = FAMILY[name]
    for m, k, n in ((9, 21, 32), (9, 32, 33)):
        sizes = {"x": (m, k), "w": (n, k), "b": (n,), "g": (k,), "h": (k,)}
        args = [rand(*sizes[a], dtype="f32").requires_grad_() for a in letters.split()]
        wide = [t.detach().double().requires_grad_() for t in args]
        dy = rand(m, n, dtype="f32")
        served = dict.fromkeys((name, f"{name}_backward"), "triton.padded")
        with tensorlogic.policy(tune="off", force=served):
            y = fn(*args)
            found = torch.autograd.grad(y, args, dy)
        with tensorlogic.policy(tune="off", force="torch.eager"):
            exactly = fn(*wide)
        close(y.detach(), exactly.detach(), "f32")
        for ours, exact in zip(found, torch.autograd.grad(exactly, wide, dy.double()), strict=True):
            torch.testing.assert_close(ours.double(), exact, atol=2e-4, rtol=2e-4)


def said(op: str, *args: Any, id: str = "triton.padded", direction: str = "inference") -> str:
    return str(OPS[op].candidates[id].unfit(OPS[op].key(args, direction)))


def test_which_keys_have_copies() -> None:
    assert said("matmul", rand(333, 768), rand(768, 1001), "none", False) == "None"
    assert said("matmul", rand(333, 769), rand(769, 1008), "none", False) == "None"
    assert "multiple of 16 bytes" in said("matmul", rand(320, 776)[:, :768], rand(768, 1008), "none", False)  # fmt: skip
    assert said("matmul", rand(320, 777)[:, :768], rand(768, 1008), "none", False) == "None"
    assert said("matmul", rand(320, 768), rand(768 * 1008 + 1)[1:].view(768, 1008), "none", False) == "None"  # fmt: skip
    assert "multiple of 16 bytes" in said("matmul", rand(333, 768), rand(768, 1000), "none", False)
    assert "multiple of 16 bytes" in said("matmul", rand(333, 768), rand(1001, 768).t(), "none", False)  # fmt: skip
    assert "too small" in said("matmul", rand(33, 33), rand(33, 33), "none", False)
    assert "multiple of 16 bytes" in said("matmul", rand(3, 33, 333), rand(3, 333, 768), "none", False)  # fmt: skip
    assert "multiple of 16 bytes" in said("linear", rand(64, 768), rand(1001, 768), rand(1001), None, "relu", False)  # fmt: skip


def test_each_tensor_counts_by_its_own_alignment() -> None:
    """An unaligned bias makes copies of nothing; an unaligned x beside an aligned bias leaves a product that is aligned."""
    x, w, b = rand(64, 768), rand(1024, 768), rand(1024)
    apart = rand(64 * 768 + 1)[1:].view(64, 768)
    assert "multiple of 16 bytes" in said("linear", x, w, rand(1025)[1:], None, "none", False)
    op = OPS["linear"]
    for args, names in (((apart, w, b), {"padded_0", "weight"}), ((x, w[:, :767], b), {"padded_0", "padded_1"})):  # fmt: skip
        plan = padded.padded(triton.describe)(op.key((*args, None, "none", False), "inference"))  # fmt: skip
        assert not isinstance(plan, str)
        product = plan.products[-1].aligned(2)
        assert isinstance(product, Product)
        assert {product.given["x"], product.given["w"]} == names
        assert product.spec.align == 16
    plan = padded.padded(triton.describe)(op.key((apart, w, rand(1025)[1:], None, "none", False), "inference"))  # fmt: skip
    assert not isinstance(plan, str)
    assert plan.products[-1].aligned(2).spec.align == 2  # type: ignore[union-attr]


def test_an_operand_is_copied_once() -> None:
    op = OPS["matmul_backward"]
    key = op.key((rand(333, 1001), rand(333, 768), rand(768, 1001), None, "none", "11"), "backward")
    config = op.candidates["triton.padded"].configs(key)[0]
    copies = [c for c in config["products"] if "BLOCK_K" not in c]
    assert len(copies) == 2  # dy for both products, and b


def test_odd_rows_are_stored_by_ours() -> None:
    """cuBLASLt takes several times as long as ours for a 16-bit output whose rows begin at odd places, and has the rest of a plan."""
    describe = padded.padded(partial(triton.describe, engine="cublaslt"))

    def engines(found: Any) -> list[str] | str:
        return found if isinstance(found, str) else [p.engine for p in found.products if isinstance(p, Product)]  # fmt: skip

    for n, dtype, engine in (
        (1001, "f16", ""),
        (1008, "f16", "cublaslt"),
        (1001, "f32", "cublaslt"),
    ):
        x, w = rand(333, 769, dtype=dtype), rand(n, 769, dtype=dtype)
        said = engines(describe(OPS["linear"].key((x, w, None, None, "none", False), "inference")))
        assert said == ([engine] if engine else "its rows are stored by another engine")
    args = (rand(333, 1001), rand(333, 768), rand(768, 1001), None, "none", "11")
    key = OPS["matmul_backward"].key(args, "backward")
    found = padded.padded(partial(matmul_cublaslt.backward, engine="cublaslt"))(key)
    assert engines(found) == ["cublaslt", "triton"]


def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm in (90, 80, 100):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for strides in ((1001, 1), (1, 1001), (2002, 2))[: 3 if sm == 90 else 1]:
            for dtype in ("f16", "f32")[: 2 if strides[1] == 1 else 1]:
                for config in padding_kernel.copy_configs(1008, strides[1] == 1):

                    def build(strides: Any = strides, dtype: str = dtype, config: Any = config) -> object:  # fmt: skip
                        return padding_kernel.copy_launcher((768, 1001), (776, 1008), strides, dtype, config, cuda)  # fmt: skip

                    jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    assert {job.kernel for job in jobs} == {"copy_padded"}
    nothing_spills(jobs)
