"""Independent branches of a graph: where calls fall apart into groups that do not need each other, and how they are spread over streams."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...core.rewrite_rule import example
from ..trace.graph_facts import _kernels, random_call, writes

# streams that one section is spread over, the caller's own included
LANES = 4
WINDOW = 96  # calls that one section spans at most
# kernels that a fork and its join must save to be tried at all
FORK = 0.25


@dataclass(frozen=True)
class Section:
    """Consecutive calls, each in one of several lanes: no call needs a value of another lane.

    The first lane stays on the stream of the caller. `gain` counts the kernels that no longer wait for others.
    """

    lanes: tuple[tuple[str, ...], ...]
    gain: int
    kind: str

    @property
    def calls(self) -> frozenset[str]:
        """Of all lanes."""
        return frozenset(name for lane in self.lanes for name in lane)


def sections(nodes: Sequence[fx.Node]) -> list[Section]:
    """Sections that do not overlap and save most together; none holds a call that writes or draws numbers."""
    found: list[Section] = []
    run: list[fx.Node] = []
    for node in [*nodes, None]:
        if node is not None and _moves(node):
            run.append(node)
        elif run:
            found += _best(run)
            run = []
    return found


def _moves(node: fx.Node) -> bool:
    """True for calls that only compute: where they run among others that they do not need is the same."""
    plain = node.op == "call_function" and not writes(node) and not random_call(node)
    return plain and not getattr(node.target, "mutates", False)


class _Groups:
    """Calls of a growing window by what they need of each other, with the kernels of each group."""

    def __init__(self) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}
        self.size: dict[fx.Node, int] = {}

    def root(self, node: fx.Node) -> fx.Node:
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def add(self, node: fx.Node) -> int:
        """Take one more call in; returns the kernels outside of the largest group."""
        self.parent[node], self.size[node] = node, _kernels(node)
        for used in node.all_input_nodes:
            if used in self.parent and (other := self.root(used)) is not node:
                self.parent[other] = node
                self.size[node] += self.size.pop(other)
        return sum(self.size.values()) - max(self.size.values())


def _best(run: list[fx.Node]) -> list[Section]:
    """Of one run of calls: the windows that save most together, by dynamic programming from its end.

    Of those that save as much the longest: its branches have the most time to run beside each other.
    """
    # saved from here on; window's end
    worth: list[tuple[float, int]] = [(0.0, -1)] * (len(run) + 1)
    for i in reversed(range(len(run))):
        best, groups = (worth[i + 1][0], -1), _Groups()
        for j in range(i, min(i + WINDOW, len(run))):
            gain = groups.add(run[j])
            if gain and (total := gain - FORK + worth[j + 1][0]) >= best[0]:
                best = (total, j + 1)
        worth[i] = best
    found, i = [], 0
    while i < len(run):
        end = worth[i][1]
        if end > 0:
            found.append(_section(run[i:end]))
        i = end if end > 0 else i + 1
    return found


def _section(window: Sequence[fx.Node]) -> Section:
    """The groups of a window, the largest first, each to the lane that has the fewest kernels."""
    groups = _Groups()
    gain = [groups.add(node) for node in window][-1]
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in window:
        members.setdefault(groups.root(node), []).append(node)
    lanes: list[list[fx.Node]] = [
        [] for _ in range(min(LANES, sum(map(bool, groups.size.values()))))
    ]
    for group in sorted(members.values(), key=lambda m: -sum(map(_kernels, m))):
        min(lanes, key=lambda lane: sum(map(_kernels, lane))).extend(group)
    order = {node: i for i, node in enumerate(window)}
    placed = [sorted(lane, key=order.__getitem__) for lane in lanes]
    kind = repr([[(str(n.target), _shape(n)) for n in lane] for lane in placed])
    return Section(tuple(tuple(n.name for n in lane) for lane in placed), gain, kind)


def _shape(node: fx.Node) -> Any:
    value = example(node)
    return None if value is None else tuple(value.shape)


# The order of calls -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """Something to do between calls: "fork" a section, "enter" one of its lanes, "join" them."""

    what: str
    section: int
    lane: int = 0


def ordered(nodes: Sequence[fx.Node], found: Sequence[Section]) -> Iterator[fx.Node | Step]:
    """The calls with each section's lanes one after the other, the caller's own last, so that the others start early."""
    named = {n.name: n for n in nodes}
    at = {name: i for i, section in enumerate(found) for name in section.calls}
    done: set[int] = set()
    for node in nodes:
        which = at.get(node.name)
        if which is None:
            yield node
        elif which not in done:
            done.add(which)
            yield Step("fork", which)
            for lane in (*range(1, len(found[which].lanes)), 0):
                yield Step("enter", which, lane)
                yield from (named[name] for name in found[which].lanes[lane])
            yield Step("join", which)


@functools.cache
def streams(device: torch.device) -> Streams:
    """The one set of a device."""
    return Streams(device)


class Streams:
    """The streams of a device that lanes run on, entered and left in the order of `ordered`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.side = [torch.cuda.Stream(device) for _ in range(LANES - 1)]
        self.own: Any = None
        self.used: list[Any] = []

    def fork(self) -> None:
        """From here on lanes may start: what was queued until now comes before them."""
        self.own, self.used = torch.cuda.current_stream(self.device), []

    def enter(self, lane: int) -> None:
        """What follows belongs to a lane; 0 is the caller's own stream."""
        if not lane:
            return torch.cuda.set_stream(self.own)
        stream = self.side[lane - 1]
        stream.wait_stream(self.own)  # which runs nothing of this section yet
        self.used.append(stream)
        torch.cuda.set_stream(stream)

    def join(self) -> None:
        """The caller's stream goes on when all lanes are done."""
        for stream in self.used:
            self.own.wait_stream(stream)
