"""Where a run loses time against the limits it measured itself, the likely cause, the remedy, and what it would give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...measure.opportunity import LEVELS, Opportunity, level
from ..machine_limits import PRODUCTS, Floors
from ..result_file import Results, Row
from ..terminal.size_text import short

NEAR = 1.2  # times the floor: what is nearer is not worth the effort
FASTER = 1.3  # what another dtype's products must be faster by
TILE = 64 * 128  # outputs of one program of a product on a GPU
ERF = "arithmetic between the loads: the error function of GELU"
TANH = "`approximate='tanh'`, which is half the arithmetic, where the model allows it"
EXP, KERNEL = (
    "arithmetic between the loads: exponentials",
    "none in this library yet; the gap is kernel work",
)
# operations that compute more than products and sums: cause, remedy, effort
ARITHMETIC = {
    "gelu": (ERF, TANH, "low"),
    "gelu_linear": (
        "an activation between load and product: tanh for every tile that reads the input",
        "let the product before it end in the GELU: `tensorlogic.linear(..., activation='gelu')`", "medium"),
    "softmax_cross_entropy": (EXP, KERNEL, "high"),
    "attention_scores": (
        f"{EXP}, and two sweeps over every row",
        "`torch.nn.functional.scaled_dot_product_attention`, where only the attended values are needed", "medium"),
    "dropout_linear": (
        "random numbers drawn on the way, for every element",
        "none while training; `training=False` where nothing is to be dropped", "high"),
}  # fmt: skip
PAGEABLE = "transfer of pageable memory"
EPS = {"f16": 4.9e-4, "bf16": 3.9e-3, "f32": 6e-8}  # half the spacing at 1
HEADS = ("priority", "what", "at", "above the floor", "up to", "likely cause", "remedy", "effort")


def found(results: Results) -> list[Opportunity]:
    """All of a run, by priority, then by time: high is a tenth of what the list could save, medium a fiftieth.

    Two lists count apart: what a program can change, and what operations leave to be gained.
    """
    floors = Floors(results)
    if not floors.copy:
        return []
    every: list[Opportunity] = []
    for parts in ((_other_dtype, _launches, _transfers, _batches), (_gaps,)):
        some = [o for part in parts for o in part(results, floors) if o.above_us > 0]
        whole = sum(o.above_us for o in some)
        every += [replace(o, priority=level(o.above_us / whole)) for o in some]
    return sorted(every, key=lambda o: (LEVELS.index(o.priority), -o.above_us))


def obtained(before: Iterable[Opportunity], old: Results, new: Results) -> list[tuple[str, ...]]:
    """What was expected of each opportunity, and how many times faster its rows have become."""
    was, now = ({r.id: r for r in run.timed} for run in (old, new))
    lines: list[tuple[str, ...]] = []
    for o in before:
        both = [i for i in o.rows if i in was and i in now]
        if both:
            gain = sum(was[i].median_us() for i in both) / sum(now[i].median_us() for i in both)
            lines.append((o.what, o.cause, f"up to {o.gain:.2f}x", f"{gain:.2f}x"))
    return lines


def _by(rows: Iterable[Row]) -> dict[tuple[str, str], list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.dtype), []).append(row)
    return groups


def _made(
    what: str,
    saved: Sequence[tuple[Row, float]],
    cause: str,
    remedy: str,
    effort: str,
    clock: str = "device",
) -> Opportunity:
    ordered = sorted(saved, key=lambda pair: -pair[1])
    time = sum(r.median_us(clock=clock) for r, _ in ordered)
    above = sum(us for _, us in ordered)
    sizes = list(dict.fromkeys(short(r.size) for r, _ in ordered))
    shown = "\u00a0".join([*sizes[:3], *(["..."] if len(sizes) > 3 else [])])  # does not wrap
    ids = tuple(r.id for r, _ in ordered)
    gain = time / max(time - above, 1e-9)
    return Opportunity(what, shown, above, gain, cause, remedy, effort, ids)


def _gaps(results: Results, floors: Floors) -> Iterator[Opportunity]:
    """Rows far from their own floor, by operation and dtype."""
    launch = results.ceilings.launch_us.get("tensorlogic", 0.0) if results.kind == "cpu" else 0.0
    for (op, dtype), rows in _by(r for r in results.timed if r.category != "batch").items():
        known = [(r, floor + launch) for r in rows if (floor := floors.us(r)) is not None]
        far = [(r, r.median_us() - us) for r, us in known if r.median_us() > NEAR * us]
        if far:
            worst = max(far, key=lambda pair: pair[1])[0]
            yield _made(f"{op} {dtype}", far, *_cause(worst, results))


def _cause(row: Row, results: Results) -> tuple[str, str, str]:
    """Likely cause, remedy and effort of a row's gap: the first that holds."""
    best, speed = row.best_eager(), row.speed() or (1.0, 1.0, 1.0)
    cpu, alone = results.kind == "cpu", row.candidate.startswith("torch.")
    processors = (results.machine.get("gpu") or {}).get("multiprocessors") or 0
    few = row.category in PRODUCTS and _outputs(row) / TILE < processors
    causes: tuple[tuple[bool, tuple[str, str, str]], ...] = (
        (speed[2] < 0.95, (
            f"PyTorch's `{best}` is {1 / speed[0]:.2f} times as fast",
            "call PyTorch's there, or put more work into one call: ours costs more around the kernel", "low")),
        ("widened" in row.candidate, (
            "conversion: half precision is widened to float32 and back",
            "`tensorlogic.constant(weight)` keeps the widened copy; bfloat16 where the processor has it", "low")),
        (".after_" in row.candidate, (
            "an extra pass over the input before the product",
            "none in this library yet; the pass would have to become part of the product", "high")),
        (alone and row.category == "fusion", (
            "extra passes over memory: no fused kernel won here",
            "`tensorlogic.explain` says why each was refused; a kernel for this shape would have to be written", "high")),
        (few, (
            f"low occupancy: fewer tiles than the {processors} multiprocessors",
            "batch more rows into one call", "medium")),
        (row.op in ARITHMETIC, ARITHMETIC.get(row.op, ("", "", ""))),
        (cpu and row.dtype != "f32" and row.category != "matmul", (
            "conversion: the processor widens every half to float32 and rounds it back",
            "fuse it with what comes before or after, so that it is converted once", "medium")),
        (cpu and alone and row.bytes > 1 << 21, (
            "unpooled allocation: fresh pages for every output", "`tensorlogic.enable(pool=True)`", "low")),
        (True, (
            "waits inside the kernel: its loads, stores and arithmetic do not overlap fully",
            KERNEL, "high")),
    )  # fmt: skip
    return next(found for holds, found in causes if holds)


