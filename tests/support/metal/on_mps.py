"""What is checked on the pretended Apple GPU, in a process of its own: `python -m tests.support.metal.on_mps` prints one line each."""

from __future__ import annotations

import json
import logging
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.autotune import measure_key
from tensorlogic.bench import machine_limits, session
from tensorlogic.cli import doctor
from tensorlogic.core import policy, tolerance
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import autograd, bound_call, candidate_loading, dispatcher
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.kernels.metal import launch as metal_launch
from tensorlogic.measure import timer
from tensorlogic.plans import environment, open_stores

from . import mps as metal_mps
from . import planted as metal_planted
from . import standin as metal_standin

DEVICE = torch.device("mps")
LINEAR = OPS["linear"]


def inputs(m: int = 33, n: int = 17, k: int = 65) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias in float16 on the device."""
    x, w, b = torch.randn(m, k), torch.randn(n, k) * k**-0.5, torch.randn(n)
    return x.half().to(DEVICE), w.half().to(DEVICE), b.half().to(DEVICE)


def right(y: Tensor, x: Tensor, w: Tensor, b: Tensor) -> None:
    """y is relu(x wᵀ + b), on the device and in its dtype."""
    assert (y.device.type, y.dtype) == ("mps", torch.float16)
    wide = [t.cpu().double() for t in (x, w, b)]
    expected = torch.relu(F.linear(*wide))
    assert tolerance.relative_error(y, expected) < 5e-4


def ours(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """The call that is looked at."""
    return tensorlogic.linear(x, w, b, activation="relu")


@contextmanager
def compiler(replaced: Callable[[str], Any] | None) -> Iterator[None]:
    """Another compile_shader, or none."""
    kept = torch.mps.compile_shader
    forget()
    if replaced is None:
        del torch.mps.compile_shader
    else:
        torch.mps.compile_shader = replaced
    try:
        yield
    finally:
        torch.mps.compile_shader = kept
        forget()


def forget() -> None:
    """As a fresh process would begin."""
    metal_launch.library.cache_clear()
    metal_launch.missing.cache_clear()
    open_stores.forget()


def evidence(*args: Tensor) -> dict[str, Any]:
    """What measuring a call leaves, by candidate."""
    op, key, device = _met(*args)
    candidate_loading.ready("mps")
    plan = measure_key.measured(op, key, device, budget_s=0.01)
    assert plan is not None
    return {e.candidate: e for e in plan.evidence}


def _met(*args: Tensor) -> tuple[Any, Any, torch.device]:
    key = LINEAR.key((*args, None, "relu", False), "inference")
    return LINEAR, key, args[0].device


def from_selector_to_output() -> None:
    """Measured, chosen by its plan, served: by the shader and nothing else."""
    args = inputs()
    found = evidence(*args)
    for id in ("metal.naive", "metal.tiled", "metal.simdgroup"):
        assert found[id].status == "measured", found[id]
        assert found[id].error <= 2
    op, key, device = _met(*args)
    plan = open_stores.current(device).get(key)
    assert plan is not None
    plan.eager = plan.captured = "metal.tiled"
    plan.eager_config = plan.captured_config = dict(found["metal.tiled"].config)
    open_stores.current(device).put(plan)
    policy.forget_entries()
    decision = dispatch_selector.decide(op, key, device, policy.current())
    assert (decision.source, decision.eager[0]) == ("plan", "metal.tiled")
    with torch.no_grad():
        ours(*args)
        metal_mps.calls.clear()
        before = metal_standin.launches
        right(ours(*args), *args)
    assert metal_standin.launches == before + 1
    assert "aten::linear" not in metal_mps.calls, metal_mps.calls
    said = str(tensorlogic.explain(tensorlogic.linear, *args, activation="relu"))
    assert "chosen: metal.tiled (from: plan)" in said


def forced_and_checked() -> None:
    """A forced candidate is checked on the very key, and serves."""
    args = inputs(5, 9, 129)
    for id in ("metal.naive", "metal.tiled", "metal.simdgroup"):
        with torch.no_grad(), tensorlogic.policy(force=id):
            before = metal_standin.launches
            right(ours(*args), *args)
            assert metal_standin.launches > before + 1


def gradients() -> None:
    """Forward keeps what backward needs, backward runs as a shader of its own."""
    x, w, b = inputs()
    with tensorlogic.policy(force={"linear": "metal.tiled", "linear_backward": "metal.simdgroup"}):
        _, z = bound_call.outputs(LINEAR, (x, w, b, None, "gelu", True))
        dy = torch.randn(33, 17).half().to(DEVICE)
        flags = LINEAR.namespace(LINEAR.key((x, w, b, None, "gelu", True), "forward"))
        before = metal_standin.launches
        made = autograd.gradients(LINEAR, flags, (True,) * 3 + (False,), (x, w, z), (), dy)
    assert metal_standin.launches >= before + 2
    wide = [t.cpu().double().requires_grad_() for t in (x, w, b)]
    expected = torch.autograd.grad(F.gelu(F.linear(*wide)), wide, dy.cpu().double())
    for got, want in zip(made, expected, strict=False):
        assert tolerance.relative_error(got, want) < 2e-3


def a_shader_that_does_not_compile() -> None:
    """Refused with the compiler's message, which explain shows; others serve."""
    message = "program_source:12:3: error: unknown type name 'simdgroup_matrix'"

    def strict(source: str) -> Any:
        if "gemm_simdgroup" in source:
            raise SyntaxError(message)
        return metal_standin.compile_shader(source)

    args = inputs(9, 33, 17)
    with compiler(strict):
        found = evidence(*args)
        assert found["metal.simdgroup"].status == "refused"
        assert found["metal.simdgroup"].reason == f"failed to compile: {message}"
        assert found["metal.tiled"].status == "measured"
        assert message in str(tensorlogic.explain(tensorlogic.linear, *args, activation="relu"))
        right(ours(*args), *args)


