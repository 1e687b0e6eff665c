"""`tensorlogic plans`: choices that were measured here, listed, exported, imported and verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App

from ..bench.terminal.progress import progress
from ..bench.terminal.user_error import Problem, tolerated
from .exit_codes import DONE, FOUND
from .options import EPILOGUE, PLAIN, Device, Margin, Ops, say, split

if TYPE_CHECKING:
    from ..bench.lockfile_check import Finding

app = App(
    name="plans",
    help="Choices that were measured here: list them, commit them as a lockfile, verify one.",
    help_epilogue=EPILOGUE,
    default_parameter=PLAIN,
)


@app.command(name="list")
def list_plans(*, op: Ops = (), device: Device = None) -> int:
    """List the choices stored for this machine."""
    from ..bench import session, suites
    from ..bench.text_table import aligned

    wanted = suites.named(split(op))
    store, _ = session.store(device)
    rows = [
        [p.eager, "" if p.captured == p.eager else p.captured, p.measured, p.key.text]
        for p in store.plans()
        if not op or p.key.op in wanted
    ]
    if rows:
        say(aligned([["candidate", "captured", "measured", "key"], *rows], [True] * 4))
    say(f"{len(rows)} plans in {store.path}")
    return DONE


@app.command(name="export")
def export_plans(path: Path, *, op: Ops = (), device: Device = None) -> int:
    """Write the stored choices as a lockfile, to commit beside a project: same lockfile, same candidates, same bits.

    Parameters
    ----------
    path
        The lockfile to write.
    """
    from ..bench import lockfile_check, session, suites
    from ..plans.lockfile import export_lockfile

    wanted = suites.named(split(op))
    store, _ = session.store(device)
    stored = [p for p in store.plans() if not op or p.key.op in wanted]
    chosen = lockfile_check.lasting(stored)
    if len(chosen) < len(stored):
        say(
            f"{len(stored) - len(chosen)} left out: what they chose has changed since it was measured; tune them again"
        )
    if not chosen:
        raise Problem(
            "there are no plans to export; measure some with `tensorlogic tune` or tensorlogic.tune(...)"
        )
    with files():
        count = export_lockfile(path, chosen, [store.environment])
    say(
        f"{count} plans written to {path}; use it with tensorlogic.policy(lockfile={str(path)!r}) or TENSORLOGIC_LOCKFILE={path}"
    )
    return DONE


@app.command(name="import")
def import_plans(path: Path, *, device: Device = None, anywhere: bool = False) -> int:
    """Take a lockfile's choices into the store of this machine.

    Parameters
    ----------
    path
        The lockfile to read.
    anywhere
        Also when it was measured on another machine or with other software.
    """
    from ..bench import lockfile_check, session

    store, where = session.store(device)
    with files():
        count, reason = lockfile_check.adopt(path, store, where, anywhere)
    if reason is not None:
        raise Problem(
            f"{path} was not imported: {reason}; use it as a lockfile (TENSORLOGIC_LOCKFILE={path}), or pass --anywhere"
        )
    say(f"{count} plans taken into {store.path}")
    return DONE


@app.command(name="verify")
def verify_plans(path: Path, *, margin: Margin = 0.1) -> int:
    """Check on this machine that every locked candidate is here, right, and not slower than the best by more than the margin.

    Exit code 1 when one is not.

    Parameters
    ----------
    path
        The lockfile to verify.
    """
    from ..bench import lockfile_check
    from ..bench.text_table import aligned

    tolerated(margin)
    with files(), progress() as tick:
        findings: list[Finding] = lockfile_check.verify(path, margin, tick)
    shown = [
        [f.state, f.candidate, f.key, f.detail] for f in findings if f.state != lockfile_check.GOOD
    ]
    if shown:
        say(aligned([["state", "candidate", "key", ""], *shown], [True] * 4))
    counts = Counter(f.state for f in findings)
    say(f"{path}: " + (", ".join(f"{n} {state}" for state, n in counts.items()) or "no plans"))
    return FOUND if any(f.bad for f in findings) else DONE


@contextmanager
def files() -> Iterator[None]:
    """What reading or writing a lockfile raises, as a problem."""
    try:
        yield
    except (ValueError, OSError) as problem:
        raise Problem(str(problem)) from problem
