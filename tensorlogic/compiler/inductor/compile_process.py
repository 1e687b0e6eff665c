"""Traced graphs compiled by PyTorch's Inductor in a process of its own, which can be stopped; what it makes is loaded here."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...guards.errors import first_line
from ...system import settings
from ...system.compile_workers import yield_priority
from ..trace.compiled_call import Look
from ..trace.graph_facts import random_call
from ..trace.serialization import packed, unpacked
from ..trace.traced_graph import Trace

CACHE = "TORCHINDUCTOR_CACHE_DIR"
EAGERLY = "force_non_lazy_backward_lowering"  # which PyTorch before 2.13 does not set by itself
MOST = 256  # artifacts that are kept; the oldest go


class Unable(Exception):
    """The reason why Inductor does not serve a graph."""


@dataclass
class Job:
    """What the compiling process is told: the graph as a list of calls, its inputs by what they look like."""

    calls: list[Any]
    looks: list[Any]
    artifact: str
    training: bool
    threads: int
    precision: str
    niceness: int

    def run(self) -> str | None:
        """Compile and save; returns why that could not be."""
        yield_priority(os.getpid(), self.niceness)
        torch.set_num_threads(self.threads)
        torch.set_float32_matmul_precision(self.precision)
        try:
            self.compile()
        except Exception as problem:  # compilers raise anything
            return first_line(problem)
        return None

    def compile(self) -> None:
        """Compile and save. Raises whatever PyTorch does."""
        from torch._functorch import config
        from torch._guards import TracingContext, tracing
        from torch._inductor import standalone_compile
        from torch._subclasses import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        mode = FakeTensorMode(shape_env=ShapeEnv())
        now: Any = contextlib.nullcontext()
        if hasattr(config, EAGERLY):  # an artifact without its backward cannot be saved
            now = config.patch({EAGERLY: True})
        with torch.set_grad_enabled(self.training), now:
            with mode:
                inputs = [v.tensor() if isinstance(v, Look) else v for v in self.looks]
            module = fx.GraphModule(nn.Module(), unpacked(self.calls))
            with tracing(TracingContext(mode)):  # where every version looks for the inputs' mode
                made = standalone_compile(module, inputs, dynamic_shapes="from_tracing_context")
        made.save(path=f"{self.artifact}.part")
        os.replace(f"{self.artifact}.part", self.artifact)


def unfit(trace: Trace) -> str | None:
    """Why a graph is not given to Inductor; None where it may be."""
    for node in trace.graph.nodes:
        if node.op == "get_attr":
            return "a graph that holds graphs of its own"
        if random_call(node) and node.op == "call_function":
            return "random numbers, which Inductor draws in another order"
    values = [*(t for _, t in trace.state.values()), *trace.example]
    if any(isinstance(v, Tensor) and v.layout != torch.strided for v in values):
        return "tensors that are not strided"
    return None


class Compiling:
    """A traced model on its way through Inductor, in a process of its own."""

    def __init__(self, trace: Trace, artifact: Path, training: bool, niceness: int = 0) -> None:
        """Start the process. Raises OSError where none can be."""
        self.artifact = artifact
        self.failed: str | None = None  # why there is no artifact
        artifact.parent.mkdir(parents=True, exist_ok=True)
        artifact.unlink(missing_ok=True)
        known = {n: t for n, (_, t) in trace.state.items()}
        known |= dict(zip(trace.inputs, trace.example, strict=True))
        job = Job(
            packed(trace.graph, values=False),
            [Look.at(known[n.name]) for n in trace.graph.nodes if n.op == "placeholder"],
            str(artifact),
            training,
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            niceness,
        )
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has ended
        with tempfile.TemporaryFile() as told:
            pickle.dump(job, told)
            told.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"from {__name__} import serve; serve()"],
                stdin=told,
                stdout=self.said,
                stderr=subprocess.DEVNULL,
                env=_environment(artifact.parent),
                process_group=0,  # Ctrl-C is this process's to handle
            )
        yield_priority(self.process.pid, niceness)

    def wait(self, seconds: float) -> None:
        """Wait until the process has ended, or for so many seconds."""
        late = ""
        try:
            self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            late = f"not compiled in the {max(0.0, seconds):.0f} s that were left"
        finally:  # an interrupt, too
            self.stop()
        self.said.seek(0)
        said = self.said.read().decode(errors="replace").strip()
        lost = late or said or f"the compiling process ended with {self.process.returncode}"
        try:
            self.failed = json.loads(said.splitlines()[-1])
        except (ValueError, IndexError):
            self.failed = None if self.artifact.exists() else lost

    def made(self) -> Callable[..., Any]:
        """The result, as `load` gives it. Raises Unable: there is none."""
        if self.failed is not None:
            raise Unable(self.failed)
        return load(self.artifact)

    def stop(self) -> None:
        """End the process and the compilers it has started, if it has not ended."""
        if self.process.poll() is not None:
            return
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def serve() -> None:
    """The compiling process: a job in, its artifact or the reason why there is none out."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a compiler's prints are no reason
    job: Job = pickle.load(sys.stdin.buffer)
    print(json.dumps(job.run()), file=out)
    out.flush()


def load(artifact: Path) -> Callable[..., Any]:
    """Load a compiled graph, as a function of its inputs in their order that returns a list.

    Raises:
        Unable: PyTorch cannot load it.
    """
    from torch._inductor import CompiledArtifact  # type: ignore[attr-defined]

    try:
        with _cached(artifact.parent):
            return CompiledArtifact.load(path=str(artifact))
    # files may be gone or of another version: PyTorch raises what it likes
    except Exception as problem:
        raise Unable(f"not loaded: {first_line(problem)}") from problem


def place(name: str) -> Path:
    """Where the artifact of a graph is kept; old ones are removed."""
    folder = settings.cache_folder() / "inductor"
    if folder.is_dir():
        known = sorted(folder.glob("*.artifact"), key=lambda p: p.stat().st_mtime)
        for path in known[: max(0, len(known) - MOST)]:
            path.unlink(missing_ok=True)
    return folder / f"{name}.artifact"


def _environment(cache: Path) -> dict[str, str]:
    path = os.pathsep.join(p for p in sys.path if p)
    return os.environ | {CACHE: str(cache), "PYTHONPATH": path}


@contextlib.contextmanager
def _cached(folder: Path) -> Iterator[None]:
    """Point Inductor's cache at a folder."""
    before = os.environ.get(CACHE)
    os.environ[CACHE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE]
        else:
            os.environ[CACHE] = before
