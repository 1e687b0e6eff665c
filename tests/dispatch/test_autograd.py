"""Gradients in every context PyTorch has: partial, strided, twice, transformed, checkpointed, lowered, compiled, exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER, Candidate
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op

from ..support.helpers import PUBLIC, TABLE, TWICE, Call, close, leaves, runnable

VARIANTS = {  # names of the table that are not an op's
    "matmul_gelu": "matmul",
    "linear_residual_relu": "linear",
    "linear_silu": "linear",
    "linear_batch_norm_relu_eval": "linear_batch_norm_relu",
}


def op_of(name: str) -> Op:
    return OPS[VARIANTS.get(name, name)]


def others(name: str) -> list[str]:
    """Candidates besides torch.eager that admit the recorded call of this case."""
    op, given, found = op_of(name), leaves(name), []

    def seen(met: Op, key: Key, device: torch.device) -> None:
        if met is op and key.direction == "forward":
            found.extend(
                id for id, c in op.candidates.items() if id != EAGER and c.unfit(key) is None
            )

    with policy.use(replace(policy.current(), observer=seen, entries={})):
        TABLE[name][0](*given)
    return found


RECORDED = [(n, id) for n in TABLE for id in others(n)]
FORCED = [*((n, EAGER) for n in TABLE), *RECORDED]


@pytest.mark.parametrize("name", [n for n in TABLE if n not in ("sum", "mean")])
def test_the_gradient_of_a_sum_has_memory_of_its_own_where_it_is_read_more_than_once(
    name: str,
) -> None:
    met: list[Key] = []

    def seen(op: Op, key: Key, device: torch.device) -> None:
        met.append(key)

    given, force = leaves(name), {op_of(name).name: others(name)[0]} if others(name) else {}
    with policy.use(replace(policy.current(), force=force, observer=seen, entries={})):
        TABLE[name][0](*given).sum().backward()
    found = [k.tensors[k.names.index("dy")] for k in met if "dy" in k.names]
    shared = [t for t in found if t is not None and 0 in t.stride]
    gradient = op_of(name).gradient
    assert gradient is not None
    assert gradient.again != (op_of(name).elementwise or name == "softmax_cross_entropy")
    assert bool(shared) == (not gradient.again and bool(found) and name != "softmax_cross_entropy")


@pytest.mark.parametrize("name", ["linear", "matmul"])
def test_sparse_incoming_gradients(name: str) -> None:
    ours, theirs, _ = TABLE[name]
    for id in [EAGER, *others(name)]:
        with tensorlogic.policy(force={op_of(name).name: id}):
            mine, plain = leaves(name), leaves(name)
            want = theirs(*plain)
            dy = torch.eye(*want.shape).to_sparse()
            expected = torch.autograd.grad(want, plain[:2], dy)
            close(torch.autograd.grad(ours(*mine), mine[:2], dy), expected)


@pytest.mark.parametrize(("name", "id"), FORCED)
def test_gradients_equal_pytorchs(name: str, id: str) -> None:
    """All of them, each alone (the others untouched), with expanded, transposed and contiguous incoming gradients."""
    ours, theirs, _ = TABLE[name]
    with tensorlogic.policy(force=id):
        want_all = leaves(name)
        want = theirs(*want_all)
        dys = [torch.randn_like(want), torch.ones(()).expand(want.shape)]
        if want.dim() > 1:
            dys.append(torch.randn(want.shape[::-1]).permute(*range(want.dim() - 1, -1, -1)))
            dys.append(torch.randn(*want.shape[:-1], 2 * want.shape[-1])[..., ::2])
        for dy in dys:
            mine = leaves(name)
            out = ours(*mine)
            close(out, want)
            close(
                torch.autograd.grad(out, mine, dy),
                torch.autograd.grad(want, want_all, dy, retain_graph=True),
            )
        for i in range(len(want_all)):
            mine = leaves(name, grad=False)
            mine[i].requires_grad_()
            (got,) = torch.autograd.grad(ours(*mine), [mine[i]], dys[0])
            close(got, torch.autograd.grad(want, [want_all[i]], dys[0], retain_graph=True)[0])


@pytest.mark.parametrize(("name", "id"), RECORDED)
def test_double_backward_of_another_candidate_raises_by_name(name: str, id: str) -> None:
    mine = leaves(name)
    with tensorlogic.policy(force=id):
        out = TABLE[name][0](*mine)
        with pytest.raises(
            RuntimeError, match=f"double backward is not available through candidate {id}"
        ):
            torch.autograd.grad(out.sum(), mine, create_graph=True)


@pytest.mark.parametrize("name", TWICE)
def test_double_backward_of_eager_is_right(name: str) -> None:
    ours, theirs, _ = TABLE[name]

    def second(fn: Call) -> tuple[Tensor, ...]:
        mine = leaves(name)
        first = torch.autograd.grad(fn(*mine).square().sum(), mine, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), mine)

    with tensorlogic.policy(force=EAGER):
        close(second(ours), second(theirs))


@pytest.mark.parametrize("name", TABLE)
def test_func_transforms(name: str) -> None:
    if "batch_norm_relu" in name:
        pytest.skip("PyTorch refuses to update statistics in place inside a transform")
    ours, theirs, _ = TABLE[name]
    given = leaves(name, grad=False)
    tangents = tuple(torch.randn_like(g) for g in given)

    def each(fn: Call) -> list[Any]:
        def loss(*args: Tensor) -> Tensor:
            return fn(*args).square().sum()

        return [
            torch.func.grad(loss)(*given),
            torch.func.jvp(fn, tuple(given), tangents),
            torch.func.vmap(torch.func.grad(loss), in_dims=(0, *[None] * (len(given) - 1)))(
                torch.stack([given[0], 2 * given[0]]), *given[1:]
            ),
            torch.func.grad(lambda x: torch.func.grad(loss)(x, *given[1:]).square().sum())(
                given[0]
            ),
        ]

    for got, want in zip(each(ours), each(theirs), strict=True):
        close(got, want)


@pytest.mark.parametrize(("name", "id"), FORCED)
def test_writes_to_saved_tensors_are_noticed(name: str, id: str) -> None:
    """Wherever PyTorch's own composition notices a write to an input before backward, so do we, or the gradient is right."""
    ours, theirs, _ = TABLE[name]
    for i in range(len(TABLE[name][2])):

        def run(fn: Call, write: bool, i: int = i) -> list[Tensor] | None:
            mine = leaves(name)
            held = [m * 1 for m in mine]
            out = fn(*held)
            if write:
                with torch.no_grad():
                    held[i].add_(1)
            try:
                return list(torch.autograd.grad(out.sum(), mine))
            except RuntimeError as problem:
                if "modified by an inplace operation" not in str(problem):
                    raise
                return None

        with tensorlogic.policy(force=id):
            got = run(ours, True)
            if got is not None:
                close(got, run(theirs, False))


