"""The result file: rows with their raw samples, the machine they were measured on, and its limits in the same run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..measure.timer import Samples
from ..system import atomic_file
from .terminal.user_error import Problem

FORMAT = "tensorlogic bench"
SCHEMA = 1
OURS = "tensorlogic"


@dataclass
class Row:
    """One operation at one size and dtype; times are microseconds per call, one entry a round."""

    id: str
    category: str
    op: str
    detail: str
    size: int
    dtype: str
    # "ok" | "refused" (wrong result) | "failed" (raised, or out of memory)
    status: str = "ok"
    reason: str = ""
    shapes: list[list[int]] = field(default_factory=list)
    key: str = ""
    candidate: str = ""
    captured: str = ""
    source: str = ""  # where the choice came from
    flops: float = 0.0
    bytes: float = 0.0  # least traffic
    error: float | None = None  # relative to float64
    eager_error: float | None = None
    baselines: list[str] = field(default_factory=list)  # PyTorch's calls, the literal one first
    # PyTorch's calls whose results did not match, and why
    excluded: dict[str, str] = field(default_factory=dict)
    device_us: dict[str, list[float]] = field(default_factory=dict)
    host_us: dict[str, list[float]] = field(default_factory=dict)  # on GPUs: the caller's own time
    evidence: list[dict[str, Any]] = field(default_factory=list)  # every candidate of the key

    def samples(self, clock: str = "device") -> Samples:
        """Times by implementation."""
        return Samples(self.device_us if clock == "device" else self.host_us)

    @property
    def subject(self) -> str:
        """Whose time the row is about: ours, or PyTorch's where we have no implementation."""
        return OURS if OURS in self.device_us else next(iter(self.device_us), "")

    def times_ms(self, clock: str = "device") -> tuple[float, float, float]:
        """Average, least and largest milliseconds."""
        values = self.samples(clock).values[self.subject]
        return statistics.fmean(values) / 1e3, min(values) / 1e3, max(values) / 1e3

    def median_us(self, name: str | None = None, clock: str = "device") -> float:
        """Median microseconds of an implementation."""
        return self.samples(clock).median(name or self.subject)

    def best_eager(self, clock: str = "device") -> str | None:
        """The fastest of PyTorch's calls."""
        samples = self.samples(clock)
        known = [b for b in self.baselines if b in samples.values]
        return min(known, key=samples.median) if known and self.subject == OURS else None

    def speed(
        self, over: str | None = None, clock: str = "device"
    ) -> tuple[float, float, float] | None:
        """Time of PyTorch's best call (or of `over`) over ours, with the 95 % interval; above 1 we are faster."""
        other = over or self.best_eager(clock)
        samples = self.samples(clock)
        if other is None or other not in samples.values or OURS not in samples.values:
            return None
        return samples.ratio(other, OURS)

    @property
    def gflops(self) -> float:
        """10⁹ operations a second at the median."""
        return self.flops / self.median_us() / 1e3

    @property
    def gbs(self) -> float:
        """10⁹ bytes a second of the least traffic at the median."""
        return self.bytes / self.median_us() / 1e3


@dataclass
class Ceilings:
    """The limits of the machine, measured in the run."""

    # bytes read and written, microseconds
    copy: list[tuple[int, float]] = field(default_factory=list)
    gflops: dict[str, float] = field(default_factory=dict)  # of a large product, by dtype
    # what the smallest call costs, by who pays
    launch_us: dict[str, float] = field(default_factory=dict)


@dataclass
class Results:
    """Everything one run has found out."""

    machine: dict[str, Any]
    run: dict[str, Any]
    ceilings: Ceilings = field(default_factory=Ceilings)
    rows: list[Row] = field(default_factory=list)
    complete: bool = False
    path: Path | None = None

    @property
    def kind(self) -> str:
        """ "cpu", "cuda" or "mps"."""
        return str(self.machine["environment"]["kind"])

    @property
    def timed(self) -> list[Row]:
        """Rows that hold times."""
        return [r for r in self.rows if r.status == "ok" and r.device_us]

    def to_json(self) -> dict[str, Any]:
        """The document of the file."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "complete": self.complete,
            "machine": self.machine,
            "run": self.run,
            "ceilings": asdict(self.ceilings),
            "rows": [asdict(r) for r in self.rows],
        }

    def write(self, path: Path) -> None:
        """Replace `path` in one step; Problem when the folder cannot be written."""
        write_text(path, _layout(self.to_json()), "the result file")
        self.path = path


def write_text(path: Path, text: str, what: str) -> None:
    """Replace a file in one step; Problem, naming `what` it is, when the folder cannot be written."""
    try:
        atomic_file.replace(path, text)
    except OSError as problem:
        raise Problem(f"{what} {path} cannot be written: {problem}") from problem


def load(path: Path) -> Results:
    """Read a result file; Problem when it is missing, truncated, foreign or of another version."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Problem(
            f"{path} does not exist; write one with `tensorlogic bench --json {path}`"
        ) from None
    except OSError as problem:
        raise Problem(f"{path} cannot be read: {problem}") from problem
    except ValueError as problem:  # not UTF-8, or not JSON
        raise Problem(f"{path} is truncated or not JSON: {problem}") from problem
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise Problem(f"{path} is not a result file of `tensorlogic bench`")
    if document.get("schema") != SCHEMA:
        raise Problem(
            f"{path} has schema {document.get('schema')!r}; this version reads {SCHEMA}: measure again, or use the version that wrote it"
        )
    try:
        ceilings = _known(Ceilings, document["ceilings"])
        ceilings.copy = [(int(size), float(us)) for size, us in ceilings.copy]
        rows = [_known(Row, r) for r in document["rows"]]
        results = Results(
            document["machine"], document["run"], ceilings, rows, document["complete"], Path(path)
        )
        if not (results.kind and all(isinstance(r.device_us, dict) for r in rows)):
            raise TypeError("machine or samples")
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise Problem(f"{path} is damaged: {type(problem).__name__} {problem}") from problem
    return results


def _known(kind: Any, record: Mapping[str, Any]) -> Any:
    """A dataclass from the fields it knows."""
    names = {f.name for f in fields(kind)}
    return kind(**{name: value for name, value in record.items() if name in names})


def _layout(document: Mapping[str, Any]) -> str:
    """JSON with one line for each part and each row, so that it can be read and compared."""
    parts = []
    for name, value in document.items():
        if name == "rows" and value:
            lines = ",\n  ".join(json.dumps(row) for row in value)
            parts.append(f'"rows": [\n  {lines}\n ]')
        else:
            parts.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def rounded(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Samples with five significant digits."""
    return {name: [float(f"{v:.5g}") for v in series] for name, series in values.items()}
