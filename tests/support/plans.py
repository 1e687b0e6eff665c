"""Candidates that tests add, plans for them, compile jobs: two of relu, right and watched; wrong ones of linear from a plug-in."""

from __future__ import annotations

import importlib
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.autotune import tuner
from tensorlogic.core import policy
from tensorlogic.core.candidate import Candidate
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.dispatch import decision as dispatch_decision
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.measure import timer
from tensorlogic.plans import open_stores
from tensorlogic.plans.plan import Evidence, Plan
from tensorlogic.system import compile_pool, compile_workers

CPU = torch.device("cpu")
RELU = OPS["relu"]
Served = list[str]
Install = Callable[..., None]


@pytest.fixture
def served() -> Iterator[Served]:
    """Candidates toy.a and toy.b of relu, right and trusted, that write down whom the call went to."""
    calls: Served = []
    candidate_loading.ready("cpu")  # or those that come later would be gone afterwards
    kept = dict(RELU.candidates)
    for name in ("toy.a", "toy.b"):
        RELU.add(toy(name, calls))
    policy.forget_entries()
    yield calls
    RELU.candidates.clear()
    RELU.candidates.update(kept)
    policy.forget_entries()


def toy(name: str, calls: Served, **about: Any) -> Candidate:
    def launch(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(name)
        return (torch.relu(x),)

    about.setdefault("trusted", True)
    return Candidate(name, bind=lambda key, config, device: launch, sources=(len,), **about)


def key_of(x: Tensor, save: bool = False) -> Key:
    return RELU.key((x, save), "forward" if save else "inference")


def plan(key: Key, eager: str, captured: str | None = None) -> Plan:
    """A plan whose evidence says that its winners were measured."""
    winners = {eager, captured or eager}
    return Plan(
        key=key,
        eager=eager,
        eager_config={},
        captured=captured or eager,
        captured_config={},
        evidence=[Evidence(w, {}, "measured", source=RELU.candidates[w].source) for w in winners],
        measured="2026-01-01T00:00:00+00:00",
    )


def put(*made: Plan) -> None:
    for one in made:
        open_stores.current(CPU).put(one)
    policy.forget_entries()


def decided(x: Tensor) -> tuple[str, str]:
    decision = dispatch_selector.decide(RELU, key_of(x), CPU, policy.current())
    return decision.source, decision.eager[0]


@pytest.fixture
def nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(tuner.KeyTuner, "__init__", refuse)
    monkeypatch.setattr(timer, "device_samples", refuse)


HEAD = """
import time
import torch
import torch.nn.functional as F
from tensorlogic.core.candidate import Candidate

class Peculiar(Exception):
    pass

KEPT, COUNT = {}, [0]

def right(x, weight, bias, residual, activation, save):
    return F.linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)

def register(ops):
    def plant(name, fn, **about):
        op = ops["linear"]
        op.add(Candidate(
            "planted." + name,
            bind=lambda key, config, device: op.closer(fn, *(v for _, v in key.flags)),
            sources=(fn,), trusted=True, **about,
        ))
"""
# name -> (body of the candidate, what its reason must contain)
WRONG = {
    "off_by_one_row": ("return (torch.roll(y, 1, 0),)", "wrong: output 0"),
    "stale_output": ("return (KEPT.setdefault(y.shape, y),)", "wrong: output 0"),
    "stale_by_address": (
        "return (KEPT.setdefault((x.data_ptr(), y.shape), y),)",
        "wrong: output 0",
    ),
    "reused_buffer": (
        "return (KEPT.setdefault(y.shape, torch.empty_like(y)).copy_(y),)",
        "a later call changed an earlier output",
    ),
    "f16_accumulation": (
        """
        z = torch.zeros_like(y)
        for k in range(x.shape[1]):
            z += x[:, k : k + 1] * weight[:, k]
        return (z if bias is None else z + bias,)
        """,
        "wrong: output 0",
    ),
    "odd_sizes": (
        "y[:, y.shape[1] & ~1 :] = 0 if bias is None else bias[-1]; return (y,)",
        "wrong: output 0",
    ),
    "nan_in_one": ("y.view(-1)[y.numel() // 2] = float('nan'); return (y,)", "has 1 NaN"),
    "one_element_off": ("y.view(-1)[-1] += 1; return (y,)", "wrong: output 0 has"),
    "unwritten_tail": ("z = torch.empty_like(y); z[:-1] = y[:-1]; return (z,)", "wrong: output 0"),
    "writes_input": ("x.mul_(2); return (y,)", "wrong: it changed its input x"),
    "writes_weight_back_late": ("weight.view(-1)[0] = 1; return (y,)", "changed its input weight"),
    "other_strides": (
        "return (torch.empty_strided(y.shape, (1, y.shape[0]), dtype=y.dtype).copy_(y),)",
        "wrong: output 0 has strides (1, 8)",
    ),
    "other_dtype": ("return (y.float(),)", "wrong: output 0 is f32"),
    "other_shape": ("return (y.view(-1),)", "wrong: output 0 is f16"),
    "nothing": ("return ()", "wrong: output 0 is NoneType"),
    "too_many": ("return (y, y)", "wrong: 2 outputs"),
    "not_a_tensor": ("return (1.0,)", "wrong: output 0 is float"),
    "raises": ("raise Peculiar('no luck')", "failed: Peculiar: no luck"),
    "asserts": ("assert False, 'broken'", "failed: AssertionError: broken"),
    "declines": ("return None", "declined the key it was bound for"),
    "allocates": ("torch.empty(1 << 52); return (y,)", "out of memory"),
    "raises_later": (
        "COUNT[0] += 1\nif COUNT[0] > 6:\n    raise Peculiar('worn out')\nreturn (y,)",
        "failed: Peculiar: worn out",
    ),
    "declines_later": (
        "COUNT[0] += 1\nreturn None if COUNT[0] > 6 else (y,)",
        "declined the key it was bound for",
    ),
}


def _module(names: list[str], extra: str = "") -> str:
    text = HEAD
    for name in names:
        body = textwrap.indent(textwrap.dedent(WRONG[name][0]).strip(), " " * 8)
        text += f"    def {name}(x, weight, bias, residual, activation, save):\n"
        text += f"        y = right(x, weight, bias, residual, activation, save)\n{body}\n"
        text += f"    plant({name!r}, {name}, supports=lambda key: None if key.spec('residual') is None and key.flag('activation') == 'none' else 'plain only')\n"
    return text + textwrap.indent(textwrap.dedent(extra), " " * 4) + "\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(names, extra source): a distribution with a `tensorlogic.candidates` entry point, found as pip's would be."""
    candidate_loading.ready("cpu")  # else those of the package go with the planted ones
    before = {name: dict(op.candidates) for name, op in OPS.items()}
    monkeypatch.setattr(tuner, "CUT", 1e9)  # a busy machine must not cut what is to be refused

    def make(*names: str, extra: str = "") -> None:
        site = tmp_path / "site"
        info = site / "planted_candidates-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "planted_candidates.py").write_text(_module(list(names), extra))
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: planted-candidates\nVersion: 1.0\n"
        )
        (info / "entry_points.txt").write_text(
            "[tensorlogic.candidates]\nplanted = planted_candidates:register\n"
        )
        monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        candidate_loading._READY.difference_update({"plugins", "cpu"})
        candidate_loading.ready("cpu")

    yield make
    for name, op in OPS.items():
        op.candidates.clear()
        op.candidates.update(before[name])
    sys.modules.pop("planted_candidates", None)
    dispatch_decision._SAID.clear()
    policy.forget_entries()


