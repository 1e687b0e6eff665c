"""What a call asks PyTorch about the state around it: modes, switches, default devices, what tensors are besides numbers.

A graph holds the answers as they were. So the questions are noted while the model's own code runs, and asked again at every later
call; nothing is asked of models that asked nothing.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import call
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils._device import DeviceContext

from ..system import function_modes
from .errors import Untraceable
from .finite_branches import FINITE

_C: Any = torch._C
KEPT = "kept by torch.nn.utils.parametrize.cached() until its block ends"
KINDS = ("cpu", "cuda")  # of devices, for which autocast has a state each
# who asks for the sake of their own callers: what they compute does not depend on it
OUTSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent), "<tensorlogic")


def autocast() -> Any:
    """For which types of devices autocast is on, and to which dtype; None where it is off."""
    if not _C._is_any_autocast_enabled():
        return None
    return tuple(torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in KINDS)  # fmt: skip


def keeps_parametrized() -> bool:
    """Whether weights that are computed from others are computed once until a block ends: a graph would read what it frees."""
    return bool(getattr(parametrize, "_cache_enabled", 0))


def precisions() -> tuple[str, str]:
    """How float32 products and convolutions are computed on CUDA devices, whichever way that was set."""
    get = _C._get_fp32_precision_getter
    return get("cuda", "matmul").replace("none", "ieee"), get("cuda", "conv").replace("none", "ieee")  # fmt: skip


def modes() -> Any:
    """Everything of the state around a call that a recorded graph might hold whether or not code asked."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast(), switches()


def switches() -> Any:
    """What a recorded graph holds of PyTorch's process-wide switches, as `Switches` in csrc/calls/tensor_guard.h."""
    return torch.get_default_dtype(), _C._get_deterministic_algorithms(), precisions()


def _devices() -> Any:
    """The default devices, the innermost last."""
    if not _C._len_torch_function_stack():
        return ()
    stack = map(_C._get_function_stack_at, range(_C._len_torch_function_stack()))
    return tuple(mode.device for mode in stack if type(mode) is DeviceContext)


PRECISIONS = ("_get_float32_matmul_precision", "_get_fp32_precision_getter", "_get_cublas_allow_tf32", "_get_cudnn_allow_tf32")  # fmt: skip
#: The state of this thread or process that questions without arguments are about, by the names of PyTorch's C functions.
STATES: dict[str, Callable[[], Any]] = {
    **{
        name: getattr(_C, name)
        for name in dir(_C)
        if re.fullmatch(r"_get_\w+_(enabled|deterministic|benchmark|tf32|reduction|accumulation|only|algorithms|memory|order)", name)
    },
    **{
        name: getattr(_C, name)
        for name in (
            "is_grad_enabled", "is_inference_mode_enabled", "is_anomaly_enabled", "is_anomaly_check_nan_enabled",
            "is_autocast_cache_enabled", "get_num_threads", "get_num_interop_threads", "get_default_dtype", "_get_warnAlways",
        )
    },
    **dict.fromkeys(PRECISIONS, precisions),  # PyTorch's own raise where they were set in two ways
    "get_autocast_dtype": lambda: tuple(map(torch.get_autocast_dtype, KINDS)),
    "is_autocast_enabled": autocast,
    "default device": _devices,
}  # fmt: skip
BUILTINS = {getattr(_C, n): n for n in STATES if hasattr(_C, n)}
for _name in ("get_autocast_cpu_dtype", "get_autocast_gpu_dtype"):
    BUILTINS[getattr(_C, _name)] = "get_autocast_dtype"
for _name in ("is_autocast_cpu_enabled", "_is_any_autocast_enabled"):
    BUILTINS[getattr(_C, _name)] = "is_autocast_enabled"
for _each in torch.utils._device._device_constructors():  # without a device they take the default
    BUILTINS[_each] = "default device"
CHECKPOINT, SEEDING, STEP = "checkpoint", "manual_seed", "optimizer.step"
ENGINE = "run_backward"  # what every backward pass calls
WRAPPERS = {
    torch.get_default_device.__code__: "default device",
    inspect.unwrap(checkpoint.checkpoint).__code__: CHECKPOINT,
    **{
        code: STEP  # what PyTorch puts around every optimizer's
        for code in torch.optim.Optimizer.profile_hook_step.__code__.co_consts
        if isinstance(code, CodeType)
    },
}
#: What PyTorch's own code asks, too, to put it back, and ours.
CALLERS = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "get_autocast_dtype", "is_autocast_cache_enabled", "get_num_threads")  # fmt: skip

#: What tensors are besides shape, strides, dtype and device.
LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad": lambda t: t.requires_grad,
    "is_leaf": lambda t: t.is_leaf,
    "retains_grad": lambda t: t.retains_grad,
    "grad": lambda t: t.is_leaf and t.grad is None,
    "grad_fn": lambda t: t.grad_fn is None,
    "_base": lambda t: t._base is None,
    "is_inference": Tensor.is_inference,
    "is_neg": Tensor.is_neg,
    "is_conj": Tensor.is_conj,
    "is_pinned": Tensor.is_pinned,
    "is_shared": Tensor.is_shared,
    "storage_offset": Tensor.storage_offset,
    "untyped_storage": lambda t: t.untyped_storage().nbytes(),
    "_is_view": Tensor._is_view,
}
LOOKS["storage"] = LOOKS["_typed_storage"] = LOOKS["untyped_storage"]
EVERY = frozenset((*STATES, *LOOKS))


