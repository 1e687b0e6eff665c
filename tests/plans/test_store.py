"""Keys, plans, and finding, merging and saving plans in one process."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorlogic.core.key import Key, TensorSpec
from tensorlogic.plans import file_format
from tensorlogic.plans import store as plans_store
from tensorlogic.plans.plan import Evidence, Plan
from tensorlogic.plans.store import PlanStore

from ..support.plan_samples import CPU, anything, linear, plan, spec


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PlanStore]:
    made = PlanStore(tmp_path / "cache", CPU)
    yield made
    made.flush()


def test_text_is_readable() -> None:
    expected = "linear inference x=f16[8,4] weight=f16[2,4]! residual=None activation=relu @cpu"
    assert linear(8, 4, 2).text == expected
    odd = linear(8, 4, 2, tensors=(spec(8, 4, stride=(1, 8), align=2), spec(2, 4), None))
    assert "x=f16[8,4](1,8)@2 weight=f16[2,4] residual=None" in odd.text
    assert linear(8, 4, 2, precision="f16x3 rtol=1e-3").text.endswith(
        "@cpu precision=f16x3 rtol=1e-3"
    )


VARIANTS: list[dict[str, Any]] = [
    {"op": "linear2"},
    {"direction": "forward"},
    {"device": "cuda"},
    {"precision": "f32"},
    {"names": ("x", "weight", "bias")},
    *(
        {"flags": (("activation", v),)}
        for v in (None, "None", True, 1, 1.0, "1", "a b", (1,), ((1,),))
    ),
    {"flags": (("activation", "relu"), ("save", True))},
    {"tensors": (spec(8, 4), spec(2, 4), None)},
    {"tensors": (spec(8, 4), spec(2, 4, constant=True), spec(8, 2))},
    {"tensors": (spec(8, 4, align=8), spec(2, 4, constant=True), None)},
    {"tensors": (spec(8, 4, stride=(8, 1)), spec(2, 4, constant=True), None)},
    {"tensors": (spec(8, 4, dtype="bf16"), spec(2, 4, constant=True), None)},
]


def test_every_field_makes_another_key() -> None:
    keys = [linear(8, 4, 2), *(linear(8, 4, 2, **v) for v in VARIANTS)]
    assert len({key.text for key in keys}) == len(keys) == len(set(keys))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_key_survives_json(variant: dict[str, Any]) -> None:
    key = linear(8, 4, 2, **variant)
    again = Key.from_json(json.loads(json.dumps(key.to_json())))
    assert again == key
    assert again.tensors == key.tensors
    assert again.flags == key.flags


SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple)
SPECS = SIZES.flatmap(
    lambda shape: st.builds(
        TensorSpec,
        st.sampled_from(["f16", "f32"]),
        st.just(shape),
        st.tuples(*[st.integers(0, 50) for _ in shape]),
        st.sampled_from([1, 2, 4, 8, 16]),
        st.booleans(),
    )
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6)
)


@given(st.lists(st.tuples(SPECS, SPECS, SCALARS, SCALARS), min_size=2, max_size=2))
def test_texts_differ_where_keys_do(drawn: list[tuple[Any, ...]]) -> None:
    a, b = (
        linear(8, 4, 2, tensors=(x, None, w), flags=(("p", p), ("q", q))) for x, w, p, q in drawn
    )
    same = (a.tensors, repr(a.flags)) == (b.tensors, repr(b.flags))
    assert (a.text == b.text) == same
    assert Key.from_json(json.loads(json.dumps(a.to_json()))).text == a.text


def test_key_answers_by_name() -> None:
    key = linear(8, 4, 2)
    assert key.spec("residual") is None
    assert key.spec("x") == spec(8, 4)
    assert key.flag("activation") == "relu"
    with pytest.raises(KeyError):
        key.flag("save")
    with pytest.raises(TypeError, match=r"flag 'p' of a key is torch\.float16"):
        _ = linear(8, 4, 2, flags=(("p", torch.float16),)).text


def test_plan_survives_json() -> None:
    before = plan(linear(8, 4, 2))
    after = Plan.from_json(json.loads(json.dumps(before.to_json())))
    assert after == before
    assert after.eager_config["BLOCK"] == (16, 32)


def test_a_changed_source_invalidates_only_its_own_plans() -> None:
    sources = {"torch.eager": "e0", "triton.tiled": "s0", "cpu.bad": "b0"}
    tiled, eager = plan(linear(8, 4, 2)), plan(linear(8, 4, 2), captured="torch.eager")
    assert tiled.valid(sources)
    assert eager.valid(sources)
    assert tiled.valid({**sources, "cpu.bad": "b1"})
    assert not tiled.valid({**sources, "triton.tiled": "s1"})
    assert not eager.valid({**sources, "torch.eager": "e1"})
    assert not tiled.valid({"torch.eager": "e0"})
    assert not plan(linear(8, 4, 2), captured="cpu.bad").valid(sources)


def test_the_later_measured_plan_stays_and_refusals_are_kept(store: PlanStore) -> None:
    key = linear(8, 4, 2)
    late = plan(key, "cpu.fused", measured="2026-11-20T12:00:00+02:00")  # the same moment
    late.evidence = [Evidence("cpu.fused", {}, "measured", source="f0")]
    store.put(plan(key))
    store.put(late)
    found = store.get(key)
    assert found is not None
    assert found.eager == "cpu.fused"
    assert store.refused(key, "cpu.bad", "b0") == "wrong: row 3"
    assert store.refused(key, "cpu.bad", "b1") is None
    assert store.refused(key, "cpu.fused", "f0") is None
    for measured in ("2026-11-19T23:00:00+00:00", "2999-01-01T00:00:00Z", "yesterday"):
        store.put(plan(key, measured=measured))
    assert store.get(key) == found


def test_plans_reach_the_next_process(store: PlanStore) -> None:
    store.put(plan(linear(8, 4, 2)))
    assert store.flush()
    again = PlanStore(store.path.parent, CPU)
    assert list(again.plans()) == [plan(linear(8, 4, 2))]
    assert PlanStore(store.path.parent, replace(CPU, driver="AVX512")).get(linear(8, 4, 2)) is None


@pytest.mark.slow
def test_saving_is_seldom_and_soon(store: PlanStore, monkeypatch: pytest.MonkeyPatch) -> None:
    saves: list[float] = []
    rewrite = file_format.rewrite

    def counted(path: Path, *args: Any) -> Any:
        if path == store.path:  # stores of earlier tests may still be saving
            saves.append(time.monotonic())
        return rewrite(path, *args)

    monkeypatch.setattr(file_format, "rewrite", counted)
    monkeypatch.setattr(plans_store, "INTERVAL_S", 2.0)
    for n in range(200):
        store.put(plan(linear(8, 4, n)))
    while (timer := store._timer) is not None:
        timer.join(10)
    assert len(saves) >= 2
    assert all(later - sooner >= 2.0 for sooner, later in itertools.pairwise(saves))
    assert len(list(PlanStore(store.path.parent, CPU).plans())) == 200


def test_what_is_put_during_a_save_is_saved_after_it(
    store: PlanStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    write = file_format.write

    def slow(*args: Any) -> None:
        entered.set()
        assert go_on.wait(10)
        write(*args)

    monkeypatch.setattr(file_format, "write", slow)
    monkeypatch.setattr(plans_store, "INTERVAL_S", 0.05)
    store.put(plan(linear(8, 4, 2)))
    assert entered.wait(10)
    store.put(plan(linear(8, 4, 3)))
    go_on.set()
    while (timer := store._timer) is not None:
        timer.join(10)
    assert len(list(PlanStore(store.path.parent, CPU).plans())) == 2


def test_what_cannot_be_saved_is_said_by_put(store: PlanStore) -> None:
    with pytest.raises(TypeError):
        store.put(plan(linear(8, 4, 2), eager_config={"dtype": torch.float16}))
    assert store.get(linear(8, 4, 2)) is None


def test_forgotten_plans_stay_forgotten(store: PlanStore) -> None:
    for n in (2, 3):
        store.put(plan(linear(8, 4, n)))
    assert store.flush()
    store.put(plan(linear(8, 4, 4)))
    assert store.forget(lambda p: p.key != linear(8, 4, 3)) == 2
    assert store.flush()
    assert [p.key for p in PlanStore(store.path.parent, CPU).plans()] == [linear(8, 4, 3)]
    near = store.nearest(linear(8, 4, 2), lambda id: True)
    assert near is not None
    assert near.key == linear(8, 4, 3)
    assert store.forget() == 1
    assert not list(store.plans())


def test_the_nearest_plan_is_found(store: PlanStore) -> None:
    for n in (64, 128, 1024):
        assert store.nearest(linear(n, n, n), anything, reach=0.5) is None
        store.put(plan(linear(n, n, n)))
    near = store.nearest(linear(96, 128, 128), anything)
    assert near is not None
    assert near.key == linear(128, 128, 128)
    far = store.nearest(linear(2048, 1024, 1024), anything)
    assert far is not None
    assert far.key == linear(1024, 1024, 1024)
    assert store.nearest(linear(8192, 8192, 8192), anything) is None
    assert store.nearest(linear(8192, 8192, 8192), anything, reach=3.0) is not None


STRANGERS = {
    "odd size": linear(128, 127, 128),
    "less divisible": linear(128, 136, 128),
    "single row": linear(1, 128, 128),
    "empty": linear(0, 128, 128),
    "flag": linear(128, 128, 128, flags=(("activation", "gelu"),)),
    "direction": linear(128, 128, 128, direction="forward"),
    "precision": linear(128, 128, 128, precision="f32"),
    "device": linear(128, 128, 128, device="cuda"),
    "op": linear(128, 128, 128, op="matmul"),
    "dtype": linear(128, 128, 128, tensors=(spec(128, 128), spec(128, 128, dtype="f32"), None)),
    "constant": linear(128, 128, 128, tensors=(spec(128, 128), spec(128, 128), None)),
    "optional": linear(128, 128, 128, tensors=(spec(128, 128), None, None)),
    "rank": linear(128, 128, 128, tensors=(spec(2, 64, 128), spec(128, 128, constant=True), None)),
    "transposed": linear(
        128,
        128,
        128,
        tensors=(spec(128, 128, stride=(1, 128)), spec(128, 128, constant=True), None),
    ),
    "strided": linear(
        128,
        128,
        128,
        tensors=(spec(128, 128, stride=(256, 1)), spec(128, 128, constant=True), None),
    ),
    "less aligned": linear(
        128, 128, 128, tensors=(spec(128, 128, align=8), spec(128, 128, constant=True), None)
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_are_no_neighbours(name: str, store: PlanStore) -> None:
    store.put(plan(linear(128, 128, 144)))
    assert store.nearest(linear(128, 128, 128), anything) is not None
    assert store.nearest(STRANGERS[name], anything) is None


def test_a_dimension_of_one_learns_from_no_other_odd_size(store: PlanStore) -> None:
    store.put(plan(linear(3, 128, 128)))
    assert store.nearest(linear(5, 128, 128), anything) is not None
    assert store.nearest(linear(1, 128, 128), anything) is None


def test_rows_of_any_number_are_neighbours_and_those_that_divide_alike_are_nearer(
    store: PlanStore,
) -> None:
    """Only the dimension that memory is read along decides how wide it may be read."""
    store.put(plan(linear(132, 128, 128)))
    near = store.nearest(linear(128, 128, 128), anything)
    assert near is not None
    store.put(plan(linear(144, 128, 128)))
    near = store.nearest(linear(128, 128, 128), anything)
    assert near is not None
    assert near.key == linear(144, 128, 128)
    many = [(spec(n, 12, 128, 64), spec(n, 12, 128, 64, constant=True), None) for n in (2, 3, 4)]
    keys = [linear(1, 1, 1, tensors=tensors) for tensors in many]
    assert keys[0].neighbor_group == keys[1].neighbor_group
    assert keys[0].distance(keys[1]) < keys[0].distance(keys[2]) == 1.0


def test_a_plan_of_the_same_layout_comes_before_a_nearer_one(store: PlanStore) -> None:
    """On a GPU, where layouts are a matter of distance, they choose kernels before sizes do."""

    def padded(m: int, k: int, n: int, gap: int) -> Key:
        tensors = (spec(m, k, stride=(k + gap, 1)), spec(n, k, constant=True), None)
        return linear(m, k, n, device="cuda", tensors=tensors)

    store.put(plan(linear(128, 128, 128, device="cuda")))
    store.put(plan(padded(512, 256, 256, 64)))
    asked = padded(128, 128, 128, 64)
    near = store.nearest(asked, anything)
    assert near is not None
    assert near.key == padded(512, 256, 256, 64)
    assert (
        asked.layout_mismatches(near.key) == asked.layout_mismatches(padded(128, 128, 128, 8)) == 0
    )
    assert asked.layout_mismatches(linear(128, 128, 128, device="cuda")) == 1
    far = store.nearest(padded(128, 128, 32768, 64), anything)
    assert far is not None
    assert far.key == padded(512, 256, 256, 64)
    store.put(plan(linear(128, 128, 32768, device="cuda")))
    far = store.nearest(padded(128, 128, 32768, 64), anything)
    assert far is not None
    assert far.key == linear(
        128, 128, 32768, device="cuda"
    )  # eight doublings are more than a layout


def test_a_plan_whose_lines_are_as_even_comes_before_one_a_little_nearer(store: PlanStore) -> None:
    even, odd = spec(128, 336), spec(128, 333)
    assert even.even
    assert not odd.even
    assert spec(333).even
    assert spec(1, 333).even
    assert not spec(128, 128, stride=(256, 2)).even
    near, far = (linear(m, k, 128, device="cuda") for m, k in ((128, 336), (48, 333)))
    store.put(plan(near))
    store.put(plan(far))
    asked = linear(128, 333, 128, device="cuda")
    assert asked.alignment_mismatches(near) == 3  # two tensors, and no other of its is uneven
    assert asked.alignment_mismatches(far) == 0
    half = linear(128, 333, 64, device="cuda")
    assert asked.alignment_mismatches(half) == 0
    assert asked.distance(near) < asked.distance(far)
    found = store.nearest(asked, anything)
    assert found is not None
    assert found.key == far


def test_layouts() -> None:
    assert spec(4, 8).layout == spec(6, 16).layout == spec(1, 8, stride=(99, 1)).layout
    transposed = spec(2, 4, 8, stride=(32, 1, 4))
    assert transposed.layout == spec(3, 8, 8, stride=(64, 1, 8)).layout != spec(2, 4, 8).layout
    sliced, wider = spec(4, 8, stride=(32, 1)), spec(4, 8, stride=(33, 1))
    expanded, every_second = spec(4, 8, stride=(0, 1)), spec(4, 8, stride=(16, 2))
    assert len({s.layout for s in (spec(4, 8), sliced, wider, expanded, every_second)}) == 5


def test_a_neighbour_measured_on_weaker_alignment_serves(store: PlanStore) -> None:
    weak = (spec(128, 128, align=2), spec(128, 128, constant=True), None)
    store.put(plan(linear(128, 128, 128, tensors=weak)))
    assert store.nearest(linear(128, 128, 128), anything) is not None


def test_only_allowed_and_valid_neighbours_serve(store: PlanStore) -> None:
    store.put(plan(linear(128, 128, 128), "other.fast"))
    store.put(plan(linear(256, 128, 128), "triton.tiled"))
    store.put(plan(linear(64, 64, 64), "torch.eager"))
    key = linear(112, 128, 128)

    def trusted(candidate: str) -> bool:
        return candidate == "triton.tiled"

    near = store.nearest(key, trusted)
    assert near is not None
    assert near.key == linear(256, 128, 128)
    near = store.nearest(key, trusted, valid=lambda p: p.eager != "triton.tiled")
    assert near is not None
    assert near.eager == "torch.eager"
    near = store.nearest(linear(256, 128, 128), trusted, reach=3.0)  # its own plan is for get
    assert near is not None
    assert near.key == linear(64, 64, 64)


def test_neighbours_are_ranked_by_their_keys_alone() -> None:
    """What a record says of the measurements is read of those that are asked; broken ones are passed over, wherever they break."""
    near, asked = linear(128, 128, 128), linear(112, 128, 128)
    sizes = [linear(n, 128, 128) for n in (64, 256, 512)]
    good = {key.text: json.dumps(plan(key).to_json()) for key in sizes}
    text = json.dumps(plan(near).to_json())
    other = json.dumps(dict(reversed(plan(near).to_json().items())), indent=1)
    broken = {
        "as it was written": (text, True),
        "its key last": (other, True),
        "read": (json.loads(text), True),
        "without measurements": (text.replace('"evidence"', '"evidences"'), False),
        "cut behind its key": (text[: text.index('"eager"')], False),
        "cut within its key": (text[: text.index('"tensors"')], False),
        "another key": (json.dumps(plan(linear(96, 128, 128)).to_json()), False),
        "no record": ("[1]", False),
    }
    for kind, (record, first) in broken.items():
        parsed: list[str] = []

        class View(plans_store.PlanView):
            def _read(self) -> tuple[file_format.Unread, ...]:
                return {near.text: record, **good}, {}  # noqa: B023

        view = View()

        def valid(found: Plan) -> bool:
            parsed.append(found.key.text)  # noqa: B023
            return True

        found = view.nearest(asked, anything, valid=valid)
        assert found is not None
        assert (found.key == near) == first, kind
        assert parsed == [found.key.text]
        assert {*view._shelves[0].parsed} <= {near.text, found.key.text}
        assert [p.key.text for p in view.neighbours(asked, anything, reach=9.0)][first:] == [
            sizes[i].text for i in (0, 1, 2)
        ]


def test_plans_of_another_version_of_an_op_are_passed_over(store: PlanStore) -> None:
    """Whatever `normal` would make of them; the others are all there."""
    key = linear(128, 128, 128)
    flags = tuple(("axis", value) for _, value in key.flags)
    store.put(plan(linear(128, 128, 144, flags=flags)))
    store.put(plan(linear(128, 128, 256)))
    store.put(plan(linear(64, 64, 64)))

    def normal(key: Key) -> Key:
        return replace(key, precision=str(key.flag("activation"))[:0] + "default")

    for _ in range(2):
        found = store.neighbours(key, anything, normal=normal)
        assert [p.key for p in found] == [linear(128, 128, 256), linear(64, 64, 64)]


def test_what_is_measured_anew_lends_where_its_record_was_broken(store: PlanStore) -> None:
    near, asked = linear(128, 128, 128), linear(112, 128, 128)
    store.put(plan(near))
    store.flush()
    document = json.loads(store.path.read_text())
    document["plans"][near.text]["key"]["tensors"] = None
    store.path.write_text(json.dumps(document))
    store = PlanStore(store.path.parent, store.environment)
    assert store.nearest(asked, anything) is None
    store.put(plan(near))
    found = store.nearest(asked, anything)
    assert found is not None
    assert found.key == near
