"""An op's GPU candidates are registered when it is first used on a GPU, those of other ops not yet: the same ones, in the same order."""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.system import hardware

pytestmark = pytest.mark.skipif(hardware.triton_missing() is not None, reason="needs Triton")
Candidates = dict[str, list[str]]

# in processes forked from one that has imported PyTorch: what each registers stays its own
PROGRAM = """
import json, os, sys
from dataclasses import replace
import torch, triton
from tensorlogic.dispatch import candidate_loading as registry, selector
from tensorlogic.core.op import OPS

def seen():
    return {name: list(op.candidates) for name, op in OPS.items()}

def apart(run):
    read, write = os.pipe()
    if os.fork() == 0:
        os.write(write, json.dumps(run()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        return json.loads(answer.read())

def after(*names):
    def run():
        for name in names:
            registry.ready("cuda", OPS.get(name))
        return seen()
    return apart(run)

class Point:
    name = value = "planted"
    def load(self):
        return lambda ops: ops["softmax"].candidates["triton.rows"]

def beside_third_parties():
    registry._foreign = lambda: [Point()]
    registry.ready("cuda", OPS["linear"])
    return seen()

def forced(id):
    def run():
        said, x = [], torch.zeros(4, 8)
        selector.say_once = lambda op, id, text: said.append(text)
        linear = OPS["linear"]
        registry.ready("cuda", linear)
        key = replace(linear.key((x, x, None, None, "none", False), "inference"), device="cuda")
        return [selector._forced(linear, key, id).source, said]
    return apart(run)

print(json.dumps({
    "none": seen(),
    "all": after(""),
    "each": {name: after(name) for name in sys.argv[1:]},
    "in turn": after(*sys.argv[1:], ""),
    "plugin": apart(beside_third_parties),
    "forced": [forced("triton.lines"), forced("triton.nowhere")],
}))
"""
ONE_OF_EACH = ("gelu_linear_backward", "softmax", "softmax_cross_entropy", "max", "add", "attention_scores")  # fmt: skip


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    env = os.environ | {"TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ONE_OF_EACH], env=env, stdout=subprocess.PIPE, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def kin(name: str) -> str:
    return candidate_loading._kin(OPS[name].reference.__module__)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_op_is_ready_with_its_kin_alone(found: dict[str, Any], name: str) -> None:
    none, every, got = found["none"], found["all"], found["each"][name]
    for other in every:
        assert got[other] == (every if kin(other) == kin(name) else none)[other], other
    assert got[name] != none[name]


def test_every_op_belongs_to_one_of_them(found: dict[str, Any]) -> None:
    assert {kin(name) for name in found["all"]} == {kin(name) for name in ONE_OF_EACH}
    assert all(found["all"][name] != found["none"][name] for name in found["all"])


def test_one_after_the_other_they_are_all(found: dict[str, Any]) -> None:
    assert found["in turn"] == found["all"]


def test_third_parties_find_all_of_ours(found: dict[str, Any]) -> None:
    assert found["plugin"] == found["all"]


def test_what_another_op_has_may_be_forced_for_it(found: dict[str, Any]) -> None:
    (source, said), (nobodys, names) = found["forced"]
    assert (source, said) == ("forced: linear has no triton.lines", [])
    assert nobodys == "forced: linear has no triton.nowhere"
    assert "no op has it here" in names[0]


def test_ops_of_others_load_everything() -> None:
    for module in (
        "",
        "somebody.ops",
        "tests.planted",
        "tensorlogic.core.op",
        "x.tensorlogic.ops.y",
    ):
        assert candidate_loading._kin(module) == ""


def test_packages_name_their_files_or_call_them_by_what_they_serve() -> None:
    folders = [folder for folders in candidate_loading.FOLDERS for folder in folders]
    for device, starts in candidate_loading.FILES.items():
        for folder in folders:
            named = candidate_loading.files(folder, device)
            begin = {
                m.name for m in pkgutil.iter_modules(folder.__path__) if m.name.startswith(starts)
            }
            assert begin <= set(named), (folder.__name__, begin)  # none is forgotten
            for name in named:
                assert importlib.util.find_spec(f"{folder.__name__}.{name}") is not None, name
    packages = {
        op.reference.__module__.removeprefix("tensorlogic.ops.").split(".")[0]
        for op in OPS.values()
    }
    assert packages <= {folder.__name__.rpartition(".")[2] for folder in folders}


def test_files_that_a_package_does_not_name_come_by_device(tmp_path: Path) -> None:
    for name in ("metal", "cublaslt", "triton_b", "cpu", "triton", "triton_a", "shapes"):
        (tmp_path / f"{name}.py").touch()
    folder = ModuleType("folder")
    folder.__path__ = [str(tmp_path)]
    assert candidate_loading.files(folder, "cuda") == ["triton", "triton_a", "triton_b", "cublaslt"]
    assert candidate_loading.files(folder, "cpu") == ["cpu"]
    folder.CANDIDATES = {"cuda": ("cublaslt", "triton")}  # type: ignore[attr-defined]
    assert candidate_loading.files(folder, "cuda") == ("cublaslt", "triton")
    assert candidate_loading.files(folder, "mps") == ["metal"]
