"""Adapters for QuACK and Liger on a GPU: three keys for each, checked, timed against everything else, explained.

Needs quack-kernels (with nvidia-cutlass-dsl[cu13], apache-tvm-ffi, torch-c-dlpack-ext, einops) and liger-kernel.
Exits 1 when a package is missing or one of its candidates is wrong, fails, or was never measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("TENSORLOGIC_CACHE_DIR", tempfile.mkdtemp(prefix="tensorlogic-providers-"))

import torch

import tensorlogic
from tensorlogic.autotune import tune
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.providers import liger, quack

Case = tuple[str, Callable[..., Any], tuple[Any, ...]]
F16, BF16 = torch.float16, torch.bfloat16


def normal(*shape: int, dtype: torch.dtype = F16, grad: bool = False) -> torch.Tensor:
    """Values near 1 on the GPU."""
    return torch.randn(shape, device="cuda", dtype=dtype, requires_grad=grad)


def cases() -> Iterator[Case]:
    """What is tuned: name, function, arguments."""
    for rows, columns, dtype in ((512, 1024, F16), (4096, 32000, F16), (8192, 128256, BF16)):
        target = torch.randint(columns, (rows,), device="cuda")
        for grad in (False, True):
            logits = normal(rows, columns, dtype=dtype, grad=grad)
            yield (
                f"cross-entropy {rows}x{columns} grad={grad}",
                tensorlogic.softmax_cross_entropy,
                (logits, target),
            )
    for rows, columns in ((128, 1024), (4096, 4096), (2048, 32768)):
        yield f"softmax {rows}x{columns}", tensorlogic.softmax, (normal(rows, columns, grad=True),)
    for m, n, k in ((256, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096)):
        x, w, b = normal(m, k), normal(n, k) * k**-0.5, normal(n)
        yield (
            f"layer_norm_linear {m}x{n}x{k}",
            tensorlogic.layer_norm_linear,
            (x, normal(k), normal(k), w, b),
        )
        yield (
            f"linear_residual_relu {m}x{n}x{k}",
            tensorlogic.linear_residual_relu,
            (x, w, b, normal(m, n)),
        )
        yield (
            f"matmul gelu_tanh {m}x{n}x{k}",
            tensorlogic.matmul,
            (x, w.t().contiguous(), "gelu_tanh"),
        )


def register() -> list[str]:
    """The adapters, where the project is not installed and its entry points are unknown; returns what is missing."""
    candidate_loading.ready("cuda")
    missing = []
    for module, package in ((quack, quack.QUACK), (liger, liger.LIGER)):
        provider = package.module.split("_")[0]
        if not any(id.startswith(f"{provider}.") for op in OPS.values() for id in op.candidates):
            module.register(OPS)
        reason = package.available("cuda")
        print(f"{provider}: {reason or package.text}", flush=True)
        missing += [reason] if reason else []
    return missing


def main() -> int:
    """Tune, explain, sum up."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    wanted = parser.parse_args().only
    missing = register()
    rows: list[tuple[str, str, str, str, str]] = []
    for name, fn, args in cases():
        if wanted not in name:
            continue
        print(f"\n=== {name}: {tune.whole(fn, *args)}", flush=True)
        keys = list(tensorlogic.explain(fn, *args))
        if name.startswith(("cross-entropy", "softmax")) and args[0].requires_grad:
            keys += list(tensorlogic.explain(backward(fn), *args))[1:]
        for explained in keys:
            print(explained, flush=True)
            rows += [
                (name, id, device_us, chosen, why)
                for id, device_us, _, _, chosen, why in explained.rows
                if id.startswith(("quack.", "liger."))
            ]
    print("\n=== summary")
    for row in rows:
        print("  ".join(row))
    measured = {id for _, id, device_us, _, _ in rows if device_us != "-"}
    bad = [r for r in rows if r[4].startswith(("refused: wrong", "refused: failed"))]
    theirs = {
        id for op in OPS.values() for id in op.candidates if id.startswith(("quack.", "liger."))
    }
    print(
        f"measured {sorted(measured)}; never measured {sorted(theirs - measured)}; refused {len(bad)}"
    )
    return int(bool(missing or bad or (not wanted and theirs - measured)))


def backward(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` and its gradient, so that explain meets the backward key."""

    def both(*args: Any) -> Any:
        out = fn(*args)
        return torch.autograd.grad(out, args[0], torch.ones_like(out))

    return both


if __name__ == "__main__":
    sys.exit(main())
