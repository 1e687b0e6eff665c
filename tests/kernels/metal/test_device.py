"""Every Metal shader on a real Apple GPU, against float64; the same trials as on the stand-in."""

from __future__ import annotations

import pytest
import torch

from tensorlogic.core.op import OPS

from ...support.metal import trials as metal_trials

pytestmark = pytest.mark.skipif(
    not torch.backends.mps.is_available(), reason="there is no Apple GPU here"
)


@pytest.mark.parametrize("dtype", metal_trials.DTYPES, ids=str)
@pytest.mark.parametrize(("name", "id"), metal_trials.PAIRS)
def test_shaders_match_float64_on_the_gpu(name: str, id: str, dtype: torch.dtype) -> None:
    for trial in metal_trials.trials(OPS[name], id, dtype):
        verdict = trial.run(torch.device("mps"))
        assert verdict, f"{trial}: {verdict.reason}"
