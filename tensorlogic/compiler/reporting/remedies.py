"""What else a program could gain: its own time against what each remedy is known to save, ranked as a report ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ...measure.opportunity import Opportunity, level, time_text

ELEMENTWISE = frozenset(
    f"aten::{n}{s}"
    for n in ("add", "sub", "mul", "div", "relu", "gelu", "silu", "tanh", "sigmoid", "exp", "pow", "neg", "clamp", "where",
              "native_layer_norm", "_softmax", "_log_softmax", "native_batch_norm", "native_dropout")
    for s in ("", "_")
)  # fmt: skip
PRODUCTS = frozenset(
    f"aten::{n}" for n in ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution")
)
HALVES = ("float16", "bfloat16")
PASSES, LAUNCHES = "extra passes over memory", "launch cost"  # what `optimize` is the remedy for
# launches that a product takes at least as long as, to be about arithmetic
WORK = 10
LARGE = 1 << 22  # bytes of an output whose fresh memory counts
NAMED = 60  # characters of the shapes


def opportunities(look: dict[str, Any], seconds: float) -> list[Opportunity]:
    """What a watched run shows; `seconds` is what the plain program takes."""
    seen = sum(s["seconds"] for s in look["spent"])
    # watched calls are waited for, and the first are cold
    shrunk = min(1.0, seconds / max(seen, 1e-12))
    spent = [{**s, "seconds": s["seconds"] * shrunk} for s in look["spent"]]
    found = [
        *_summed(spent),
        *_float32(spent, look),
        *_launches(look, seconds),
        *_fresh(spent, look),
    ]
    shares = [(o.above_us / max(seconds * 1e6, 1e-9), o) for o in found]
    return [
        replace(o, priority=level(share), gain=1 / max(1 - share, 0.05))
        for share, o in sorted(shares, key=lambda pair: -pair[0])
    ]


def split(
    every: list[Opportunity], optimized: bool, captured: bool
) -> tuple[list[Opportunity], list[Opportunity]]:
    """What is left to be done, and what was done already."""
    causes = (PASSES,) * optimized + (LAUNCHES,) * captured
    done = [o for o in every if o.cause.startswith(causes)] if causes else []
    return [o for o in every if o not in done], done


def lines(
    left: list[Opportunity],
    done: list[Opportunity],
    obtained: tuple[float, float, float] | None = None,
) -> list[str]:
    """Opportunities that matter as text, and what was expected of those that were taken beside what came of them."""
    found = []
    shown = [o for o in left if o.priority != "low"]
    for o in shown:
        found += [
            f"  {o.priority:<6}  {o.what} ({o.sizes[:NAMED]}): up to {time_text(o.above_us)}, {o.gain:.2g}x; effort {o.effort}",
            f"          {o.cause}; {o.remedy}",
        ]
    if done and obtained is not None:
        expected = "; ".join(f"{o.cause.partition(':')[0]}, up to {o.gain:.2g}x" for o in done)
        found.append(
            f"  done    expected: {expected}; obtained, with all else that was done: "
            f"{obtained[0]:.2f}x [{obtained[1]:.2f}, {obtained[2]:.2f}]"
        )
    return ["what else could be gained" if shown else "what was gained", *found] if found else []


def _made(what: str, at: str, us: float, cause: str, remedy: str, effort: str) -> Opportunity:
    return Opportunity(what, at, us, 0.0, cause, remedy, effort, ())


# operations -> their opportunity in words, the share of their time that it could save, cause, remedy, effort
SUMMED = (
    ({"aten::_to_copy"}, "conversions", 1.0, "conversion between dtypes or layouts",
     "keep values in one dtype from layer to layer; convert weights once, before the loop", "medium"),
    ({"aten::copy_", "aten::_local_scalar_dense"}, "copies and reads of single values", 1.0,
     "transfer: values are copied, or waited for one by one",
     "copy into pinned memory once a batch; call `.item()` outside the loop", "low"),
    # what a fused pass reads and writes less, at most
    (ELEMENTWISE, "element-wise operations and norms on their own", 0.5, PASSES,
     "`tensorlogic.optimize(model, inputs)`, or the fused functions", "low"),
)  # fmt: skip


def _summed(spent: list[dict[str, Any]]) -> Iterator[Opportunity]:
    for ops, words, share, *rest in SUMMED:
        some = [s for s in spent if s["op"] in ops]
        us, calls = 1e6 * sum(s["seconds"] for s in some), sum(s["calls"] for s in some)
        if calls and us:
            yield _made(f"{calls} {words}", some[0]["shapes"], share * us, *rest)


def _float32(spent: list[dict[str, Any]], look: dict[str, Any]) -> Iterator[Opportunity]:
    least = WORK * look["launch_us"] / 1e6  # below it a call is no faster in halves
    some = [s for s in spent if s["op"] in PRODUCTS and s["dtypes"][:1] == ["float32"]]
    some = [s for s in some if s["seconds"] > least * s["calls"]]
    us = 1e6 * sum(s["seconds"] for s in some)
    if some and look["quick_halves"]:
        yield _made(
            f"{sum(s['calls'] for s in some)} products in float32",
            some[0]["shapes"],
            0.5 * us,
            "arithmetic: this device multiplies halves at twice the rate or more",
            "bfloat16 tensors, or `torch.autocast`, where their rounding is enough",
            "medium",
        )


def _launches(look: dict[str, Any], seconds: float) -> Iterator[Opportunity]:
    us = look["operations"] * look["launch_us"]
    if us > 0.5e6 * seconds:
        yield _made(
            f"{look['operations']} operations in {time_text(1e6 * seconds)}",
            f"{look['launch_us']:.1f} us each",
            0.8 * us,
            f"{LAUNCHES}: above half of the time",
            "`tensorlogic.capture(fn)` on a GPU; larger batches elsewhere",
            "low",
        )


def _fresh(spent: list[dict[str, Any]], look: dict[str, Any]) -> Iterator[Opportunity]:
    if look["environment"]["kind"] != "cpu":
        return
    large = [s for s in spent if s["bytes"] >= LARGE]
    us = sum(s["calls"] * s["bytes"] for s in large) / (1 << 20) * look["fresh"]
    took = 1e6 * sum(s["seconds"] for s in large)
    if large and us:
        yield _made(
            f"{sum(s['calls'] for s in large)} outputs of 4 MiB and more",
            large[0]["shapes"],
            min(us, 0.8 * took),
            "unpooled allocation: fresh pages for every output",
            "`tensorlogic.enable(pool=True)`, or TENSORLOGIC_ENABLE=pool",
            "low",
        )
