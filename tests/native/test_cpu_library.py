"""The native kernels against float64, for each element type and each instruction set forced in turn, at odd sizes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlogic.cli import doctor as cli_doctor
from tensorlogic.native import cpu_library, library_files
from tensorlogic.ops.common.dropout_rng import keep_mask
from tensorlogic.system import settings

from ..support.native import (
    DTYPES,
    EXACT,
    INF,
    NAN,
    assert_ulps,
    ulps_of,
)
from ..support.native import ops as ops  # a fixture

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)

SIZES = (1, 3, 17, 1023, 70_001)


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of a half type; for float32 a dense sample of every magnitude that matters to an exponential."""
    if dtype == torch.float32:
        spread = [torch.randn(100_003) * scale for scale in (1e-3, 0.3, 1, 4, 12, 40)]
        special = torch.tensor(
            [0.0, -0.0, INF, -INF, NAN, 1e30, -1e30, 1e-40, -1e-40, -88.8, -103.0]
        )
        # round numbers, where tables begin and end, and their neighbours: whole vectors of each
        round_ = torch.arange(-32 * 20, 32 * 20 + 1).float() / 32
        ends = [torch.nextafter(round_, torch.tensor(to)) for to in (-INF, INF)]
        whole = torch.cat([round_, *ends]).repeat_interleave(16)
        return torch.cat([whole, *spread, torch.linspace(-110, 110, 100_001), special])
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(EXACT))
def test_activation_is_within_two_ulps_everywhere(ops: Any, name: str, dtype: torch.dtype) -> None:
    x = every_value(dtype)
    y = ops.silu(x) if name == "silu" else ops.gelu(x, name == "gelu_tanh")
    assert_ulps(y, EXACT[name](x.double()), ulps_of(ops))


def test_exponentials_leave_no_denormal_numbers(ops: Any) -> None:
    """A vector with one that is, or would be, takes twenty times as long on many processors."""
    far = torch.linspace(-120, 0, 4097)
    rows = torch.cat([far.expand(3, -1), torch.full((3, 700), -INF)], 1).contiguous()
    target, none = torch.full((3,), 4096), 0
    _, lse = ops.softmax_cross_entropy(rows, target, -100, 0.0, none)
    weight = torch.full((3,), 2.0**-9)
    found = {
        "silu": ops.silu(far),
        "gelu": ops.gelu(far, False),
        "gelu_tanh": ops.gelu(far, True),
        "softmax": ops.softmax(rows, None, 1.0, False, torch.float32),
        "loss": ops.softmax_cross_entropy_backward(weight, rows, target, lse, -100, 0.0, none),
    }
    tiny = torch.finfo(torch.float32).tiny
    for name, y in found.items():
        left = y[(y != 0) & (y.abs() < tiny)]
        assert left.numel() == 0, (name, left[:3])
        assert (y == 0).any(), name


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", sorted(EXACT))
def test_activation_in_any_company(ops: Any, name: str, dtype: torch.dtype) -> None:
    """Vectors are taken together: what lies beside an element, or how many follow, changes neither it nor a zero's sign."""
    values = every_value(dtype)
    for n in (2**16, 2**15 + 129, 200, 65):
        x = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(n))][:n]
        y = ops.silu(x) if name == "silu" else ops.gelu(x, name == "gelu_tanh")
        assert_ulps(y, EXACT[name](x.double()), ulps_of(ops))
        finite = torch.isfinite(x)
        assert torch.equal(torch.signbit(y)[finite], torch.signbit(x)[finite])


@pytest.mark.parametrize("name", sorted(EXACT))
def test_float32_activation_is_the_same_in_any_company(ops: Any, name: str) -> None:
    """Elements beyond the tables are taken out of their vectors, and together: few, as many as a vector holds, and all there are."""
    g = torch.Generator().manual_seed(3)
    values = torch.cat([
        torch.randn(1600, generator=g) * 3, torch.rand(480, generator=g) * -100, torch.rand(400, generator=g) * -20,
        torch.tensor([-INF, INF, NAN, -NAN, 0.0, -0.0, -1e30, 1e30] * 3),
    ])  # fmt: skip

    def of(x: Tensor) -> Tensor:
        return ops.silu(x) if name == "silu" else ops.gelu(x, name == "gelu_tanh")

    alone = torch.cat([of(one) for one in values.split(1)])
    far = (values < -4).nonzero()[:, 0]
    near = (values > -4).nonzero()[:, 0]
    for share in (0.0, 0.01, 0.03, 0.1, 0.2, 0.25, 0.3, 0.5, 0.8, 1.0):
        for n in (64 * 40, 64 * 3 + 21):
            take = torch.rand(n, generator=g) < share
            some = torch.randint(len(far), (n,), generator=g)
            others = torch.randint(len(near), (n,), generator=g)
            at = torch.where(take, far[some], near[others])
            found = of(values[at]).view(torch.int32)
            wanted = alone[at].view(torch.int32)
            number = ~torch.isnan(alone[at])
            assert torch.equal(found[number], wanted[number]), (share, n)
            assert bool(torch.isnan(of(values[at]))[~number].all())


