"""Decisions about regions and whole models, with their evidence, kept on disk: the next process need not measure again.

One JSON file per environment, beside the plans: written in one step under a lock, of a damaged one what can be read.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from ...core import policy as policies
from ...core.op import OPS
from ...dispatch import candidate_loading
from ...guards.global_state import precisions
from ...measure import timer
from ...native import hook_extension, library_files
from ...plans import file_format, open_stores
from ...plans.environment import environment
from ...plans.file_format import Records
from ...system import settings
from ...system.package import FOLDER
from ..reporting.report import Report, Row
from ..rewrite.matcher import Region
from ..trace.traced_graph import Trace

# of a way's error that the next one must have where the whole model's error grew
MILDER = 0.8
MOST = 4000  # records of one file; the oldest go
LOCK_S = 2.0  # for a file that another process is saving
# what a report and a stored choice have in common
TOLD = ("outcome", "reason", "rows", "error", "before_us", "after_us", "ratio", "watched")
# key of an op -> when its plan was measured, None where nobody has
Plans = dict[str, str | None]


@dataclass
class Decision:
    """What stands for all regions of one kind: a way or candidate, or nothing, with the evidence."""

    way: str | None = None
    ready: tuple[str, ...] = ()  # ways that passed their check
    row: Row = field(default_factory=lambda: Row("", "", ""))
    paying: dict[str, Row] = field(default_factory=dict)  # ways that are fast enough
    plans: dict[str, str | None] = field(default_factory=dict)  # key of its op -> measured when

    def milder(self) -> bool:
        """Go over to the fastest way of those with a clearly smaller error; False where there is none."""
        limit = MILDER * (self.row.error or 0.0)
        fit = {way: r for way, r in self.paying.items() if (r.error or 0.0) <= limit}
        if not fit:
            return False
        least = min(fit, key=lambda way: slowness(fit[way]))
        found = fit[least]
        self.way, self.ready, row = least, (least,), self.row
        row.candidate, row.after_us, row.ratio = found.candidate, found.after_us, found.ratio
        row.error = found.error
        return True

    def inexact(self) -> list[str | None]:
        """This way, and those that add to the original's error no less."""
        least = max(self.row.error or 0.0, 1.1)
        return [self.way, *(w for w, r in self.paying.items() if (r.error or 0.0) >= least)]


def evidence(region: Region, way: str, shown: str, error: float, samples: timer.Samples) -> Row:
    """The times of one way beside the original calls."""
    before, after = samples.median("before"), samples.median(way)
    ratio = samples.ratio(way, "before")
    return Row(region.root, region.op, shown, 0, before, after, ratio, error)


def slowness(row: Row) -> float:
    """The fraction of the original's time that a way takes."""
    return row.ratio[0] if row.ratio is not None else float("inf")


def refused(region: Region, reason: str, error: float | None) -> Decision:
    """The decision for a region that stays as it was."""
    return Decision(None, (), Row(region.root, region.op, "", 0, error=error, refused=reason))


