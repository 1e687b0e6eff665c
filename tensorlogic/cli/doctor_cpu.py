"""What PyTorch does badly on this CPU, in measured seconds, and what `tensorlogic.enable()` changes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..core.policy import measuring
from ..cpu_overrides import enable
from ..dispatch.explain import explain
from ..measure import timer
from ..native import cpu_library
from ..native import hook_ops as native_hook_ops

CPU = torch.device("cpu")
Call = Callable[[], object]
WORTH = 1.5  # times faster from which PyTorch's way is called bad
WORSE = 1.03  # times slower from which ours is
GUARD = "enabled, this is slower here: PyTorch serves it, behind a guard that costs this much"
TUNE = "enabled, this is slower here: `tensorlogic.tune(function, *inputs)` under enable() measures it and keeps the faster way"
BUDGET_S = 0.15  # for each pair


@dataclass(frozen=True)
class Compared:
    """One kind of work: seconds a call by PyTorch alone and with what is enabled."""

    work: str
    pytorch_s: float
    enabled_s: float
    remedy: str
    # times slower than PyTorch alone when enabled, at the low end of the 95 % interval
    least: float
    chosen: str = ""  # who serves it when enabled, and by what evidence

    @property
    def state(self) -> str:
        """ "slow": PyTorch alone is; "worse": what is enabled is slower beyond doubt; "even"."""
        slow = self.pytorch_s / self.enabled_s >= WORTH
        return "slow" if slow else "worse" if self.least > WORSE else "even"

    @property
    def cure(self) -> str:
        """What helps."""
        return self.remedy if self.state == "slow" else TUNE if self.chosen else GUARD

    @property
    def text(self) -> str:
        """The times in words."""
        by = f", by {self.chosen}" if self.chosen else ""
        gain = self.pytorch_s / self.enabled_s
        return (
            f"PyTorch {self.pytorch_s:.6f} s, repaired {self.enabled_s:.6f} s: {gain:.2f} times{by}"
        )


def features() -> str:
    """What arithmetic this CPU has, as far as it decides which kernels run."""
    found = [torch.backends.cpu.get_cpu_capability()]
    if cpu_library.available() is None:
        found.append(f"native kernels for {cpu_library.op('features')()}")
    for name in ("bf16", "fp16"):
        probe = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
        has = probe is not None and torch.backends.mkldnn.is_available() and bool(probe())
        found.append(f"{name} products in hardware: {'yes' if has else 'no'}")
    return "; ".join(found)


def compared() -> Iterator[Compared]:
    """Each kind of work, timed; about a second in all. What was enabled before is enabled afterwards."""
    half = "tensorlogic.enable() repairs it; TENSORLOGIC_ENABLE=1 for programs as they are"
    a, b = (torch.randn(384, 384).half() for _ in range(2))
    row, weight = torch.randn(1024).half(), torch.randn(1024, 1024).half()
    x, filters = torch.randn(1, 32, 28, 28).half(), torch.randn(32, 32, 3, 3).half()
    q = torch.randn(1, 4, 128, 64).half()
    works: dict[str, Call] = {
        "float16 product 384x384x384": lambda: a @ b,
        "float16 vector x matrix 1024": lambda: row @ weight,
        "float16 convolution 32 channels": lambda: torch.conv2d(x, filters),
        "float16 attention 4x128x64": lambda: F.scaled_dot_product_attention(q, q, q),
        "bfloat16 product 384x384x384": lambda: a.bfloat16() @ b.bfloat16(),
    }
    was = enable.enabled()
    with measuring(), torch.no_grad():
        enable.enable()
        try:
            for work, call in works.items():
                yield _pair(work, _alone(call), call, half, _chosen(call))
        finally:
            if not was:
                enable.disable()
        if cpu_library.available() is None:
            yield _fresh()


def _fresh() -> Compared:
    """An output of 64 MiB: from PyTorch's allocator, whose pages are new each time, and from the pool."""
    big, add = torch.ones(16 << 20), cpu_library.op("add")
    wide = (
        "or preload tcmalloc"
        if native_hook_ops.available()
        else "tensorlogic.enable(pool=True) for all"
    )
    remedy = f"tensorlogic's own functions take outputs from the pool; {wide}"
    return _pair("a fresh output of 64 MiB", lambda: big + big, lambda: add(big, big), remedy)


def _chosen(call: Call) -> str:
    """The candidate that serves a call while enabled, and where the choice comes from; "" where PyTorch's own does."""
    return "; ".join(f"{e.eager} ({e.source})" for e in explain(call))


def _alone(call: Call) -> Call:
    def run() -> object:
        with native_hook_ops.suspended():
            return call()

    return run


def _pair(work: str, pytorch: Call, ours: Call, remedy: str, chosen: str = "") -> Compared:
    calls: dict[str, list[Call]] = {"pytorch": [pytorch], "ours": [ours]}
    samples = timer.device_samples(calls, CPU, BUDGET_S, rounds=9)
    _, least, _ = samples.ratio("ours", "pytorch")
    alone, repaired = (samples.median(name) / 1e6 for name in calls)
    return Compared(work, alone, repaired, remedy, least, chosen)