def inputs(
    m: int = 8, k: int = 64, n: int = 15, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    return [
        torch.randn(m, k).to(dtype),
        (torch.randn(n, k) / 8).to(dtype),
        torch.randn(n).to(dtype),
    ]


def reasons(plan: Plan) -> dict[str, str]:
    return {
        e.candidate.removeprefix("planted."): e.reason
        for e in plan.evidence
        if e.status == "refused"
    }


JOBS = """
import os, sys, time
from dataclasses import dataclass

@dataclass(frozen=True)
class Job:
    what: str
    path: str

    def run(self):
        print("noise on stdout")
        if self.what == "fail":
            raise ValueError("no such instruction")
        if self.what == "odd":
            raise Odd("beyond the usual")
        if self.what == "die":
            os._exit(3)
        if self.what == "sleep":
            time.sleep(2)
        if self.what == "wait":
            while not os.path.exists(self.path + ".go"):
                time.sleep(0.01)
        with open(self.path, "w") as f:
            f.write(str(os.getpid()))

class Odd(Exception):
    pass
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a module that only sys.path knows."""
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "compile_jobs.py").write_text(textwrap.dedent(JOBS))
    return folder


@pytest.fixture
def job(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """job(what) -> a picklable job from that module; workers of this test's own."""
    monkeypatch.syspath_prepend(str(source))
    monkeypatch.setattr(compile_pool, "_workers", None)
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "1")
    import compile_jobs  # type: ignore[import-not-found]

    yield lambda what, name="out": compile_jobs.Job(what, str(tmp_path / name))
    if compile_pool._workers is not None:
        compile_pool._workers.close()
    sys.modules.pop("compile_jobs", None)


class Kept(compile_workers.ForkServer):
    """Forks workers for one test after the other."""

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def kept() -> Iterator[Kept]:
    nursery = Kept()
    yield nursery
    compile_workers.ForkServer.close(nursery)


@pytest.fixture
def nursed(job: Any, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """This test's worker is forked from a process that others use, too, since importing PyTorch takes it 2 s."""
    monkeypatch.setattr(compile_pool, "ForkServer", lambda: kept)


def finish(*jobs: Any) -> None:
    begin = time.monotonic()
    while not compile_pool.ready(jobs):
        assert time.monotonic() - begin < 240  # idle processes wait for every other one
        time.sleep(0.01)


def begun(job: Any) -> None:
    begin = time.monotonic()
    while not compile_pool._workers.jobs[job].running():  # type: ignore[union-attr]
        assert time.monotonic() - begin < 240  # idle processes wait for every other one
        time.sleep(0.01)