def a_group_that_does_not_fit() -> None:
    """A GPU that gives a kernel fewer threads refuses it before it is started."""

    class Small:
        def __init__(self, library: Any) -> None:
            self.library = library

        def __getattr__(self, name: str) -> Any:
            kernel = getattr(self.library, name)
            kernel.max_threads_per_threadgroup = 64
            return kernel

    args = inputs(9, 31, 17)
    with compiler(lambda source: Small(metal_standin.compile_shader(source))):
        found = evidence(*args)
        assert "needs 256 threads in a group; this GPU gives it 64" in found["metal.tiled"].reason
        right(ours(*args), *args)


def a_shader_that_is_wrong() -> None:
    """Refused on the key, never timed, never used; forcing it raises."""
    args = inputs(17, 33, 9)

    def faulty(source: str) -> Any:
        bug = "transposed stride"
        return metal_standin.compile_shader(
            metal_planted.planted(source, bug) if metal_planted.BUGS[bug][0] in source else source
        )

    with compiler(faulty):
        found = evidence(*args)
        for id in ("metal.naive", "metal.tiled", "metal.simdgroup"):
            assert found[id].status == "refused"
            assert found[id].reason.startswith("wrong: output 0")
        right(ours(*args), *args)
        with (
            tensorlogic.policy(force="metal.tiled"),
            torch.no_grad(),
            pytest.raises(dispatch_selector.Refused, match=r"metal\.tiled was asked for"),
        ):
            ours(*args)


def no_compile_shader() -> None:
    """PyTorch's own kernels serve, and that is said once."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tensorlogic")
    logger.addHandler(handler)
    try:
        with compiler(None):
            for n in (7, 8):
                args = inputs(5, n, 3)
                found = evidence(*args)
                assert "has no torch.mps.compile_shader" in found["metal.tiled"].reason
                right(ours(*args), *args)
            lacks = [f for f in doctor._apple() if f.about == "Metal shaders"]
            assert lacks[0].state == "lacks"
        assert len([s for s in said if "has no torch.mps.compile_shader" in s]) == 1
    finally:
        logger.removeHandler(handler)


def every_op_is_right() -> None:
    """Every public op with the device's own kernels, on its cases."""
    torch.manual_seed(3)
    for name, op in OPS.items():
        if op.internal or op.baseline is not None:
            continue
        for case in list(op.cases())[:3]:
            half = [
                a.half() if isinstance(a, Tensor) and a.is_floating_point() else a for a in case
            ]
            there = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in half]
            save = [False] if op.gradient is not None else []
            wide = [tolerance.wide(a) if isinstance(a, Tensor) else a for a in [*half, *save]]
            with torch.no_grad():
                out = dispatcher.call(op, tuple(there))
            expected = op.reference(*wide)
            expected = expected[0] if isinstance(expected, tuple) else expected
            assert out.device.type == "mps", name
            assert tolerance.relative_error(out, expected) < 4e-3, name


def trials_run_on_the_device() -> None:
    """What a Mac's test run does: the trials of the stand-in, on tensors of the device."""
    from . import trials as metal_trials  # takes the candidates out of their ops, so it comes last

    for name, id in metal_trials.PAIRS:
        for trial in list(metal_trials.trials(OPS[name], id, torch.float32, cases=False))[:2]:
            verdict = trial.run(DEVICE)
            assert verdict, f"{trial}: {verdict.reason}"


