"""linear_batch_norm_relu in training: its kernels' statistics, outputs and gradients against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.core import tolerance

from ...support.triton import DEVICE
from ...support.triton import close_to_largest as close
from ...support.triton import randn as rand

from tensorlogic.dispatch import candidate_loading  # isort: skip  (after the interpreter is asked for)
from tensorlogic.core.op import OPS  # isort: skip
from tensorlogic.kernels.norm import batch_norm as norm_batch_norm  # isort: skip
from tensorlogic.kernels.elementwise import column_passes

from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.core.key import Key  # isort: skip

from ...support.compiled import nothing_spills  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
candidate_loading.ready(DEVICE.type)
OP, BACKWARD = OPS["linear_batch_norm_relu"], OPS["linear_batch_norm_relu_backward"]
IDS = ("triton.held", "triton.statistics")
SIZES = ((2, 8, 5), (67, 17, 37))
VECTORS = ("bias", "running_mean", "running_var", "gamma", "beta")


def inputs(m: int, k: int, n: int, dtype: str, given: str) -> list[Tensor | None]:
    """x, weight and the vectors; those not `given` are absent."""
    found: dict[str, Tensor] = {
        "bias": rand(n, dtype=dtype) + 3, "running_mean": rand(n, dtype="f32"),
        "running_var": torch.rand(n, device=DEVICE) + 0.5, "gamma": rand(n, dtype=dtype), "beta": rand(n, dtype=dtype),
    }  # fmt: skip
    x, weight = rand(m, k, dtype=dtype), (rand(n, k, dtype=dtype) * k**-0.5)
    return [x, weight, *(found[name] if name in given.split() else None for name in VECTORS)]


def wide(values: list[Any]) -> list[Any]:
    return [v.double() if isinstance(v, Tensor) else v for v in values]


def copied(values: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in values]


def bound(op: Any, id: str, key: Key) -> list[Any]:
    """Launchers of every configuration whose program is small enough for the interpreter."""
    candidate = op.candidates[id]
    assert candidate.unfit(key) is None
    return [candidate.bind(key, config, DEVICE) for config in candidate.configs(key)[:2]]


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize(
    ("dtype", "given"),
    [("f16", " ".join(VECTORS)), ("f32", " ".join(VECTORS)), ("f32", "running_mean running_var beta"), ("f16", "gamma"), ("f32", "")],
)  # fmt: skip
def test_a_training_pass(id: str, dtype: str, given: str) -> None:
    for m, k, n in SIZES[dtype == "f16" :]:  # two halves tell little of what spreads
        args = inputs(m, k, n, dtype, given)
        flags = (1e-3, True, 0.3, True)
        exact = wide(args)
        want = OP.reference(*exact, *flags)
        for launch in bound(OP, id, OP.key((*args, *flags), "forward")):
            mine = copied(args)
            got = launch(*mine)
            for ours, exactly in zip((*got, *mine[3:5]), (*want, *exact[3:5]), strict=True):
                if exactly is not None:
                    assert ours.shape == exactly.shape
                    close(ours, exactly, dtype)


@pytest.mark.parametrize("id", IDS)
def test_what_is_not_recorded_is_not_kept(id: str) -> None:
    args = inputs(9, 8, 5, "f16", "")
    key = OP.key((*args, 1e-5, True, 0.1, False), "inference")
    y, z, mean, rstd = bound(OP, id, key)[0](*args)
    assert y.shape == (9, 5)
    assert z.shape == (0,)
    assert z.dtype == torch.float16
    assert mean.shape == rstd.shape == (5,)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize(
    ("dtype", "gamma", "off"), [("f16", True, False), ("f32", True, True), ("f32", False, False)]
)
def test_a_training_step_backward(id: str, dtype: str, gamma: bool, off: bool) -> None:
    for m, k, n in SIZES[1:]:
        args = inputs(m, k, n, dtype, "gamma bias" if gamma else "bias")
        y, z, mean, rstd = OP.reference(*args, 1e-3, True, 0.1, True)
        dy = rand(m, n, dtype=dtype)
        if off:  # statistics of another batch
            mean, rstd = mean + 0.3, rstd * 1.5
        saved = [dy, args[0], args[1], y, z, mean.float(), rstd.float(), args[5]]
        key = BACKWARD.key((*saved, True, 1e-3, "11111"), "backward")
        want = BACKWARD.reference(*wide(saved), True, 1e-3, "11111")
        for launch in bound(BACKWARD, id, key):
            for name, ours, exactly in zip("xwbge", launch(*saved), want, strict=True):
                scale = (
                    exactly.abs().max() + (name == "b") * m**0.5
                )  # db is hardly more than rounding
                bound_by = 4e-3 if dtype == "f16" else 2e-5
                assert (ours.double() - exactly).abs().max() <= bound_by * scale, name


@pytest.mark.parametrize("id", IDS)
def test_nothing_that_is_not_finite_is_hidden(id: str) -> None:
    args = inputs(9, 8, 5, "f32", "gamma")
    y, z, mean, rstd = OP.reference(*args, 1e-3, True, 0.1, True)
    dy = rand(9, 5, dtype="f32")
    y[3, 2], dy[3, 2] = 1.0, float("inf")
    saved = [dy, args[0], args[1], y, z, mean, rstd, args[5]]
    for launch in bound(BACKWARD, id, BACKWARD.key((*saved, True, 1e-3, "11111"), "backward")):
        *_, db, dgamma, dbeta = launch(*saved)
        for sums in (db, dgamma, dbeta):
            assert not sums[2].isfinite()
            assert sums[[0, 1, 3, 4]].isfinite().all()


def launched(id: str, args: list[Any], eps: float, momentum: float) -> tuple[Any, ...]:
    """What the first configuration gives, and the running statistics after it."""
    key = OP.key((*args, eps, True, momentum, True), "forward")
    mine = copied(args)
    return (*bound(OP, id, key)[0](*mine), *mine[3:5])


@pytest.mark.parametrize("id", IDS)
def test_nothing_that_is_not_finite_is_hidden_forward(id: str) -> None:
    """On a GPU a maximum of NaN and 0 would be 0."""
    for bad in (float("nan"), float("inf")):
        args = inputs(40, 8, 5, "f32", "running_mean running_var gamma beta")
        args[0][3] = bad  # type: ignore[index]
        want = OP.reference(*copied(args), 1e-3, True, 0.1, True)
        *got, mean, var = launched(id, args, 1e-3, 0.1)
        for ours, exactly in zip(got[:2], want[:2], strict=True):
            assert torch.equal(ours.isfinite(), exactly.isfinite())
        for statistic in (*got[2:], mean, var):
            assert not statistic.isfinite().any()


@pytest.mark.parametrize("id", IDS)
def test_a_feature_that_is_dead_has_no_spread(id: str) -> None:
    """PyTorch's 1 / sqrt(0) is 0 where eps is 0: such a column is relu(beta)."""
    args = inputs(40, 8, 5, "f32", "running_mean running_var gamma beta")
    args[1][2] = 0.0  # type: ignore[index]
    y, _, _, rstd, _, running_var = launched(id, args, 0.0, 0.5)
    assert rstd[2] == 0
    torch.testing.assert_close(y[:, 2], args[6][2].relu().expand(40))  # type: ignore[index]
    torch.testing.assert_close(running_var[2], 0.5 * args[4][2])  # type: ignore[index]


