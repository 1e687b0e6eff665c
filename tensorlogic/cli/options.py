"""What the commands share: exit codes, options that several take, and how lists and results are read and shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter

from ..bench.terminal.user_error import Problem

PLAIN = Parameter(negative=(), show_default=False)
EPILOGUE = "Exit codes: 0 done; 1 a finding (regression, lockfile that does not hold, something broken); 2 a request or file that cannot be served; 130 interrupted."


MANY = "repeat, or separate by commas"
Names = tuple[str, ...]
Ops = Annotated[Names, Parameter("--op", help=f"operation or category; {MANY}")]
SIZES = f"side of matrices, or number of elements: 512, 10K; {MANY}"
Sizes = Annotated[Names, Parameter("--size", help=SIZES)]
Dtypes = Annotated[Names, Parameter("--dtype", help=f"f16, bf16, f32; {MANY}")]
DEVICES = "cpu, cuda, cuda:N or mps; the best one here if not given"
Device = Annotated[str | None, Parameter("--device", help=DEVICES)]
SLOWER = "relative slowdown that is tolerated: 0.05 is 5 %"
Margin = Annotated[float, Parameter("--margin", show_default=True, help=SLOWER)]


def split(values: Sequence[str]) -> tuple[str, ...]:
    """Parts between commas; Problem where nothing was named."""
    parts = tuple(part for value in values for part in value.split(",") if part)
    if values and not parts:
        raise Problem(f"{values[0]!r} names nothing: leave the option out, or give a name")
    return parts


def sizes(values: Sequence[str]) -> tuple[int, ...]:
    from ..bench.terminal.size_text import parse

    return tuple(parse(v) for v in split(values))


def say(text: object) -> None:
    sys.stdout.write(f"{text}\n")


def separated(tokens: Sequence[str]) -> list[str]:
    """With `--` before a script to try, so that what follows it is the script's own."""
    given = list(tokens)
    if given[:1] != ["try"] or "--" in given:
        return given
    at = 1
    while at < len(given) and given[at].startswith("-"):
        takes = given[at] in ("--entry", "--margin", "--seconds", "--lockfile", "--record")
        at += 1 + takes
    return [*given[:at], *(["--"] if at < len(given) else []), *given[at:]]