PAIRS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "add_relu": lambda a, b: torch.relu(a + b),
    "mul_relu": lambda a, b: torch.relu(a * b),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(PAIRS))
def test_pairs_round_once(ops: Any, name: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        a, b = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
        got, wanted = getattr(ops, name)(a, b), PAIRS[name](a.float(), b.float()).to(dtype)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_infinity_and_denormals_are_torchs(ops: Any, dtype: torch.dtype) -> None:
    values = torch.tensor(
        [NAN, INF, -INF, 0.0, -0.0, 1.0, -2.5, 3e-8, -6e-8, 65504.0, 1e-40, 3e38]
    ).to(dtype)
    a, b = (v.contiguous() for v in torch.broadcast_tensors(values[:, None], values[None, :]))
    for name, meaning in PAIRS.items():
        wanted = meaning(a.float(), b.float()).to(dtype)
        torch.testing.assert_close(getattr(ops, name)(a, b), wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(ops.relu(values), torch.relu(values), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 7), (7,)), ((5, 7), (5, 1)), ((7,), (5, 7)), ((2, 3, 4), (4,)), ((2, 3, 4), (3, 4)), ((6, 1), (9,)), ((40, 70), (1,)), ((3, 1, 2), (3, 1, 1)), ((), (3,)), ((0, 4), (4,)), ((129, 1025), (1025,)), ((129, 1025), (129, 1))],
)  # fmt: skip
def test_operands_broadcast_as_in_torch(
    ops: Any, left: tuple[int, ...], right: tuple[int, ...]
) -> None:
    a, b = torch.randn(left), torch.randn(right)
    torch.testing.assert_close(ops.sub(a, b), a - b, rtol=0, atol=0)
    torch.testing.assert_close(ops.affine(a, b, b), torch.addcmul(b, a, b))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_element_wise_ops(ops: Any, dtype: torch.dtype) -> None:
    a, b, dy = (torch.randn(3001).to(dtype) for _ in range(3))
    wide = [t.double().requires_grad_() for t in (a, b)]
    bound = 4 * torch.finfo(dtype).eps

    def check(got: Any, y: Tensor, *of: Tensor) -> None:
        for g, wanted in zip(got, torch.autograd.grad(y, of, dy.double()), strict=True):
            torch.testing.assert_close(g.double(), wanted, rtol=bound, atol=bound)

    check([ops.silu_backward(dy, a)], F.silu(wide[0]), wide[0])
    check([ops.gelu_backward(dy, a, False)], F.gelu(wide[0]), wide[0])
    check([ops.gelu_backward(dy, a, True)], F.gelu(wide[0], approximate="tanh"), wide[0])
    check([ops.relu_backward(dy, torch.relu(a))], torch.relu(wide[0]), wide[0])
    check(ops.mul_backward(dy, a, b), wide[0] * wide[1], *wide)
    check(ops.mul_relu_backward(dy, a, b), torch.relu(wide[0] * wide[1]), *wide)
    safe = (b.abs() + 0.5).to(dtype)
    wide[1] = safe.double().requires_grad_()
    check(ops.div_backward(dy, a, safe), wide[0] / wide[1], *wide)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_that_round_to_zero_have_no_gradient(ops: Any, dtype: torch.dtype) -> None:
    """The kernel makes the output again from the operands: it must round it, too."""
    info = torch.finfo(dtype)
    a = torch.tensor([0.4, 0.5, 0.6, 1.0, -0.4, -1.0]).to(dtype).repeat(20)
    b = torch.full_like(a, info.smallest_normal * info.eps)  # the smallest number there is
    dy = torch.ones_like(a)
    above = (a * b > 0).to(dtype)
    assert 0 < above.sum() < (a > 0).sum()
    da, db = ops.mul_relu_backward(dy, a, b)
    torch.testing.assert_close(da, above * b, rtol=0, atol=0)
    torch.testing.assert_close(db, above * a, rtol=0, atol=0)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_conversion_is_torchs_bit_for_bit(
    ops: Any, source: torch.dtype, target: torch.dtype
) -> None:
    x = torch.cat(
        [torch.randn(5001) * s for s in (1e-8, 1e-4, 1, 1e4)] + [every_value(torch.float16).float()]
    ).to(source)
    torch.testing.assert_close(ops.convert(x, target), x.to(target), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(ops: Any, dtype: torch.dtype, activation: str) -> None:
    apply = {"none": lambda z: z, "relu": torch.relu, **EXACT}[activation]
    number = cpu_library.ACTIVATIONS[activation]
    for rows, cols in ((1, 1), (7, 33), (33, 1031)):
        acc = torch.randn(rows, cols)
        bias, residual = torch.randn(cols).to(dtype), torch.randn(rows, cols).to(dtype)
        for b, r in ((bias, residual), (bias, None), (None, residual), (None, None)):
            z = acc + (0 if b is None else b.float()) + (0 if r is None else r.float())
            y, pre = ops.epilogue_pre(acc, b, r, number, dtype)
            assert_ulps(y, apply(z.double()), ulps_of(ops))
            torch.testing.assert_close(ops.epilogue(acc, b, r, number, dtype), y, rtol=0, atol=0)
            torch.testing.assert_close(pre, z.to(dtype), rtol=0, atol=0)
        z = acc + bias.float() + residual.float()
        ops.epilogue_(acc, bias.float(), residual.float(), number)
        assert_ulps(acc, apply(z.double()), ulps_of(ops))


@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_draws_the_reference_mask(ops: Any, dtype: torch.dtype) -> None:
    seed, offset, p = 2**61 + 12345678901, 2**40 + 3, 0.3
    x = torch.randn(7, 12_345).to(dtype)
    keep = keep_mask(tuple(x.shape), p, seed, offset, x.device)
    assert_ulps(ops.dropout(x, p, seed, offset), torch.where(keep, x.double() / (1 - p), 0), 1)


def test_forced_level_serves_and_unknown_is_refused(ops: Any) -> None:
    current = ops.isa()
    assert ops.set_isa(current) == current
    with pytest.raises(RuntimeError, match="sse9"):
        ops.set_isa("sse9")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n: n.add(torch.ones(2, 3).t(), torch.ones(3, 2)), "contiguous"),
        (lambda n: n.add(torch.ones(2), torch.ones(2).half()), "element type"),
        (lambda n: n.add(torch.ones(2), torch.ones(3)), "broadcast"),
        (lambda n: n.relu(torch.ones(2, dtype=torch.float64)), "float16, bfloat16 or float32"),
        (lambda n: n.dropout(torch.ones(2), 1.0, 0), r"\[0, 1\)"),
        (lambda n: n.epilogue(torch.ones(2, 3), torch.ones(2), None, 0, torch.float32), "bias"),
        (lambda n: n.epilogue(torch.ones(2, 3), None, None, 9, torch.float32), "activation"),
        (lambda n: n.sum(torch.ones(2), 0, 2), "dimensions"),
        (lambda n: n.max(torch.ones(0), 0, 1), "nothing to reduce"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.tensorlogic_native)


