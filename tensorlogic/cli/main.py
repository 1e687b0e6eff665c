"""The command line. PyTorch is imported by the commands that need it, not to show help.

Exit codes: 0 done; 1 a finding (a regression, a lockfile that does not hold, something broken); 2 a request or a file
that cannot be served; 130 interrupted (what was measured is kept).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from ..bench.terminal.progress import progress
from ..bench.terminal.user_error import Problem, tolerated
from ..system.package import version
from ..system.settings import LIGHT, wrong
from .exit_codes import DONE, FOUND, INTERRUPTED, REFUSED, ended
from .options import (
    EPILOGUE,
    PLAIN,
    Device,
    Dtypes,
    Margin,
    Names,
    Ops,
    Sizes,
    say,
    separated,
    sizes,
    split,
)
from .plans import app as plans

app = App(
    name="tensorlogic",
    help=(
        "The fastest correct way to run half-precision tensor work on this machine, found by measuring.\n\n"
        "Begin with `tensorlogic doctor` (what is here), `tensorlogic try program.py` (what your program gains), "
        "`tensorlogic bench --quick` (how fast this machine is), `tensorlogic report` (where its time goes), "
        "`tensorlogic explain linear --size 512` (who runs an operation, and why)."
    ),
    help_epilogue=EPILOGUE,
    help_format="markdown",
    version=version,
    suppress_keyboard_interrupt=False,
    default_parameter=PLAIN,
)
app.command(plans)
app.register_install_completion_command(help="Complete commands and options in this shell.")


@app.command
def bench(
    *,
    quick: bool = False,
    op: Ops = (),
    size: Sizes = (),
    dtype: Dtypes = (),
    device: Device = None,
    json: Path | None = None,
    resume: bool = False,
    report: bool = False,
    verify: Path | None = None,
    suite: Literal["ops", "precision"] = "ops",
) -> int:
    """Measure the operations on this machine against PyTorch, and the machine's limits in the same run.

    Every result is compared with float64 before it is timed. Ctrl-C keeps what was measured.

    Examples: `tensorlogic bench --quick`; `tensorlogic bench --op linear,add_relu --size 512 --dtype f16 --json mine.json`.

    Parameters
    ----------
    quick
        Fewer sizes and rounds: under two minutes on two cores.
    json
        Write the result file here (otherwise into the cache folder).
    resume
        Keep the rows that the result file holds already, and measure the others.
    report
        Also write the report (see `tensorlogic report --help`) beside the result file.
    verify
        Measure a sample of this result file's rows again and say whether it holds here; exit code 1 when it does not.
    suite
        "precision": conversions, transfers, memory and error of every way to compute a product, of which the other options
        but `--quick`, `--device` and `--json` say nothing.
    """
    if suite == "precision":
        return _precision(quick, device, json)
    from ..bench import session
    from ..bench.report import render
    from ..bench.report import summary as report_summary
    from ..bench.report import tables as report_tables

    if verify is not None:
        from ..bench import result_check

        with progress() as tick:
            verified = result_check.verify(verify, tick)
        say(verified)
        return FOUND if verified.failed else DONE

    if report and json is not None:
        render.beside([json])  # a refusal comes before what takes minutes
    with progress() as tick:
        results = session.bench(
            quick=quick,
            ops=split(op),
            sizes=sizes(size),
            dtypes=split(dtype),
            device=device,
            json=json,
            resume=resume,
            tick=tick,
        )
    report_tables.show(results, report_summary.lines(results))
    say(f"result file: {results.path}")
    if report and results.path is not None and results.timed:
        from ..bench.report import report as report_report

        page = render.write(report_report.make(results), render.beside([results.path]))
        say(f"report: {page}")
    return DONE if results.complete else INTERRUPTED


def _precision(quick: bool, device: str | None, path: Path | None) -> int:
    import torch

    from ..bench import precision_suite, session
    from ..core import policy
    from ..system import settings

    devices = [torch.device("cpu")]
    if device is not None:
        devices = [session.pick_device(device)]
    elif torch.cuda.is_available():
        devices.append(torch.device("cuda"))
    if devices[0].type not in precision_suite.SIZES:
        raise Problem(f"device is {device!r}; --suite precision measures cpu, cuda or cuda:N")
    to = path or settings.cache_folder() / "precision.json"
    with progress() as tick, policy.measuring():
        found = precision_suite.run(
            devices,
            quick,
            lambda text: tick(0, 1, text),
            lambda found: precision_suite.write(found, to),
        )
    precision_suite.write(found, to)
    say(precision_suite.table(found))
    say(f"result file: {to}")
    return DONE


@app.command
def report(
    results: Annotated[tuple[Path, ...], Parameter(negative=())] = (),
    /,
    *,
    out: Path | None = None,
    markdown: bool = False,
    mixed: bool = False,
) -> int:
    """Show what a run has found, on the terminal and as one HTML file: speeds, limits, opportunities, choices, errors.

    Examples: `tensorlogic report mine.json`; `tensorlogic report before.json after.json --out change.html`.

    Parameters
    ----------
    results
        A result file of `tensorlogic bench --json`, or an earlier and a later one; the newest in the cache folder if none is given.
    out
        Where the page goes; beside the (last) result file if not given.
    markdown
        Print Markdown instead, and write no page.
    mixed
        Compare files of different machines all the same.
    """
    from ..bench import session
    from ..bench.report import render
    from ..bench.report import report as report_report

    paths = list(results) or [session.newest()]
    made = report_report.read(paths, mixed=mixed, drawn=not markdown)
    if markdown:
        sys.stdout.write(render.markdown(made))
        return DONE
    page = render.write(made, render.beside(paths, out))
    render.show(made)
    say(f"\nreport: {page}")
    return DONE


@app.command
def compare(
    before: Path, after: Path, *, margin: Margin = 0.05, mixed: bool = False, absolute: bool = False
) -> int:
    """Tell what became better, worse or stayed, between two result files; exit code 1 on a regression beyond the margin.

    Times count relative to PyTorch's in the same run, which cancels drift of the machine between the runs.

    Parameters
    ----------
    before
        Result file of `tensorlogic bench --json`.
    after
        A later one.
    mixed
        Compare files of different machines all the same.
    absolute
        Compare the times themselves.
    """
    from ..bench import compare as comparing
    from ..bench import result_file

    found = comparing.compare(
        result_file.load(before), result_file.load(after), margin, mixed=mixed, absolute=absolute
    )
    say(found)
    return FOUND if found.regressions else DONE


@app.command(name="try")
def try_(
    script: str = "",
    *args: str,
    entry: str = "",
    again: bool = False,
    verify: bool = False,
    margin: Margin = 0.1,
    seconds: float = 60.0,
    lockfile: Path = Path("tensorlogic.lock.json"),
    record: Path = Path("tensorlogic.try.json"),
) -> int:
    """Run an unmodified PyTorch program with and without us in turn: what it gains, why, and how to keep it.

    The program is watched once, what it calls is tuned, then whole runs follow one another. Nothing of it is changed.
    Options come before the script; what follows it belongs to it.

    Examples: `tensorlogic try train.py --epochs 1`; `tensorlogic try --entry mine.model:step`; `tensorlogic try --verify train.py --epochs 1`.

    Parameters
    ----------
    script
        A Python file, followed by its arguments.
    entry
        In place of a script a function without arguments, as module:function: for programs with a long set-up or side effects.
    again
        Run the program again although it writes files or opens sockets.
    verify
        Exit with 1 when the gain on record is lost, the outputs differ, or the program fails with us; writes nothing.
    seconds
        About how long to take turns.
    lockfile
        Where the choices go.
    record
        Where the result goes that --verify compares with.
    """
    from .try_script import screen
    from .try_script import trial as runs

    tolerated(margin)
    if not 0 < seconds < float("inf"):
        raise Problem(f"seconds is {seconds}; a time above 0 is required")
    known = screen.held(record) if verify else None
    asked = runs.Asked(script, args, entry, None if verify else lockfile.absolute(), again, seconds)
    with progress() as tick:
        trial = runs.attempt(asked, tick)
    for line in screen.lines(trial):
        say(line)
    if trial.interrupted:
        return INTERRUPTED
    if known is not None:
        why = screen.lost(trial, known, margin)
        say(f"verified: {why or 'the gain holds'}")
        return FOUND if why else DONE
    say(screen.save(trial, record))
    return FOUND if trial.failure or not trial.agree else DONE


@app.command
def explain(
    op: str,
    /,
    *,
    size: str | None = None,
    shape: Annotated[Names, Parameter("--shape", allow_leading_hyphen=True)] = (),
    flag: Annotated[Names, Parameter("--flag")] = (),
    dtype: str = "f16",
    device: Device = None,
    measure: Annotated[bool, Parameter(negative="--no-measure", show_default=True)] = True,
) -> int:
    """Show every candidate of an operation with times, error, and chosen or why not.

    Examples: `tensorlogic explain linear_residual_relu --size 512`;
    `tensorlogic explain linear --shape 16x768 --shape 3072x768 --shape 3072 --flag activation=gelu`.

    Parameters
    ----------
    op
        Name of a function, such as linear.
    size
        Side of its matrices, or number of elements of a plain element-wise operation.
    shape
        Of its tensors in the order of its arguments ("-" leaves an optional one out); repeat it.
    flag
        Another argument as name=value; repeat it.
    dtype
        Of its floating tensors: f16 (if not given), bf16, f32 or f64.
    measure
        Measure the key if it is not known yet.
    """
    from ..bench import command_inputs, session
    from ..bench.terminal import size_text

    where = session.pick_device(device)
    bad = next((f for f in flag if "=" not in f), None)
    if bad is not None:
        raise Problem(f"flag is {bad!r}; name=value is required")
    flags = dict(f.split("=", 1) for f in flag)
    fn, args, kwargs = command_inputs.call(
        op, dtype, where, size=size_text.parse(size) if size else None, shapes=shape, flags=flags
    )
    say(command_inputs.explained(fn, args, kwargs, measure))
    return DONE


@app.command
def tune(
    *,
    quick: bool = False,
    op: Ops = (),
    size: Sizes = (),
    dtype: Dtypes = (),
    device: Device = None,
) -> int:
    """Measure operations ahead and remember the choices; without --op those of the benchmark. Ctrl-C keeps what was measured.

    Parameters
    ----------
    quick
        The benchmark's fewer sizes.
    """
    from ..bench import session

    with progress() as tick:
        text = session.tune(
            quick=quick,
            ops=split(op),
            sizes=sizes(size),
            dtypes=split(dtype),
            device=device,
            tick=tick,
        )
    say(text)
    store, _ = session.store(device)
    if not store.flush():
        raise Problem(
            f"the choices were not remembered: {store.path} cannot be written; make room, or name another folder by TENSORLOGIC_CACHE_DIR"
        )
    return DONE


@app.command
def doctor() -> int:
    """Say what this machine has and lacks, and what each lack costs; exit code 1 when something is broken."""
    from . import doctor as doctoring

    return doctoring.main()


def main(tokens: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code."""
    given = separated(sys.argv[1:] if tokens is None else tokens)

    def run() -> object:
        words = given[: given.index("--")] if "--" in given else given
        if words[:1] not in ([], ["doctor"]) and not LIGHT & set(words):
            for problem in wrong().values():
                raise problem
        try:
            return app(given, exit_on_error=False, result_action="return_value")
        except CycloptsError:  # said already
            return REFUSED

    return ended(run)


if __name__ == "__main__":
    sys.exit(main())
