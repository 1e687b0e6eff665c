"""Help for a program that knows nothing of us: repaired half precision, and its modules replaced by optimised ones."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...cpu_overrides.enable import disable, enable

# calls a module with the arguments of the call that is served
Run = Callable[[nn.Module], Any]
Serve = Callable[[int, nn.Module, tuple[Any, ...], dict[str, Any], Run], Any]
_INSIDE = threading.local()


def signature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Shapes and dtypes of the tensors among the arguments, and whether gradients are recorded."""
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    tensors = [f"{t.dtype}{list(t.shape)}@{t.device.type}" for t in leaves if isinstance(t, Tensor)]
    recording = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    return " ".join([*tensors, "recorded" if recording else "inference"])


class Outermost:
    """While active, calls of modules with parameters that no other module makes go through `serve`.

    Modules have numbers in the order in which they are first called: the same in every run of one program.
    """

    def __init__(self, serve: Serve) -> None:
        self.serve, self.original = serve, nn.Module.__call__
        # keeps the module, so its id stays its own
        self.known: dict[int, tuple[int, nn.Module]] = {}

    def __enter__(self) -> None:
        original, serve, known = self.original, self.serve, self.known

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if getattr(_INSIDE, "depth", 0) or next(module.parameters(), None) is None:
                return original(module, *args, **kwargs)
            _INSIDE.depth = 1
            try:
                number = known.setdefault(id(module), (len(known), module))[0]
                return serve(number, module, args, kwargs, lambda m: original(m, *args, **kwargs))
            finally:
                _INSIDE.depth = 0

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def __exit__(self, *problem: object) -> None:
        nn.Module.__call__ = self.original  # type: ignore[method-assign]


class Help:
    """The levers, pulled between `__enter__` and `__exit__`: may be entered again and again.

    Args:
        repair: call `enable()`. modules: number of a module -> the signature that it is optimised for.
    """

    def __init__(self, repair: bool, modules: Mapping[int, str]) -> None:
        self.repair, self.modules = repair, modules
        self.fast: dict[int, nn.Module] = {}
        self.helped: list[dict[str, Any]] = []  # what became of the modules
        self.seconds = 0.0  # spent on getting ready
        self.watch: Serve | None = None  # what each outermost call goes through in the end
        self.patch = Outermost(self._serve)

    def __enter__(self) -> Help:
        begin = time.perf_counter()
        if self.repair:
            enable()
        self.seconds += time.perf_counter() - begin
        self.patch.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self.patch.__exit__()
        if self.repair:
            disable()

    def _serve(
        self,
        number: int,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Run,
    ) -> Any:
        wanted = self.modules.get(number)
        if wanted is not None and number not in self.fast and wanted == signature(args, kwargs):
            self.fast[number] = self._optimised(module, args, kwargs)
        served = self.fast.get(number, module)
        return self.watch(number, served, args, kwargs, run) if self.watch else run(served)

    def _optimised(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> nn.Module:
        """The module made faster, or itself; measured on copies, so that the program's own state stays."""
        from ...compiler.optimize import optimize

        begin, made = time.perf_counter(), module
        self.patch.__exit__()
        training = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        about = {"name": type(module).__name__, "outcome": "original", "refused": []}
        try:
            made = optimize(module, _by_name(module, args, kwargs), training=training)
            report: Any = made.report
            refused = [f"{r.op} {r.region}: {r.refused}" for r in report.refused]
            about |= {"outcome": report.outcome, "summary": report.summary, "refused": refused}
        except (RuntimeError, ValueError, TypeError) as problem:  # what optimize raises
            about["summary"] = str(problem)
        finally:
            self.helped.append(about)
            self.patch.__enter__()
            self.seconds += time.perf_counter() - begin
        return made


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The arguments, all by keyword where some are, as `optimize` takes them."""
    if not kwargs:
        return args
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    if isinstance(bound.arguments.get("args"), tuple):
        raise ValueError("its forward takes *args beside keywords")
    return dict(bound.arguments)
