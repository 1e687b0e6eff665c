"""PyTorch's function modes: which want to see a call, and the one that does not, a default device."""

from __future__ import annotations

import torch
from torch.utils._device import DeviceContext

# a context: no function mode, no `__torch_function__` inside
aside = torch._C.DisableTorchFunction


def intercepted() -> bool:
    """True where a torch-function mode wants to see calls.

    A default device (`torch.set_default_device`, `with torch.device(...)`) alone is none of these: it fills in device
    arguments that were left out, and calls of ours leave none to it.
    """
    return torch._C._is_torch_function_mode_enabled() and not default_device()


def default_device() -> bool:
    """True where default devices are the only function modes: `with torch.device(...)` puts one upon another."""
    return torch._C._is_torch_function_mode_enabled() and all(
        type(torch._C._get_function_stack_at(i)) is DeviceContext
        for i in range(torch._C._len_torch_function_stack())
    )
