"""How fast this machine's sides compute and how fast its links move bytes, timed once a process."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch

from ..measure import isolation as measure_isolation
from ..measure import timer
from ..memory import pinned_buffers, transfer
from ..plans import open_stores

# seconds and bytes a second of a transfer, until some were timed
LINK = (20e-6, 12e9)
PROBED = (1 << 12, 1 << 25)  # bytes of the transfers that a link is timed by
SIDES = {"cpu": 768, "cuda": 2048}  # of the products that tell how fast either side computes
SHARE = 0.05  # of the time that timing a side again may take
_SPEED: dict[torch.device, float] = {}
# when one is timed again, in what share of the time
_NEXT: dict[torch.device, tuple[float, float]] = {}


@dataclass
class Link:
    """Transfers of this process to and from one device: seconds and bytes."""

    latency: float = LINK[0]
    bandwidth: float = LINK[1]
    timed: bool = field(default=False)

    def seconds(self, nbytes: int) -> float:
        """Expected time to move so many bytes."""
        return 0.0 if nbytes == 0 else self.latency + nbytes / self.bandwidth


_LINKS: dict[torch.device, Link] = {}


def link(device: torch.device) -> Link:
    """The link to a device, timed once: small and large transfers to and fro, of memory that was written to and lies in no cache."""
    its = _LINKS.setdefault(device, Link())
    if not its.timed:
        taken = []
        with measure_isolation.preserved(torch.device("cpu")):
            memory = torch.empty(5 * PROBED[1], dtype=torch.uint8, device="cpu")
            # By this thread: PyTorch's would go on spinning beside those that copy.
            memory.numpy()[:: pinned_buffers.PAGE] = 1
            for nbytes in PROBED:
                seconds = []
                for part in memory.split(PROBED[1]):
                    timer.synchronize(device)
                    begin = time.perf_counter()
                    transfer.to(transfer.to(part[:nbytes], device), "cpu")
                    seconds.append((time.perf_counter() - begin) / 2)
                taken.append(sorted(seconds[1:])[len(seconds) // 2])
        its.latency = taken[0]
        its.bandwidth = (PROBED[1] - PROBED[0]) / max(taken[1] - taken[0], 1e-6)
        its.timed = True
    return its


def speed(place: torch.device) -> float:
    """Operations a second of a product of float32 matrices there, timed now and then, or what calls have shown to be more."""
    time_again(place)
    return _SPEED[place]


def time_again(place: torch.device) -> None:
    """Time such a product, at first and ever less often; others may have had a core, so the least of all times counts."""
    begin, (next_, share) = time.perf_counter(), _NEXT.get(place, (-math.inf, SHARE))
    if begin < next_:
        return
    side, seconds = SIDES[place.type], []
    plain = torch.autocast(place.type, enabled=False)
    with measure_isolation.preserved(place), torch.no_grad(), plain:
        x = torch.ones(side, side, dtype=torch.float32, device=place)
        for _ in range(6):
            timer.synchronize(place)
            start = time.perf_counter()
            torch.mm(x, x)
            timer.synchronize(place)
            seconds.append(time.perf_counter() - start)
    shown(place, 2.0 * side**3 / min(seconds))
    end = time.perf_counter()
    _NEXT[place] = end + (end - begin) / share, share / 2


def shown(place: torch.device, speed: float) -> None:
    """Something ran as fast as that there."""
    _SPEED[place] = max(_SPEED.get(place, 0.0), speed)


def forget() -> None:
    """Time everything anew, as a fresh process would."""
    _LINKS.clear()
    _SPEED.clear()
    _NEXT.clear()


open_stores.ON_FORGET.append(forget)