@dataclass
class Choice:
    """What was found for a whole model: which regions stand and by what, or that nothing pays, with the evidence."""

    outcome: str
    captured: bool
    reason: str
    banned: list[str]
    ways: dict[str, str | None]
    rows: list[Row]
    error: float | None
    before_us: float | None
    after_us: float | None
    ratio: tuple[float, float, float] | None
    plans: Plans = field(default_factory=dict)
    sections: list[Any] = field(default_factory=list)  # lanes of calls on streams of their own
    watched: dict[str, Any] | None = None  # where the time of a call of the original went
    hurried: list[str] = field(default_factory=list)  # calls that did not wait for a compiler
    when: str = field(default_factory=lambda: f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC")

    @classmethod
    def of(cls, report: Report, program: Any, banned: list[str], plans: Plans) -> Choice:
        """What a report says, and the program that is served from now on (None: the original)."""
        told = {name: getattr(report, name) for name in TOLD}
        if program is None:
            return cls(captured=False, banned=banned, ways={}, plans=plans, **told)
        return cls(
            captured=program.replay is not None,
            banned=banned,
            ways=dict(program.ways),
            plans=plans,
            sections=[s.lanes for s in program.sections],
            hurried=sorted(program.function.sites.hurried),
            **told,
        )

    def tell(self, report: Report) -> None:
        """Put what an earlier process has found into this one's report."""
        vars(report).update({name: getattr(self, name) for name in TOLD})
        report.watch = None
        report.notes.append(f"decided and timed by an earlier process, {self.when}")


class Stored:
    """The decisions that hold for one traced model here and now, and those that it adds; `save` writes them."""

    def __init__(self, trace: Trace, device: torch.device, training: bool, budget_s: float) -> None:
        policy = policies.current()
        plain = policy.force is None and not policy.reproducible and policy.tune != "full"
        self.usable = plain and all(n.op != "get_attr" for n in trace.graph.nodes)
        self.device, self.budget_s = device, budget_s
        self.new: Records = {}
        self.artifact = secrets.token_hex(12)  # of what Inductor makes of the graph
        if not self.usable:
            return
        candidate_loading.ready(device.type)
        self.environment = environment(device)
        self.path = settings.cache_folder() / "programs" / self.environment.file_name
        self.state = repr((code_version(), _candidates(), switches(device), training))
        self.artifact = _digest(self.state, text_of(trace))
        self.name = f"model {self.artifact}"

    def region(self, key: Any) -> Decision | None:
        """What was decided for regions like this one, unless an op's plan has been measured since."""
        record = self._get(self._region(key))
        return None if record is None else _read(_decision, record)

    def keep_region(self, key: Any, decision: Decision) -> None:
        """To be saved: a decision, refusals included."""
        if self.usable:
            record = asdict(decision)
            self.new[self._region(key)] = record | {"budget_s": self.budget_s}

    def whole(self) -> Choice | None:
        """What was found for this very graph."""
        record = self._get(self.name) if self.usable else None
        return None if record is None else _read(_choice, record)

    def keep_whole(self, choice: Choice) -> None:
        """To be saved: what was found for the model."""
        if self.usable:
            self.new[self.name] = asdict(choice) | {"budget_s": self.budget_s}

    def keeper(self, earlier: Choice) -> Callable[[Report, Any], None]:
        """Keep what later calls have decided instead of `earlier`, and save it."""

        def keep(report: Report, program: Any) -> None:
            ways = {} if report.outcome == "compiled" else earlier.ways
            now = Choice.of(report, program, earlier.banned, earlier.plans)
            self.keep_whole(replace(now, ways=ways))
            self.save()

        return keep

    def save(self) -> None:
        """Write what is new; trouble with the disk is said once and never raised."""
        if not self.new:
            return
        new, self.new = self.new, {}

        def change(records: Records) -> None:
            for name in new.keys() & records.keys():  # the latest stand at the end
                del records[name]
            records.update(new)
            for name in list(records)[: max(0, len(records) - MOST)]:
                del records[name]

        _records(self.path).update(new)
        try:
            file_format.rewrite(self.path, self.environment, change, LOCK_S)
        except (OSError, NotImplementedError) as problem:
            file_format.warn_once(self.path, "cannot be written; decisions stay here", problem)

    def _region(self, key: Any) -> str:
        return f"region {_digest(self.state, repr(key))}" if self.usable else ""

    def _get(self, name: str) -> file_format.Record | None:
        """A record that was made with a budget like today's, and with today's plans."""
        if not self.usable:
            return None
        record = self.new.get(name) or _records(self.path, self.environment).get(name)
        if record is None or not record.get("budget_s", 0.0) >= self.budget_s:
            return None
        return record if self._planned(record.get("plans")) else None

    def _planned(self, plans: Any) -> bool:
        return isinstance(plans, Mapping) and all(
            planned(text, self.device) == when for text, when in plans.items()
        )


def planned(text: str, device: torch.device) -> str | None:
    """When the plan of an op's key was measured; None without one."""
    plan = open_stores.current(device).of(text)
    return None if plan is None else plan.measured


def text_of(trace: Trace) -> str:
    """A traced model as text: calls, names, and the shape, strides, dtype and device of every value; no contents."""
    wants = {n: (t.requires_grad, t.is_inference()) for n, (_, t) in trace.state.items()}
    rest = [v for v in trace.example if not isinstance(v, Tensor)]
    lines = [f"{trace.in_spec} {trace.out_spec} {rest!r}"]
    for n in trace.graph.nodes:
        value = fx.node.map_aggregate(n.meta.get("val"), _spec)
        lines.append(f"{n.name} {n.target} {n.args} {n.kwargs} {value} {wants.get(n.name)}")
    return "\n".join(lines)


def _spec(value: Any) -> str:
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout == torch.strided else value.layout
        return f"{value.dtype}{tuple(value.shape)}{strides}{value.device.type}"
    return str(value)


def switches(device: torch.device) -> tuple[Any, ...]:
    """PyTorch's and our own settings that change how long calls take."""
    backends, sdp, cudnn = torch.backends, torch.backends.cuda, torch.backends.cudnn
    autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    kinds = sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.math_sdp_enabled()
    exact = torch.are_deterministic_algorithms_enabled(), precisions()
    own = backends.mkldnn.enabled, hook_extension.enabled, settings.NATIVE_ISA.read()
    return *exact, *own, *autocast, *kinds, cudnn.enabled, cudnn.benchmark, cudnn.deterministic


@functools.cache
def code_version() -> str:
    """A hash of everything that decides and computes: this package's text, and which libraries were built beside it."""
    found = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*.py")):
        found.update(path.relative_to(FOLDER).as_posix().encode())
        found.update(path.read_bytes())
    for path in sorted(library_files.library().parent.glob("*.so")):
        about = path.stat()
        found.update(f"{path.name} {about.st_size} {about.st_mtime_ns}".encode())
    return found.hexdigest()[:16]


def _candidates() -> str:
    """Which candidates there are; of third parties' also their text."""
    known = ((name, c) for name, op in sorted(OPS.items()) for c in op.known)
    return _digest(*(f"{name} {c.id} {'' if c.trusted else c.source}" for name, c in known))


# what files held when this process first looked, and what it added
_KNOWN: dict[Path, Records] = {}


def _records(path: Path, about: Any = None) -> Records:
    found = _KNOWN.get(path)
    if found is None:
        try:
            found = {} if about is None else file_format.read_own(path, about).records
        except OSError as problem:
            file_format.warn_once(path, "cannot be read; decisions are made anew", problem)
            found = {}
        _KNOWN[path] = found
    return found


open_stores.ON_FORGET.append(_KNOWN.clear)


def _read(make: Callable[[Any], Any], record: Mapping[str, Any]) -> Any:
    """What a record says; None where another hand has written it."""
    try:
        return make({k: v for k, v in record.items() if k != "budget_s"})
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _row(record: Mapping[str, Any]) -> Row:
    return Row(**{**record, "ratio": _ratio(record["ratio"])})


def _ratio(read: Any) -> tuple[float, ...] | None:
    return None if read is None else tuple(map(float, read))


def _decision(record: dict[str, Any]) -> Decision:
    paying = {way: _row(row) for way, row in record["paying"].items()}
    known = {**record, "row": _row(record["row"]), "ready": tuple(record["ready"])}
    return Decision(**{**known, "paying": paying})


def _choice(record: dict[str, Any]) -> Choice:
    read: dict[str, Any] = {"rows": [_row(r) for r in record["rows"]], "ways": dict(record["ways"])}
    lists = {"banned": list(record["banned"]), "hurried": list(record.get("hurried", ()))}
    return Choice(**{**record, **read, **lists, "ratio": _ratio(record["ratio"])})


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:24]


def merged(plans: Iterable[Plans]) -> Plans:
    """The plans of several decisions as one mapping."""
    return {text: when for each in plans for text, when in each.items()}