def timed_by_events() -> None:
    """Device time comes from a pair of the device's events for every sample."""
    made: list[Any] = []

    class Counted(metal_mps.Event):
        def __init__(self, enable_timing: bool = False) -> None:
            super().__init__(enable_timing)
            made.append(self)

    kept, torch.mps.Event = torch.mps.Event, Counted  # type: ignore[misc]
    try:
        x = torch.ones(8, device=DEVICE)
        samples = timer.device_samples({"relu": [lambda: torch.relu(x)]}, DEVICE, 0.02, rounds=7)
    finally:
        torch.mps.Event = kept  # type: ignore[misc]
    assert len(made) == 2 * len(samples.values["relu"])
    assert all(e.timing for e in made)
    assert samples.median("relu") > 0


def memory_is_told() -> None:
    """What PyTorch holds for the device, and the most it was seen to hold."""
    stats = tensorlogic.pool.stats("mps")
    assert (stats.bytes_in_use, stats.bytes_held) == (1 << 20, 3 << 20)
    assert stats.high_water_bytes == 1 << 22


def plans_are_for_the_chip() -> None:
    """Chip, cores, macOS and PyTorch are what a measurement holds for."""
    here = environment.environment(DEVICE)
    assert (here.device, here.kind) == ("Apple M4 Pro, 20 GPU cores", "mps")
    assert here.driver.startswith("macOS")
    assert here.torch == torch.__version__
    assert here.file_name.startswith("apple-m4-pro-20-gpu-cores-")


def capture_declines() -> None:
    """There are no graphs to record, which is said; the function runs."""
    x = torch.ones(4, device=DEVICE)
    fast = tensorlogic.capture(lambda t: t + 1)
    for _ in range(4):
        assert torch.equal(fast(x).cpu(), torch.full((4,), 2.0))
    assert fast.graphs == 0
    assert fast.reason == "inputs lie on mps; graphs are captured on CUDA devices"


def optimize_serves() -> None:
    """A model is rewritten, checked and timed there, or given back with a reason."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))
    model = model.half().to(DEVICE).eval()
    x = torch.randn(4, 16).half().to(DEVICE)
    with torch.no_grad():
        before = model(x)
        fast = tensorlogic.optimize(model, x)
        assert tolerance.relative_error(fast(x), before.cpu().double()) < 2e-3
    said = str(fast.report)
    assert {r.op for r in fast.report.rows} == {"linear"}, said
    assert "fails" not in said, said
    assert "wrong" not in said, said


def the_benchmark_runs() -> None:
    """The same result file as elsewhere, for this device."""
    machine_limits.SIDES["mps"], machine_limits.FOOTPRINTS["mps"] = (
        (64,),
        (1 << 12,),
    )  # what a CPU can bear
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m4.json"
        results = session.bench(
            ops=["linear", "relu"], sizes=[64], dtypes=["f16"], device="mps", json=path, quick=True
        )
        read = json.loads(path.read_text())
    assert results.complete
    assert read["machine"]["gpu"]["name"] == "Apple M4 Pro, 20 GPU cores"
    wrong = [(r.id, r.status, r.reason) for r in results.rows if r.status != "ok"]
    assert results.rows
    assert not wrong, wrong
    assert any(e["candidate"] == "metal.tiled" for r in results.rows for e in r.evidence)


def doctor_tells() -> None:
    """The chip, its memory, its shaders."""
    said = doctor.report(doctor._devices())
    assert "Apple M4 Pro, 20 GPU cores, macOS" in said
    assert "16 GiB for it at most" in said
    assert "compile here; each is checked on every key before it is timed" in said


CHECKS = (
    from_selector_to_output, forced_and_checked, gradients, a_shader_that_does_not_compile,
    a_group_that_does_not_fit, a_shader_that_is_wrong, no_compile_shader, every_op_is_right, timed_by_events,
    memory_is_told, plans_are_for_the_chip, capture_declines, optimize_serves, the_benchmark_runs, doctor_tells,
    trials_run_on_the_device,
)  # fmt: skip


def main() -> None:
    """Run every check, each with what is left of the ones before forgotten."""
    metal_mps.install()
    for check in CHECKS:
        torch.manual_seed(1)
        problem = ""
        try:
            with tensorlogic.policy(tune="off"):
                check()
        except BaseException:  # whatever goes wrong belongs to that check
            problem = traceback.format_exc()
        print(json.dumps({"name": check.__name__, "problem": problem}), flush=True)
        open_stores.forget()


if __name__ == "__main__":
    main()
