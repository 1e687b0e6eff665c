"""Ships the native libraries that `tools/build_native.py` has built: a wheel with them is for one platform, without them for any."""

from __future__ import annotations

import platform
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

GLIBC = re.compile(rb"GLIBC_2\.(\d+)")


def platform_tag(libraries: list[Path]) -> str:
    """The oldest platform that has what the libraries were linked against."""
    machine = platform.machine().lower()
    if sys.platform != "linux":
        return f"{sys.platform}_{machine}"
    minor = max(int(n) for path in libraries for n in GLIBC.findall(path.read_bytes()))
    return f"manylinux_2_{max(minor, 17)}_{machine}"


class NativeHook(BuildHookInterface):
    """Called by hatchling for every wheel; editable installs find the libraries in the source tree."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the libraries that are there and name the wheel after what they need."""
        folder = Path(self.root) / "tensorlogic" / "_native"
        stale = runpy.run_path(str(Path(self.root) / "tools" / "build_native.py"))["stale"](folder)
        for name in stale:
            self.app.display_warning(
                f"{name} is left out: it was built from other sources than these"
            )
        libraries = sorted(path for path in folder.glob("*.so") if path.name not in stale)
        if version == "editable" or not libraries:
            return
        for path in libraries:
            build_data["force_include"][str(path)] = f"tensorlogic/_native/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(libraries)}"
