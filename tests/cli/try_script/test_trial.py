"""`tensorlogic try`: real programs in real processes, and what a person reads."""

from __future__ import annotations

import re
import socket
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tensorlogic.bench.terminal.user_error import Problem
from tensorlogic.cli import main
from tensorlogic.cli.try_script import assist, observe, screen
from tensorlogic.cli.try_script import trial as runs
from tensorlogic.compiler.reporting import op_profile as profiling
from tensorlogic.compiler.reporting import remedies
from tensorlogic.measure.opportunity import Opportunity
from tensorlogic.plans import lockfile

PROGRAM = """
import sys, torch
from torch import nn

torch.manual_seed(0)
width = int(sys.argv[1])
model = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)).half().eval()
with torch.no_grad():
    for _ in range(100):
        y = model(torch.randn(32, width).half())
print(y.float().norm())
"""
ENVIRONMENT = {"device": "A", "kind": "cpu", "threads": 2, "torch": "2.13.0", "triton": None, "driver": "x"}  # fmt: skip


def written(folder: Path, text: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def trial(plain: list[float], ours: list[float], **about: Any) -> runs.Trial:
    watched = {"environment": ENVIRONMENT, "spent": [], "modules": [], "seconds": 1.0}
    asked = runs.Asked("program.py")
    return runs.Trial(asked, watched, plain=plain, ours=ours, difference=1e-4, **about)


@pytest.mark.slow
def test_a_program_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "PAIRS", (1, 1))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, PROGRAM)
    before = path.read_text()
    code = main.main(["try", "--seconds", "1", str(path), "128"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert path.read_text() == before
    assert re.search(r"^the whole program +\S.*x \[.*1 pairs of runs in turn$", out, re.MULTILINE)
    assert "a call of its modules" in out
    assert "outputs agree" in out
    assert "Sequential: " in out
    assert "addmm" in out
    assert "float16[128x128]" in out
    said = [line for line in out.splitlines() if line.startswith("written: ")]
    assert [line.split(" ")[1] for line in said] == [
        str(tmp_path / name) for name in ("tensorlogic.lock.json", "tensorlogic.try.json")
    ]
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} == {
        "program.py", "tensorlogic.try.json", "tensorlogic.lock.json",
    }  # fmt: skip
    assert len(list(lockfile.load_lockfile(Path("tensorlogic.lock.json")).plans())) > 0


@pytest.mark.slow
def test_a_function_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(
        tmp_path,
        """
        import torch
        a, b = torch.randn(192, 192).half(), torch.randn(192, 192).half()
        def step():
            return torch.relu(a @ b)
        """,
        "mine_to_try.py",
    )
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main.main(["try", "--entry", "mine_to_try:step", "--seconds", "1"]) == 0
    out = capsys.readouterr().out
    assert "calls in turn" in out
    assert "outputs agree" in out
    if "nothing beats" not in out:
        assert "TENSORLOGIC_ENABLE=1" in out


@pytest.mark.slow
def test_programs_that_cannot_be_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*tokens: object) -> str:
        assert main.main(["try", *map(str, tokens)]) == 2
        return capsys.readouterr().err

    assert "does not exist" in refused(tmp_path / "none.py")
    assert "module:function is required" in refused("--entry", "mine")
    assert "one of them" in refused()
    assert "does not exist" in refused("--verify", "--record", tmp_path / "none.json", "x.py")
    wrong = written(tmp_path, "raise RuntimeError('of its own')\n")
    assert "of its own" in refused(wrong)


def test_a_program_that_writes_is_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(self: runs.Runner, mode: str, **env: str) -> dict[str, Any]:
        ran.append(mode)
        watched = {"outside": ["writes model.pt"], "environment": ENVIRONMENT, "spent": []}
        return watched

    monkeypatch.setattr(runs.Runner, "run", run)
    path = written(tmp_path, "")
    with pytest.raises(Problem, match=r"writes model\.pt.*--again"):
        runs.attempt(runs.Asked(str(path)))
    assert ran == ["look"]