def _outputs(row: Row) -> float:
    """Elements of a product's output."""
    if row.op == "attention_scores" and row.shapes:
        return math.prod(row.shapes[0][:-1]) * float(row.shapes[1][-2])
    return float(row.shapes[0][0] * row.size) if row.shapes else float(row.size) ** 2


def _other_dtype(results: Results, floors: Floors) -> Iterator[Opportunity]:
    """Products whose dtype has slower units than another one."""
    peaks = {**results.ceilings.gflops, **{d: p for d, p in floors.peak.items() if p}}
    for dtype in dict.fromkeys(r.dtype for r in results.timed):
        own = peaks.get(dtype, 0.0)
        # float32 may go to any half; halves only where the other one has units of its own
        other = max(
            (d for d in peaks if d not in ("f32", dtype)), key=peaks.__getitem__, default=""
        )
        if not own or not other or peaks[other] < FASTER * own:
            continue
        products = [r for r in results.timed if r.dtype == dtype and r.category in PRODUCTS]
        saved = [
            (r, r.median_us() - max(floor, r.flops / peaks[other] / 1e3))
            for r in products
            if r.flops / own / 1e3 > 0.5 * r.median_us()
            and (floor := floors.us(r, other)) is not None
        ]
        if not saved:
            continue
        totals: dict[str, float] = {}
        for row, us in saved:
            totals[row.op] = totals.get(row.op, 0.0) + us
        ops = sorted(totals, key=lambda op: -totals[op])
        remedy = f"{other} tensors, where a relative rounding of {EPS[other]:.0e} is enough"
        if dtype == "f32":
            remedy += "; `tensorlogic.precision('adaptive', rtol=...)` keeps a budget"
        cause = f"arithmetic: {dtype} products run at {own:,.0f} GFLOPS here, {other} at {peaks[other]:,.0f}"
        yield _made(f"products in {dtype}: {', '.join(ops)}", saved, cause, remedy, "low")