@pytest.mark.parametrize(("name", "id"), FORCED)
def test_hooks_and_retained_graphs(name: str, id: str) -> None:
    ours, _, _ = TABLE[name]
    mine = leaves(name)
    seen: list[Tensor] = []
    mine[0].register_hook(lambda g: seen.append(g.clone()))
    with tensorlogic.policy(force=id):
        out = ours(*mine)
        out.register_hook(lambda g: 2 * g)
        out.sum().backward(retain_graph=True)
        once = mine[0].grad
        assert once is not None
        once = once.clone()
        out.sum().backward()
    close(mine[0].grad, 2 * once)
    close(seen[0], once)
    if name not in ("add", "sub", "sum", "mean"):  # these keep nothing that could be freed
        with pytest.raises(RuntimeError, match="second time"):
            out.sum().backward()


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_pytorchs_dtypes(name: str, dtype: torch.dtype) -> None:
    """Output and gradient dtypes of the composition under autocast, for inputs of one dtype and for float32 parameters."""
    ours, theirs, shapes = TABLE[name]
    for mixed in (False, True):
        given = leaves(name, dtype)
        if mixed and len(shapes) > 1:
            given[1:] = [g.detach().float().requires_grad_() for g in given[1:]]

        def run(fn: Call, given: list[Tensor] = given) -> tuple[Tensor, tuple[Tensor, ...]]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                out = fn(*given)
            return out, torch.autograd.grad(out.float().square().sum(), given)

        try:
            want, want_grads = run(theirs)
        except RuntimeError:
            continue  # PyTorch's own composition refuses the mixture
        got, got_grads = run(ours)
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.float(), want.float(), rtol=0.05, atol=0.05)
        assert [g.dtype for g in got_grads] == [g.dtype for g in want_grads]
        for g, w in zip(got_grads, want_grads, strict=True):
            torch.testing.assert_close(g.float(), w.float(), rtol=0.1, atol=0.3)


