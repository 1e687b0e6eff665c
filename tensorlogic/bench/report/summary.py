"""What a run says in a few lines: limits, how near the operations come to them, where fusion wins and where it loses."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from .. import machine_limits
from ..machine_info import clocks
from ..result_file import Results, Row
from ..terminal.size_text import short

OTHERS = 0.1  # of the processors that other programs may take unmentioned
# upper over lower quartile of a row that something else disturbed
UNSTEADY = 2.0


def standing(rows: Iterable[Row], clock: str = "device") -> dict[str, list[Row]]:
    """Rows that win, are even and lose, by the 95 % interval of their speed over PyTorch's best."""
    found: dict[str, list[Row]] = {"wins": [], "even": [], "loses": []}
    for row in rows:
        speed = row.speed(clock=clock)
        if speed is not None:
            found["wins" if speed[1] > 1 else "loses" if speed[2] < 1 else "even"].append(row)
    return found


def geomean(values: Iterable[float]) -> float | None:
    """Geometric mean, None of nothing."""
    given = [v for v in values if v > 0]
    return statistics.geometric_mean(given) if given else None


def lines(results: Results) -> list[str]:
    """The summary, one fact a line."""
    return [*limits(results), *findings(results, wins=True), *caveats(results)]


def findings(results: Results, wins: bool = False) -> list[str]:
    """How near the operations come to the limits, what loses, and what could not be timed."""
    not_timed = [f"not timed: {r.id}: {r.reason}" for r in results.rows if r.status != "ok"]
    return [*shares(results), *losses(results, wins), *not_timed]


def losses(results: Results, wins: bool = False) -> list[str]:
    """What loses against PyTorch, and out of how many; of the fused rows what wins, too, if asked."""
    found, fused = [], [r for r in results.timed if r.category == "fusion"]
    known = clocks(results)
    named = {c: f"{c} time" if len(known) > 1 else "time" for c in known}
    for clock, time in named.items():
        literal = geomean(s[0] for r in fused if (s := r.speed("separate", clock)) is not None)
        best = geomean(s[0] for r in fused if (s := r.speed(clock=clock)) is not None)
        stand = standing(fused, clock)
        if literal is not None and best is not None:
            counts = ", ".join(f"{name} {len(some)}" for name, some in stand.items())
            found.append(
                f"fusion, {time}: {literal:.2f}x the separate operations, {best:.2f}x PyTorch's best; "
                f"{counts} of {sum(map(len, stand.values()))}"
            )
            for name in ("wins", "loses") if wins else ("loses",):
                found += [f"  {name}: {_named(stand[name], clock)}"] if stand[name] else []
    for clock, time in named.items():
        lost = standing((r for r in results.timed if r.category != "fusion"), clock)["loses"]
        if lost:
            found.append(f"other losses against PyTorch, {time}: {_named(lost, clock)}")
    return found


def limits(results: Results) -> list[str]:
    """What the run found this machine to reach, one limit a line."""
    found, rows = [], results.timed
    for dtype in dict.fromkeys(
        [*results.ceilings.gflops, *(r.dtype for r in rows if r.category == "matmul")]
    ):
        peak = machine_limits.peak_gflops(results.ceilings, rows, dtype)
        products = [r for r in rows if r.dtype == dtype and r.category in ("matmul", "fusion")]
        best = max(products, key=lambda r: r.gflops, default=None)
        reached = f"; best row {best.gflops:,.0f} ({best.op} {short(best.size)})" if best else ""
        found.append(f"peak compute {dtype}: {peak:,.0f} GFLOPS{reached}")
    if results.ceilings.copy:
        rates = {size: size / us / 1e3 for size, us in results.ceilings.copy}
        largest, fastest = max(rates), max(rates, key=lambda size: rates[size])
        more = f"; {rates[fastest]:,.1f} at {fastest / 2**20:.3g} MiB, in caches"
        more = "" if largest == fastest else more
        found.append(
            f"peak bandwidth: copy {rates[largest]:,.1f} GB/s (read and written, {largest / 2**20:.0f} MiB){more}"
        )
    if results.ceilings.launch_us:
        names = {"torch": "PyTorch", "tensorlogic": "ours", "device": "on the device"}
        found.append(
            "launch cost (add of one element): "
            + ", ".join(f"{names[n]} {us:.2f} us" for n, us in results.ceilings.launch_us.items())
        )
    return found


def shares(results: Results) -> list[str]:
    """How near the categories come to the limits."""
    parts, floors = [], machine_limits.Floors(results)
    for category in dict.fromkeys(r.category for r in results.timed):
        some = [r for r in results.timed if r.category == category]
        shares = [s for r in some if (s := floors.share(r)) is not None]
        mean = geomean(shares)
        if mean is not None:
            parts.append(f"{category} {mean:.0%} ({min(shares):.0%} to {max(shares):.0%})")
    head = "share of the limit measured in this run (geometric mean): "
    return [head + ", ".join(parts)] if parts else []


def _named(rows: list[Row], clock: str) -> str:
    """By operation, with the sizes and speeds."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        speed = row.speed(clock=clock)
        assert speed is not None
        groups.setdefault(f"{row.op} {row.dtype}", []).append(f"{short(row.size)} {speed[0]:.2f}x")
    return "; ".join(f"{name} ({', '.join(sizes)})" for name, sizes in groups.items())


def caveats(results: Results) -> list[str]:
    """Why the run is not what it should be: interrupted, or on a busy machine."""
    found = [] if results.complete else ["this run is not complete: it was interrupted"]
    others = results.run.get("others")
    if results.run.get("busy") and (others is None or others > OTHERS):  # a load is of minutes ago
        found.append(f"note: {results.run['busy']}")
    if (others or 0.0) > OTHERS:
        found.append(
            f"note: other programs took {results.run['others']:.0%} of the processors while this one measured: "
            "times are those of a shared machine"
        )
    if results.run.get("throttled"):
        found.append(f"note: {results.run['throttled']}")
    times = [sorted(r.samples().values[r.subject]) for r in results.timed]
    unsteady = [t for t in times if t[len(t) * 3 // 4] > UNSTEADY * t[len(t) // 4]]
    if len(unsteady) > max(2, len(results.timed) // 10):
        found.append(
            f"note: the times of {len(unsteady)} of {len(results.timed)} rows vary more than twofold "
            "within the row: something else was running; measure again on a quiet machine"
        )
    return found
