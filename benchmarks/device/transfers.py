"""Transfers of ordinary memory by numbers of threads, sizes of chunks and of what a thread copies at a time, and kinds of stores.

python benchmarks/device/transfers.py [--seconds 30] [--json FILE]

GB/s, (median, best) of several, each transfer waited for, beside PyTorch's, copies of pinned memory and of the host alone. The rule that
stands is run first and last: what tensorlogic/memory/transfer_tuning.py has timed and chosen by itself.
Without a GPU only the host's part is run: all that a transfer does but moving, so that no more can be had.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from tensorlogic.memory import pinned_buffers, transfer, transfer_tuning
from tensorlogic.memory.transfer_tuning import Rule, Stores
from tensorlogic.native import cpu_library

MIB = 1 << 20
SIZES = tuple(n * MIB for n in (4, 16, 64, 256))
WALKED = 512 * MIB  # bytes that transfers to the GPU walk through
WORKERS = (1, 4, 7, 10, 13, 15)
DEVICE = torch.device("cuda", 0)
RULE = ("RINGS", "UNIT", "PATIENCE", "CHUNKS")  # of pinned_buffers.py
USUAL = {name: getattr(pinned_buffers, name) for name in RULE}


def rate(call: Callable[[], Any], nbytes: int) -> tuple[float, float]:
    """(median, best) GB/s of a call that is waited for."""
    taken = []
    for _ in range(4 + min(8, 128 * MIB // nbytes)):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    taken = taken[1:]
    return round(nbytes / statistics.median(taken) / 1e9, 1), round(nbytes / min(taken) / 1e9, 1)


def idle() -> int:
    """The address of a function that returns 0, whatever it is given: a copy engine that takes no time."""
    found = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value
    assert found
    return found


def host_alone(nbytes: int, rule: Rule, up: bool) -> float:
    """GB/s of what the native library's threads do of a transfer, best of several."""
    host = torch.zeros(nbytes, dtype=torch.uint8)
    ring = torch.zeros(pinned_buffers.RINGS[up], dtype=torch.uint8)
    handles = list(range(1, pinned_buffers.EVENTS + 1))
    number = cpu_library.op("staging_open")(ring, handles, [idle()] * 4, 0)
    fixed = (
        *pinned_buffers.CHUNKS,
        pinned_buffers.UNIT,
        rule.workers,
        pinned_buffers.PATIENCE,
        up,
        rule.stores,
        0,
    )
    taken = []
    for _ in range(6):
        begin = time.perf_counter()
        cpu_library.op("staged_copy")(number, host.data_ptr(), 0, nbytes, *fixed)
        taken.append(time.perf_counter() - begin)
    return round(nbytes / min(taken) / 1e9, 1)


def hosts() -> Iterator[dict[str, Any]]:
    """The host's part by threads, stores and direction."""
    for nbytes, stores, up in itertools.product((16 * MIB, 64 * MIB), Stores, (True, False)):
        counts = [w for w in WORKERS if w <= (os.cpu_count() or 1)]
        rates = {w: host_alone(nbytes, Rule(w, stores), up) for w in counts}
        yield {"host alone": f"{nbytes // MIB} MiB", "up": up, "stores": stores.name, **rates}