def test_changes_outside_are_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "HARMLESS", ("/dev/",))
    heard = observe.Outside("/ours/")
    path = tmp_path / "out.txt"
    path.write_text("before it listens")
    heard.active = True
    path.read_text()
    assert list(heard.found) == []
    path.write_text("x")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
    heard.active = False
    path.write_text("y")
    assert list(heard.found) == [f"writes {path}", "listens at ('127.0.0.1', 0)"]


def test_what_takes_the_time_is_seen() -> None:
    profile, a = profiling.Profile(), torch.randn(64, 64)
    with profile:
        for _ in range(3):
            (a @ a).relu()
    spent = {s.op: s for s in profile.spent.values()}
    assert spent["aten::mm"].calls == 3
    assert spent["aten::mm"].shapes == "float32[64x64], float32[64x64]"
    assert spent["aten::relu"].bytes == a.numel() * 4
    assert all(s.seconds > 0 for s in spent.values())


def test_only_outermost_modules_count() -> None:
    modules, model = observe.Modules(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    called, x = nn.Module.__call__, torch.randn(2, 4)
    with modules.watching():
        model(x)
        model(x)
        with torch.no_grad():
            model(x)
        nn.ReLU()(x)  # without parameters
    assert nn.Module.__call__ is called
    counted = {c.signature: (c.number, c.name, c.calls) for c in modules.called.values()}
    shapes = "torch.float32[2, 4]@cpu"
    assert counted == {
        f"{shapes} recorded": (0, "Sequential", 2),
        f"{shapes} inference": (0, "Sequential", 1),
    }
    torch.testing.assert_close(modules.outputs[f"0 {shapes} recorded 1 0 float32"].float(), model(x).flatten())  # fmt: skip


def test_help_replaces_a_module_and_goes_away() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU()).eval(), torch.randn(8, 64)
    with torch.no_grad():
        expected = model(x)
        help = assist.Help(True, {0: assist.signature((x,), {})})
        for _ in range(2):
            with help:
                torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    assert [h["name"] for h in help.helped] == ["Sequential"]
    assert help.seconds > 0
    assert type(model) is nn.Sequential
    from tensorlogic.cpu_overrides import enable

    assert not enable.enabled()


def test_the_verdict() -> None:
    gained = trial([2.0, 2.1, 2.0], [1.0, 1.0, 1.0], repair=True)
    text = "\n".join(screen.lines(gained))
    assert re.search(r"2\.00x \[2\.00, 2\.10\] +3 pairs of runs", text)
    assert "TENSORLOGIC_ENABLE=1" in text
    even = trial([1.0, 1.1, 1.0], [1.0, 1.0, 1.1])
    assert "nothing beats what you have" in "\n".join(screen.lines(even))
    assert "to keep it" not in "\n".join(screen.lines(even))
    wrong = trial([2.0, 2.0], [1.0, 1.0], agree=False)
    assert not wrong.won
    assert "does not give the same outputs" in "\n".join(screen.lines(wrong))
    broken = trial([], [], failure="RuntimeError: no")
    assert "with us the program fails" in "\n".join(screen.lines(broken))
    assert "A, 2 threads; PyTorch" in text
    gained.look["environment"] = ENVIRONMENT | {"kind": "cuda", "threads": 0}
    assert "A; PyTorch" in "\n".join(screen.lines(gained))


