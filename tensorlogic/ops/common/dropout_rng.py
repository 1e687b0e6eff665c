"""Dropout's random numbers: seeds drawn from PyTorch's generators, and the mask as a function of seed, offset and index."""

from __future__ import annotations

import threading
from math import prod

import torch
from torch import Tensor

from ...system.capture_state import capturing

ROUNDS = 7
_MASK = 0xFFFFFFFF


def draw(device: torch.device, generator: torch.Generator | None) -> tuple[int, int, Tensor | None]:
    """(seed, offset, state): two integers that no other draw of this generator repeats, or both in an int64[2] tensor.

    A negative seed is one of a generator that the caller gave. The tensor is for captured and traced calls, whose replays must draw anew; it is None otherwise.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or capturing(device):
        return 0, 0, torch.randint(0, 2**62, (2,), device=device, generator=generator)
    if device.type == "cuda":
        g = generator
        if g is None:
            index = torch.cuda.current_device() if device.index is None else device.index
            g = torch.cuda.default_generators[index]
        offset = g.get_offset()
        g.set_offset(offset + 4)
        seed = g.initial_seed() & 0x7FFFFFFFFFFFFFFF
        return seed if generator is None else -1 - seed, offset, None
    if device.type == "cpu":
        seed, offset = torch.randint(0, 2**62, (2,), device=device, generator=generator).tolist()
        return seed, offset, None
    return 0, 0, torch.randint(0, 2**62, (2,), device=device, generator=generator)


_LOCAL = threading.local()


def seeded(device: torch.device, seed: int, offset: int) -> torch.Generator:
    """A generator of this thread, set to a state that follows from seed and offset."""
    known: dict[torch.device, torch.Generator] | None = getattr(_LOCAL, "generators", None)
    if known is None:
        known = _LOCAL.generators = {}
    if device not in known:
        known[device] = torch.Generator(device)
    return known[device].manual_seed((seed * 0x9E3779B97F4A7C15 + offset) & 0x7FFFFFFFFFFFFFFF)


def keep_mask(
    shape: tuple[int, ...], p: float, seed: int | Tensor, offset: int | Tensor, device: torch.device
) -> Tensor:
    """True where dropout keeps: uniform(Philox4x32-7(key=seed, counter=(index, offset))) >= p, index in C order.

    Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    index = torch.arange(prod(shape), device=device)
    c0, c1, c2, c3 = (
        index & _MASK,
        index >> 32,
        (offset & _MASK) + 0 * index,
        ((offset >> 32) & _MASK) + 0 * index,
    )
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(ROUNDS):
        c0, c1, c2, c3 = (
            _high(0xCD9E8D57, c2) ^ c1 ^ k0,
            _low(0xCD9E8D57, c2),
            _high(0xD2511F53, c0) ^ c3 ^ k1,
            _low(0xD2511F53, c0),
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    signed = torch.where(c0 >= 2**31, 2**32 - 1 - c0, c0)
    return (signed.float() * 4.6566127342e-10 >= p).view(shape)


def _high(a: int, b: Tensor) -> Tensor:
    """The upper 32 bits of the product of two unsigned 32-bit numbers, without passing 63 bits."""
    return ((b >> 16) * a + (((b & 0xFFFF) * a) >> 16)) >> 16


def _low(a: int, b: Tensor) -> Tensor:
    """The lower 32 bits of the product."""
    return (b * a) & _MASK
