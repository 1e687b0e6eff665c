"""A progress bar on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Tick = Callable[[int, int, str], None]  # done, in all, what comes next


@contextmanager
def progress() -> Iterator[Tick]:
    """A bar on standard error from the first tick on; nothing where that is no terminal, or without rich."""
    try:
        from rich import progress as rich
        from rich.console import Console
    except ImportError:  # the extra `bench` is not installed
        yield lambda done, total, text: None
        return
    text_column = rich.TextColumn("{task.description}", markup=False)
    bar = rich.Progress(
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        text_column,
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )
    task = bar.add_task("", total=None)

    def tick(done: int, total: int, text: str) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, description=text)

    try:
        yield tick
    finally:
        bar.stop()
