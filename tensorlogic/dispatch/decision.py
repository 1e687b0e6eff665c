"""Decision: which candidate serves a key, before it is bound; Choice: after."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..core.candidate import EAGER, Candidate, Config, Launcher
from ..core.op import Op

LOG = logging.getLogger("tensorlogic")
NO_NEW_COMPILES = "cost model, without what must be compiled first"
_SAID: set[tuple[str, str]] = set()


@dataclass
class Choice:
    """A candidate bound to a key, and where the decision came from."""

    candidate: Candidate
    config: Config
    launch: Launcher
    source: str
    cacheable: bool = True
    captured: Choice | None = None  # what calls under graph capture take instead
    direct: Callable[..., Tensor] | None = None  # the launcher without its tuple, if PyTorch has it
    settle: Callable[..., Tensor] | None = None  # gradient of a joint forward and backward
    # beside a joint one: forward alone, for calls that want it so
    apart: Choice | None = None


@dataclass(frozen=True)
class Decision:
    """What an eager call and a captured call take, before anything is bound."""

    eager: tuple[str, Config]
    captured: tuple[str, Config]
    source: str


FIXED: dict[tuple[str, str], Decision] = {}  # what deterministic calls of this process met
PLAIN = Decision((EAGER, {}), (EAGER, {}), "eager")


def say_once(op: Op, id: str, text: str) -> None:
    if (op.name, id) not in _SAID:
        _SAID.add((op.name, id))
        LOG.warning(text)
