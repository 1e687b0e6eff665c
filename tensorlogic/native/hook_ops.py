"""Operators of the hooks, and suspending what they repair; loads the native library, and with it the hooks, at first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import cpu_library, hook_extension


def available() -> str | None:
    """None where the hooks are loaded, else why not; loads the native library at first use, and them with it."""
    return cpu_library.available() or hook_extension.missing()


def op(name: str) -> Callable[..., Any]:
    """The operator `tensorlogic_hooks::name`; raises RuntimeError where the hooks are absent."""
    if not hook_extension.loaded() and (reason := available()):
        raise RuntimeError(reason)
    return hook_extension.direct(name)


@contextmanager
def suspended() -> Iterator[None]:
    """Inside, in this thread, PyTorch's own kernels serve: what is measured there is what `disable` would give."""
    before, hook_extension.SUSPENSION.now = hook_extension.SUSPENSION.now, True
    switch = op("suspend") if available() is None else None
    try:
        if switch is not None:
            switch(1)
        yield
    finally:
        hook_extension.SUSPENSION.now = before
        if switch is not None:
            switch(-1)
