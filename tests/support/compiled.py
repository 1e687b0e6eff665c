"""What the compiler makes of kernels, for tests: in a process with Triton's interpreter off."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, cast

from tensorlogic.kernels.triton_runtime.launch import CompileJob, Resources

# Bytes of stack that CUDA 12.8's assembler (Triton 3.6) takes of its own accord for addresses, though registers are left. A tile takes more
STACK = 24 if find_spec("triton") and version("triton").startswith("3.6.") else 0

SERVER = """
import os, pickle, sys
from tensorlogic.kernels.triton_runtime import launch as triton_launch
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # a compiler that fails prints what it was given
while True:
    try:
        what, sys.path[:] = pickle.load(sys.stdin.buffer)
        jobs = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    made = []
    for job in jobs:
        try:
            made.append(triton_launch.resources(job) if what == "resources" else triton_launch.run_compile_job(job).asm["ptx"])
        except triton_launch.CompileFailure as failure:
            made.append(str(failure))
    pickle.dump(made, answers)
    answers.flush()
"""


@cache
def server() -> subprocess.Popen[bytes]:
    """A process with the interpreter off that compiles for all tests of this one and ends with it."""
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )  # fmt: skip


def made(what: str, jobs: Sequence[CompileJob]) -> list[Any]:
    """The `what` ("resources" or "ptx") of each job, or why it does not compile."""
    process = server()
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump((what, [path for path in sys.path if path]), process.stdin)
        pickle.dump(list(jobs), process.stdin)
        process.stdin.flush()
        return cast("list[Any]", pickle.load(process.stdout))
    except (
        BaseException
    ):  # it has died of these jobs, or nobody waits for its answer: others get a new one
        server.cache_clear()
        process.kill()
        process.wait()
        raise


def resources(jobs: Sequence[CompileJob]) -> list[Resources | str]:
    """What each needs of a multiprocessor, or why it does not compile."""
    return made("resources", jobs)


def nothing_spills(jobs: Sequence[CompileJob]) -> None:
    """Fail where one of `jobs` does not compile or spills, and say which."""
    bad = {}
    for job, answer in zip(jobs, resources(jobs), strict=True):
        if not isinstance(answer, Resources) or answer.stack > STACK:
            bad[f"{job.kernel} sm_{job.sm} {job.num_warps} {dict(job.constexprs)}"] = answer
    assert not bad, "\n".join(f"{job}: {answer}" for job, answer in bad.items())


def ptx(jobs: Sequence[CompileJob]) -> list[str]:
    """The PTX of each."""
    return cast("list[str]", made("ptx", jobs))
