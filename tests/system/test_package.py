"""Where the library lies and which version it says it is, installed or not."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

import tensorlogic
from tensorlogic.system import package


def test_the_folder_is_the_packages() -> None:
    assert package.FOLDER.samefile(Path(tensorlogic.__file__).parent)


def test_a_checkout_that_is_not_installed_has_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert package.version() == tensorlogic.__version__
