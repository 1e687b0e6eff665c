"""Plan: the candidate chosen for a key; Evidence: what was measured of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from ..core.key import Key, _sorted, _tuples
from . import legacy_hashes as plans_legacy_hashes


@dataclass
class Evidence:
    """What is known of one candidate on one key."""

    candidate: str
    config: dict[str, Any]
    status: str  # "measured" | "refused"
    device_us: float = 0.0
    host_us: float = 0.0
    spread: float = 0.0  # half the distance of the quartiles over the median
    error: float = 0.0  # relative to eager's
    reason: str = ""  # why it was refused, or why it lost
    source: str = ""  # hash of the candidate's source


DISTURBED = "; what it runs on was disturbed"  # ends the reason of such evidence
UNFINISHED = "; kernels of it were still being compiled"  # likewise


@dataclass
class Plan:
    """The choice for one key, with everything it rests on."""

    key: Key
    eager: str  # candidate of eager calls
    eager_config: dict[str, Any]
    # of captured and compiled calls: smallest device time, alone or in a pair
    captured: str
    captured_config: dict[str, Any]
    evidence: list[Evidence] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    measured: str = ""  # ISO date and time
    accuracy: list[dict[str, Any]] = field(default_factory=list)  # errors on callers' data

    def valid(self, sources: Mapping[str, str]) -> bool:
        """True when both winners exist today (id -> source hash) with the source as measured."""
        known = {(e.candidate, e.source) for e in self.evidence if e.status == "measured"}
        return all((id, sources.get(id)) in known for id in (self.eager, self.captured))

    def measured_us(
        self, captured: bool, sources: Mapping[str, str]
    ) -> dict[str, tuple[float, dict[str, Any]]]:
        """Device (or, of eager calls, waiting) microseconds and configuration of each candidate whose source hash today is in `sources`.

        A plan without times says only who won.
        """
        eager, graph = (self.eager, self.eager_config), (self.captured, self.captured_config)
        winner = graph if captured else eager
        found = {
            e.candidate: (e.device_us if captured else self.waited_us(e), e.config)
            for e in self.evidence
            if e.status == "measured" and sources.get(e.candidate) == e.source
        }
        if any(us <= 0 for us, _ in found.values()):
            found = {winner[0]: (1.0, winner[1])}
        return {id: (us, winner[1] if id == winner[0] else own) for id, (us, own) in found.items()}

    def waited_us(self, e: Evidence) -> float:
        """What a caller waits. Of those that were out of the running the host's time was not measured: then the most that any took."""
        host = e.host_us
        if host == e.device_us:
            others = (o.host_us for o in self.evidence if o.host_us != o.device_us)
            host = max(others, default=host)
        return max(e.device_us, host)

    @property
    def disturbed(self) -> bool:
        """Whether it was measured once, while something disturbed what some of the candidates run on."""
        return any(e.reason.endswith(DISTURBED) for e in self.evidence)

    @property
    def incomplete(self) -> bool:
        """Whether there was no time to compile all that may serve the key."""
        return any(e.reason.endswith(UNFINISHED) for e in self.evidence)

    def to_json(self) -> dict[str, Any]:
        """A record of the plan file."""
        return {
            "key": self.key.to_json(),
            "eager": self.eager,
            "eager_config": _sorted(self.eager_config),
            "captured": self.captured,
            "captured_config": _sorted(self.captured_config),
            "evidence": [{**asdict(e), "config": _sorted(e.config)} for e in self.evidence],
            "versions": _sorted(self.versions),
            "measured": self.measured,
            **({"accuracy": self.accuracy} if self.accuracy else {}),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`; lists in configurations come back as tuples, former ids and hashes as those of today."""
        record = plans_legacy_hashes.updated(record)
        evidence = [Evidence(**{**e, "config": _config(e["config"])}) for e in record["evidence"]]
        return cls(
            key=Key.from_json(record["key"]),
            eager=record["eager"],
            eager_config=_config(record["eager_config"]),
            captured=record["captured"],
            captured_config=_config(record["captured_config"]),
            evidence=evidence,
            versions=dict(record["versions"]),
            measured=record["measured"],
            accuracy=list(record.get("accuracy", ())),
        )


def merged(old: Plan, new: Plan) -> Plan:
    """The later measured of two plans, with the other's refusals of candidates new to it."""
    late, early = (old, new) if _when(old.measured) > _when(new.measured) else (new, old)
    known = {e.candidate for e in late.evidence}
    kept = [e for e in early.evidence if e.status == "refused" and e.candidate not in known]
    return replace(late, evidence=[*late.evidence, *kept]) if kept else late


def _when(measured: str) -> datetime:
    """The time of measuring; unreadable, or a day ahead of the clock, counts as the oldest."""
    oldest = datetime.min.replace(tzinfo=UTC)
    try:
        time = datetime.fromisoformat(measured)
    except (ValueError, TypeError):
        return oldest
    time = time if time.tzinfo else time.replace(tzinfo=UTC)
    return time if time < datetime.now(UTC) + timedelta(days=1) else oldest


def _config(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _tuples(value) for name, value in record.items()}
