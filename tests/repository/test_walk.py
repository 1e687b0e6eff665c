"""docs/walk.md: its steps exist, are few, and are taken in that order by a first call on a CPU."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.native import cpu_library

ROOT = Path(tensorlogic.__file__).parents[1]
PAGE = ROOT / "docs" / "walk.md"
STEP = re.compile(r"^\d+\. `((?:tensorlogic|csrc)/[\w/.]+)` `(\w+)` ", re.MULTILINE)
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the documents are not here")


def steps(device: str) -> list[tuple[str, str]]:
    """The files and functions under "On a CPU" or "On a GPU"."""
    (section,) = re.findall(rf"^## On a {device}$(.*?)^## ", PAGE.read_text(), re.M | re.S)
    return STEP.findall(section)


def entered(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The package's functions that a call enters, by file, each where it was first entered."""
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, arg: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT / "tensorlogic"):
            found.setdefault((path.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def test_it_is_short() -> None:
    assert PAGE.read_text().count("\n") <= 60


@pytest.mark.parametrize("device", ["CPU", "GPU"])
def test_its_steps_exist(device: str) -> None:
    assert 4 <= len(dict(steps(device))) <= 6
    for file, function in steps(device):
        assert re.search(rf"\b{function}\(", (ROOT / file).read_text()), (file, function)


def test_a_first_call_on_a_cpu_takes_them_in_order() -> None:
    if cpu_library.available("cpu"):
        pytest.skip("the native library is not built")
    x, w, b = torch.randn(64, 256), torch.randn(128, 256), torch.randn(128)
    # of another processor's cost model the key might be PyTorch's
    with tensorlogic.policy(tune="off", force={"linear": "cpu.epilogue"}):
        tensorlogic.linear(x[:3], w, b)
        seen = entered(lambda: tensorlogic.linear(x, w, b, activation="relu"))
    taken = [step for step in steps("CPU") if step[0].endswith(".py")]
    assert [step for step in seen if step in taken] == taken