class Asked:
    """Questions, and the answers of the moment when it is made."""

    def __init__(
        self, names: Iterable[str] = (), held: Sequence[Tensor] = (), given: Sequence[Any] = ()
    ) -> None:
        """`held`: a model's tensors, `given`: the flattened inputs of a call."""
        names = sorted(names)
        self.states = [
            (ask, ask()) for ask in dict.fromkeys(STATES[n] for n in names if n in STATES)
        ]
        self.looks = [*dict.fromkeys(LOOKS[n] for n in names if n in LOOKS)]
        self.held = [t for t in held if t.layout is torch.strided] if self.looks else []
        self.answers = self._answers(given)

    def _answers(self, given: Sequence[Any]) -> list[Any]:
        return [look(t) for look in self.looks for t in (*self.held, *_tensors(given))]

    @property
    def holds(self) -> Callable[[], bool] | None:
        """What asks again whether the answers that no tensor gives are the same; None where there are none."""
        if len(self.states) == 1:
            ((ask, answer),) = self.states
            return lambda: ask() == answer
        asks, answers = [ask for ask, _ in self.states], [answer for _, answer in self.states]
        return (lambda: [*map(call, asks)] == answers) if asks else None

    def steady(self) -> bool:
        """Whether they are, where nobody keeps what asks."""
        return self.holds is None or self.holds()

    def alike(self, given: Sequence[Any]) -> bool:
        """Whether those that tensors give are, with these inputs."""
        return not self.looks or self._answers(given) == self.answers


@contextlib.contextmanager
def noting(backward: Callable[[Mapping[str, Any]], None] | None = None) -> Iterator[set[str]]:
    """The questions that Python code of this thread puts meanwhile; every one where a profiler is at work that cannot be shared.

    `backward` is told what each backward pass that begins is given.
    """
    names: set[str] = set()
    other: Any = sys.getprofile()
    pausing = hasattr(other, "enable") and hasattr(other, "disable")  # cProfile's
    if not (other is None or pausing or isinstance(other, (FunctionType, MethodType))):
        names |= EVERY
        yield names
        return
    if pausing:
        other.disable()
    sys.setprofile(_Noting(names, None if pausing else other, backward))
    try:
        yield names
    finally:
        sys.setprofile(None if pausing else other)
        if pausing:
            other.enable()


class _Noting:
    """What Python calls at every call and return."""

    def __init__(
        self,
        names: set[str],
        other: Callable[..., Any] | None,
        backward: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:
        self.names, self.known, self.other = names, set[CodeType](), other
        self.backward = backward

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self.other is not None:
            self.other(frame, event, arg)
        if event == "c_call":
            name = BUILTINS.get(arg)
            if name is None:
                name = getattr(arg, "__name__", "")
                if name == ENGINE and self.backward is not None and _between(frame.f_code):
                    self.backward(frame.f_locals)
                if name in FINITE:
                    self.names.add("finite")
                if name in (SEEDING, "seed") and _global(arg):
                    self.names.add(SEEDING)
                if name not in LOOKS or not isinstance(getattr(arg, "__self__", None), Tensor):
                    return
            if name not in self.names and not (
                _between(frame.f_code) and (name in CALLERS or name in LOOKS)
            ):
                self.names.add(name)
        elif event == "call" and frame.f_code not in self.known:
            code = frame.f_code
            self.known.add(code)
            if code in WRAPPERS:
                self.names.add(WRAPPERS[code])
            elif not _between(code):  # attributes of tensors are no calls
                self.names.update(n for n in code.co_names if n in LOOKS)


def _global(method: Any) -> bool:
    """Whether a method is that of a generator which calls draw from unless they are given one of their own."""
    generator = getattr(method, "__self__", None)
    return generator is torch.default_generator or generator in torch.cuda.default_generators


def _between(code: CodeType) -> bool:
    """Whether code is PyTorch's or ours."""
    return code.co_filename.startswith(OUTSIDE)


def answered(names: Iterable[str], model: nn.Module, given: Sequence[Any]) -> Asked:
    """The questions of a model's code with today's answers.

    Raises:
        Untraceable: it reads gradients, which a graph would hold as they are now.
    """
    held = [*model.parameters(), *model.buffers()]
    found = Asked(names, held, given)
    if "grad" in names and any(t.is_leaf and t.grad is not None for t in (*held, *_tensors(given))):
        raise Untraceable("the model reads gradients of tensors that it is given or holds")
    return found


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided]


def plain_modes() -> bool:
    """True where nothing traces, transforms or intercepts PyTorch's calls."""
    return (
        not torch._C._len_torch_dispatch_stack()
        and not function_modes.intercepted()
        and not torch.compiler.is_compiling()
        and torch._C._functorch.maybe_current_level() is None
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )
