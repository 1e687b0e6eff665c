"""Inputs or outputs of more than 2**31 elements through every family of GPU kernels, forward and backward, each candidate forced;
exits 1 if one is wrong.

python benchmarks/device/huge.py [--only TEXT]

Memory for the output is poisoned with NaN before; afterwards none may be left in it, and rows at both ends and around element 2**31
are compared with PyTorch's own on those rows in float64. Needs about 50 GB.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.bench import measure_case
from tensorlogic.core import policy
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.dispatch import selector as dispatch_selector

MANY = 2**31
ROWS, COLUMNS = 65600, 32800  # more than that
LINES, LONG = 3, 800_000_000  # likewise, of few lines
DEVICE = torch.device("cuda")
OURS = ("triton.", "cublaslt.")
NEAR = 8e-2  # what an element of the size of 1 may be off by, beside its own rounding
ROUNDING = 2**-10


@dataclass(frozen=True)
class Case:
    """A call, its arguments, and what some rows of its output must be: `want(rows)` in float64; no rows where it is a scalar."""

    name: str
    call: Callable[..., Tensor]
    args: tuple[Any, ...]
    want: Callable[[slice], Tensor]
    rows: int = 0
    near: float = NEAR


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    """Normal float16 values; drawn a part at a time."""
    out = torch.empty(shape, dtype=torch.float16, device=DEVICE)
    for part in out.view(-1).split(1 << 28):
        part.normal_(0, scale)
    return out


def wide(t: Tensor, at: slice) -> Tensor:
    """These rows in float64."""
    return t[at].double()


def cases() -> Iterator[Callable[[], Case]]:
    """Makers of cases, so that one's memory is free before the next."""
    t = tensorlogic

    def flat() -> Case:
        a, b = normal(MANY + 4104), normal(MANY + 4104)
        return Case(
            "add_relu", t.add_relu, (a, b), lambda at: (wide(a, at) + wide(b, at)).relu(), len(a)
        )

    def odd() -> Case:
        a = normal(MANY + 4099)
        return Case("gelu, odd", t.gelu, (a,), lambda at: F.gelu(wide(a, at)), len(a))

    def by_row() -> Case:
        a, b = normal(65600, 32800), normal(32800)
        return Case(
            "mul_relu of a row",
            t.mul_relu,
            (a, b),
            lambda at: (wide(a, at) * b.double()).relu(),
            len(a),
        )

    def total() -> Case:
        a = normal(MANY + 4104, scale=0.1)
        return Case(
            "sum", t.sum, (a,), lambda at: sum(p.double().sum() for p in a.split(1 << 28)), 0, 2e-2
        )

    def largest() -> Case:
        a = normal(MANY + 4104)
        a[-1] = 60000
        return Case("max", t.max, (a,), lambda at: a[-1].double())

    def of_rows() -> Case:
        a = normal(65600, 32800)
        return Case(
            "sum of rows", lambda a: t.sum(a, 1), (a,), lambda at: wide(a, at).sum(1), len(a), 0.2
        )

    def of_columns() -> Case:
        a = normal(65600, 32800)
        return Case("mean of columns", lambda a: t.mean(a, 0), (a,), lambda at: sum(p[:, at].double().sum(0) for p in a.split(8192)) / 65600, 32800, 4e-5)  # fmt: skip

    def of_narrow_columns() -> Case:
        a = normal(MANY // 17 + 300, 17)
        return Case("mean of narrow columns", lambda a: t.mean(a, 0), (a,), lambda at: sum(p[:, at].double().sum(0) for p in a.split(1 << 24)) / len(a), 17, 2e-6)  # fmt: skip

    def softmax() -> Case:
        a = normal(65600, 32800)
        return Case(
            "softmax",
            lambda a: t.softmax(a, -1),
            (a,),
            lambda at: wide(a, at).softmax(-1),
            len(a),
            2e-6,
        )

    def loss() -> Case:
        a = normal(65600, 32800)
        target = torch.randint(32800, (65600,), device=DEVICE)
        return Case("cross-entropy", t.softmax_cross_entropy, (a, target), lambda at: sum(F.cross_entropy(p.double(), q, reduction="sum") for p, q in zip(a.split(4096), target.split(4096), strict=True)) / 65600)  # fmt: skip

    def long_x() -> Case:
        x, w, b = normal(270000, 8000), normal(64, 8000, scale=8000**-0.5), normal(64)
        return Case("linear, long x", lambda *a: t.linear(*a, activation="relu"), (x, w, b), lambda at: F.linear(wide(x, at), w.double(), b.double()).relu(), len(x))  # fmt: skip

    def few_lines() -> Case:
        a = normal(LINES, LONG, scale=16.0)  # so that some of what comes out is not 0
        return Case(
            "softmax of few lines",
            lambda a: t.softmax(a, -1),
            (a,),
            lambda at: wide(a, at).softmax(-1),
            len(a),
            1e-6,
        )

    def wide_y(n: int) -> Case:
        x, w, b = normal(70000, 64), normal(n, 64, scale=0.125), normal(n)
        return Case(f"linear, wide y of {n}", lambda *a: t.linear(*a, activation="gelu"), (x, w, b), lambda at: F.gelu(F.linear(wide(x, at), w.double(), b.double())), len(x))  # fmt: skip

    def residual(n: int) -> Case:
        x, w, b, r = normal(70000, 64), normal(n, 64, scale=0.125), normal(n), normal(70000, n)
        return Case(f"linear_residual_relu of {n}", t.linear_residual_relu, (x, w, b, r), lambda at: (F.linear(wide(x, at), w.double(), b.double()) + wide(r, at)).relu(), len(x))  # fmt: skip

    def product() -> Case:
        a, b = normal(70016, 128), normal(128, 32768, scale=128**-0.5)
        return Case("matmul", t.matmul, (a, b), lambda at: wide(a, at) @ b.double(), len(a))

    def normed() -> Case:
        x, g, h, w = normal(270000, 8000), normal(8000), normal(8000), normal(64, 8000, scale=8000**-0.5)  # fmt: skip
        return Case("layer_norm_linear", t.layer_norm_linear, (x, g, h, w, None), lambda at: F.linear(F.layer_norm(wide(x, at), (8000,), g.double(), h.double()), w.double()), len(x))  # fmt: skip

    def gelu_first() -> Case:
        x, w, b = normal(270000, 8000), normal(64, 8000, scale=8000**-0.5), normal(64)
        return Case("gelu_linear", t.gelu_linear, (x, w, b), lambda at: F.linear(F.gelu(wide(x, at), approximate="tanh"), w.double(), b.double()), len(x))  # fmt: skip

    def scores(s: int, columns: int, heads: int) -> Case:
        q, k = normal(1, heads, s, 64), normal(1, heads, columns, 64)
        call = lambda q, k: t.attention_scores(q, k, 0.125).view(-1, columns)  # noqa: E731

        def want(at: slice) -> Tensor:
            first, last = at.start // s, (at.stop - 1) // s
            parts = (
                wide(q[0, h], slice(None)) @ k[0, h].double().T for h in range(first, last + 1)
            )
            both = torch.cat([(p * 0.125).softmax(-1) for p in parts])
            return both[at.start - first * s : at.stop - first * s]

        return Case(f"attention scores {s} x {columns}", call, (q, k), want, heads * s, 1e-4)

    yield from (flat, odd, by_row, total, largest, of_rows, of_columns, of_narrow_columns, softmax, few_lines, loss, long_x, product, normed, gelu_first)  # fmt: skip
    for n in (32000, 32001):
        yield lambda n=n: wide_y(n)
        yield lambda n=n: residual(n)
    yield lambda: scores(2048, 2048, 520)
    yield lambda: scores(1024, 384, 5520)


@dataclass(frozen=True)
class Gradient:
    """A backward op, all its arguments, and which of its outputs is a gradient whose rows are those of the arguments with rows."""

    name: str
    op: str
    args: tuple[Any, ...]
    output: int
    rows: int
    near: float

    def want(self, at: slice) -> Tensor:
        """The reference's, of these rows in float64."""
        op, part = OPS[self.op], []
        for a in self.args:
            whole = isinstance(a, Tensor) and a.dim() > 0 and len(a) == self.rows
            part.append(a[at] if whole else a)
        part = [p.double() if isinstance(p, Tensor) and p.is_floating_point() else p for p in part]
        found = op.reference(*part)[self.output]
        assert found is not None
        return found


def gradients() -> Iterator[Callable[[], Gradient]]:
    """Makers of backward cases; gradients are scaled so that float16 holds them."""

    def flat() -> Gradient:
        dy, a = normal(MANY + 4104), normal(MANY + 4104)
        args = (dy, a, None, None, None, "gelu", "100")
        return Gradient("gelu backward", "pointwise_backward", args, 0, len(a), NEAR)

    def marked(output: int) -> Gradient:
        dy, a = normal(MANY + 4104), normal(MANY + 4104)
        name = f"relu and its gradient, {('output', 'gradient')[output]}"
        return Gradient(name, "pointwise_together", (dy, a, None, "relu"), output, len(a), NEAR)

    def softmax() -> Gradient:
        dy, y = normal(ROWS, COLUMNS, scale=1e3), normal(ROWS, COLUMNS)
        for part in y.split(4096):
            part.copy_(part.softmax(-1))
        return Gradient("softmax backward", "softmax_backward", (dy, y, 1), 0, ROWS, 1e-3)

    def few_lines() -> Gradient:
        dy, y = normal(LINES, LONG, scale=1e3), normal(LINES, LONG, scale=16.0)
        for line in y:
            line.copy_(line.softmax(-1))
        return Gradient(
            "softmax of few lines backward", "softmax_backward", (dy, y, 1), 0, LINES, 1e-2
        )

    def logits() -> tuple[Tensor, Tensor, Tensor]:
        up = torch.full((), 1024.0, dtype=torch.float16, device=DEVICE)
        return up, normal(ROWS, COLUMNS), torch.randint(COLUMNS, (ROWS,), device=DEVICE)

    def loss() -> Gradient:
        up, a, target = logits()
        lse = torch.cat([p.float().logsumexp(-1) for p in a.split(4096)])
        kept = (lse, torch.ones(1, device=DEVICE))
        args = (up, a, target, *kept, -100, 0.0, "sum")
        name = "cross-entropy backward"
        return Gradient(name, "softmax_cross_entropy_backward", args, 0, ROWS, 1e-3)

    def together() -> Gradient:
        args = (*logits(), -100, 0.0, "sum")
        name = "cross-entropy with gradient"
        return Gradient(name, "softmax_cross_entropy_together", args, 1, ROWS, 1e-3)

    yield from (flat, partial(marked, 0), partial(marked, 1), softmax, few_lines, loss, together)


def backward(case: Gradient) -> Iterator[tuple[str, Any, str | None]]:
    """Every candidate of ours that serves it, its configuration, and what is wrong."""
    op = OPS[case.op]
    key = op.key(case.args, "backward")
    given = [a for p, a in zip(op.params, case.args, strict=True) if p.is_dynamic]
    for id, candidate in op.candidates.items():
        if not id.startswith(OURS) or candidate.unfit(key) is not None:
            continue
        config = candidate.configs(key)[0]
        launch = candidate.bind(key, config, DEVICE)
        like = case.args[1]
        torch.full(like.shape, float("nan"), dtype=torch.float16, device=DEVICE)
        made = launch(*given)[case.output]
        assert made is not None
        yield id, config, wrong(case, made)


def wrong(case: Case | Gradient, out: Tensor) -> str | None:
    """Why an output is, or None."""
    if not case.rows:
        want, got = case.want(slice(0, 1)), out.double()
        off = float((got - want).abs() / want.abs().clamp_min(1))
        return None if off < case.near else f"{float(got)}, {float(want)} wanted"
    if any(bool(part.isnan().any()) for part in out.view(-1).split(1 << 28)):
        return "not all of it was written"
    width = out.numel() // case.rows
    step = max(1, min(case.rows, (1 << 20) // width))
    edge = min(case.rows - step, max(0, MANY // max(width, 1) - step // 2))
    for start in (0, edge, case.rows - step):
        at = slice(start, start + step)
        want = case.want(at).view(step, -1)
        error = (out.view(case.rows, -1)[at].double() - want).abs()
        off = float((error - want.abs() * ROUNDING).max())
        if not off <= case.near:
            return f"rows from {start} off by {off:.3g}"
    return None


@torch.no_grad()
def main() -> int:
    """Every case by every candidate of ours that serves it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="")
    only, begin, bad, done = parser.parse_args().only, time.monotonic(), 0, 0
    candidate_loading.ready(DEVICE.type)
    for make in cases():
        case = make()
        if only not in case.name:
            continue
        with tensorlogic.policy(tune="off"):
            op, key, _ = measure_case.meet(case.call, case.args)[0]
        for id in [id for id in op.candidates if id.startswith(OURS)]:
            with tensorlogic.policy(force=id, tune="off"):
                decision = dispatch_selector.decide(op, key, DEVICE, policy.current())
                if decision.source != "forced":
                    continue
                shape = case.call(*case.args).shape
                torch.full(
                    shape, float("nan"), dtype=torch.float16, device=DEVICE
                )  # freed at once: the next output lies there
                reason = wrong(case, case.call(*case.args))
            done, bad = done + 1, bad + (reason is not None)
            print(
                f"{'WRONG' if reason else 'right'} {case.name} {id} {dict(decision.eager[1])} {reason or ''}",
                flush=True,
            )
        del case
        torch.cuda.empty_cache()
    for build in gradients():
        gradient = build()
        if only in gradient.name:
            for id, config, reason in backward(gradient):
                done, bad = done + 1, bad + (reason is not None)
                print(
                    f"{'WRONG' if reason else 'right'} {gradient.name} {id} {dict(config)} {reason or ''}",
                    flush=True,
                )
        del gradient
        torch.cuda.empty_cache()
    print(
        f"{done} checks, {bad} wrong, {time.monotonic() - begin:.0f} s, {torch.cuda.get_device_name()}"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