def test_a_lost_gain_is_found(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    screen.save(trial([2.0, 2.0], [1.0, 1.0]), path)
    known = screen.held(path)
    assert screen.lost(trial([2.0, 2.0], [1.05, 1.05]), known, 0.1) is None
    why = screen.lost(trial([2.0, 2.0], [1.5, 1.5]), known, 0.1)
    assert why is not None
    assert "was 2.00x and is 1.33x" in why
    assert "outputs differ" in str(screen.lost(trial([2.0], [1.0], agree=False), known, 0.1))
    assert "fails" in str(screen.lost(trial([2.0], [1.0], failure="no"), known, 0.1))
    other = trial([2.0], [1.0])
    other.asked.args = ("64",)
    with pytest.raises(Problem, match="the record is of"):
        screen.lost(other, known, 0.1)
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 3'))
    with pytest.raises(Problem, match="another version"):
        screen.held(path)
    path.write_text("{")
    with pytest.raises(Problem, match="cannot be read"):
        screen.held(path)


def test_outputs_are_compared_with_what_two_plain_runs_differ_by() -> None:
    plain, ours = {"0 f 1 0 float32": torch.ones(4)}, {"0 f 1 0 float32": torch.ones(4) * 1.1}
    found = trial([1.0], [1.0])
    runs._compare(found, plain, plain, ours)
    assert not found.agree
    runs._compare(found, plain, {"0 f 1 0 float32": torch.ones(4) * 0.9}, ours)
    assert found.agree  # the program itself is no more certain than that
    runs._compare(found, plain, plain, {"0 f 1 0 float32": torch.tensor([1, 1, 1, torch.nan])})
    assert not found.agree


def test_runs_that_differ_on_their_own_are_not_said_to_agree() -> None:
    found = trial([1.0], [1.0])
    found.difference, found.own = 1.4, 1.3
    assert any(
        "cannot be compared: two runs without us differ by 130%" in t for t in screen.lines(found)
    )
    found.own = 0.0
    assert any("outputs agree" in t for t in screen.lines(found))


def test_what_is_kept_of_outputs_is_not_counted_as_the_programs() -> None:
    profile, modules = profiling.Profile(), observe.Modules()
    with profile:
        modules.keep("it", torch.ones(8) * 2)
    assert {op for op, _ in profile.spent} == {"aten::ones", "aten::mul"} or not any(
        "copy" in op for op, _ in profile.spent
    )
    assert modules.outputs["it 0 float32"].tolist() == [2.0] * 8


def test_advice() -> None:
    def spent(op: str, us: float, calls: int = 1, **about: Any) -> dict[str, Any]:
        return {"op": f"aten::{op}", "shapes": "s", "calls": calls, "seconds": us / 1e6, "bytes": 0, "dtypes": ["float16"]} | about  # fmt: skip

    watched = {
        "environment": ENVIRONMENT, "operations": 1000, "launch_us": 1.0, "fresh": 400.0, "quick_halves": True, "modules": [{"calls": 100}],
        "spent": [spent("_to_copy", 300), spent("relu", 200), spent("add", 500, bytes=8 << 20)],
    }  # fmt: skip
    cold = {
        **watched,
        "operations": 1,
    }  # watched calls take longer than those that were timed
    assert max(o.above_us for o in remedies.opportunities(cold, 1e-4)) <= 100
    found = remedies.opportunities(watched, 1.5e-3)
    causes = {o.cause.partition(":")[0]: o for o in found}
    assert causes["launch cost"].priority == "high"
    assert causes["conversion between dtypes or layouts"].above_us == 300
    assert causes["extra passes over memory"].above_us == 350
    assert causes["unpooled allocation"].above_us == 400  # what was spent bounds what can be saved
    assert [o.above_us for o in found] == sorted((o.above_us for o in found), reverse=True)
    watched["operations"] = 10
    assert "launch cost" not in {o.cause.partition(":")[0] for o in remedies.opportunities(watched, 1.5e-3)}  # fmt: skip
    product, small = (
        spent("mm", us, calls=n, dtypes=["float32"]) for us, n in ((100, 1), (100, 50))
    )
    watched["spent"] = [product, small]
    (arithmetic,) = remedies.opportunities(watched, 2e-4)
    assert arithmetic.what == "1 products in float32"  # the small ones are launches
    watched["quick_halves"] = False
    assert not remedies.opportunities(watched, 2e-4)


def test_what_was_done_stands_apart_with_expected_and_obtained() -> None:
    def some(cause: str, gain: float) -> Opportunity:
        return Opportunity("it", "s", 100.0, gain, cause, "do", "low", (), "high")

    every = [
        some(remedies.PASSES, 1.2),
        some(f"{remedies.LAUNCHES}: much", 3.0),
        some("transfer", 2.0),
    ]
    left, done = remedies.split(every, True, False)
    assert [o.cause for o in done] == [remedies.PASSES]
    assert len(left) == 2
    assert len(remedies.split(every, True, True)[1]) == 2
    assert remedies.split(every, False, False) == (every, [])
    text = "\n".join(remedies.lines(left, done, (1.5, 1.4, 1.6)))
    assert "expected: extra passes over memory, up to 1.2x; obtained, with all else that was done: 1.50x [1.40, 1.60]" in text  # fmt: skip
    assert remedies.lines([], done) == []