def plain(host: Tensor, there: Tensor) -> dict[str, Any]:
    """What PyTorch does, what pinned memory allows, at once and by chunks, and copies of the host alone."""
    n, pinned, other = host.nbytes, host.pin_memory(), torch.empty_like(host)
    found = {
        "up PyTorch": rate(lambda: host.to(DEVICE), n),
        "down PyTorch": rate(lambda: there.cpu(), n),
        "up pinned": rate(lambda: there.copy_(pinned, non_blocking=True), n),
        "down pinned": rate(lambda: pinned.copy_(there, non_blocking=True), n),
        "host copy": rate(lambda: other.copy_(host), n),
    }
    for chunk in (MIB // 2, MIB, 2 * MIB):
        pairs = list(zip(there.view(-1).split(chunk // 4), pinned.view(-1).split(chunk // 4), strict=True))  # fmt: skip

        def up(pairs: Any = pairs) -> None:
            for to, of in pairs:
                to.copy_(of, non_blocking=True)

        def down(pairs: Any = pairs) -> None:
            for of, to in pairs:
                to.copy_(of, non_blocking=True)

        found[f"pinned by {chunk // 1024} KiB"] = (rate(up, n), rate(down, n))
    return found


def both_ways(walk: Iterator[Tensor], there: Tensor) -> tuple[tuple[float, float], ...]:
    """Up and down by `staging.to`; up from memory that does not lie in caches."""
    n = there.nbytes
    return rate(lambda: transfer.to(next(walk), DEVICE), n), rate(
        lambda: transfer.to(there, "cpu"), n
    )


def aside(walk: Iterator[Tensor], there: Tensor) -> dict[str, float]:
    """Microseconds until a transfer returns, and from then on until the engine is done: in one call of C, and by Python."""
    ways: dict[str, Callable[[Tensor, torch.device], Any]] = {
        "": transfer.to,
        " by Python": lambda t, place: transfer._staged(t, place, t.dtype, False),
    }
    found = {}
    for up, (name, way) in itertools.product((True, False), ways.items()):
        assert pinned_buffers.stager(0, up).left <= 0  # else it may time its rules in the midst
        outer, last = [], []
        for _ in range(30):
            given, place = (next(walk), DEVICE) if up else (there, torch.device("cpu"))
            torch.cuda.synchronize()
            begin = time.perf_counter()
            way(given, place)
            outer.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
            last.append(time.perf_counter() - begin - outer[-1])
        for part, values in (("returned", outer), ("wait", last)):
            found[f"{'up' if up else 'down'} {part}{name}"] = round(statistics.median(values) * 1e6, 1)  # fmt: skip
    return found


def rules() -> Iterator[dict[str, Any]]:
    """What is tried: constants of pinned_buffers.py that differ, and of the rules that it times; {} is what it has found for itself."""
    yield {}
    for stores, workers in itertools.product(Stores, (7, 10, 13, 15)):
        yield {"workers": workers, "stores": stores}
    for name, values in (
        ("PATIENCE", (0,)),
        ("UNIT", (MIB // 16, MIB // 4)),
        ("CHUNKS", ((MIB // 8, 4 * MIB), (MIB // 2, 4 * MIB), (MIB // 4, 2 * MIB), (MIB // 4, 8 * MIB))),
        ("RINGS", ((24 * MIB, 24 * MIB), (48 * MIB, 48 * MIB), (96 * MIB, 8 * MIB))),
    ):  # fmt: skip
        for value in values:
            yield {name: value}
    yield {}


def follow(rule: dict[str, Any], found: dict[bool, transfer_tuning.Rules]) -> None:
    """Have transfers follow a rule; `found` is what was timed for either direction."""
    wanted = {**USUAL, **rule}
    own = {name: wanted.pop(name) for name in ("workers", "stores") if name in wanted}
    if wanted["RINGS"] != pinned_buffers.RINGS:
        pinned_buffers._STAGERS.clear()
    transfer._QUICK.clear()  # of what it was before
    for name, value in wanted.items():
        setattr(pinned_buffers, name, value)
    for up in (True, False):
        mover = pinned_buffers.stager(0, up)
        one, two, three = found[up]
        mover.rules = (replace(one, **own), replace(two, **own), replace(three, **own))
        mover.left = 0


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    end = time.perf_counter() + given.seconds
    about = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}  # fmt: skip
    found: dict[str, Any] = {**about, "native": cpu_library.available() is None, "rows": []}

    def keep(row: dict[str, Any]) -> None:
        found["rows"].append(row)
        sys.stdout.write(f"{row}\n")
        sys.stdout.flush()
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    keep(about)
    for row in hosts():
        keep(row)
    if not torch.cuda.is_available():
        return 0
    memory = torch.randint(0, 256, (WALKED // 4,), dtype=torch.int32).view(torch.float32)
    pairs = [(itertools.cycle(memory.split(n // 4)), memory[: n // 4].to(DEVICE)) for n in SIZES]
    for up in (True, False):
        mover = pinned_buffers.stager(0, up)
        mover.left, begin = 0, time.perf_counter()
        mover._settle()
        keep({"found": "up" if up else "down", "rules": str(mover.rules), "seconds": round(time.perf_counter() - begin, 3)})  # fmt: skip
    for walk, there in pairs:
        host = next(walk)
        for _ in range(2):  # by Python, and in one call of C
            assert torch.equal(transfer.to(transfer.to(host, DEVICE), "cpu"), host)
        keep({"bytes": host.nbytes, **plain(host, there), **aside(walk, there)})
    found_rules = {up: pinned_buffers.stager(0, up).rules for up in (True, False)}
    for rule in rules():
        if rule and time.perf_counter() > end - 1:
            continue
        follow(rule, found_rules)
        row = {"rule": rule}
        for walk, there in pairs:
            row[f"{there.nbytes // MIB} MiB"] = both_ways(walk, there)
        keep(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
