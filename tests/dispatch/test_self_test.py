"""Native kernels that nobody has measured on a key: right on small tensors of that kind, or they do not serve."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import candidate_loading, decision, self_test
from tensorlogic.native import cpu_library
from tensorlogic.plans import open_stores

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)
CPU = torch.device("cpu")
Wrong = Callable[[tuple[Any, ...], Tensor], None]


@pytest.fixture
def plant() -> Iterator[Callable[..., list[Key]]]:
    """plant(op, id, wrong): the candidate's outputs pass through `wrong`, it promises to win, the keys it was bound to are kept."""
    candidate_loading.ready("cpu")
    kept: list[tuple[Op, dict[str, Any]]] = []

    def run(name: str, id: str, wrong: Wrong) -> list[Key]:
        op, bound = OPS[name], []
        kept.append((op, dict(op.candidates)))
        own = op.candidates[id]

        def bind(key: Key, config: Any, device: torch.device) -> Any:
            launch = own.bind(key, config, device)
            bound.append(key)

            def planted(*dynamic: Any) -> Any:
                outs = launch(*dynamic)
                wrong(dynamic, outs[0])
                return outs

            return planted

        op.candidates[id] = replace(own, bind=bind, sources=(str(wrong),), guess=lambda key: 0.1)
        return bound

    self_test.forget()
    yield run
    for op, candidates in reversed(kept):
        op.candidates.clear()
        op.candidates.update(candidates)
    self_test.forget()
    policy.forget_entries()


def at_a_tables_end(dynamic: tuple[Any, ...], y: Tensor) -> None:
    """Exactly 4 in a whole vector: 29, as a table whose last segment had no end once gave it."""
    whole = (dynamic[0] == 4.0).reshape(-1)
    for i in range(0, whole.numel() - 15, 16):
        if bool(whole[i : i + 16].all()):
            y.reshape(-1)[i : i + 16] = 29.0


def in_its_last_row(dynamic: tuple[Any, ...], y: Tensor) -> None:
    y[-1, -1] += 1.0


def nothing(dynamic: tuple[Any, ...], y: Tensor) -> None: ...


def served(op: str, *args: Any) -> str:
    """The candidate that a call of these arguments is bound to."""
    from tensorlogic.dispatch.bound_call import bind

    return bind(OPS[op], args, policy.current(), False).choice.candidate.id


