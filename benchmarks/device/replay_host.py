"""Host time of replayed calls, step by step: the input's copy and the graph's launch, PyTorch's and the driver's, and what our own
checks add to both. A call that is given the graph's own buffer copies nothing: what it takes is what a call takes beyond copies.

python benchmarks/device/replay_host.py [--out FILE.json]   without a GPU, a graph that does nothing stands for CUDA's
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.cuda_graphs.capture import Captured
from tensorlogic.cuda_graphs.captured_graph import CallTape, Tape
from tensorlogic.cuda_graphs.replay import Replay
from tensorlogic.measure import timer
from tensorlogic.system import hardware

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")


class Idle:
    """A graph that is replayed in no time, so that what is around it is timed."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        pass

    def record(self, fn: Callable[[], Any]) -> Any:
        """What `fn` gives, once."""
        return fn()

    def replay(self) -> None:
        """Nothing."""


def chain(x: Tensor) -> Tensor:
    """50 kernels."""
    for _ in range(50):
        x = x + 1
    return x


def deep() -> nn.Module:
    """36 modules in a row, as a Transformer of 12 layers has."""
    layers = (nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU()) for _ in range(12))
    return nn.Sequential(*layers).to(DEVICE).eval()


def captured(fn: Callable[..., Any], x: Tensor, unsafe_views: bool) -> Callable[[], Any]:
    """A captured call that is replayed by now."""
    call = replayed(fn, x, unsafe_views)
    return lambda: call(x)


def replayed(fn: Callable[..., Any], x: Tensor, unsafe_views: bool) -> Captured:
    """A captured function that is replayed by now."""
    call = tensorlogic.capture(fn, unsafe_views=unsafe_views)
    call.tape = CallTape if CUDA else Idle
    for _ in range(5):
        call(x)
    if call.graphs != 1:
        raise RuntimeError(f"nothing is replayed: {call.reason}")
    return call


def bare_copy(to: Tensor, x: Tensor) -> Callable[[], Any] | None:
    """The driver's copy on the device, by ctypes; None without a GPU."""
    if not CUDA:
        return None
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    places = [ctypes.c_uint64(t.data_ptr()) for t in (to, x)]
    size = ctypes.c_size_t(x.nbytes)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return lambda: copy(*places, size, stream)


def bare_launch(tape: Any) -> Callable[[], Any] | None:
    """The driver's launch of a graph, by ctypes; None where it is not known."""
    if not getattr(tape, "handle", 0):
        return None
    launch = ctypes.CDLL("libcuda.so.1").cuGraphLaunch
    handle = ctypes.c_void_p(tape.handle)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    return lambda: launch(handle, stream)


def optimized(x: Tensor) -> Callable[[], Any] | None:
    """An optimised model's call, replayed; None where nothing paid."""
    fast = tensorlogic.optimize(deep(), x)
    program = fast.__dict__.get("_program")
    program = getattr(program, "program", program)  # of one that Inductor may still beat
    if program is None:
        return None
    if not CUDA:
        program.replay = Replay(program.function.run, [x], DEVICE, tape=Idle)
        program.pointers = program._where()
    for _ in range(3):
        fast(x)
    return lambda: fast(x)


def least(call: Callable[[], Any], budget_s: float = 0.2) -> float:
    """Microseconds a call, queued and not waited for: the least of the rounds, which nothing else disturbed."""
    return min(timer.host_samples({"call": [call]}, DEVICE, budget_s, 15).values["call"])


@torch.no_grad()
def table() -> dict[str, float]:
    """Microseconds of host time by what was called."""
    x = torch.randn(8, 64, device=DEVICE)
    buffer = torch.empty_like(x)
    rows = {"copy of the input": least(lambda: buffer.copy_(x)), "clone": least(x.clone)}
    copy = bare_copy(buffer, x)
    if copy is not None:
        rows["copy, the driver's alone"] = least(copy)
    bare = (Tape if CUDA else Idle)(DEVICE, None)
    for _ in range(3):
        chain(buffer)
    bare.record(lambda: chain(buffer))
    bare.replay()  # the first one looks
    rows["launch of 50 kernels"] = least(bare.replay)
    launch = bare_launch(bare)
    if launch is not None:
        rows["launch, the driver's alone"] = least(launch)
    views = replayed(chain, x, True)
    own = views.replays()[0].static[0]
    rows["captured, 50 kernels, views"] = least(lambda: views(x))
    rows["the same, nothing to copy"] = least(lambda: views(own))
    rows["captured, 50 kernels"] = least(captured(chain, x, False))
    rows["captured module"] = least(captured(deep(), x, False))
    call = optimized(x)
    if call is not None:
        rows["optimized module"] = least(call)
    rows["copy of the input, ours"] = (
        rows["captured, 50 kernels, views"] - rows["the same, nothing to copy"]
    )
    rows["beyond PyTorch's copy"] = rows["captured, 50 kernels, views"] - rows["copy of the input"]
    rows["beyond the copy"] = rows["the same, nothing to copy"]
    if launch is not None:
        rows["beyond copy and launch"] = (
            rows["beyond the copy"] - rows["launch, the driver's alone"]
        )
    return rows


def versions() -> dict[str, str]:
    """What a figure was measured with, and when."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "driver": hardware.gpu_driver() if CUDA else "",
        "date": datetime.date.today().isoformat(),
    }


def main() -> None:
    """Print the table; write it where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    rows = table()
    for name, us in rows.items():
        print(f"{name:28s} {us:7.2f} us")
    if chosen.out:
        name = torch.cuda.get_device_name() if CUDA else "cpu, no graph launched"
        whole = {"device": name, **versions(), "us": rows}
        chosen.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
