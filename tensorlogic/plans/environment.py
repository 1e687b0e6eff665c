"""The machine and software that measurements hold for."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..system import hardware
from ..system.package import installed

# of plan files; part of their names, so that versions do not meet in one file
SCHEMA = 1
UNDERLYING = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12")


@dataclass(frozen=True)
class Environment:
    """The machine and software that a measurement holds for; in another one it is not valid."""

    device: str  # model name
    kind: str  # "cuda", "cpu", "mps"
    driver: str  # on a CPU: the instruction set that PyTorch uses
    torch: str
    triton: str | None
    libraries: tuple[str, ...]  # "name version" of the libraries beneath PyTorch
    threads: int = 0  # of PyTorch, on a CPU only

    @cached_property
    def id(self) -> str:
        """A short hash of every field."""
        return digest(self.to_json())[:12]

    @property
    def file_name(self) -> str:
        """Name of this environment's plan file."""
        model = re.sub(r"[^a-z0-9]+", "-", self.device.lower()).strip("-")[:48]
        return f"{model}-{self.id}.v{SCHEMA}.json"

    def resembles(self, other: Environment) -> bool:
        """True for the same device model, CPU threads and torch x.y: enough for shipped plans."""

        def model(e: Environment) -> tuple[Any, ...]:
            return (e.kind, e.device, e.threads, e.torch.split(".")[:2])

        return model(self) == model(other)

    def akin(self, other: Environment) -> bool:
        """True for another GPU model of the same chip, or a GPU under another torch x.y: its plans serve until this one's are measured."""
        if not self.kind == other.kind == "cuda" or self.resembles(other):
            return False
        chips = hardware.CHIPS
        return self.device == other.device or (
            self.device in chips and chips[self.device] == chips.get(other.device)
        )

    def versions(self) -> dict[str, str]:
        """Name -> version of all software that counts, for a plan's record."""
        named = dict(library.split(" ", 1) for library in self.libraries)
        triton = {} if self.triton is None else {"triton": self.triton}
        return {"torch": self.torch, **triton, "driver": self.driver, **named}

    def to_json(self) -> dict[str, Any]:
        """The fields, in order."""
        return {**asdict(self), "libraries": list(self.libraries)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Environment:
        """The inverse of `to_json`."""
        return cls(**{**record, "libraries": tuple(record["libraries"])})


def environment(device: torch.device) -> Environment:
    """The environment of calls on `device` (found once per device and number of CPU threads)."""
    if device.type == "cpu":
        return _environment("cpu", 0, torch.get_num_threads())
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return _environment("cuda", index, 0)
    return _environment(device.type, 0, 0)


@lru_cache
def _environment(kind: str, index: int, threads: int) -> Environment:
    if kind == "cuda":
        model, driver = torch.cuda.get_device_name(index), hardware.gpu_driver()
    elif kind == "cpu":
        model, driver = hardware.cpu(), torch.backends.cpu.get_cpu_capability()
    else:
        model, driver = hardware.apple_gpu(), f"macOS {platform.mac_ver()[0]}"
    found = [(name, installed(name)) for name in UNDERLYING] if kind == "cuda" else []
    return Environment(
        device=model,
        kind=kind,
        driver=driver,
        torch=str(torch.__version__),
        triton=installed("triton"),
        libraries=tuple(f"{name} {version}" for name, version in found if version is not None),
        threads=threads,
    )


def digest(value: Any) -> str:
    """sha256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