def test_absent_library_gives_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_library, "_state", [])
    monkeypatch.setattr(library_files, "library", lambda: tmp_path / "libtensorlogic_native.so")
    reason = cpu_library.available()
    assert reason is not None
    assert "not built" in reason
    with pytest.raises(RuntimeError, match="not built"):
        cpu_library.op("add")
    assert cpu_library.isa() is None
    assert cpu_library.bad_setting() is None
    assert cpu_library.available("cuda") is not None


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (settings.NATIVE_LIBRARY, "/nowhere/a.so", r"LIBRARY: /nowhere/a\.so does not exist"),
        (settings.NATIVE_LIBRARY, __file__, r"LIBRARY: the native library .* does not load"),
        (settings.NATIVE_ISA, "sse", r"ISA is 'sse'; one of portable(, avx2)?.* is required"),
    ],
)
def test_a_variable_that_keeps_the_library_away_is_said_once(
    monkeypatch: pytest.MonkeyPatch, variable: settings.Variable, value: str, said: str
) -> None:
    monkeypatch.setattr(cpu_library, "_state", [])
    monkeypatch.setenv(variable.name, value)
    with pytest.warns(UserWarning, match=said) as warned:
        assert {bool(cpu_library.available()) for _ in range(3)} == {True}
    assert len(warned) == 1
    found = {f.about: f for f in cli_doctor._settings()}[variable.name]
    assert (found.state, bool(re.search(said, found.found))) == ("broken", True)


# What the 64-bit ARM branch takes from its header, in the compiler's own vector types: enough to check the branch anywhere.
NEON = """
typedef float float32x4_t __attribute__((vector_size(16)));
typedef unsigned short float16x4_t __attribute__((vector_size(8)));
float32x4_t vfmaq_f32(float32x4_t, float32x4_t, float32x4_t);
float32x4_t vfmsq_f32(float32x4_t, float32x4_t, float32x4_t);
float32x4_t vrndnq_f32(float32x4_t);
float32x4_t vcvt_f32_f16(float16x4_t);
float16x4_t vcvt_f16_f32(float32x4_t);
"""


