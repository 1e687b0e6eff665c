"""The documentation as a site: `make site`, or `sphinx-build -W docs docs/_build`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "tensorlogic" / "__init__.py").read_text())

project = "TensorLogic"
author = "the TensorLogic contributors"
release = VERSION[1] if VERSION else ""
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # docstrings say shapes and dtypes
autodoc_member_order = "bysource"
html_theme = "furo"
html_title = f"TensorLogic {release}"
OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")  # files of the checkout that are no pages


def _within(app: Any, name: str, source: list[str]) -> None:
    """Links out of the folder become the names of what they lead to; the tests check them in the checkout."""
    source[0] = OUTSIDE.sub(lambda m: f"{m[1]} (`{m[2].removeprefix('../')}`)" if "`" not in m[1] else m[1], source[0])  # fmt: skip


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _within)