@pytest.mark.parametrize("id", IDS)
def test_a_momentum_of_one_forgets_everything(id: str) -> None:
    args = inputs(40, 8, 5, "f32", "running_mean running_var")
    args[3].fill_(1e8)  # type: ignore[union-attr]
    args[4].fill_(1e8)  # type: ignore[union-attr]
    exact = copied(args)
    OP.reference(*exact, 1e-3, True, 1.0, True)
    *_, mean, var = launched(id, args, 1e-3, 1.0)
    torch.testing.assert_close(mean, exact[3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(var, exact[4], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("id", IDS)
@pytest.mark.parametrize("which", [3, 4, 5, 6])
def test_a_call_that_is_declined_has_changed_nothing(id: str, which: int) -> None:
    """A tensor less aligned than the key's: another candidate serves, and moves the running statistics once."""
    args = inputs(40, 8, 16, "f32", "running_mean running_var gamma beta")
    key = OP.key((*args, 1e-3, True, 0.3, True), "forward")
    launch = bound(OP, id, key)[0]
    mine = copied(args)
    apart = torch.empty(17, device=DEVICE)[1:]
    mine[which] = apart.copy_(mine[which])
    before = copied(mine)
    assert launch(*mine) is None
    for now, then in zip(mine, before, strict=True):
        assert now is None or torch.equal(now, then)


def statistics(z: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Mean and variance of z's columns by `batch_statistics_columns`, the same twice."""
    m, n = z.shape
    dtypes = dict.fromkeys(("z", "mean", "var", "rstd"), "f32")
    space, counters = column_passes.backward_space(n, 2, config)
    room = torch.full((space,), float("nan"), device=DEVICE)
    counter = torch.zeros(counters, device=DEVICE, dtype=torch.int32)
    run = column_passes.launcher(
        norm_batch_norm.batch_statistics_columns, m, n, dtypes, config, DEVICE, 4, ("eps",)
    )
    made = []
    for _ in range(2):  # the second run finds the counters as the first one left them
        mean, var, rstd = (torch.full((n,), float("nan"), device=DEVICE) for _ in range(3))
        assert run(z, mean, var, rstd, room, counter, 1e-3)
        assert not counter.any()
        made.append((mean, var))
    assert torch.equal(made[0][0], made[1][0])
    return made[1]


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_columns_far_from_zero_keep_their_digits(parts: int) -> None:
    """Means a thousand deviations away, and a first row that is far off, cost no digits of the variance."""
    m, n = 83, 20
    z = rand(m, n, dtype="f32") + 1000
    z[0] -= 900
    exact = z.double()
    config = {"BLOCK_R": 8, "BLOCK_C": 32, "parts": parts, "num_warps": 4}
    mean, var = statistics(z, config)
    torch.testing.assert_close(mean.double(), exact.mean(0), rtol=1e-6, atol=0)
    torch.testing.assert_close(var.double(), exact.var(0, correction=0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("parts", [1, 5, 32])
def test_the_mean_of_numbers_around_zero_is_as_good_as_their_sum(parts: int) -> None:
    """A part's first rows are far from its mean, as that is from 0: distances from there would add up to more than the numbers do."""
    m, n = 8000, 16
    z = rand(m, n, dtype="f32")
    config = {"BLOCK_R": 8, "BLOCK_C": 16, "parts": parts, "num_warps": 4}
    mean, _ = statistics(z, config)
    exact = z.double().mean(0)
    assert tolerance.relative_error(mean, exact) < 4e-7 * (1 + 2 * (parts == 1))


@pytest.mark.parametrize("value", [0.1, 1000.1])
def test_equal_numbers_are_their_mean(value: float) -> None:
    """What is left of a column that is one number is multiplied by 1 / sqrt(eps)."""
    for m, parts in ((83, 1), (83, 3), (1000, 7)):
        z = torch.full((m, 20), value, device=DEVICE)
        mean, var = statistics(z, {"BLOCK_R": 8, "BLOCK_C": 32, "parts": parts, "num_warps": 4})
        assert torch.equal(mean, z[0])
        assert not var.any()
    for m in (37, 51, 83):
        x, weight = torch.full((m, 1), value, device=DEVICE), torch.ones(5, 1, device=DEVICE)
        beta = rand(5, dtype="f32").abs()
        args = [x, weight, None, None, None, None, beta]
        y, _, mean, _, *_ = launched("triton.held", args, 1e-5, 0.1)
        assert torch.equal(mean, x[0].expand(5))
        assert torch.equal(y, beta.expand(m, 5))


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_statistics_are_judged_like_the_product_they_are_of(dtype: str) -> None:
    """A mean, in float32, of halves that were rounded to one side is as good as they are; of float32 it is not."""
    key = OP.key((*inputs(7, 8, 5, dtype, ""), 1e-3, True, 0.1, True), "forward")
    coarse = OP.candidates["cublaslt.statistics"].coarse(key)
    assert OP.candidates["triton.statistics"].coarse(key) == 0
    exact = torch.rand(200).double() + 1
    eager = (exact * (1 + 2e-5)).float()

    def right(off: float) -> bool:
        return bool(tolerance.judge([(exact * (1 + off)).float()], [eager], [exact], 1.0, coarse))

    assert right(2e-5)
    assert right(1e-4) == (dtype == "f16")
    assert not right(2e-3)


def test_which_keys_are_left_to_others() -> None:
    x, w = rand(4, 8), rand(6, 8)
    stats = (rand(6), rand(6).abs() + 1)

    def said(id: str, *args: Any) -> str:
        return str(OP.candidates[id].unfit(OP.key(args, "forward")))

    evaluation = (x, w, None, *stats, None, None, 1e-5, False, 0.1, True)
    assert "given" in said("triton.held", *evaluation)
    strided = rand(12)[::2]
    assert "strided" in said("triton.held", x, w, None, *stats, strided, None, 1e-5, True, 0.1, True)  # fmt: skip
    long = rand(5000, 8)
    assert "too long" in said("triton.held", long, w, None, *stats, None, None, 1e-5, True, 0.1, True)  # fmt: skip
    assert "too long" not in said("triton.statistics", long, w, None, *stats, None, None, 1e-5, True, 0.1, True)  # fmt: skip


def numbers(kernel: Any) -> tuple[str, ...]:
    """Those that it takes."""
    return tuple(name for name in ("eps", "momentum") if name in kernel.arg_names)


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    forward = ("z", "running_mean", "running_var", "gamma", "beta", "y", "mean", "rstd")
    kept = ("dy", "y", "z", "mean", "rstd")
    vectors = ("db", "dgamma", "dbeta")
    for sm, m, n, dtype, most in (
        (90, 500, 1024, "f16", 6), (90, 1024, 77, "f32", 2), (80, 500, 1024, "f32", 1), (100, 500, 1024, "f16", 1),
    ):  # fmt: skip
        monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device, sm=sm: sm)

        def named(*names: str, dtype: str = dtype) -> dict[str, str | None]:
            single = ("mean", "var", "rstd", "total", "moment")
            return {name: "f32" if name in single else dtype for name in names}

        ways: list[tuple[Any, dict[str, str | None], Any]] = [
            (norm_batch_norm.batch_norm_relu_fwd_held, named(*forward), norm_batch_norm.held_configs(m, n, "fwd")),
            (norm_batch_norm.batch_norm_relu_bwd_held, named(*kept, "gamma", "dz", *vectors), norm_batch_norm.held_configs(m, n, "bwd")),
            (norm_batch_norm.batch_statistics_columns, named("z", "mean", "var", "rstd"), column_passes.backward_configs(m, n)),
            (norm_batch_norm.batch_norm_relu_fwd_trained, named("z", "mean", "var", "rstd", *forward[1:6]), column_passes.apply_configs(m, n)),
            (norm_batch_norm.batch_norm_relu_bwd_sums, named(*kept, "gamma", "total", "moment", *vectors), norm_batch_norm.sums_configs(m, n)),
            (norm_batch_norm.batch_norm_relu_bwd_tiled, named(*kept, "gamma", "total", "moment", "dz"), column_passes.apply_configs(m, n)),
        ]  # fmt: skip
        for kernel, dtypes, configs in ways:
            for config in configs[:most]:

                def build(kernel: Any = kernel, dtypes: Any = dtypes, config: Any = config, m: int = m, n: int = n) -> object:  # fmt: skip
                    return column_passes.launcher(
                        kernel, m, n, dtypes, config, cuda, 16, numbers(kernel)
                    )

                jobs += triton_runtime_launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    assert {job.kernel for job in jobs} == {
        "batch_norm_relu_fwd_held", "batch_norm_relu_bwd_held", "batch_statistics_columns", "batch_norm_relu_bwd_sums",
        "batch_norm_relu_bwd_tiled", "batch_norm_relu_fwd_trained",
    }  # fmt: skip
    nothing_spills(jobs)
