"""Writes down what moving and renaming must not change, and compares.

    python tools/before.py write before.json    # in a checkout's root
    python tools/before.py compare before.json  # later: one line a difference, exit code 1

Each part is found out by a process of its own, without a plan store. Choices depend on the processor: compare on the same one.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

STEP = 20  # between shipped plans whose keys are decided anew
PARTS = ("names", "surroundings", "choices", "shipped", "candidates:cpu", "candidates:cuda", "candidates:mps")  # fmt: skip
CODES = ("DONE", "FOUND", "REFUSED", "INTERRUPTED", "UNREAD")


def of(names: str, *modules: str) -> Any:
    """A definition, by any of its names, from the first of these modules that is there and has it."""
    for module, name in itertools.product((f"tensorlogic.{m}" for m in modules), names.split("|")):
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as problem:
            if not module.startswith(problem.name or "-"):
                raise
        except AttributeError:  # the module has no such name
            pass
    raise SystemExit(f"before.py: none of {', '.join(modules)} has {names}")


def signature(thing: Any) -> str:
    """The kind of a thing, and what it takes; annotations without their modules."""
    kind = "class" if inspect.isclass(thing) else type(thing).__name__
    with suppress(TypeError, ValueError):
        kind += re.sub(r"[a-z_]+[.](?=[A-Z])", "", str(inspect.signature(thing)))
    return kind


def names() -> dict[str, str]:
    """The public names; of a module those of its functions, too."""
    package = importlib.import_module("tensorlogic")
    found = {name: getattr(package, name) for name in package.__all__}
    for name, module in [(n, m) for n, m in found.items() if inspect.ismodule(m)]:
        own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
        found |= {f"{name}.{v.__name__}": v for v in own if not v.__name__.startswith("_")}
    return {name: signature(thing) for name, thing in found.items()}


def candidates(device: str) -> dict[str, Any]:
    """Every op's schema, and its candidates in order, all of them loaded for a kind of device."""
    of("ready", "dispatch.candidate_loading", "registry")(device)
    ops = dict(of("OPS", "core.op", "op"))
    ops |= {f"{name}, precise": op.precise for name, op in ops.items() if op.precise}
    return {n: [[(p.name, p.kind) for p in o.params], list(o.candidates)] for n, o in ops.items()}


def decision(*asked: Any) -> str:
    """What eager and captured calls of an op's key take, and by what."""
    found = of("decide", "dispatch.selector", "selector")(*asked)
    picks = [f"{id} {json.dumps(c, sort_keys=True)}" for id, c in (found.eager, found.captured)]
    return f"{found.source}: {' | '.join(dict.fromkeys(picks))}"


def choices() -> dict[str, str]:
    """What serves the benchmark's keys on this CPU where nothing was measured, recorded for gradients and not."""
    recipes, maker = (of(n, "bench.cases") for n in ("RECIPES", "InputFactory|Maker"))
    cases, selection = (of(n, "bench.suites") for n in ("cases", "Selection"))
    rates = of("factors", "kernels.cpu.calibration", "ops.common.cpu_rates").__module__
    sys.modules[rates].factors = lambda name, dtype, products: (
        (1.0,) * len(products)
    )  # nothing is timed
    policy, use = (of(n, "core.policy", "policies") for n in ("Policy", "use"))
    dtypes, plain, found = of("DTYPES", "core.dtypes", "numerics"), policy(tune="off"), {}

    def observer(op: Any, key: Any, device: torch.device) -> None:
        found[key.text] = decision(op, key, device, plain)
        raise LookupError  # the call need not go on

    watched = policy(tune="off", observer=observer)
    every = cases(selection("cpu", ops=tuple(recipes), dtypes=("f16", "bf16", "f32")))
    for case, recorded in itertools.product(every, (False, True)):
        make = maker(dtypes[case.dtype], torch.device("cpu"), case.seed)
        args = recipes[case.op].inputs(case.size, make)
        args[0].requires_grad_(recorded)
        with suppress(LookupError), use(watched), torch.set_grad_enabled(recorded):
            recipes[case.op].ours(*args)
    return found


