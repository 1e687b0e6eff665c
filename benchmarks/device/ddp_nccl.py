"""Two processes train one model under DistributedDataParallel, plain and by `optimize(training=True)`: gradients, losses, step times.

python benchmarks/device/ddp_nccl.py [--small] [--out FILE.json]

NCCL where there are two GPUs, gloo on the CPU elsewhere. Each rank has a batch of its own; the reference is the whole batch
in float64 on one device. Ends with an error where something differs by more than it may.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import tensorlogic
from tensorlogic.plans import open_stores

WORLD = 2
STEPS = 5  # whose losses are compared
TIMED = 30


def network(d: int, layers: int) -> nn.Module:
    """A Transformer without dropout, its input's width."""
    layer = nn.TransformerEncoderLayer(d, 4, 4 * d, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def gradients(model: nn.Module) -> Tensor:
    """All of them, one after the other, in float64."""
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error in float32."""
    return F.mse_loss(model(x).float(), y.float())


def trained(model: nn.Module, x: Tensor, y: Tensor) -> tuple[list[float], Tensor, float]:
    """Losses of the first steps, the gradients of the first, and the median time of later ones in milliseconds."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, first, times = [], None, []
    for i in range(STEPS + TIMED):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, x, y)
        loss.backward()
        if first is None:
            first = gradients(model).clone()
        optimizer.step()
        if x.is_cuda:
            torch.cuda.synchronize()
        if i < STEPS:
            losses.append(loss.item())
        else:
            times.append((time.perf_counter() - begin) * 1e3)
    assert first is not None
    return losses, first, statistics.median(times)


def gathered(value: Any) -> list[Any]:
    """The same of every rank."""
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, value)
    return found


def rank_main(rank: int, address: str, small: bool, out: Path | None) -> None:
    """One process."""
    cuda = torch.cuda.device_count() >= WORLD
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=address, rank=rank, world_size=WORLD)  # fmt: skip
    dtype = torch.bfloat16 if cuda else torch.float32
    d, layers, rows = (256, 2, 4) if small else (768, 6, 8)
    torch.manual_seed(0)
    model = network(d, layers).to(device, dtype)
    xs, ys = (torch.randn(WORLD, rows, 4 * d // 8, d, device=device, dtype=dtype) for _ in range(2))
    dist.broadcast(xs, 0)
    dist.broadcast(ys, 0)
    x, y = xs[rank], ys[rank]

    wide = copy.deepcopy(model).double()
    sum(loss_of_wide(wide, xs[i], ys[i]) for i in range(WORLD)).backward()  # type: ignore[union-attr]
    exact = gradients(wide) / WORLD

    tuned = copy.deepcopy(model)
    tensorlogic.tune(lambda v: tensorlogic.linear(v, tuned.layers[0].linear1.weight), x)  # type: ignore[union-attr,index,arg-type]
    plans = sorted((p.key.text, p.eager) for p in open_stores.current(device).plans())
    digests = gathered(hashlib.sha256(repr(plans).encode()).hexdigest())

    ids = [rank] if cuda else None
    plain = DistributedDataParallel(copy.deepcopy(model), device_ids=ids)
    begin = time.perf_counter()
    optimised = tensorlogic.optimize(copy.deepcopy(model), (x,), training=True)
    ready = time.perf_counter() - begin
    fast = DistributedDataParallel(optimised, device_ids=ids)
    losses, want, plain_ms = trained(plain, x, y)
    ours, got, fast_ms = trained(fast, x, y)

    def off(g: Tensor) -> float:
        return ((g - exact).norm() / exact.norm()).item()

    everyone = gathered(
        {
            "sum": got.sum().item(),
            "losses": ours,
            "plain losses": losses,
            "outcome": optimised.report.outcome,
        }
    )  # type: ignore[union-attr]
    found = {
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
        "ranks": everyone,
        "gradient error": off(got),
        "plain gradient error": off(want),
        "step ms": fast_ms,
        "plain step ms": plain_ms,
        "ready s": ready,
        "plans": len(plans),
        "plans alike": len(set(digests)) == 1,
    }
    if rank == 0:
        print(json.dumps(found, indent=1), flush=True)
        if out is not None:
            out.write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()
    assert found["plans alike"], "the ranks have different plans"
    assert len({e["sum"] for e in everyone}) == 1, "the ranks have different gradients"
    assert off(got) <= 1.5 * max(off(want), 1e-6), (off(got), off(want))
    tolerance = 0.02 if cuda else 1e-4
    assert all(abs(a / b - 1) < tolerance for a, b in zip(ours, losses, strict=True)), everyone


def loss_of_wide(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss in float64."""
    return F.mse_loss(model(x.double()), y.double())


def main() -> None:
    """Start both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    address = f"file://{tempfile.mkdtemp()}/rendezvous"
    mp.spawn(rank_main, (address, given.small, given.out), nprocs=WORLD)
    print("both ranks are right")


if __name__ == "__main__":
    main()
