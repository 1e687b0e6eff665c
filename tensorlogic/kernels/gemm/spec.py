"""GemmSpec: what one matrix product of a plan computes; Operand: one of its matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]


ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


PROLOGUES = ("none", "activation", "gradient", "dropout", "layer_norm", "rms_norm")


OUTERS = ("none", "residual", "gradient", "dropout")


@dataclass(frozen=True)
class Operand:
    """A matrix in memory: dtype name and strides, in elements, of rows, columns and batch."""

    dtype: str
    rows: int
    columns: int
    batch: int = 0  # 0: one matrix for all


@dataclass(frozen=True)
class GemmSpec:
    """y[M, N] = activation(outer(columnwise(prologue(x[M, K]) @ w[K, N] + bias))), `batch` times.

    Sums are float32. `x`, `w`, `y` are meant as the letters say, whatever the order in memory: a
    weight kept as [N, K] has w = Operand(dtype, 1, K). Vectors are contiguous and given by dtype
    name; None: absent.

    prologue, of x:
      "activation"  act(x), act named by `kind`
      "gradient"    x * act'(saved): x is dy; `saved` is y for relu, else the pre-activation
      "dropout"     x / (1 - p) where kept; seed and offset in an int64[2] tensor, or with `seeded`
                    two numbers of each call
      "layer_norm"  (x - mean) * rstd * gamma + beta, row mean and rstd given as float32 [tokens],
                    or with `inline` computed by the kernel (worth it for few columns of tiles) and,
                    with `save_statistics`, stored there
      "rms_norm"    x * rstd * gamma + beta, likewise, without a mean
      `transposed`: x is the transpose of the [tokens, features] matrix that the prologue speaks of
    columnwise, vectors [N]: (... - mean) / sqrt(var + eps) * scale + shift, each optional
    outer: "residual" adds `residual` [M, N]; "gradient" multiplies by act'(residual), act named by
      `kind`; "dropout" drops elements with the mask that the prologue gives an [M, N] input
    `z`: dtype of a second output, the value before `activation` (with `early_z` x @ w + bias), with y's strides
    `x_out`: dtype of an output for prologue(x), contiguous [batch, M, K]
    `row_sum`: dtype of an output [M], prologue(x) summed over K (a bias gradient, if x is dz')
    """

    m: int
    n: int
    k: int
    x: Operand
    w: Operand
    y: Operand
    batch: int = 1
    prologue: str = "none"
    kind: str = "none"
    transposed: bool = False
    seeded: bool = False
    saved: Operand | None = None
    inline: bool = False
    save_statistics: bool = False
    gamma: str | None = None
    beta: str | None = None
    bias: str | None = None
    mean: str | None = None
    var: str | None = None
    scale: str | None = None
    shift: str | None = None
    outer: str = "none"
    residual: Operand | None = None
    activation: str = "none"
    z: str | None = None
    early_z: bool = False
    x_out: str | None = None
    row_sum: str | None = None
    precision: str = "ieee"
    align: int = 16

    def __post_init__(self) -> None:
        """Refuse contradictions by name; what is merely not built is `gemm_refusal`'s."""
        for name, value, known in (
            ("prologue", self.prologue, PROLOGUES), ("outer", self.outer, OUTERS),
            ("kind", self.kind, ACTIVATIONS), ("activation", self.activation, ACTIVATIONS),
        ):  # fmt: skip
            if value not in known:
                raise ValueError(f"{name} is {value!r}; must be one of {', '.join(known)}")
        if (self.saved is not None) != (self.prologue == "gradient"):
            raise ValueError(
                f"prologue {self.prologue!r} with saved={self.saved}: 'gradient', and only it, takes saved"
            )
        if (self.residual is not None) != (self.outer in ("residual", "gradient")):
            raise ValueError(
                f"outer {self.outer!r} with residual={self.residual}: 'residual' and 'gradient' take one"
            )
        if self.inline and (self.prologue not in ("layer_norm", "rms_norm") or self.transposed):
            raise ValueError(
                "inline statistics are those of a layer_norm or rms_norm prologue that is not transposed"
            )
