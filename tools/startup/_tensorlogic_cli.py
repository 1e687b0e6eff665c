"""The command `tensorlogic`: help, the version and shell completion come without importing PyTorch, which takes a second.

Installed beside the package, because importing anything of the package imports PyTorch first. Where PyTorch is not
installed every command comes this way, so that `tensorlogic doctor` can say so.
"""

import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

LIGHT = {"--help", "-h", "--version", "--install-completion"}


def main():
    """Run the command line; returns its exit code."""
    words = sys.argv[1:3] if sys.argv[1:2] == ["try"] else sys.argv[1:]  # the rest is the script's
    if not words or LIGHT & set(words) or find_spec("torch") is None:
        _bare()
    # Ctrl-C while PyTorch is imported ends the process at once: nothing is being written, and some imports swallow exceptions
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from tensorlogic.cli.main import main as run
    except ModuleNotFoundError as problem:
        if problem.name != "cyclopts":
            raise
        return _without_extra(words)
    except ValueError as problem:  # a variable of the environment: the command says which
        if type(problem).__name__ != "Wrong":
            raise
        _bare()
        from tensorlogic.cli.main import main as run
    finally:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


def _bare():
    """Let modules of the package be imported without its `__init__`, and so without PyTorch."""
    spec = find_spec("tensorlogic")
    if spec is not None and spec.origin is not None:
        package = ModuleType("tensorlogic")
        package.__path__ = [str(Path(spec.origin).parent)]
        sys.modules["tensorlogic"] = package


def _without_extra(words):
    """What can be said where the extra `bench` is not installed."""
    if words[:1] == ["doctor"]:
        from tensorlogic.cli import doctor as cli_doctor
        from tensorlogic.cli import exit_codes

        return exit_codes.ended(cli_doctor.main)
    sys.stderr.write(
        "tensorlogic: the command line needs more: pip install 'tensorlogic-engine[bench]'\n"
    )
    return 2
