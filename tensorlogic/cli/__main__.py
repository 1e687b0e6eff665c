"""`python -m tensorlogic.cli`: the command line."""

from .. import __main__  # noqa: F401
