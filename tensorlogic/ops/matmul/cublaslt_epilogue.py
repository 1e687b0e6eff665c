"""matmul by cuBLASLt: the library's algorithms tried in turn, activation in the epilogue."""

from __future__ import annotations

import sys
from dataclasses import replace

from ...core.key import Key
from ..common import gemm_padded, gemm_wiring
from ..common.gemm_wiring import Plan, Product
from . import MATMUL, triton_tiled


def describe(key: Key) -> Plan | str:
    """The tiled candidate's product by the other engine."""
    found = triton_tiled.describe(key)
    if isinstance(found, str):
        return found
    return replace(
        found,
        products=tuple(
            replace(p, engine="cublaslt") for p in found.products if isinstance(p, Product)
        ),
    )


_SOURCES = (triton_tiled, sys.modules[__name__])
gemm_wiring.candidate(MATMUL, "cublaslt.epilogue", describe, _SOURCES)
gemm_padded.candidate(MATMUL, "cublaslt.padded", describe, _SOURCES)
