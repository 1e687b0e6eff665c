"""matmul by cuBLASLt: the library's algorithms tried in turn, activation in the epilogue."""

from __future__ import annotations

import sys
from dataclasses import replace

from ...core.key import Key
from ...kernels.gemm import bind, padded
from ...kernels.gemm.bind import Plan, Product
from . import MATMUL, triton


def describe(key: Key) -> Plan | str:
    """The tiled candidate's product by the other engine."""
    found = triton.describe(key)
    if isinstance(found, str):
        return found
    return replace(
        found,
        products=tuple(
            replace(p, engine="cublaslt") for p in found.products if isinstance(p, Product)
        ),
    )


_SOURCES = (triton, sys.modules[__name__])
bind.candidate(MATMUL, "cublaslt.epilogue", describe, _SOURCES)
padded.candidate(MATMUL, "cublaslt.padded", describe, _SOURCES)
