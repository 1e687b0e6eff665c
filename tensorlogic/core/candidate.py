"""Candidate: one implementation of an op's exact schema, and the reason of one that failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from ..system.compile_pool import CompileFailure
from .key import Key
from .source_hash import source_hash

Config = Mapping[str, Any]
Outputs = tuple[Tensor | None, ...]
# (tensors and scalars in schema order) -> outputs, or None to decline
Launcher = Callable[..., Outputs | None]
EAGER = "torch.eager"
# a third party's candidate may raise anything: kept by name as its reason, never the caller's
BIND_ERRORS = (Exception,)


class Failed(Exception):
    """A candidate failed, and `reason` says why; `entrant` is the one of several that are timed."""

    def __init__(self, problem: Exception | str, entrant: Any = None) -> None:
        self.reason = problem if isinstance(problem, str) else failure_reason(problem)
        self.entrant = entrant
        super().__init__(self.reason)


def failure_reason(problem: Exception) -> str:
    """The reason that evidence keeps of what a candidate raised."""
    if isinstance(problem, Failed):
        return problem.reason
    text = " ".join(str(problem).split())[:300]
    if isinstance(problem, (torch.OutOfMemoryError, MemoryError)) or "allocate memory" in text:
        return f"out of memory: {text}"
    if isinstance(problem, CompileFailure):
        return f"failed to compile: {text}"
    return f"failed: {type(problem).__name__}: {text}"


class Probe(Protocol):
    """A measurement that tells whether something else uses what a candidate runs on."""

    def slow(self) -> bool:
        """Whether the probe takes clearly longer now than it does undisturbed."""


@dataclass(frozen=True)
class Candidate:
    """One implementation of an op's exact schema; its id is `provider.strategy`."""

    id: str
    bind: Callable[[Key, Config, torch.device], Launcher]
    supports: Callable[[Key], str | None] = lambda key: None  # None, or why it cannot run here
    configs: Callable[[Key], Sequence[Config]] = lambda key: ({},)  # best guess first
    # device type -> None, or why this machine cannot run it
    available: Callable[[str], str | None] = lambda device: None
    # modules, or texts such as a package's version, that decide the result: others end evidence
    sources: tuple[Any, ...] = ()
    # compile work for other processes
    jobs: Callable[[Key, Config, torch.device], Sequence[Any]] = lambda key, config, device: ()
    # expected time over torch.eager's, for keys nobody has measured
    guess: Callable[[Key], float] = lambda key: 1.0
    # relative error that its form of numbers brings on normal inputs; it is checked against that
    coarse: Callable[[Key], float] = lambda key: 0.0
    # False: so slow to load or compile that only tune and the like may measure it
    background: bool = True
    deterministic: bool = True
    # shipped with this package: may serve a key whose neighbour it was measured on
    trusted: bool = False
    # by which one sees that what it runs on is disturbed, and it will not be judged
    clock: Probe | None = None
    # but not before it was right on this machine, on small tensors of that kind
    vouched: bool = False
    # what a caller does next with outputs: timed too, where configurations leave them elsewhere
    then: Callable[[Outputs], object] | None = None
    # of a joined op: forward, which may prepare a gradient, and what makes it the one for dy
    parts: Callable[..., tuple[Launcher, Callable[..., Tensor]]] | None = None

    @cached_property
    def source(self) -> str:
        """Hash of the code that decides what this candidate computes, the same wherever it lies."""
        return source_hash(self.sources or (self.bind,))

    def unfit(self, key: Key) -> str | None:
        """Why this candidate cannot run a key on this machine, or None."""
        try:
            return self.available(key.device) or self.supports(key)
        except Exception as problem:
            # a third party's code may raise anything; it is said by name
            return f"unsupported: asking it raised {type(problem).__name__}: {problem}"