def _launches(results: Results, floors: Floors) -> Iterator[Opportunity]:
    """The rule of launches: where they are above half of what a caller waits for, capture or batch."""
    if results.kind == "cuda":
        small = [r for r in results.timed if r.host_us and r.category != "transfer"]
        waits = [(r, r.median_us(clock="host"), r.median_us()) for r in small]
        saved = [(r, host - device) for r, host, device in waits if host > 2 * device]
        remedy, clock = "`tensorlogic.capture(fn)` or `tensorlogic.optimize(model, inputs)`", "host"
    else:
        launch = results.ceilings.launch_us.get("tensorlogic", 0.0)
        small = [r for r in results.timed if r.key and 2 * launch > r.median_us()]
        saved = [(r, min(launch, 0.9 * r.median_us())) for r in small]
        remedy, clock = (
            "more work in one call: batch, or fuse with `tensorlogic.optimize`",
            "device",
        )
    if saved:
        ops = list(dict.fromkeys(r.op for r, _ in saved))
        what = f"calls of small work: {', '.join(ops[:6])}{', ...' if len(ops) > 6 else ''}"
        cause = "launch cost: above half of what a caller waits for"
        yield _made(what, saved, cause, remedy, "low", clock)


def _transfers(results: Results, floors: Floors) -> Iterator[Opportunity]:
    """Pageable beside pinned memory, fresh beside reused."""
    pairs = {
        "to device, pageable": ("to device, pinned", PAGEABLE, "`tensor.pin_memory()`, reused, for what is sent often"),
        "to host, pageable": ("to host, pinned", PAGEABLE, "copy into a pinned tensor that is reused"),
        "clone": ("copy", "unpooled allocation: fresh pages", "`tensorlogic.enable(pool=True)`, or an output that is reused"),
    }  # fmt: skip
    moves = {(r.detail, r.size): r for r in results.timed if r.category == "transfer"}
    for slow, (fast, cause, remedy) in pairs.items():
        saved = [
            (r, r.median_us() - other.median_us())
            for (detail, size), r in moves.items()
            if detail == slow
            and (other := moves.get((fast, size))) is not None
            and r.median_us() > NEAR * other.median_us()
        ]
        if saved:
            yield _made(f"transfer: {slow}", saved, cause, remedy, "low")


def _batches(results: Results, floors: Floors) -> Iterator[Opportunity]:
    """The rule of small concurrent requests: what the measured curve over the batch size gives."""
    for (op, dtype), rows in _by(r for r in results.timed if r.category == "batch").items():
        rows = sorted(rows, key=lambda r: r.size)
        one, many = rows[0], max(rows, key=lambda r: r.size / r.median_us())
        apart = many.size / one.size * one.median_us()  # as many requests, one batch after another
        if apart > 2 * many.median_us():
            waits = many.median_us() / one.median_us()
            yield Opportunity(
                f"many small requests: {op} {dtype}, batch {one.size}",
                short(one.size),
                apart - many.median_us(),
                apart / many.median_us(),
                f"weights are read for every request: batch {many.size} takes {waits:.1f} times as long as {one.size}",
                f"collect requests up to batch {many.size}",
                "medium",
                (one.id, many.id),
            )
