"""Operators of the hooks, and suspending what they repair; loads the native library, and with it the hooks, at first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import hooks, native


def available() -> str | None:
    """None where the hooks are loaded, else why not; loads the native library at first use, and them with it."""
    return native.available() or hooks.missing()


def op(name: str) -> Callable[..., Any]:
    """The operator `tensorlogic_hooks::name`; raises RuntimeError where the hooks are absent."""
    if not hooks.loaded() and (reason := available()):
        raise RuntimeError(reason)
    return hooks.direct(name)


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, in this thread, PyTorch's own kernels serve: what is measured there is what `disable` would give."""
    before, hooks.SUSPENSION.now = hooks.SUSPENSION.now, True
    switch = op("suspend") if available() is None else None
    try:
        if switch is not None:
            switch(1)
        yield
    finally:
        hooks.SUSPENSION.now = before
        if switch is not None:
            switch(-1)