def shipped() -> dict[str, Any]:
    """Each shipped plan's winners; for some of their keys what is decided on that device by the plan, and without it."""
    candidates("cuda")
    ops, plan = of("OPS", "core.op", "op"), of("Plan", "plans.plan", "plan_records")
    for op in ops.values():
        for id in op.candidates:
            op.candidates[id] = replace(op.candidates[id], available=lambda kind: None)
    sources = {name: {c.id: c.source for c in op.candidates.values()} for name, op in ops.items()}
    environments = sys.modules[of("environment", "plans.environment", "environments").__module__]
    current, forget = (of(n, "plans.open_stores", "stores") for n in ("current", "forget"))
    policy, here = of("Policy", "core.policy", "policies")(tune="off"), torch.device("cpu")
    found: dict[str, Any] = {}
    for path in sorted(of("SHIPPED", "plans.store", "plans").glob("*.json")):
        contents = of("read", "plans.file_format", "plan_files")(path)
        device = environments.Environment.from_json(contents.environments["cuda"])
        environments._environment = lambda *_, device=device: device
        forget()
        store, by_key = current(here), found.setdefault(path.name, {})
        for n, p in enumerate(map(plan.from_json, contents.records.values())):
            winners = [p.eager, p.eager_config, p.captured, p.captured_config]
            about = by_key[p.key.text] = {"valid": p.valid(sources[p.key.op]), "winners": winners}
            if n % STEP == 0:
                asked, get = (ops[p.key.op], p.key, here, policy), store.get
                about["decision"] = decision(*asked)
                store.get = lambda *_, **more: None
                about["by neighbours"] = decision(*asked)
                store.get = get
    return found


def surroundings() -> dict[str, Any]:
    """The machine, settings, exit codes, entry points, commands, and by what users' plans are found again."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    loads = {
        f"{group}: {name}": signature(of(target.split(":")[1], target.split(":")[0].partition(".")[2]))
        for group, points in project["entry-points"].items()
        for name, target in points.items()
    }  # fmt: skip
    environment = of("Environment", "plans.environment", "environments")
    store = environment("A GPU", "cuda", "1", "2.13.0", "3.6.0", ("nvidia-cublas 13",)).file_name
    return {
        "machine": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
        "settings": {v.name: v.default for v in of("VARIABLES", "system.settings", "settings")},
        "exit codes": [of(code, "cli.exit_codes", "exits") for code in CODES],
        "distribution": {"scripts": project["scripts"], "entry points": loads},
        "commands": {
            f"{app.name[0]} {name}": signature(app[name].default_command)
            for app in (of("app", "cli.main", "cli"), of("app", "cli.plans", "cli_plans"))
            for name in app
            if name[0] != "-"
        },
        "plan files": [of("FORMAT", "plans.file_format", "plan_files"), store],
    }


def record() -> dict[str, Any]:
    """Every part, by new processes on the checkout in this folder."""
    found = {}
    own = {n: v for n, v in os.environ.items() if not n.startswith("TENSORLOGIC_")}
    for part in PARTS:
        with tempfile.TemporaryDirectory() as empty:
            out = Path(empty, "part.json")
            own |= {"TENSORLOGIC_CACHE_DIR": empty, "PYTHONPATH": os.getcwd()}
            own["TRITON_INTERPRET"] = "1" if part in ("shipped", "candidates:cuda") else "0"
            subprocess.run([sys.executable, __file__, "part", out, part], env=own, check=True)
            found[part] = json.loads(out.read_text())
    return found


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(inner, f"{path} / {name}".removeprefix(" / "))
    else:
        yield path, json.dumps(value, sort_keys=True)


def main(verb: str, file: str, part: str = "") -> int:
    """Record or compare; the exit code."""
    if verb != "compare":
        function, *device = part.split(":") if part else ["record"]
        found = globals()[function](*device)
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
        return 0
    old, new = dict(flat(json.loads(Path(file).read_text()))), dict(flat(record()))
    changed = [path for path in old | new if old.get(path) != new.get(path)]
    for path in changed:
        print(f"{path}: {old.get(path)} -> {new.get(path)}")
    return bool(changed)


if __name__ == "__main__":
    asked = sys.argv[1:2] in (["part"], ["write"], ["compare"]) and sys.argv[2:]
    sys.exit(main(*sys.argv[1:]) if asked else __doc__)
