"""The stand-in itself: what it refuses, and what its simdgroups, barriers and arguments do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...support.metal import standin as metal_standin
from ...support.metal.translate import Unknown, translate

needs_compiler = pytest.mark.skipif(
    metal_standin.compiler() is None, reason="the stand-in needs g++"
)
KERNEL = "kernel void f(device float* y [[buffer(0)]], uint i [[thread_position_in_grid]])"
LANES = """#include <metal_stdlib>
using namespace metal;
kernel void f(device float* y [[buffer(0)]], constant long* n [[buffer(1)]], constant float& a [[buffer(2)]],
              uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("#include <metal_atomic>\n" + KERNEL + "{}", "metal_atomic"),
        ("#define T half\n#include <metal_stdlib>\n" + KERNEL + "{}", "a definition before"),
        ("inline float f(float x) { return x; }", "no kernel"),
        ("kernel void f(device float* y [[buffer(1)]]) {}", "in order from 0"),
        ("kernel void f(device float* y) {}", "device float"),
        ("kernel void f(float* y [[buffer(0)]]) {}", "no address space"),
        ("kernel void f(texture2d<float> t [[texture(0)]]) {}", "texture"),
        ("kernel void f(uint i [[dispatch_threads_per_threadgroup]]) {}", "dispatch_threads"),
        (KERNEL + "{ threadgroup float total; }", "threadgroup float total"),
        (KERNEL + "{ threadgroup const float* p; }", "arrays and plain pointers"),
        (KERNEL + "{ device atomic_int* p; }", "atomic_int"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(source: str, said: str) -> None:
    with pytest.raises(Unknown, match=said):
        translate(source, "x")


@needs_compiler
@pytest.mark.parametrize(
    "body",
    [
        "y[i] = simd_prefix_inclusive_sum(y[i]);",  # no such function here
        "half h = half(y[i]); y[i] = exp(h);",  # which Metal would round to half
        "simdgroup_matrix<float, 8, 8> m; y[i] = m.thread_elements()[0];",  # in no order that is documented
        "simdgroup_matrix<float, 4, 4> m; y[i] = m.own[0];",
    ],
)
def test_what_is_not_declared_does_not_compile(body: str) -> None:
    with pytest.raises(SyntaxError, match="error:"):
        metal_standin.compile_shader(f"{LANES}{body} }}")


def run(body: str, threads: int = 64, group: int = 64, before: str = "") -> torch.Tensor:
    y = torch.arange(threads, dtype=torch.float32)
    kernel = metal_standin.compile_shader(
        f"{LANES.replace('kernel', before + 'kernel')}{body} }}"
    ).f
    kernel(y, (5, 7), 0.5, threads=(threads,), group_size=(group,))
    return y


@needs_compiler
def test_simdgroups_have_32_lanes_and_arguments_their_types() -> None:
    x = torch.arange(64.0).view(2, 32)
    assert torch.equal(run("y[i] = simd_sum(y[i]);").view(2, 32), x.sum(1, True).expand(2, 32))
    assert torch.equal(run("y[i] = simd_max(-y[i]);").view(2, 32)[:, 0], torch.tensor([0.0, -32.0]))
    assert torch.equal(run("y[i] = simd_min(y[i]);").view(2, 32)[:, 5], torch.tensor([0.0, 32.0]))
    assert run("y[i] = float(n[0] * n[1]) + a + float(lane);")[33].item() == 35 + 0.5 + 1


@needs_compiler
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if (i < 7) return; y[i] = simd_sum(y[i]);", "different places"),
        ("if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);", "different places"),
        (
            "if (i < 32) { threadgroup_barrier(mem_flags::mem_threadgroup); }\n"
            "else { threadgroup_barrier(mem_flags::mem_threadgroup); }",
            "different places",
        ),
        ("threadgroup float t[1]; t[0] = y[i];", "written that thread"),
        ("threadgroup float t[64]; t[lane] = y[i]; y[i] = t[lane];", "without a barrier"),
        ("threadgroup float t[64]; y[i] = t[i];", "nobody wrote"),
        (
            "threadgroup float t[64]; t[i] = y[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = t[63 - i];",
            "without a barrier|nobody wrote",
        ),
        ("threadgroup_barrier(mem_flags::mem_none);", "orders no memory"),
        (
            "threadgroup float t[640]; simdgroup_matrix<float, 8, 8> m; simdgroup_load(m, t + lane, 8);",
            "different matrices|nobody wrote",
        ),
    ],
)
def test_what_a_gpu_would_punish_is_an_error(body: str, said: str) -> None:
    with pytest.raises(metal_standin.ShaderError, match=said):
        run(body)


@needs_compiler
def test_a_simdgroup_barrier_is_enough_within_a_simdgroup() -> None:
    body = (
        "threadgroup float t[64]; t[i] = y[i]; simdgroup_barrier(mem_flags::mem_threadgroup); "
        "y[i] = t[i / 32 * 32 + 31 - lane];"
    )
    assert torch.equal(run(body), torch.arange(64.0).view(2, 32).flip(1).reshape(-1))


@needs_compiler
@pytest.mark.parametrize(
    "call", [{"threads": (65,), "group_size": (64,)}, {"threads": (2048,), "group_size": (2048,)}]
)
def test_a_wrong_grid_is_refused(call: Any) -> None:
    kernel = metal_standin.compile_shader(f"{LANES} y[i] = 0; }}").f
    with pytest.raises(metal_standin.ShaderError, match=r"multiple of the group|Metal takes 1024"):
        kernel(torch.zeros(2048), (1,), 1.0, **call)
