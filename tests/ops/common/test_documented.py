"""Public functions whose docstrings are put together: every part, in order, once."""

from __future__ import annotations

import inspect

import pytest

import tensorlogic

PARTS = ("Args:", "Returns:", "Raises:", "Source:", "Example:")
NAMES = ("add", "sub", "mul", "div", "add_relu", "mul_relu", "affine", "sum", "mean", "max", "min")


@pytest.mark.parametrize("name", NAMES)
def test_every_part_follows_the_meaning(name: str) -> None:
    doc = inspect.getdoc(getattr(tensorlogic, name)) or ""
    lines = doc.splitlines()
    assert lines[0].endswith(".")
    assert lines[1] == ""
    found = [line.split(" ")[0] for line in lines if line.split(" ")[0] in PARTS]
    assert tuple(found) == PARTS
    assert f">>> tensorlogic.{name}(" in doc
