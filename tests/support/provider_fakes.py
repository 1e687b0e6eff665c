"""Stand-ins for third-party packages: their functions' signatures and demands, computed by plain PyTorch; what tests of adapters share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading

CPU = torch.device("cpu")
LABELS = torch.zeros(4, dtype=torch.int64)
CROSS_ENTROPY = """
import torch

def cross_entropy_fwd(x, target, target_logit=None, weight=None, ignore_index=-100, return_lse=False, return_dx=False, inplace_backward=False):
    assert x.dim() == 2 and target.dim() == 1 and target.dtype == torch.int64
    keep = target != ignore_index
    lse = torch.logsumexp(x.float(), 1)
    logit = x.float().gather(1, torch.where(keep, target, 0).unsqueeze(1)).squeeze(1)  # IndexError where a GPU reads astray
    loss = torch.where(keep, lse - logit, 0.0) {fault}
    return (loss, lse) if return_lse else loss

def cross_entropy_bwd(x, target, dloss, lse, weight=None, ignore_index=-100, inplace_backward=False):
    assert dloss.dim() == 1 and dloss.dtype == lse.dtype == torch.float32 and dloss.shape == lse.shape == target.shape
    classes = torch.arange(x.shape[1], device=x.device)
    grad = torch.exp(x.float() - lse.unsqueeze(1)) - (classes == target.unsqueeze(1)).float()
    return (grad * torch.where(target == ignore_index, 0.0, dloss).unsqueeze(1)).to(x.dtype)
"""
SOFTMAX = """
import torch

def softmax_fwd(x):
    assert x.dim() == 2
    return torch.softmax(x.float(), 1).to(x.dtype)

def softmax_bwd(dy, y):
    assert dy.dim() == 2 and dy.shape == y.shape and dy.dtype == y.dtype
    dy, wide = dy.float(), y.float()
    return (wide * (dy - (dy * wide).sum(1, keepdim=True))).to(y.dtype)
"""
RMSNORM = """
import torch

def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert x.dim() == 2 and weight.dtype == torch.float32 and (bias is None or bias.dtype == torch.float32)
    return torch.nn.functional.layer_norm(x.float(), x.shape[1:], weight, bias, eps).to(x.dtype)
"""
GEMM_CONFIG = """
from dataclasses import dataclass

@dataclass(frozen=True)
class GemmConfig:
    tile_m: int = 128
    tile_n: int = 192
    pingpong: bool = True
    is_dynamic_persistent: bool = True
    cluster_m: int = 2
    cluster_n: int = 1
    device_capacity: int = 9
"""
GEMM_INTERFACE = """
import torch
import torch.nn.functional as F

ASKED = []
ACT = {None: lambda z: z, "relu": F.relu, "gelu_erf": F.gelu, "silu": F.silu, "gelu_tanh_approx": lambda z: F.gelu(z, approximate="tanh")}

def gemm_act(A, B, C=None, bias=None, activation=None, alpha=1.0, preact_out=None, postact_out=None, out_dtype=None,
             postact_dtype=None, store_preact=True, dynamic_scheduler=False, tuned=True, config=None):
    assert A.dim() == B.dim() == 2 and not tuned and A.dtype == B.dtype
    ASKED.append(activation)
    z = A.float() @ B.float()
    z = z if C is None else z + C.float()
    z = z if bias is None else z + bias.float()
    return (z.to(A.dtype) if store_preact else None), ACT[activation](z).to(A.dtype)
"""


def install(
    folder: Path, distribution: str, module: str, version: str, files: dict[str, str]
) -> None:
    """Write a package and its metadata into a folder of the import path."""
    info = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    )
    (folder / module).mkdir()
    for name, text in {"__init__": "", **files}.items():
        (folder / module / f"{name}.py").write_text(text)


def quack(folder: Path, version: str = "0.6.5", fault: str = "") -> None:
    """QuACK, right or with a fault in its loss."""
    files = {
        "cross_entropy": CROSS_ENTROPY.replace("{fault}", fault),
        "softmax": SOFTMAX,
        "rmsnorm": RMSNORM,
        "gemm_config": GEMM_CONFIG,
        "gemm_interface": GEMM_INTERFACE,
    }
    install(folder, "quack-kernels", "quack", version, files)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """Candidates and modules of a test's packages are gone after it, and known ones are put aside meanwhile."""
    candidate_loading.ready("cpu")  # what is registered meanwhile stays for those who come later
    kept = {op.name: dict(op.candidates) for op in OPS.values()}
    for op in OPS.values():
        for id in filter(of_an_adapter, kept[op.name]):
            del op.candidates[id]
    yield
    for op in OPS.values():
        op.candidates.clear()
        op.candidates.update(kept[op.name])
    for name in [m for m in sys.modules if m == "quack" or m.startswith("quack.")]:
        del sys.modules[name]


def of_an_adapter(id: str) -> bool:
    """Whether a candidate is one of an adapter's."""
    return id.split(".")[0] in ("quack", "liger")


def key(op: str, *args: Any) -> Key:
    """The key of op-level arguments."""
    save = ("save", True) in zip((p.name for p in OPS[op].params), args, strict=True)
    return OPS[op].key(args, "backward" if OPS[op].internal else "forward" if save else "inference")


def half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float16)
