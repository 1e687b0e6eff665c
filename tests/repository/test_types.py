"""What a type checker sees of the public names: complete signatures, and mistakes that it refuses."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import tensorlogic
from tensorlogic.core.activations import ACTIVATIONS
from tensorlogic.core.numeric_mode import MODES
from tensorlogic.ops.softmax_cross_entropy import REDUCTIONS
from tensorlogic.system.settings import TUNE_MODES

SETUP = """
import numpy as np
import torch
from torch import Tensor, nn
import tensorlogic

x, w, b = torch.randn(4, 8), torch.randn(2, 8), torch.randn(2)
plain: nn.Module = nn.Linear(8, 2)

class Model(nn.Module):
    def forward(self, x: Tensor, times: int = 1) -> tuple[Tensor, int]:
        return x, times

def step(x: Tensor, times: int) -> Tensor:
    return x * times

@tensorlogic.capture
def captured(x: Tensor, times: int) -> Tensor:
    return x * times

@tensorlogic.precision("f16")
def halved(x: Tensor, times: int = 1) -> Tensor:
    return x * times

@tensorlogic.policy(force="torch.eager")
def forced(x: Tensor, times: int = 1) -> Tensor:
    return x * times
"""
TENSOR = "torch._tensor.Tensor"
RIGHT = {  # an expression, and the end of its type's name
    'tensorlogic.linear(x, w, bias=b, activation="gelu_tanh")': TENSOR,
    'tensorlogic.linear(x, w, precision="f16")': TENSOR,
    'tensorlogic.matmul(a=x, b=w, precision=tensorlogic.precision("adaptive", rtol=1e-2))': TENSOR,
    "tensorlogic.mul_relu(2, x)": TENSOR,
    "tensorlogic.affine(x, 2.0, True)": TENSOR,
    "tensorlogic.linear_residual_relu(x, w, None, residual=b)": TENSOR,
    "tensorlogic.sum(x, [0, 1], keepdim=True)": TENSOR,
    'tensorlogic.softmax_cross_entropy(x, x.argmax(1), reduction="none")': TENSOR,
    "tensorlogic.optimize(plain, x)": "OptimizedModule",
    "tensorlogic.optimize(plain, {'input': x}, training=True, budget_s=1).report": "report.Report",
    'tensorlogic.optimize(plain, (x,), precision="f32").eval().report.summary': "str",
    "tensorlogic.optimize(plain, (x,)).generate": "Any",
    "tensorlogic.capture(step)(x, times=2)": TENSOR,
    "tensorlogic.capture(Model(), max_graphs=2, batch=0, buckets=(4, 8))(x)": f"tuple[{TENSOR}, int]",
    "tensorlogic.capture(nn.Linear(8, 2))(x)": TENSOR,
    "tensorlogic.capture(plain)(x)": "Any",
    "tensorlogic.capture(tensorlogic.relu)(x)": TENSOR,
    "captured(x, 2)": TENSOR,
    "(captured.graphs, captured.nbytes, captured.reason)": "tuple[int, int, str | None]",
    "halved(x)": TENSOR,
    "forced(x, times=2)": TENSOR,
    'tensorlogic.policy(tune="off").__enter__()': "Policy",
    'tensorlogic.precision("f32").__enter__()': "precision_policy.precision",
    'tensorlogic.placement("cpu").__enter__()': "Policy",
    "next(iter(tensorlogic.explain(tensorlogic.linear, x, w, activation='relu'))).rows[0][0]": "str",
    "tensorlogic.tune(plain, x).unfinished": "list[str]",
    'tensorlogic.candidates("linear")': "dict[str, str | None]",
    "tensorlogic.candidates(tensorlogic.linear)": "dict[str, str | None]",
    "tensorlogic.candidates(tensorlogic.linear, x, w)": "dict[str, str | None]",
    'tensorlogic.to(x, "cpu", torch.float16)': TENSOR,
    'tensorlogic.to(np.ones(3), torch.device("cpu"), asynchronous=True).wait()': TENSOR,
    'tensorlogic.unified(np.ones(3)).on("cpu")': TENSOR,
    "tensorlogic.matmul(tensorlogic.unified(x), w)": TENSOR,
    "tensorlogic.constant(nn.Parameter(w))": "Parameter",
    "tensorlogic.pool.stats().bytes_held": "int",
}
WRONG = (  # one mistake each
    "tensorlogic.no_such_name",
    "from tensorlogic import no_such_name",
    "tensorlogic.TYPE_CHECKING",
    "tensorlogic.pool.no_such_name",
    "tensorlogic.linear(x)",
    "tensorlogic.linear(x, w, activaton='relu')",
    "tensorlogic.linear(x, w, activation='rellu')",
    "tensorlogic.linear([1.0], w)",
    "tensorlogic.relu(x, x)",
    "tensorlogic.add('1', x)",
    "tensorlogic.gelu(x, approximate='tan')",
    "tensorlogic.sum(x, axis=0)",
    "tensorlogic.softmax_cross_entropy(x, x, reduction='avg')",
    "text: str = tensorlogic.matmul(x, w)",
    "tensorlogic.optimize(step, x)",
    "tensorlogic.optimize(plain, 4)",
    "tensorlogic.optimize(plain, x, precision='f64')",
    "tensorlogic.optimize(plain, x).report.no_such_name",
    "tensorlogic.capture(step, 4)",
    "tensorlogic.capture(step)(x)",
    "tensorlogic.capture(Model())(x, times='2')",
    "captured(x)",
    "halved(x, tims=2)",
    "forced('x')",
    "tensorlogic.policy(tune='on')",
    "tensorlogic.precision('f64')",
    "tensorlogic.placement(0)",
    "tensorlogic.explain(step, x)",
    "tensorlogic.tune(step, x)",
    "tensorlogic.candidates(tensorlogic.linear, x)",
    "tensorlogic.to(3, 'cpu')",
    "tensorlogic.to(x, 'cpu', asynchronous=True).no_such_name",
    "tensorlogic.unified('x')",
    "tensorlogic.constant(3)",
    "tensorlogic.invalidate('x')",
    "tensorlogic.enable(True)",
    "tensorlogic.pool.configure(1 << 20)",
)
POOL = ("stats", "configure", "shrink_to_fit", "clear")
NAMES = (*tensorlogic.__all__, *(f"pool.{name}" for name in POOL))
LOOSE = re.compile(r"^(Any|def \(\*(\w+: )?Any.*|.*-> Any)$")  # nothing said


class Said:
    """What mypy says of two files, by line."""

    def __init__(self, folder: Path) -> None:
        shown = (*(f"tensorlogic.{name}" for name in NAMES), *RIGHT)
        self.lines = {"right": [f"reveal_type({s})" for s in shown], "wrong": [*WRONG]}
        for name, lines in self.lines.items():
            text = SETUP + "\n".join(lines) + "\n"
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
        root = Path(tensorlogic.__file__).parents[1]
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
        ran = subprocess.run(
            [*command, f"--cache-dir={folder / 'cache'}", "right.py", "wrong.py"],
            cwd=folder, env={"MYPYPATH": str(root), "HOME": str(folder)},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        self.text = ran.stdout + ran.stderr
        found = re.findall(r"^(right|wrong)\.py:(\d+): (?:error|note): (.*)$", self.text, re.M)
        self.of: dict[tuple[str, str], list[str]] = {}
        for name, number, message in found:
            at = int(number) - SETUP.count("\n") - 1
            line = self.lines[name][at] if at >= 0 else "the setup"
            self.of.setdefault((name, line), []).append(message)

    def type(self, expression: str) -> str:
        """The type that is shown for an expression."""
        said = self.of.get(("right", f"reveal_type({expression})"), [self.text[-2000:]])
        shown = re.fullmatch(r'Revealed type is "(.*)"', said[0])
        assert len(said) == 1, said
        assert shown, said
        return shown[1]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """One run of mypy for all cases: most of its 20 s go to PyTorch."""
    pytest.importorskip("mypy")
    return Said(tmp_path_factory.mktemp("client"))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_a_complete_type(said: Said, name: str) -> None:
    assert not LOOSE.match(said.type(f"tensorlogic.{name}"))


@pytest.mark.slow
@pytest.mark.parametrize("expression", RIGHT)
def test_a_right_expression_has_its_type(said: Said, expression: str) -> None:
    assert said.type(expression).endswith(RIGHT[expression])


@pytest.mark.slow
@pytest.mark.parametrize("line", WRONG)
def test_a_mistake_is_refused(said: Said, line: str) -> None:
    assert said.of.get(("wrong", line)), said.text[-2000:]


@pytest.mark.slow
def test_nothing_else_is_refused(said: Said) -> None:
    assert not [m for (_, line), m in said.of.items() if line == "the setup"]


def words(fn: Any, name: str) -> tuple[str, ...]:
    """The words that an argument's type allows."""
    hint = get_type_hints(fn)[name]
    options = [hint] if get_origin(hint) is Literal else get_args(hint)
    return tuple(w for o in options if get_origin(o) is Literal for w in get_args(o))


def test_types_name_the_words_that_are_taken() -> None:
    t = tensorlogic
    for fn in (t.linear, t.matmul):
        assert ("none", *words(fn, "activation")) == ACTIVATIONS
        assert words(fn, "precision") == MODES
    assert words(t.precision.__init__, "mode") == words(t.optimize, "precision") == MODES
    assert words(t.gelu, "approximate") == words(t.gelu_linear, "approximate") == ("none", "tanh")
    assert words(t.policy, "tune") == TUNE_MODES
    assert set(words(t.softmax_cross_entropy, "reduction")) == set(REDUCTIONS)


def test_types_of_arguments_can_be_looked_up() -> None:
    for name in NAMES:
        found: Any = tensorlogic
        for part in name.split("."):
            found = getattr(found, part)
        if name not in ("pool", "PrecisionWarning"):
            assert get_type_hints(found.__init__ if name == "precision" else found), name


def test_dir_shows_public_names_alone() -> None:
    shown = {name for name in dir(tensorlogic) if not re.fullmatch(r"__\w+__", name)}
    assert shown == set(tensorlogic.__all__)
