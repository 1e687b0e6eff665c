"""Spells in which some candidates take twice their time decide no choice: in virtual time, which candidates and waits move."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tensorlogic.autotune import measure_key, tuner
from tensorlogic.core.candidate import EAGER, Candidate, Outputs
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.kernels.cpu import register as cpu_register
from tensorlogic.measure import interference, timer, verification
from tensorlogic.plans.environment import environment
from tensorlogic.plans.machine_notes import Notes
from tensorlogic.plans.plan import DISTURBED, Plan

from ..support.clockwork import Clock

CPU = torch.device("cpu")
OWN_US = (650.0, 800.0, 950.0)  # of the planted candidate's configurations
EAGER_US = 1000.0


class Machine(Clock):
    """A clock that moves only when somebody works or sleeps; during `spells` what is shaky takes twice as long."""

    def __init__(self) -> None:
        super().__init__(now=100.0)
        self.spells: list[tuple[float, float]] = []

    def work(self, us: float, shaky: bool) -> None:
        left = us * 1e-6
        while left > 0:
            slow = shaky and any(begin <= self.now < end for begin, end in self.spells)
            step = min(left, 1e-3)
            self.now += step * (2 if slow else 1)
            left -= step


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    made.stands_in(monkeypatch, timer, tuner, verification, interference)
    monkeypatch.setattr(interference, "DRIFT", 1.25)
    monkeypatch.setattr(interference.WaitBudget, "spent_s", 0.0)
    monkeypatch.setattr(interference.WaitBudget, "since", 0.0)
    return made


def plus(x: Tensor) -> Tensor:
    return x + 1


def planted(machine: Machine, clock: interference.InterferenceProbe | None) -> tuple[Op, Key]:
    """x + 1 by torch.eager, 1 ms, and by a shaky candidate that takes 0.65 at best."""
    op = Op(plus, flops=lambda key: 1.0, traffic=lambda key: 1.0, listed=False)

    def taking(us: float, shaky: bool) -> Callable[..., Outputs]:
        return lambda x: (machine.work(us, shaky), (x + 1,))[1]

    op.add(Candidate(EAGER, bind=lambda key, config, device: taking(EAGER_US, False)))
    op.add(
        Candidate(
            "planted.shaky",
            bind=lambda key, config, device: taking(OWN_US[config["n"]], True),
            configs=lambda key: [{"n": n} for n in range(len(OWN_US))],
            clock=clock,
        )
    )
    return op, op.key((torch.zeros(8),), "inference")


def look(op: Op, key: Key, background: bool = False) -> Plan:
    made = tuner.KeyTuner(op, key, CPU, environment(CPU), background=background)
    plan = made.run()
    assert plan is not None
    return plan


def ticking(machine: Machine) -> interference.InterferenceProbe:
    """A clock that runs on what the planted candidate runs on, looked at while nothing disturbs it."""
    clock = interference.InterferenceProbe(lambda: lambda: machine.work(100.0, True))
    assert not clock.slow()
    return clock


def chosen(
    machine: Machine, clock: interference.InterferenceProbe | None, begin: float, length: float
) -> str:
    """The choice where a spell of that length begins so long after the study, or before."""
    op, key = planted(machine, clock)
    machine.now += 50.0
    machine.spells = [(machine.now + begin, machine.now + begin + length)]
    plan = look(op, key)
    return f"{plan.eager} {dict(plan.eager_config)}"


BEGINS = [-0.5, -0.2, -0.02, 0.03, 0.06, 0.09, 0.12, 0.2, 0.3]


def test_a_spell_is_waited_for_and_its_looks_taken_again(machine: Machine) -> None:
    clock = ticking(machine)
    best = "planted.shaky {'n': 0}"
    alone = {chosen(machine, None, begin, 0.8) for begin in BEGINS}
    assert alone > {best}  # what happens without a clock
    for begin in BEGINS:
        assert chosen(machine, clock, begin, 0.8) == best, begin
    assert 0 < machine.slept < interference.STUDY_S * len(BEGINS)


def test_what_lasts_for_a_moment_disturbs_no_configuration_alone(machine: Machine) -> None:
    """No clock is needed for this: configurations are looked at in rounds."""
    for begin in (i * 0.01 for i in range(24)):
        assert chosen(machine, None, begin, 0.012) == "planted.shaky {'n': 0}", begin
    assert machine.slept == 0.0


def test_patience_ends_and_the_plan_says_so(machine: Machine) -> None:
    clock = ticking(machine)
    op, key = planted(machine, clock)
    machine.spells = [(machine.now, machine.now + 1e6)]
    plan = look(op, key)
    assert 1.0 < machine.slept <= interference.STUDY_S
    reasons = {e.candidate: e.reason for e in plan.evidence}
    assert reasons["planted.shaky"].endswith(DISTURBED)
    assert not reasons[EAGER].endswith(DISTURBED)
    assert not measure_key.complete(op, plan, key)  # so that it is measured again, but not for ever
    second = tuner.KeyTuner(op, key, CPU, environment(CPU), known=plan).run()
    assert second is not None
    assert second.evidence[1].reason.endswith("both times")
    assert measure_key.complete(op, second, key)
    begin, before = machine.now, machine.slept
    for _ in range(20):
        look(op, key)
    waited = machine.slept - before
    assert waited <= interference.FIRST_S + interference.SHARE * (machine.now - begin) + 0.1
    machine.spells = []
    assert measure_key.complete(op, look(op, key), key)


def test_in_the_background_nobody_waits(machine: Machine) -> None:
    clock = ticking(machine)
    op, key = planted(machine, clock)
    machine.spells = [(machine.now, machine.now + 0.8)]
    made = tuner.KeyTuner(op, key, CPU, environment(CPU), background=True)
    steps = 0
    for _ in made.steps():
        machine.now += 0.1  # calls of the program
        steps += 1
    assert machine.slept == 0.0
    assert made.plan is not None
    assert made.plan.eager == "planted.shaky"
    machine.spells = [(machine.now, machine.now + 1e6)]
    endless = tuner.KeyTuner(op, key, CPU, environment(CPU), background=True)
    assert sum(1 for _ in endless.steps()) < steps + 2 * interference.POSTPONED
    assert endless.plan is not None


def test_a_clock_learns_its_least_time(machine: Machine) -> None:
    readings = itertools.chain([5.0] * 10, [9.0] * 4, [5.5] * 4, [3.0] * 4, [5.0] * 4)
    clock = interference.InterferenceProbe(
        lambda: lambda: machine.work(next(readings) * 1e3, False)
    )
    assert [clock.slow() for _ in range(5)] == [False, True, False, False, True]
    nothing = interference.InterferenceProbe(lambda: None)
    assert not nothing.slow()


def _reading(machine: Machine, us: float) -> interference.InterferenceProbe:
    """A clock of a new process, every reading of which is that long."""
    return interference.InterferenceProbe(lambda: lambda: machine.work(us, False), Notes(".clock"))


def test_a_first_reading_that_is_disturbed_is_told_by_what_an_earlier_process_read(
    machine: Machine,
) -> None:
    assert not _reading(machine, 180.0).slow()  # the very first on this machine knows no better
    assert not _reading(machine, 100.0).slow()
    assert _reading(machine, 180.0).slow()
    assert not _reading(machine, 104.0).slow()


def test_a_noted_time_that_is_never_met_again_is_let_go_of(machine: Machine) -> None:
    """The virtual machine has moved to a slower one, say."""
    assert not _reading(machine, 100.0).slow()
    moved = _reading(machine, 180.0)
    assert moved.slow()
    machine.now += interference.STRANGE_S + 1
    assert not moved.slow()
    assert not _reading(machine, 180.0).slow()  # nor do later processes wait for it


@pytest.mark.parametrize(
    "line", ["nonsense", "1", "{threads} nan 1", "{threads} 1e", "{threads} 0.0 5"]
)
def test_a_damaged_note_is_no_time(machine: Machine, line: str) -> None:
    path = Notes(".clock").look(CPU)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line.format(threads=torch.get_num_threads()) + "\n")
    assert not _reading(machine, 100.0).slow()
    assert _reading(machine, 180.0).slow()


@pytest.mark.usefixtures("amx")
def test_products_by_tiles_have_a_clock() -> None:
    assert cpu_register.PRODUCTS.make() is not None
    assert cpu_register.PRODUCTS.slow() in (True, False)
    assert cpu_register.PRODUCTS.least