@pytest.mark.parametrize("shape", [(64,), (2, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kernel_that_is_wrong_at_a_tables_end_does_not_reach_a_caller(
    plant: Any, caplog: pytest.LogCaptureFixture, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    plant("gelu", "cpu.fused", at_a_tables_end)
    decision._SAID.clear()
    x = torch.full(shape, 4.0, dtype=dtype)
    y = tensorlogic.gelu(x, approximate="tanh")
    assert torch.equal(y, torch.nn.functional.gelu(x, approximate="tanh"))
    assert "cpu.fused failed on gelu" in caplog.text
    assert "torch.eager serves it" in caplog.text


def test_a_wrong_element_of_a_product_is_seen_and_its_size_does_not_matter(plant: Any) -> None:
    bound = plant("linear", "cpu.epilogue", in_its_last_row)
    x, w = torch.randn(1024, 1024), torch.randn(1024, 1024)
    assert served("linear", x, w, None, None, "none", False) == EAGER
    small = [k for k in bound if k.tensors[0].shape != x.shape]  # type: ignore[union-attr]
    assert small
    assert all(OPS["linear"].flops(k) <= self_test.FLOPS for k in small)


def test_what_was_found_is_kept_in_the_process_and_on_disk(
    plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant("gelu", "cpu.fused", nothing)
    checks: list[Key] = []
    usual = self_test._check
    monkeypatch.setattr(
        self_test, "_check", lambda op, kind, *a: checks.append(kind) or usual(op, kind, *a)
    )
    for n in (100, 401, 16_001):
        assert served("gelu", torch.randn(n), "none", False) == "cpu.fused"
    assert len(checks) == 1
    assert served("gelu", torch.randn(100).half(), "none", False) == "cpu.fused"
    assert len(checks) == 2  # of another type
    self_test.forget()
    policy.forget_entries()
    assert served("gelu", torch.randn(800 + 3), "none", False) == "cpu.fused"
    assert len(checks) == 2
    open_stores.current(CPU).path.with_suffix(".checked").write_bytes(
        b"\xff\n["
    )  # not as it was written
    self_test.forget()
    assert served("gelu", torch.randn(100), "none", False) == "cpu.fused"
    assert len(checks) == 3


def test_a_draw_that_was_bad_luck_is_drawn_again(plant: Any) -> None:
    turns: list[int] = []

    def first_only(dynamic: tuple[Any, ...], y: Tensor) -> None:
        turns.append(1)
        if len(turns) == 1:
            y.add_(1.0)

    plant("gelu", "cpu.fused", first_only)
    assert served("gelu", torch.randn(100), "none", False) == "cpu.fused"


@pytest.mark.parametrize("shape", [(1,), (29, 1), (1, 3), (5, 1, 7), (2, 4096)])
def test_right_kernels_are_not_refused_for_odd_shapes(shape: tuple[int, ...]) -> None:
    for name, rest in (("gelu", ("none",)), ("gelu", ("tanh",)), ("silu", ()), ("div", ())):
        op, candidate = OPS[name], OPS[name].candidates["cpu.fused"]
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = torch.randn(shape).to(dtype)
            given = (x, x) if name == "div" else (x,)
            key = op.key((*given, *rest, False), "inference")
            assert self_test.self_test_refusal(op, key, candidate, {}, CPU) is None


def test_a_kind_has_the_layout_of_its_key() -> None:
    add, linear = OPS["add"], OPS["linear"]
    a, b = torch.randn(4, 6, 8), torch.randn(8)
    cases = (
        (add, (a, b, False)),
        (add, (a.transpose(0, 1), a.transpose(0, 1), False)),
        (add, (torch.randn(512, 2048)[:, :1024], torch.randn(1, 1).expand(512, 1024), False)),
        (linear, (torch.randn(1, 1024), torch.randn(1024, 512).t(), None, None, "gelu", False)),
        (
            linear,
            (torch.randn(3, 300, 64), torch.randn(48, 64), torch.randn(48), None, "none", False),
        ),
    )
    for op, args in cases:
        key = op.key(args, "inference")
        kind = self_test.kind_of(op, key)
        assert self_test.kind_of(op, kind).text == kind.text
        for t, small in zip(key.tensors, kind.tensors, strict=True):
            if t is not None and small is not None:
                assert small.layout[0] == t.layout[0]
                assert [s == 0 for s in small.stride] == [s == 0 for s in t.stride]
                assert [n == 1 for n in small.shape] == [n == 1 for n in t.shape]
                assert [n % 16 == 0 for n in small.shape] == [n % 16 == 0 for n in t.shape]


def test_a_call_while_a_trace_is_made_is_served_by_pytorch_and_checked_later(plant: Any) -> None:
    plant("gelu", "cpu.fused", nothing)
    x, met = torch.randn(100), []

    def traced(x: Tensor) -> Tensor:
        with pytest.raises(self_test.CannotTestNow):
            self_test.self_test_refusal(
                OPS["gelu"], key, OPS["gelu"].candidates["cpu.fused"], {}, CPU
            )
        met.append(1)
        return tensorlogic.gelu(x)

    key = OPS["gelu"].key((x, "none", False), "inference")
    made = torch.jit.trace(traced, (x,), check_trace=False)
    assert met
    assert torch.allclose(made(x), torch.nn.functional.gelu(x))
    assert served("gelu", x, "none", False) == "cpu.fused"


def test_checking_leaves_the_callers_random_numbers_and_modes_alone(plant: Any) -> None:
    plant("gelu", "cpu.fused", nothing)
    x = torch.randn(100)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.inference_mode():
        tensorlogic.gelu(x)
    assert torch.equal(torch.rand(3), expected)


def test_every_vouched_candidate_is_right_on_the_kinds_of_its_ops_cases() -> None:
    candidate_loading.ready("cpu")
    for op in OPS.values():
        for candidate in [c for c in op.candidates.values() if c.vouched]:
            for case in list(op.cases())[:4]:
                args = (*case, False) if op.gradient is not None else tuple(case)
                key = op.key(args, "backward" if op.internal else "inference")
                kind = self_test.kind_of(op, key)
                if candidate.unfit(key) is None and candidate.unfit(kind) is None:
                    config = candidate.configs(key)[0]
                    assert self_test.self_test_refusal(op, key, candidate, config, CPU) is None


@pytest.mark.slow
def test_another_process_reads_what_was_found() -> None:
    script = (
        "import torch, tensorlogic\n"
        "from tensorlogic.dispatch import self_test as vouching\n"
        "usual, checks = vouching._check, []\n"
        "vouching._check = lambda *a: checks.append(1) or usual(*a)\n"
        "tensorlogic.gelu(torch.randn(3000).bfloat16())\n"
        "print(len(checks))"
    )
    found = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [f.stdout.strip() for f in found] == ["1", "0"]
