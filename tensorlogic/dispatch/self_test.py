"""Native kernels that would serve a key nobody has measured are checked before, once a machine, on small tensors of that kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from ..core.candidate import BIND_ERRORS, Candidate, Config
from ..core.key import Key, TensorSpec
from ..core.op import Op
from ..measure import isolation, verification
from ..native import cpu_library
from ..plans.machine_notes import Notes
from ..system import capture_state

# Sizes up to the first number are represented by the second: few rows, one block, several; all with ragged ends.
SIZES = ((6, 5), (13, 11), (48, 29), (160, 83), (1 << 62, 173))
VECTOR = 16  # sizes that it divides are represented by such
LINE = 30_011  # elements of one-dimensional tensors
FLOPS, TRAFFIC = 1.2e7, 1 << 20  # of a check, at most
DRAWS = 2  # wrong once may be eager's luck with the numbers

# of what was right; of what was wrong, in this process only, with the reason
_NOTES = Notes(".checked")


class CannotTestNow(Exception):
    """The check has to wait: a graph is being captured or traced."""


def self_test_refusal(
    op: Op, key: Key, candidate: Candidate, config: Config, device: torch.device
) -> str | None:
    """Why the candidate may not serve keys of this kind unmeasured, or None; checks it now where nobody has.

    Raises:
        Later: nothing can be checked in this context.
    """
    if torch._C._get_tracing_state() is not None:
        raise CannotTestNow
    kind = _fitting(op, key, candidate)
    path = _NOTES.look(device)
    about = (candidate.id, candidate.source, cpu_library.isa(), dict(config), kind.text)
    what = json.dumps(about, default=str)
    if what in _NOTES.known:
        return _NOTES.known[what]
    if not capture_state.can_call_now(device):
        raise CannotTestNow
    reason = _NOTES.known[what] = _check(op, kind, candidate, config, device)
    if reason is None:
        _NOTES.append(path, what)
    return reason


def forget() -> None:
    """Know nothing that was not said on disk."""
    _NOTES.forget()


def _check(
    op: Op, kind: Key, candidate: Candidate, config: Config, device: torch.device
) -> str | None:
    """None if the candidate is right on this very key, with one of two draws of inputs."""
    reason = None
    for draw in range(DRAWS):
        try:
            with isolation.preserved(device, op), torch.no_grad():
                launch = candidate.bind(kind, config, device)
                checker = verification.Checker(op, kind, device, draw)
                constant = any(t and t.constant for t in kind.tensors)
                for _ in range(1 + constant):  # then with what was derived from it
                    verdict = checker.check(launch, coarse=candidate.coarse(kind))
                    if not verdict:
                        break
        except BIND_ERRORS as problem:
            reason = f"failed: {type(problem).__name__}: {problem}"
            continue
        if verdict:
            return None
        reason = verdict.reason
    return f"{reason}, on {kind.text}"


# the kind of a key --------------------------------------------------------------------------------------------------


def _fitting(op: Op, key: Key, candidate: Candidate) -> Key:
    """The small key that stands for this one; itself where its kind is not one that the candidate runs."""
    small = kind_of(op, key)
    return key if candidate.unfit(small) else small


def kind_of(op: Op, key: Key) -> Key:
    """A key with the same dtypes, flags and order of strides, its sizes one of a few, as large as a check may cost."""
    line = all(t is None or len(t.shape) == 1 for t in key.tensors)
    small = key
    for most in range(len(SIZES), 0, -1):
        sizes = [(0, LINE)] if line else SIZES[:most]
        sizes = sizes[-1:] if op.elementwise else sizes  # room for all landmarks
        small = replace(key, tensors=tuple(t and _small(t, sizes) for t in key.tensors))
        if op.flops(small) <= FLOPS and op.traffic(small) <= TRAFFIC:
            break
    return small


def _small(t: TensorSpec, sizes: Sequence[tuple[int, int]]) -> TensorSpec:
    shape = tuple(_size(n, sizes) for n in t.shape)
    return replace(t, shape=shape, stride=_strides(t, shape))


def _size(n: int, sizes: Sequence[tuple[int, int]]) -> int:
    if n <= 1:
        return n
    ragged = next((few for limit, few in sizes if n <= limit), sizes[-1][1])
    return ragged if n % VECTOR else ragged + -ragged % VECTOR


def _strides(t: TensorSpec, shape: Sequence[int]) -> tuple[int, ...]:
    """Dense ones in the same order, repeated and padded where those of `t` are."""
    strides = list(t.stride)
    dense, step = 1, 1  # of t, and of what stands for it
    for d in sorted(range(len(shape)), key=lambda d: (t.stride[d], -d)):
        if t.stride[d] == 0 or t.shape[d] == 1:
            continue
        if t.stride[d] > dense:  # padded
            step += VECTOR - step % VECTOR if t.stride[d] % VECTOR == 0 else 1
        strides[d] = step
        dense, step = t.stride[d] * t.shape[d], step * shape[d]
    if 0 not in t.stride:
        contiguous = [prod(shape[d + 1 :]) for d in range(len(shape))]
        strides = [c if n == 1 else s for s, c, n in zip(strides, contiguous, t.shape, strict=True)]
    return tuple(strides)
