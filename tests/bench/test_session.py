"""The benchmark: what it selects, that nothing wrong is timed, the result file, its limits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.bench import (
    cases,
    command_inputs,
    machine_info,
    machine_limits,
    measure_case,
    result_file,
    session,
    suites,
)
from tensorlogic.bench.report import report as report_report
from tensorlogic.bench.report import summary as report_summary
from tensorlogic.bench.result_file import OURS, Ceilings, Row
from tensorlogic.bench.terminal.user_error import Problem

from ..support.bench import (
    TINY,
    held,
    made,
    run,
)
from ..support.bench import tiny as tiny  # a fixture

CPU = torch.device("cpu")


@pytest.mark.parametrize("recipe", cases.RECIPES.values(), ids=lambda r: r.op)
def test_every_operation_is_right_and_timed(
    recipe: cases.Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "FEATURES", 64)
    row = measure_case.measured(cases.Case(recipe.category, recipe.op, 32, "f32", "cpu"), CPU, TINY)
    assert (row.status, row.reason, row.excluded) == ("ok", "", {})
    assert set(row.device_us) == {OURS, *recipe.eager}
    assert row.error is not None
    assert row.error < 1e-5
    assert row.speed() is not None
    assert row.flops > 0
    assert row.bytes > 0
    assert row.candidate in {e["candidate"] for e in row.evidence}


def test_all_eleven_fused_operations_are_there() -> None:
    assert [r.op for r in cases.FUSED] == [
        "linear", "linear_residual_relu", "gelu_linear", "linear_batch_norm_relu", "dropout_linear", "layer_norm_linear",
        "softmax_cross_entropy", "attention_scores", "add_relu", "mul_relu", "affine",
    ]  # fmt: skip
    assert all(next(iter(r.eager)) == "separate" and len(r.eager) >= 2 for r in cases.FUSED)


def test_standard_sizes() -> None:
    chosen = suites.cases(suites.Selection("cpu"))
    sizes = {
        c.category: sorted({d.size for d in chosen if d.category == c.category}) for c in chosen
    }
    assert sizes["matmul"] == [64, 128, 256, 512, 1024]
    assert sizes["fusion"] == [128, 256, 512, 1024]
    assert sizes["activation"] == sizes["transfer"] == [1 << 10, 10 << 10, 100 << 10, 1 << 20]
    gpu = suites.cases(suites.Selection("cuda"))
    assert max(c.size for c in gpu if c.category == "fusion") == 8192
    assert max(c.size for c in gpu if c.category == "transfer") == 128 << 20
    assert {c.detail for c in gpu if c.category == "transfer"} == set(cases.TRANSFERS["cuda"])
    assert len({c.id for c in gpu}) == len(gpu)


def test_selection() -> None:
    chosen = suites.cases(
        suites.Selection("cpu", ops=("linear", "activation"), sizes=(96,), dtypes=("bf16",))
    )
    assert [c.id for c in chosen] == [
        "activation relu 96 bf16",
        "activation gelu 96 bf16",
        "fusion linear 96 bf16",
    ]
    with pytest.raises(Problem, match="op is 'linaer'"):
        suites.Selection("cpu", ops=("linaer",))
    with pytest.raises(Problem, match="dtype is 'int8'"):
        suites.Selection("cpu", dtypes=("int8",))
    with pytest.raises(Problem, match="nothing to measure"):
        suites.cases(suites.Selection("cpu", ops=("linear",), sizes=(1 << 30,)))


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x)
        y[-1] += 1
        return y

    wrong = replace(
        cases.RECIPES["relu"],
        ours=lambda x: off(x) if x.dtype == torch.float16 else tensorlogic.relu(x),
    )
    monkeypatch.setitem(cases.RECIPES, "relu", wrong)
    monkeypatch.setattr(
        measure_case, "meet", lambda fn, args, captured=False: real(tensorlogic.relu, args)
    )
    row = measure_case.measured(cases.Case("activation", "relu", 64, "f16", "cpu"), CPU, TINY)
    assert row.status == "refused"
    assert row.reason.startswith("wrong: output 0 has")
    assert row.device_us == {}


real = measure_case.meet


def test_a_wrong_baseline_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = cases.RECIPES["add_relu"]
    monkeypatch.setitem(
        cases.RECIPES, "add_relu", replace(recipe, eager={**recipe.eager, "wrong": torch.add})
    )
    row = measure_case.measured(cases.Case("fusion", "add_relu", 32, "f32", "cpu"), CPU, TINY)
    assert row.status == "ok"
    assert "wrong" in row.excluded
    assert "wrong" not in row.device_us


def test_dropout_is_checked_by_what_it_keeps() -> None:
    x = torch.randn(200, 200)
    kept = torch.nn.functional.dropout(x, 0.25)
    assert cases.dropout_error(kept, x, 0.25)[1] is None
    assert "neither 0 nor" in str(cases.dropout_error(kept * 1.01, x, 0.25)[1])
    assert "are kept" in str(
        cases.dropout_error(torch.nn.functional.dropout(x, 0.5) * 0.5 / 0.75, x, 0.25)[1]
    )


def test_failures_leave_their_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate too much")

    monkeypatch.setitem(cases.RECIPES, "add", replace(cases.RECIPES["add"], inputs=fail))
    row = measure_case.measured(cases.Case("elementwise", "add", 64, "f16", "cpu"), CPU, TINY)
    assert (row.status, row.reason) == ("failed", "out of memory: tried to allocate too much")


def test_run_writes_and_loads(tmp_path: Path) -> None:
    ticks: list[str] = []
    made = run(
        tmp_path / "deep" / "r.json",
        ops=["add_relu", "transfer"],
        sizes=[64],
        dtypes=["f16"],
        tick=lambda d, n, t: ticks.append(t),
    )
    again = result_file.load(tmp_path / "deep" / "r.json")
    assert json.dumps(again.to_json()) == json.dumps(made.to_json())
    assert again.complete
    assert [r.id for r in again.rows] == [
        "transfer transfer copy 64 f16",
        "transfer transfer clone 64 f16",
        "fusion add_relu 64 f16",
    ]
    assert "fusion add_relu 64 f16" in ticks
    assert len(again.rows[2].device_us[OURS]) == TINY.rounds
    machine = again.machine
    assert machine["environment"]["torch"] == torch.__version__
    assert {"python", "system", "processor", "cores", "memory_gib", "torch_build"} <= machine.keys()
    assert not re.search(r"(?<![\w.])/\w+/", json.dumps(machine)), "a folder of this machine"
    assert again.run["before"]["time"] <= again.run["after"]["time"]
    assert again.ceilings.gflops["f16"] > 0
    assert not list(tmp_path.rglob("*.tmp"))


def test_interrupt_keeps_rows_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.json"
    measured: list[str] = []

    def until(stop: int) -> Callable[..., Row]:
        def measure(case: cases.Case, device: torch.device, effort: measure_case.Effort) -> Row:
            if len(measured) == stop:
                raise KeyboardInterrupt
            measured.append(case.id)
            return original(case, device, effort)

        return measure

    original = measure_case.measured
    monkeypatch.setattr(measure_case, "measured", until(1))
    first = run(path, ops=["add", "mul"], sizes=[64], dtypes=["f32"])
    assert not first.complete
    assert [r.op for r in result_file.load(path).rows] == ["add"]
    assert any("not complete" in line for line in report_summary.lines(result_file.load(path)))
    monkeypatch.setattr(measure_case, "measured", until(9))
    second = run(path, ops=["add", "mul"], sizes=[64], dtypes=["f32"], resume=True)
    assert second.complete
    assert second.run["kept"] == 1
    assert (
        "2 rows, 1 of them kept from an interrupted run"
        in report_report.Report(second, None, []).about
    )
    assert [r.op for r in second.rows] == ["add", "mul"]
    assert measured == ["elementwise add 64 f32", "elementwise mul 64 f32"]


def test_unusable_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with pytest.raises(Problem, match=r"r\.json does not exist"):
        result_file.load(path)
    held(made(1, 2)).write(path)
    text = path.read_text()
    for damaged, reason in (
        (text[: len(text) // 2], "truncated or not JSON"),
        ("[]", "not a result file"),
        ('{"format": "tensorlogic plans"}', "not a result file"),
        (text.replace('"schema": 1', '"schema": 9'), "schema 9"),
        (text.replace('"rows"', '"rovs"'), "damaged"),
        (text.replace('"device_us": {', '"device_us": 3, "x": {'), "damaged"),
    ):
        path.write_text(damaged)
        with pytest.raises(Problem, match=reason):
            result_file.load(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Problem, match="not JSON"):
        result_file.load(path)
    with pytest.raises(Problem, match="cannot be written"):
        held().write(path / "inside" / "a-file.json")


def test_share_of_the_limit() -> None:
    limits = Ceilings([(1000, 1.0), (100_000, 10.0)], {"f16": 1.0})
    assert machine_limits.copy_us(limits.copy, 10) == 1.0
    assert machine_limits.copy_us(limits.copy, 10_000) == pytest.approx(10**0.5)
    assert machine_limits.copy_us(limits.copy, 1_000_000) == pytest.approx(100.0)
    row = made(20, 20)
    row.flops, row.bytes = 1e4, 1000.0
    run = held(row)
    run.ceilings = limits
    assert machine_limits.Floors(run).share(row) == pytest.approx(
        10 / 20
    )  # 1e4 operations at 1 GFLOPS take 10 us


def test_a_row_faster_than_the_copy_raises_the_limit() -> None:
    limits = Ceilings([(1000, 1.0), (100_000, 10.0)], {})
    quick, slow = made(5, 20, size=1), made(20, 20, size=2)
    for row, moved in ((quick, 100_000.0), (slow, 50_000.0)):
        row.flops, row.bytes = 0.0, moved
    run = held(quick, slow)
    run.ceilings = limits
    floors = machine_limits.Floors(run)
    assert floors.share(quick) == pytest.approx(1.0)
    assert floors.us(slow) == pytest.approx(5 ** (math.log(50) / math.log(100)))
    assert all(s <= 1.0001 for r in run.rows if (s := floors.share(r)) is not None)


def test_calls_from_shapes() -> None:
    fn, args, kwargs = command_inputs.call(
        "linear", "f32", CPU, shapes=["2x3", "4x3", "-", "2x4"], flags={"activation": "relu"}
    )
    assert fn(*args, **kwargs).shape == (2, 4)
    assert "bias" not in kwargs
    fn, args, kwargs = command_inputs.call(
        "attention_scores", "f32", CPU, shapes=["2x5x8", "2x7x8"]
    )
    assert fn(*args, **kwargs).shape == (2, 5, 7)
    fn, args, kwargs = command_inputs.call("softmax_cross_entropy", "f32", CPU, shapes=["4x9", "4"])
    assert fn(*args, **kwargs).shape == ()
    for name in command_inputs.public():
        fn, args, kwargs = command_inputs.call(name, "f32", CPU, size=16)
        assert torch.isfinite(fn(*args, **kwargs)).all(), name
    for about, reason in (
        ({"op": "linaer"}, "op is 'linaer'"),
        ({"op": "linear", "shapes": ["2xx"]}, "shape is '2xx'"),
        ({"op": "linear", "shapes": ["-", "2x2"]}, "requires x"),
        ({"op": "linear", "shapes": ["2x2"]}, "requires weight"),
        ({"op": "relu", "shapes": ["2", "2"]}, "2 shapes were given"),
        ({"op": "silu", "flags": {"colour": "red"}}, "no argument 'colour'"),
    ):
        with pytest.raises(Problem, match=reason):
            command_inputs.call(about.pop("op"), "f32", CPU, **about)  # type: ignore[arg-type]


def test_devices_are_named() -> None:
    assert session.pick_device("cpu") == CPU
    for name, reason in (("tpu", "cpu, cuda, cuda:N or mps is required"), ("meta", "is required")):
        with pytest.raises(Problem, match=reason):
            session.pick_device(name)


def test_results_are_plain_json(tmp_path: Path) -> None:
    held(made(1, 2)).write(tmp_path / "r.json")
    document = json.loads((tmp_path / "r.json").read_text())
    assert list(document) == ["format", "schema", "complete", "machine", "run", "ceilings", "rows"]


def test_a_disturbed_machine_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    found = held(made(10, 20))
    assert report_summary.caveats(found) == []
    found.run |= {"others": 0.37, "throttled": "the GPU ran at 1000 of 1980 MHz"}
    assert ["other programs took 37 %" in c.replace("37%", "37 %") for c in report_summary.caveats(found)] == [True, False]  # fmt: skip
    gpu = {"clocks.sm": "1000 MHz", "clocks.max.sm": "1980 MHz", "utilization.gpu": "99 %"}
    assert "1000 of 1980 MHz" in str(machine_info.throttled({"gpu": gpu}))
    assert machine_info.throttled({"gpu": {**gpu, "utilization.gpu": "0 %"}}) is None
    assert machine_info.throttled({"gpu": None}) is None
    times = iter([100.0, 110.0])
    monkeypatch.setattr(machine_info, "_busy_s", lambda: next(times))
    monkeypatch.setattr(machine_info, "_own_s", lambda: 5.0)
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert machine_info.Others().share(2) == 0.5  # ten of twenty seconds were others'
