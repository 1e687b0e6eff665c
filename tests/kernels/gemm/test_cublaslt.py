"""cuBLASLt's side of the product family: what it takes and why not; on a GPU, its results against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tensorlogic.kernels.gemm import cublaslt as gemm_cublaslt
from tensorlogic.kernels.gemm.spec import GemmSpec, Operand

M, N, K = 48, 64, 40


def spec(dtype: str = "f16", **more: Any) -> GemmSpec:
    return GemmSpec(
        M, N, K, Operand(dtype, K, 1), Operand(dtype, 1, K), Operand(dtype, N, 1), **more
    )


ROW = Operand("f16", N, 1)
REFUSED = {
    "transforms neither": {"prologue": "activation", "kind": "gelu"},
    "nor columns": {"mean": "f16", "var": "f16"},
    "one dtype": {"bias": "f32"},
    "contiguous along neither": {"x": Operand("f16", 2 * K, 2)},
    "rows of the output": {"outer": "residual", "residual": Operand("f16", 1, M)},
    "tanh gelu only": {"activation": "silu"},
    "no dropout": {"outer": "dropout"},
    "no gradient": {"outer": "gradient", "kind": "gelu_tanh", "residual": ROW},
    "faster": {"row_sum": "f16"},
    "keeps the pre-activation": {"activation": "relu", "z": "f16"},
    "aligned to 16 bytes": {"activation": "gelu_tanh", "z": "f16", "align": 8},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refusals_say_why(reason: str) -> None:
    assert reason in str(gemm_cublaslt.lt_refusal(replace(spec(), **REFUSED[reason])))


SERVED: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": "f16"},
    "residual relu": {
        "bias": "f16",
        "outer": "residual",
        "residual": Operand("f16", N + 8, 1),
        "activation": "relu",
    },
    "gelu": {"bias": "f16", "activation": "gelu_tanh"},
    "gelu kept": {"bias": "f16", "activation": "gelu_tanh", "z": "f16"},
    "gelu kept, residual": {
        "outer": "residual",
        "residual": Operand("f16", N + 8, 1),
        "activation": "gelu_tanh",
        "z": "f16",
    },
}


@pytest.mark.parametrize("name", SERVED)
def test_arguments_are_those_that_the_product_has(name: str) -> None:
    what = spec(**SERVED[name])
    assert gemm_cublaslt.lt_refusal(what) is None
    absent = {"bias": what.bias, "residual": what.residual, "z": what.z}
    order = ("x", "w", "bias", "residual", "y", "z")
    assert gemm_cublaslt.lt_arguments(what) == tuple(
        a for a in order if a not in absent or absent[a]
    )


def test_is_unavailable_without_cuda() -> None:
    assert gemm_cublaslt.lt_available("cpu") == "cuBLASLt runs on CUDA devices"
    if torch.version.cuda is None:
        assert "no CUDA" in str(gemm_cublaslt.lt_available("cuda"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("name", "layouts"), list(itertools.product(SERVED, ("row column", "column row")))
)
def test_results(name: str, layouts: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def matrix(rows: int, columns: int, layout: str = "row") -> torch.Tensor:
        shape = (rows, columns) if layout == "row" else (columns, rows)
        made = torch.randn(shape, device=device).half()
        return made if layout == "row" else made.t()

    x_layout, w_layout = layouts.split()
    wanted = SERVED[name]
    x, w = matrix(M, K, x_layout), matrix(K, N, w_layout)
    given = {"x": x, "w": w, "bias": matrix(1, N)[0], "residual": matrix(M, N + 8)[:, :N]}
    nan = float("nan")
    given |= {
        "y": torch.full((M, N), nan, device=device).half(),
        "z": torch.full((M, N), nan, device=device).half(),
    }
    operands = {"x": Operand("f16", *x.stride()), "w": Operand("f16", *w.stride())}
    what = replace(spec(**wanted), **operands)
    start = gemm_cublaslt.lt_launcher(what, {"rank": 0}, device)
    assert start(*(given[a] for a in gemm_cublaslt.lt_arguments(what)))
    z = x.double() @ w.double() + (given["bias"].double() if what.bias else 0.0)
    if what.outer == "residual":
        z = z + given["residual"].double()
    act = {"relu": F.relu, "gelu_tanh": lambda v: F.gelu(v, approximate="tanh")}.get(
        what.activation, lambda v: v
    )
    for got, want, there in ((given["y"], act(z), True), (given["z"], z, what.z)):
        if there:
            assert (got.double() - want).norm() <= 1e-3 * want.norm()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_gelu_keeps_is_right_for_the_kernel_behind_it_in_a_graph() -> None:
    """Our backward pass starts while the library's kernel ends: it must wait for all that was kept."""
    from tensorlogic.kernels.elementwise import column_passes

    device = torch.device("cuda", torch.cuda.current_device())
    m, n, k = 1024, 768, 512
    what = GemmSpec(
        m, n, k, Operand("f16", k, 1), Operand("f16", 1, k), Operand("f16", n, 1), activation="gelu_tanh", z="f16",
    )  # fmt: skip
    product = gemm_cublaslt.lt_launcher(what, {"rank": 0}, device)
    config = column_passes.backward_configs(m, n)[0]
    space, counters = column_passes.backward_space(n, 1, config)
    behind = column_passes.activation_backward_launcher(
        "gelu_tanh_bwd", m, n, "f16", config, device, 16
    )
    w = (torch.randn(n, k, device=device) * k**-0.5).half()
    sets = []
    for _ in range(8):
        x, dy = torch.randn(m, k, device=device).half(), torch.randn(m, n, device=device).half()
        y, z, dz = (torch.full_like(dy, torch.nan) for _ in range(3))
        scratch = (
            torch.empty(space, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )
        sets.append((x, dy, y, z, dz, torch.empty(n, device=device).half(), *scratch))

    def run() -> None:
        for x, dy, y, z, dz, db, *scratch in sets:
            assert product(x, w.t(), y, z)
            assert behind(dy, z, dz, db, *scratch)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(20):
        for _, _, y, z, dz, *_ in sets:
            for out in (y, z, dz):
                out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for x, dy, _, _, dz, *_ in sets:
            leaf = (x.double() @ w.double().t()).requires_grad_()
            (want,) = torch.autograd.grad(F.gelu(leaf, approximate="tanh"), leaf, dy.double())
            assert (dz.double() - want).norm() <= 2e-3 * want.norm()