def test_neon_branch_compiles(tmp_path: Path) -> None:
    """By a cross compiler where there is one, else as far as types and names go."""
    cross, here = shutil.which("aarch64-linux-gnu-g++"), shutil.which("g++")
    if cross is None and here is None:
        pytest.skip("no g++ here")
    command = [cross] if cross else [str(here), "-D__aarch64__", f"-I{tmp_path}"]
    (tmp_path / "arm_neon.h").write_text(NEON)
    sources = Path(__file__).resolve().parents[2] / "csrc"
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wno-psabi", f"-I{sources}"]
    portable = str(sources / "isa" / "portable.cpp")
    done = subprocess.run([*map(str, command), *flags, portable], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "wanted"), [("portable", "portable None"), ("sse", "None TENSORLOGIC_NATIVE_ISA")]
)
def test_a_variable_chooses_the_instruction_set(level: str, wanted: str) -> None:
    code = "from tensorlogic.native import cpu_library as native; print(native.isa(), native.available())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TENSORLOGIC_NATIVE_ISA": level},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(wanted)


def test_a_tensor_whose_storage_was_let_go_of_is_refused() -> None:
    """As FSDP does with parameters between uses; PyTorch's products refuse it, too."""
    gone = torch.randn(3, 4)
    gone.untyped_storage().resize_(0)
    with pytest.raises(
        RuntimeError, match=r"shape \[3, 4\] has no memory: its storage was resized"
    ):
        cpu_library.op("matmul")(gone, torch.ones(4, 5))


@pytest.mark.parametrize("size", [0, 40, 1000, -1])
def test_a_library_that_is_cut_short_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Loading what an interrupted copy has left would end the process by a bus error."""
    short = tmp_path / library_files.library().name
    short.write_bytes(library_files.library().read_bytes()[:size])
    assert library_files.is_truncated(short)
    assert not library_files.is_truncated(library_files.library())
    monkeypatch.setattr(library_files, "library", lambda: short)
    assert "is cut short" in str(cpu_library._load())


@pytest.mark.slow
def test_an_import_that_failed_says_the_same_again(tmp_path: Path) -> None:
    """With TENSORLOGIC_ENABLE=pool, say, the start of Python has imported the package once when a program imports it."""
    program = """
for _ in range(2):
    try:
        import tensorlogic
    except RuntimeError as problem:
        print(problem)
"""
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
        env={
            **os.environ,
            "TENSORLOGIC_ENABLE": "pool",
            settings.NATIVE_LIBRARY.name: str(tmp_path / "nothing.so"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.count("enable: pool=True needs the hooks") == 2, ran.stdout + ran.stderr


def test_outputs_stored_and_inputs_asked_for_otherwise_are_the_same(ops: Any) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for rows, cols in ((1, 70_001), (37, 64), (129, 1031), (4, 31)):
            x, y = torch.randn(rows, cols).to(dtype), torch.randn(rows, cols).to(dtype)
            v = torch.randn(cols).to(dtype)
            calls: dict[str, tuple[Any, ...]] = {
                "add": (x, v), "sub": (x, y), "mul": (x, y), "div": (x, y), "add_relu": (x, y),
                "mul_relu": (x, v), "affine": (x, v, v), "relu": (x,), "silu": (x,), "gelu": (x, True),
                "relu_backward": (x, y), "silu_backward": (x, y), "gelu_backward": (x, y, False),
            }  # fmt: skip
            for name, args in calls.items():
                run = cpu_library.op(name)
                usual = run(*args, 1)
                for way in (2, 3):  # past the caches; near by
                    other = run(*args, way)
                    assert torch.equal(usual.view(torch.uint8), other.view(torch.uint8)), (
                        name,
                        way,
                    )
            target, lse = torch.randint(cols, (rows,)), x.float().logsumexp(1)
            loss = (torch.ones((), dtype=dtype), x, target, lse, -100, 0.1, 1)
            usual, past = (
                cpu_library.op("softmax_cross_entropy_backward")(*loss, s) for s in (1, 2)
            )
            assert torch.equal(usual.view(torch.uint8), past.view(torch.uint8))


def test_outputs_are_stored_in_no_fourth_way() -> None:
    x = torch.randn(8)
    for number in (-1, 4):
        with pytest.raises(RuntimeError, match=f"stores must be 0 .* got {number}"):
            cpu_library.op("relu")(x, number)
        with pytest.raises(RuntimeError, match=f"stores must be 0 .* got {number}"):
            cpu_library.launcher("gelu", False, number)(x)
