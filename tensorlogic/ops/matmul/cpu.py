"""matmul on CPUs: our own product of operands as they lie."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...core.activations import SMOOTH
from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.cpu import gemm as cpu_gemm
from ...kernels.cpu import register as cpu_register
from ...kernels.register import rows
from ...native import cpu_library
from . import MATMUL, MATMUL_BACKWARD


def supports(key: Key) -> str | None:
    """None for non-empty operands of one kernel dtype."""
    a, b = key.tensors
    assert a is not None and b is not None
    if 0 in (*a.shape, *b.shape):
        return "an operand is empty"
    return register.one_dtype(key)


def build(key: Key, config: Config) -> Launcher:
    """Any layout and batch; the activation in the epilogue, the pre-activation too where backward needs it."""
    code = cpu_library.ACTIVATIONS[key.flag("activation")]
    if key.flag("save") and key.flag("activation") in SMOOTH:
        both = cpu_library.op("matmul_pre")
        return lambda a, b: both(a, b, code)
    return cpu_library.launcher("matmul", code)


def supports_backward(key: Key) -> str | None:
    """None for matrices and batches of them, with contiguous gradients where an activation's comes first."""
    dy, a, b, _ = key.tensors
    assert dy is not None and a is not None and b is not None
    if len(a.shape) < 2 or len(b.shape) < 2 or 0 in (*dy.shape, *a.shape, *b.shape):
        return "an operand is empty or one-dimensional"
    if key.flag("activation") != "none":
        return cpu_register.contiguous(key, "dy", "kept")
    return register.one_dtype(key)


def build_backward(key: Key) -> Launcher:
    """The activation's gradient in one pass, then two products, summed over broadcast batch dimensions."""
    gradient, needs = cpu_gemm.activation_gradient(key.flag("activation")), key.flag("needs")
    run = cpu_library.op("matmul")

    def launch(dy: Any, a: Any, b: Any, kept: Any) -> Any:
        dz, da, db = gradient(dy, kept), None, None
        if needs[0] == "1":
            da = run(dz, b.mT).sum_to_size(a.shape)
        if needs[1] == "1" and b.dim() == 2:  # the batch is one long sum, in float32
            db = run(rows(a).t(), rows(dz))
        elif needs[1] == "1":
            db = run(a.mT, dz).sum_to_size(b.shape)
        return da, db

    return launch


cpu_gemm.add_backward(MATMUL_BACKWARD, build_backward, __name__, supports_backward)
cpu_gemm.add(
    MATMUL,
    "cpu.epilogue",
    build,
    __name__,
    supports,
    lambda key: [{"product": "native"}],
    partial(cpu_gemm.guess, x="a", weight="b", linear=False),
)
