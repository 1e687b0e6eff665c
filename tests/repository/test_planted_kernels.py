"""`tools/planted.py` knows every kernel: an off-by-one and a spill can be planted in each as it is today. The tool itself takes
longer than tests may."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("planted")


def test_every_kernel_has_its_plants_and_tests(planted: ModuleType) -> None:
    kernels = planted.kernels()
    assert len(kernels) > 40
    assert set(planted.OFF_BY_ONE) == set(kernels)
    assert set(planted.TESTS) == set(kernels.values())
    for pair in planted.TESTS.values():
        for name in " ".join(pair).split():
            file, _, test = name.partition("::")
            assert f"def {test}" in (ROOT / "tests" / "kernels" / file).read_text()


def test_the_record_says_of_every_kernel_who_noticed(planted: ModuleType) -> None:
    record = (ROOT / "benchmarks" / "results" / "planted.txt").read_text()
    assert "**nobody**" not in record
    assert set(
        re.findall(r"^\| `(\w+)` \| `test_\w+` .*\| `test_\w+`", record, re.MULTILINE)
    ) == set(planted.kernels())


def test_every_kernel_is_sanitized(planted: ModuleType) -> None:
    """`make sanitize` takes the tests that run it on a GPU."""
    sanitize = importlib.import_module("sanitize")
    taken = {str(path.relative_to(ROOT / "tests" / "kernels")) for path in sanitize.kernel_tests()}
    for module, pair in planted.TESTS.items():
        files = {name.partition("::")[0] for name in " ".join(pair).split()}
        assert files & taken, module


def test_plants_are_in_the_sources_of_today(planted: ModuleType) -> None:
    for kernel, module in planted.kernels().items():
        text = (ROOT / planted.KERNELS / f"{module}.py").read_text()
        off = planted.with_off_by_one(text, kernel)
        assert sum(a != b for a, b in zip(text.splitlines(), off.splitlines(), strict=True)) == 1
        spilt = planted.with_spill(text, kernel)
        ast.parse(spilt)
        assert spilt.count("ballast = ") == 2


def test_a_plant_whose_text_is_gone_is_said(planted: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"reduce_spun: no longer says 'left < N'"):
        planted.with_off_by_one("@triton.jit\ndef reduce_spun(x):\n    pass\n", "reduce_spun")
