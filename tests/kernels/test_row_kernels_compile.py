"""What the compiler makes of element-wise, reduction, row and score kernels: no spills, no oversized shared memory."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from tensorlogic.kernels.attention_scores import recompute as attention_scores_recompute
from tensorlogic.kernels.cross_entropy import rows as cross_entropy_rows
from tensorlogic.kernels.elementwise import column_passes as elementwise_column_passes
from tensorlogic.kernels.elementwise import dropout as elementwise_dropout
from tensorlogic.kernels.elementwise import elementwise as elementwise_elementwise
from tensorlogic.kernels.elementwise import epilogue_pass as elementwise_epilogue_pass
from tensorlogic.kernels.norm import layer_norm as norm_layer_norm
from tensorlogic.kernels.reduce import contiguous as reduce_contiguous
from tensorlogic.kernels.softmax import rows as softmax_rows
from tensorlogic.kernels.triton_runtime import launch

from ..support.compiled import STACK

from ..support.compiled import resources  # isort: skip

MODULES = (
    elementwise_column_passes,
    elementwise_epilogue_pass,
    cross_entropy_rows,
    elementwise_dropout,
    elementwise_elementwise,
    norm_layer_norm,
    reduce_contiguous,
    softmax_rows,
    attention_scores_recompute,
)
ANY = torch.device("cuda", 0)


def prepare_all() -> None:
    """Prepare the first configurations of each family at sizes that matter."""
    for op in elementwise_elementwise.ELEMENTWISE:
        inputs, outputs = elementwise_elementwise.ELEMENTWISE[op]
        for modes in (["full"] * inputs, ["full", "row", "one"][:inputs]):
            names = ["f16"] * (inputs + outputs)
            for config in elementwise_elementwise.elementwise_configs(names, 4096, 4096, modes)[:1]:
                elementwise_elementwise.elementwise_launcher(
                    op, names, 4096, 4096, modes, config, ANY
                )
    for seeded in (False, True):
        elementwise_dropout.dropout_launcher(
            "f16", 4096 * 4096, seeded, elementwise_dropout.CONFIGS[0], ANY, 16
        )
    for shape in ((1, 1 << 27, 1), (4096, 1000, 1), (1, 4096, 1023)):
        for kind in ("mean", "max"):
            for config in reduce_contiguous.reduce_configs(*shape, "f16")[:1]:
                reduce_contiguous.reduce_launcher(kind, "f16", "f16", *shape, config, ANY)
    polled = [
        c for c in reduce_contiguous.reduce_configs(1, 1 << 20, 1, "f16") if "polled" in c.values()
    ]
    for config in polled[:1]:
        reduce_contiguous.reduce_launcher("sum", "f16", "f16", 1, 1 << 20, 1, config, ANY)
    for columns in (77, 4096):
        given = dict.fromkeys(("z", "bias", "mean", "var", "gamma", "beta", "y", "kept"), "f16")
        for config in elementwise_column_passes.apply_configs(4096, columns)[:1]:
            elementwise_column_passes.apply_launcher(4096, columns, given, config, ANY, 16)
        for config in elementwise_epilogue_pass.finish_configs(columns)[:1]:
            for kept in (None, "f16"):
                follows = dict.fromkeys(("z", "bias", "residual", "y"), "f32") | {"kept": kept}
                elementwise_epilogue_pass.finish_launcher(4096, columns, follows, (columns, 1), "gelu_tanh", config, ANY)  # fmt: skip
        sums = ("dy", "y", "z", "mean", "var", "gamma", "dz", "db", "dgamma", "dbeta")
        for config in elementwise_column_passes.backward_configs(4096, columns)[:1]:
            elementwise_column_passes.activation_backward_launcher(
                "gelu_bwd", 4096, columns, "f16", config, ANY, 16
            )
            elementwise_column_passes.backward_launcher(
                4096, columns, dict.fromkeys(sums, "f16"), config, ANY, 16
            )
    for columns in (77, 4096, 32000, 50257):
        names = ("f16", "f16", "f16")
        for config in softmax_rows.softmax_configs(columns, "f16")[:1]:
            softmax_rows.softmax_launcher(4096, columns, "f16", "f16", config, ANY)
        for config in softmax_rows.softmax_configs(columns, "f16", backward=True)[:1]:
            softmax_rows.softmax_backward_launcher(4096, columns, names, config, ANY)
        for config in norm_layer_norm.layer_norm_configs(columns, "f16")[:1]:
            norm_layer_norm.layer_norm_launcher(4096, columns, names, config, ANY)
        for config in norm_layer_norm.layer_norm_backward_configs(4096, columns, "f16")[:1]:
            norm_layer_norm.layer_norm_backward_launcher(4096, columns, names, config, ANY)
        for config in cross_entropy_rows.cross_entropy_configs(columns, "f16")[:1]:
            cross_entropy_rows.cross_entropy_launcher(
                4096, columns, "f16", "f16", "mean", -100, config, ANY, smooth=True, save=True
            )
        for config in cross_entropy_rows.cross_entropy_configs(columns, "f16"):
            cross_entropy_rows.cross_entropy_launcher(
                4096, columns, "f16", "f16", "mean", -100, config, ANY, save=True
            )
        for config in cross_entropy_rows.cross_entropy_backward_configs(columns, "f16")[:1]:
            cross_entropy_rows.cross_entropy_backward_launcher(
                4096, columns, "f16", "f16", "mean", -100, config, ANY
            )
    for s, d, dtype, causal, mask in (
        (2048, 64, "f16", False, "none"), (512, 64, "f16", False, "none"), (333, 128, "bf16", True, "bool"),
        (1024, 128, "f16", True, "float"), (128, 64, "f32", False, "none"), (1024, 256, "f16", True, "none"),
    ):  # fmt: skip
        strides = (16 * s * d, s * d, d)
        other = "bool" if mask == "bool" else dtype
        for config in attention_scores_recompute.attention_scores_configs(
            s, s, d, dtype, mask, causal
        )[:1]:
            attention_scores_recompute.attention_scores_launcher(
                (4, 16, s, s, d), dtype, dtype, strides, strides, mask, other, (0, 0, s, 1), causal, config, ANY
            )  # fmt: skip


def test_first_configurations_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: dict[launch.CompileJob, None] = {}

    def record(kernel: Any, *, device: torch.device, **options: Any) -> Any:
        simple = kernel in (
            elementwise_elementwise.elementwise_flat,
            elementwise_elementwise.elementwise_rows,
        )
        for sm in (90,) if simple else (80, 90, 100):
            jobs[launch.compile_job(kernel, sm=sm, **options)] = None
        return lambda *args: True

    for module in MODULES:
        monkeypatch.setattr(module, "prepare", record, raising=False)
    prepare_all()
    bad = {}
    for job, answer in zip(jobs, resources(list(jobs)), strict=True):
        if isinstance(answer, str) or answer.stack > STACK:
            bad[f"{job.kernel} sm_{job.sm} {job.num_warps} warps {dict(job.constexprs)}"] = answer
    assert not bad, "\n".join(f"{job}: {answer}" for job, answer in bad.items())