def test_autocast_updates_the_running_statistics() -> None:
    x, w, mean, var = torch.randn(8, 6), torch.randn(5, 6), torch.zeros(5), torch.ones(5)
    with torch.autocast("cpu"):
        tensorlogic.linear_batch_norm_relu(x, w, None, mean, var, None, None, training=True)
    assert mean.dtype is torch.float32
    assert mean.abs().sum() > 0
    assert not torch.equal(var, torch.ones(5))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "id", [EAGER, *(i for i in OPS["dropout_linear"].candidates if i != EAGER)]
)
def test_checkpointed_dropout_draws_the_same_mask(id: str, reentrant: bool) -> None:
    op, x, w = OPS["dropout_linear"], torch.randn(8, 16), torch.randn(4, 16)
    if not runnable(op, [x, w, None, 0.5, 1, 2, None], id, save=True):
        pytest.skip(f"{id} does not serve this case")

    def run(wrap: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        leaf = x.clone().requires_grad_()

        def block(t: Tensor) -> Tensor:
            return tensorlogic.dropout_linear(t, w, None, p=0.5)

        out = checkpoint(block, leaf, use_reentrant=reentrant) if wrap else block(leaf)
        torch.rand(7)
        out.sum().backward()
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    with tensorlogic.policy(force=id):
        for got, want in zip(run(True), run(False), strict=True):
            assert torch.equal(got, want)


def test_a_gradients_own_gradient_is_never_silently_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward op that is called while gradients are recorded differentiates as PyTorch's formulas do."""
    from tensorlogic.ops.pointwise.definitions import backward_call

    def detached(key: Key, config: Any, device: torch.device) -> Call:
        eager = OPS["pointwise_backward"].candidates[EAGER].bind(key, {}, device)
        return lambda *dynamic: tuple(g if g is None else g.detach() for g in eager(*dynamic))

    toy = Candidate("toy.kernel", detached, trusted=True, guess=lambda key: 0.01)
    monkeypatch.setitem(OPS["pointwise_backward"].candidates, toy.id, toy)
    policy.forget_entries()
    dy = torch.randn(5, requires_grad=True)
    a, b = torch.randn(5, requires_grad=True), torch.randn(5)
    da, _, _ = backward_call(dy, a, b, None, None, "mul", "100")
    close(torch.autograd.grad(da.sum(), dy)[0], b)


def test_complex_gradients_are_pytorchs() -> None:
    a = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    b = torch.randn(3, 3, dtype=torch.complex64, requires_grad=True)
    for ours, theirs in ((tensorlogic.mul, torch.mul), (tensorlogic.matmul, torch.matmul)):
        torch._dynamo.reset()
        for fn in (ours, torch.compile(ours, backend="aot_eager")):
            got = torch.autograd.grad(fn(a, b).abs().sum(), [a, b])
            close(got, torch.autograd.grad(theirs(a, b).abs().sum(), [a, b]))


def test_every_public_op_is_in_the_table() -> None:
    assert set(PUBLIC) - {"dropout_linear"} == {op_of(n).name for n in TABLE}


@pytest.mark.parametrize("force", [None, "torch.eager"])
def test_our_gradient_stands_behind_pytorchs_forward(
    monkeypatch: pytest.MonkeyPatch, force: str | None
) -> None:
    from tensorlogic.dispatch import autograd, bound_call, decision
    from tensorlogic.dispatch import selector as dispatch_selector

    monkeypatch.setattr(bound_call, "FOLLOWED", ("cpu",))
    monkeypatch.setattr(bound_call, "HEAVY_BYTES", -1.0)
    decide = dispatch_selector.decide
    monkeypatch.setattr(
        dispatch_selector,
        "decide",
        lambda op, *more: decision.PLAIN if op.name == "div" else decide(op, *more),
    )
    served, asked = autograd.gradients, list[str]()

    def gradients(op: Any, *more: Any) -> Any:
        asked.append(op.name)
        return served(op, *more)

    monkeypatch.setattr(autograd, "gradients", gradients)
    for dtype in (torch.float32, torch.float64):  # of x, the row's, too, and wider than it
        x, row = torch.randn(40, 30, dtype=dtype), torch.rand(30).add(0.5)
        x.requires_grad_()
        row.requires_grad_()
        dy = torch.randn(40, 30, dtype=dtype)
        with tensorlogic.policy(tune="off", force=force):
            got = torch.autograd.grad(tensorlogic.div(x, row), (x, row), dy)
        for a, b in zip(got, torch.autograd.grad(x / row, (x, row), dy), strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)
    assert asked == ([] if force else ["div", "div"])


def test_a_forward_of_ours_takes_no_other_road_under_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorlogic.dispatch import bound_call

    monkeypatch.setattr(bound_call, "FOLLOWED", ("cpu",))
    op, args = OPS["div"], (torch.randn(40, 30, requires_grad=True), torch.randn(40, 30), True)
    for force in ("cpu.fused", EAGER):
        with tensorlogic.policy(tune="off", force=force), torch.enable_grad():
            bound = bound_call.bind(op, args, policy.current(), recording=True)
        assert bound.choice.candidate.id == force
        assert not bound.has_capture_variant


@pytest.mark.parametrize("name", ["mul", "div", "silu", "gelu", "softmax", "max", "affine"])
def test_a_gradients_own_gradient_behind_pytorchs_forward(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorlogic.dispatch import bound_call, decision
    from tensorlogic.dispatch import selector as dispatch_selector

    monkeypatch.setattr(bound_call, "FOLLOWED", ("cpu",))
    monkeypatch.setattr(bound_call, "HEAVY_BYTES", -1.0)
    monkeypatch.setattr(dispatch_selector, "decide", lambda *about: decision.PLAIN)
    plain: dict[str, Callable[..., Tensor]] = {
        "mul": torch.mul, "div": torch.div, "silu": F.silu, "gelu": F.gelu, "softmax": lambda x: torch.softmax(x, -1),
        "max": lambda x: torch.amax(x, 1), "affine": lambda x, s, b: x * s + b,
    }  # fmt: skip
    rest = {"softmax": (-1,), "max": (1,)}.get(name, ())
    found = []
    args = [torch.randn(6, 5, dtype=torch.float64) for _ in range({"mul": 2, "div": 2, "affine": 3}.get(name, 1))]  # fmt: skip
    with tensorlogic.policy(tune="off"):
        for fn in (lambda *a: getattr(tensorlogic, name)(*a, *rest), plain[name]):
            leaves = [a.clone().requires_grad_() for a in args]
            y = fn(*leaves)
            (first,) = torch.autograd.grad(y.square().sum(), leaves[:1], create_graph=True)
            found.append(torch.autograd.grad(first.pow(3).sum(), leaves, allow_unused=True))
    for got, want in zip(*found, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("needs", [(True, True), (False, True)])
def test_a_residuals_gradient_is_what_comes_in(needs: tuple[bool, bool]) -> None:
    x, w, r, dy = torch.randn(6, 8), torch.randn(5, 8), torch.randn(6, 5), torch.randn(6, 5)
    leaves = [t.requires_grad_() for t, n in zip((x, r), needs, strict=True) if n]
    *rest, dr = torch.autograd.grad(tensorlogic.linear(x, w, None, r), leaves, dy)
    assert dr.data_ptr() == dy.data_ptr()
    for got in rest:
        torch.testing.assert_close(got, dy @ w)
