"""The public surface is what the design says: names, the order of arguments and their defaults; arguments may only be added."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import tensorlogic

# as a caller writes them; what is not written may be passed besides
SURFACE = """
linear(x, weight, bias=None, residual=None, activation=None)
matmul(a, b, activation=None)
add(a, b)
sub(a, b)
mul(a, b)
div(a, b)
relu(x)
gelu(x, approximate="none")
silu(x)
softmax(x, dim=-1)
add_relu(a, b)
mul_relu(a, b)
affine(x, scale, bias)
linear_residual_relu(x, weight, bias, residual)
gelu_linear(x, weight, bias, approximate="tanh")
linear_batch_norm_relu(x, weight, bias, running_mean, running_var, gamma, beta, eps=1e-5, training=False, momentum=0.1)
dropout_linear(x, weight, bias, p=0.5, training=True, generator=None)
layer_norm_linear(x, gamma, beta, weight, bias, eps=1e-5)
softmax_cross_entropy(logits, target, ignore_index=-100, label_smoothing=0.0, reduction="mean")
attention_scores(q, k, scale, mask=None, is_causal=False)
sum(x, dim=None, keepdim=False)
mean(x, dim=None, keepdim=False)
max(x, dim=None, keepdim=False)
min(x, dim=None, keepdim=False)
optimize(model, example_inputs)
capture(fn)
enable()
disable()
precision(mode, rtol=None)
explain(fn)
tune(fn)
policy(tune=None, force=None, deterministic=None, lockfile=None)
candidates(op)
invalidate(tensor)
placement(device="auto")
to(tensor, device, dtype=None)
unified(tensor)
pool.stats(device="cpu")
pool.configure(*, max_bytes=None, max_buffers_per_size=None)
pool.shrink_to_fit(max_bytes=0)
pool.clear()
""".strip().splitlines()
RETURNS_TENSOR = SURFACE[: SURFACE.index("optimize(model, example_inputs)")]


def found(name: str) -> Any:
    value: Any = tensorlogic
    for part in name.split("."):
        value = getattr(value, part)
    return value


def written(line: str) -> dict[str, inspect.Parameter]:
    scope: dict[str, Any] = {}
    name = line.partition("(")[0]
    exec(f"def made{line.removeprefix(name)}: ...", scope)
    return dict(inspect.signature(scope["made"]).parameters)


@pytest.mark.parametrize("line", SURFACE)
def test_a_public_function_takes_what_the_design_says(line: str) -> None:
    have = dict(inspect.signature(found(line.partition("(")[0])).parameters)
    want = written(line)
    for name, parameter in want.items():
        assert have[name].kind == parameter.kind, name
        assert have[name].default == parameter.default, name
    place = [n for n, p in have.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    first = [n for n, p in want.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert place[: len(first)] == first
    for added in have.keys() - want.keys():
        variadic = have[added].kind in (
            inspect.Parameter.VAR_POSITIONAL,
            inspect.Parameter.VAR_KEYWORD,
        )
        assert variadic or have[added].default is not inspect.Parameter.empty, added


@pytest.mark.parametrize("line", RETURNS_TENSOR)
def test_an_operation_is_shown_to_return_a_tensor(line: str) -> None:
    assert inspect.signature(found(line.partition("(")[0])).return_annotation == "Tensor"


def test_every_public_name_is_importable_and_listed_once() -> None:
    assert len(set(tensorlogic.__all__)) == len(tensorlogic.__all__)
    assert all(hasattr(tensorlogic, name) for name in tensorlogic.__all__)
    named = {line.partition("(")[0].partition(".")[0] for line in SURFACE}
    assert named <= set(tensorlogic.__all__)
