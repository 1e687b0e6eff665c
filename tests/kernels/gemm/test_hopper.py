"""The warp-specialised products against float64 on a Hopper GPU; anywhere, which they refuse, and compiled without spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorlogic.kernels.gemm import bind

from ...support.gemm import COLUMNWISE, RING, check, matrix, operand, specialised
from ...support.triton import DEVICE, HOPPER

from tensorlogic.kernels.gemm import hopper  # isort: skip  (after the interpreter is asked for)
from tensorlogic.kernels.gemm.spec import GemmSpec

from tensorlogic.kernels.gemm.spec import Operand  # isort: skip
from ...support.compiled import resources  # isort: skip

WIDE = RING | {"wide": (2, 256, 64, 3)}


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("ring", RING)
@pytest.mark.parametrize("programs", [1, 3, 100])
@pytest.mark.parametrize("layouts", ["row column row", "column row row", "padded padded padded"])
def test_specialised(ring: str, programs: int, layouts: str) -> None:
    config, size = specialised(RING[ring], programs), {"m": 264, "n": 200, "k": 328, "align": 16}
    check(config, layouts=layouts, bias="f16", outer="residual", activation="relu", z="f16", **size)
    check(config, "bf16", layouts=layouts, **size)
    check(config, layouts=layouts, outer="gradient", kind="gelu_tanh", **size)
    vectors = dict.fromkeys(COLUMNWISE, "f32") | {"bias": "f16", "shift": "f16"}
    check(config, layouts=layouts, activation="silu", z="f16", **vectors, **size)
    check(config, layouts=layouts, activation="silu", z="f16", early_z=True, bias="f16", **size)
    if layouts == "row column row":  # rows that begin at odd places
        size["n"] = 203
        check(
            config,
            layouts=layouts,
            bias="f16",
            outer="residual",
            activation="relu",
            z="f16",
            **size,
        )


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    ("ring", "part"), [("two", 64), ("two", 32), ("three", 32), ("one", 16), ("wide", 64)]
)
@pytest.mark.parametrize("programs", [1, 3, 100])
def test_tiles_that_leave_in_parts(ring: str, part: int, programs: int) -> None:
    config = specialised(WIDE[ring], programs) | {"PART": part}
    size = {"m": 264, "n": 456, "k": 328, "align": 16}
    check(config, bias="f16", outer="residual", activation="relu", **size)
    check(config, bias="f16", outer="residual", activation="gelu", z="f16", **size)
    check(config, "bf16", activation="silu", z="bf16", **size)
    check(config, outer="gradient", kind="gelu_tanh", **size)
    if ring != "wide":  # it would spill
        vectors = dict.fromkeys(COLUMNWISE, "f32") | {"bias": "f16", "shift": "f16"}
        check(config, activation="silu", z="f16", **vectors, **size)
    check(config, activation="relu", z="f16", early_z=True, bias="f16", **size)
    check(config, **size)
    if ring == "wide":
        return
    size["n"] = 203  # by threads: whole, whatever the configuration says
    check(config, outer="residual", activation="relu", z="f16", **size)
    check(config, activation="gelu", **size)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "size", [(8, 8, 8), (1, 64, 64), (64, 8, 1000), (5, 4096, 8), (1000, 16, 24)]
)
@pytest.mark.parametrize("ring", RING)
def test_specialised_at_edges(size: tuple[int, int, int], ring: str) -> None:
    m, n, k = size
    check(specialised(RING[ring], 4), m=m, n=n, k=k, bias="f16", align=16, outer="residual")


def test_specialised_refuses_what_bulk_copies_cannot_reach() -> None:
    f16 = {"x": Operand("f16", 64, 1), "w": Operand("f16", 1, 64), "y": Operand("f16", 64, 1)}
    plain = GemmSpec(64, 64, 64, **f16)
    assert hopper.specialised_refusal(plain) is None
    for served in (
        {"w": Operand("f16", 64, 1)},
        {"y": Operand("f16", 65, 1)},  # rows that begin at odd places are stored by threads
        {"outer": "residual", "residual": Operand("f16", 0, 1)},  # one row for all
    ):
        assert hopper.specialised_refusal(replace(plain, **served)) is None, served
    for change in (
        {"align": 8},
        {"x": Operand("f16", 65, 1)},  # rows begin at odd places
        {"x": Operand("f16", 0, 1)},  # one row, repeated
        {"x": Operand("f16", 32, 1)},  # rows overlap
        {"x": Operand("f16", 128, 2)},
        {"y": Operand("f16", 1, 64)},
        {"y": Operand("f16", 2**25 + 1, 1)},
        {"y": Operand("f32", 64, 1)},
        {"batch": 2},
        {"prologue": "activation", "kind": "gelu"},
        {"outer": "dropout"},
        {"outer": "residual", "residual": Operand("f16", 64, 1), "z": "f16", "early_z": True},
    ):
        assert hopper.specialised_refusal(replace(plain, **change)), change


def test_a_neighbour_s_bulk_copies_give_way_where_rows_begin_at_odd_places() -> None:
    from tensorlogic.kernels.gemm.bind import Product

    x, w = matrix(40, 35, "f16"), matrix(35, 24, "f16", "column")
    spec = GemmSpec(40, 24, 35, operand(x, "f16"), operand(w, "f16"), Operand("f16", 24, 1))
    product = Product(spec, {"x": "x", "w": "w"}, {"y": ("y", (40, 24), "f16")})
    config, y = specialised(RING["two"], 4), torch.full((40, 24), torch.nan, device=DEVICE).half()
    assert product.arguments(config) == ("x", "w", "y")
    assert product.workspace(config) == (0, 0)
    assert product.start(config, DEVICE)(x, w, y)
    torch.testing.assert_close(y.double(), x.double() @ w.double(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("side", [768, 1024, 1536, 2048, 3000, 4096, 8192])
def test_specialised_configurations_fit(side: int) -> None:
    spec = GemmSpec(
        side, side, side, Operand("f16", side, 1), Operand("f16", 1, side), Operand("f16", side, 1)
    )
    offered = hopper.specialised_configs(spec, 132)
    assert 0 < len(offered) <= hopper.MOST
    for c in offered:
        tiles = -(-side // c["BLOCK_M"]) * -(-side // c["BLOCK_N"])
        assert 0 < c["programs"] <= tiles
        assert ("PART" in c) == (tiles == c["programs"] and c["BLOCK_N"] > 32), c
    finished = hopper.specialised_configs(replace(spec, activation="gelu"), 132)
    assert all(c.get("PART", 0) == min(64, c["BLOCK_N"] // 2) for c in finished)
    odd = replace(spec, y=Operand("f16", side + 1, 1), activation="gelu")  # stored by threads
    assert not any("PART" in c for c in hopper.specialised_configs(odd, 132))
    assert not hopper.specialised_configs(replace(spec, m=64, n=64, k=64), 132)


def test_specialised_compiles_without_spilling() -> None:
    from tensorlogic.kernels.triton_runtime import launch

    def spec(n: int, w: Operand, **more: Any) -> GemmSpec:
        return GemmSpec(n, n, n, Operand("f16", n, 1), w, Operand("f16", n, 1), **more)

    residual = {"outer": "residual", "residual": Operand("f16", 2048, 1)}
    odd = residual | {"residual": Operand("f16", 2049, 1), "z": "f16", "activation": "gelu"}
    wanted = [
        spec(2048, Operand("f16", 1, 2048), bias="f16", activation="relu", **residual),
        spec(1024, Operand("f16", 1024, 1), activation="gelu_tanh"),
        spec(1024, Operand("f16", 1, 1024), **dict.fromkeys(COLUMNWISE, "f32")),
        spec(2048, Operand("f16", 1, 2048), bias="f16", activation="gelu", z="f16", **residual),
        spec(
            2048, Operand("f16", 2048, 1), **residual | {"outer": "gradient", "kind": "gelu_tanh"}
        ),
        spec(
            1024, Operand("f16", 1, 1024), **dict.fromkeys(COLUMNWISE, "f32"), z="f16", early_z=True
        ),
        replace(spec(2048, Operand("f16", 1, 2048), **odd), y=Operand("f16", 2049, 1)),
        replace(
            spec(2048, Operand("f16", 1, 2048), activation="gelu", **residual),
            y=Operand("f16", 2049, 1),
        ),
    ]
    jobs = [
        bind.gemm_jobs(s, config, 90)[0]
        for s in wanted
        for config in hopper.specialised_configs(s, 132)
    ]
    answers = resources(jobs)
    assert len(answers) == len(wanted) * hopper.MOST
    for a in answers:
        assert isinstance(a, launch.Resources), a
        assert a.stack == 0 < a.registers <= 240, a


def test_too_few_registers_are_said() -> None:
    """By the compiler's own words, whatever it prints beside them: these kernels do not spill, they do not compile."""

    n = 2048
    spec = GemmSpec(n, n, n, Operand("f16", n, 1), Operand("f16", 1, n), Operand("f16", n, 1))
    job = bind.gemm_jobs(spec, hopper.specialised_configs(spec, 132)[0], 90)[0]
    (answer,) = resources([replace(job, registers=96)])
    assert isinstance(answer, str)
    assert "registers (96)" in answer
