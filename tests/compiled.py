"""What the compiler makes of kernels, for tests: in a process with Triton's interpreter off."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import cast

from tensorlogic.ops.common import triton_launch
from tensorlogic.ops.common.triton_launch import CompileJob

TEXTS = """
import pickle, sys
from tensorlogic.ops.common import triton_launch
texts = [triton_launch.run_compile_job(job).asm["ptx"] for job in pickle.load(sys.stdin.buffer)]
sys.stdout.buffer.write(pickle.dumps(texts))
"""


def nothing_spills(jobs: Sequence[CompileJob]) -> None:
    """Fail where one of `jobs` does not compile or needs a stack, and say which."""
    bad = {}
    for job, answer in zip(jobs, triton_launch.resources_apart(jobs), strict=True):
        if not isinstance(answer, triton_launch.Resources) or answer.stack:
            bad[f"{job.kernel} sm_{job.sm} {job.num_warps} {dict(job.constexprs)}"] = answer
    assert not bad, "\n".join(f"{job}: {answer}" for job, answer in bad.items())


def ptx(jobs: Sequence[CompileJob]) -> list[str]:
    """The PTX of each."""
    path = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", TEXTS],
        input=pickle.dumps(list(jobs)), stdout=subprocess.PIPE, check=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path},
    )  # fmt: skip
    return cast("list[str]", pickle.loads(done.stdout))
