"""What it costs on this machine that a recorded call is ours rather than PyTorch's own, kernels aside."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from ..autotune import tuner
from ..core import policy
from ..core.op import OPS
from ..measure import isolation
from ..system import capture_state
from . import bound_call

CPU = torch.device("cpu")
ROUNDS = 60  # of forward and backward of one element: 2 ms
OURS = "cpu.fused"


def extra_us() -> float:
    """Microseconds that forward and backward of a small recorded call take longer by our way, on a CPU; 0 where nothing can be timed now."""
    return _measured() if capture_state.can_call_now(CPU) else 0.0


@functools.cache
def _measured() -> float:
    """A ReLU of one element by our kernels and node and by PyTorch's, in turns; the least of each. Without our kernels, 0."""
    relu, x, dy = OPS["relu"], torch.ones(1, device=CPU), torch.ones(1, device=CPU)
    ours = relu.candidates.get(OURS)
    if ours is None or ours.unfit(relu.key((x, True), "forward")) is not None:
        return 0.0

    def took(fn: Callable[[Tensor], Tensor]) -> float:
        begin = time.perf_counter()
        torch.autograd.grad(fn(x), x, dy)
        return time.perf_counter() - begin

    alone = policy.Policy("off", {relu.name: OURS, "pointwise_backward": OURS})
    with isolation.preserved(CPU, relu), policy.use(alone), torch.enable_grad():
        x.requires_grad_()
        run = bound_call.bind(relu, (x, True), alone, recording=True).run
        both = [(took(run), took(torch.relu)) for _ in range(ROUNDS)]
    mine, plain = (min(times) for times in zip(*both, strict=True))
    return max(0.0, 1e6 * (mine - plain))


tuner.AUTOGRAD_OVERHEAD_US = extra_us
