"""Models of timm and transformers with random weights through `tensorlogic.optimize`: errors against higher precision, times, outcomes.

python benchmarks/zoo.py [name ...] [--out FILE.json]   on a GPU at usual sizes in float16, elsewhere at small sizes in float32

Every model comes back faster or as it was, never wrong and never with an exception; the script ends with 1 if one does not.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers as hf
from torch import Tensor, nn

import tensorlogic
from tensorlogic import measure
from tensorlogic.program.check import tensors_in, widen
from tensorlogic.program.copies import fresh

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.float16 if CUDA else torch.float32
BATCH = 4 if CUDA else 2
TOKENS = 128 if CUDA else 12
WORST = 1.5  # times eager's own error

Inputs = dict[str, Any]
Entry = Callable[[], tuple[nn.Module, Callable[[], Inputs]]]


def vision(name: str, size: int = 224) -> Entry:
    """A model of timm, smaller images on a CPU where it allows them."""

    def make() -> tuple[nn.Module, Callable[[], Inputs]]:
        model = timm.create_model(name)
        flexible = not CUDA and not hasattr(model, "patch_embed") and size == 224
        side = 96 if flexible and "mixer" not in name else size
        word = "x"
        return model, lambda: {word: torch.randn(BATCH, 3, side, side)}

    return make


def ids(rows: int = BATCH, length: int = TOKENS) -> Tensor:
    """Random token numbers."""
    return torch.randint(3, 120, (rows, length))


def sized(**more: Any) -> dict[str, Any]:
    """Usual sizes with few layers on a GPU, tiny ones elsewhere, in the words that most configurations share."""
    if CUDA:
        base = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    else:
        base = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    return {"vocab_size": 1000, "num_hidden_layers": 6 if CUDA else 2, **base, **more}


def text(kind: str, config: Callable[[], Any], inputs: Callable[[], Inputs] | None = None) -> Entry:
    """A model of transformers on token numbers."""

    def make() -> tuple[nn.Module, Callable[[], Inputs]]:
        return getattr(hf, kind)(config()), inputs or (lambda: {"input_ids": ids()})

    return make


def step(kind: str, config: Callable[[], Any]) -> Entry:
    """One step of a decoder whose cache holds a prompt."""

    def make() -> tuple[nn.Module, Callable[[], Inputs]]:
        model = getattr(hf, kind)(config()).to(DEVICE, DTYPE).eval()

        def inputs() -> Inputs:
            with torch.no_grad():
                cache = model(ids(1).to(DEVICE), use_cache=True).past_key_values
            return {"input_ids": ids(1, 1), "past_key_values": cache, "use_cache": True}

        return model, inputs

    return make


def masked() -> Inputs:
    """Tokens of which the first row has some filled in."""
    given = ids()
    mask = torch.ones_like(given)
    mask[0, -3:] = 0
    return {"input_ids": given, "attention_mask": mask}


def gpt2() -> Any:
    """GPT-2 in the sizes of `sized`."""
    d, heads, layers = (768, 12, 6) if CUDA else (64, 4, 2)
    return hf.GPT2Config(vocab_size=1000, n_embd=d, n_head=heads, n_layer=layers)


def llama() -> Any:
    """A LLaMA with grouped keys."""
    return hf.LlamaConfig(**sized(num_key_value_heads=4))


def t5() -> Any:
    """T5, encoder and decoder."""
    d, heads, layers = (512, 8, 4) if CUDA else (64, 4, 2)
    return hf.T5Config(
        vocab_size=1000,
        d_model=d,
        d_kv=d // heads,
        d_ff=4 * d,
        num_layers=layers,
        num_heads=heads,
        decoder_start_token_id=0,
    )


ZOO: dict[str, Entry] = {
    "bert": text("BertModel", lambda: hf.BertConfig(**sized()), masked),
    "gpt2": text("GPT2LMHeadModel", gpt2),
    "gpt2 step": step("GPT2LMHeadModel", gpt2),
    "llama": text("LlamaForCausalLM", llama),
    "llama step": step("LlamaForCausalLM", llama),
    "t5": text(
        "T5ForConditionalGeneration",
        t5,
        lambda: {"input_ids": ids(), "decoder_input_ids": ids(BATCH, 4)},
    ),
    "vit": vision("vit_tiny_patch16_224"),
    "resnet50": vision("resnet50"),
    "convnext": vision("convnext_atto"),
    "mobilenetv3": vision("mobilenetv3_small_100"),
    "efficientnet": vision("efficientnet_b0"),
    "swin": vision("swin_tiny_patch4_window7_224"),
    "mixer": vision("mixer_s32_224"),
    "qwen2": text("Qwen2ForCausalLM", lambda: hf.Qwen2Config(**sized(num_key_value_heads=4))),
    "deberta": text(
        "DebertaV2Model",
        lambda: hf.DebertaV2Config(**sized(relative_attention=True, pos_att_type=["p2c", "c2p"])),
        masked,
    ),
    "densenet": vision("densenet121"),
}


def onto(given: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs on the device, floating ones in `dtype`."""
    for t in tensors_in(given):
        t.data = (widen(t, dtype) if t.is_floating_point() else t).to(DEVICE)
    return given


def outputs(model: nn.Module, given: Inputs, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Every tensor that a call gives, on inputs of its own."""
    args, kwargs = fresh((), given, dtype)
    if "x" in kwargs:
        args, kwargs = (kwargs.pop("x"),), kwargs
    return tensors_in(model(*args, **kwargs))


def error(outs: list[Tensor], refs: list[Tensor]) -> float:
    """Largest relative error of the outputs, infinite where they are not of the same kind."""
    if [t.shape for t in outs] != [t.shape for t in refs]:
        return float("inf")
    worst = 0.0
    for out, ref in zip(outs, refs, strict=True):
        if not ref.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(out, ref) else float("inf"))
        else:
            gap = (out.double() - ref.double()).norm() / ref.double().norm().clamp_min(1e-30)
            worst = max(worst, gap.item())
    return worst


def example(given: Inputs) -> Any:
    """As `optimize` takes them."""
    return (given["x"],) if "x" in given else given


@torch.no_grad()
def tried(entry: Entry) -> dict[str, Any]:
    """One model's record."""
    torch.manual_seed(0)
    model, inputs = entry()
    model = model.to(DEVICE, DTYPE).eval()
    first, second = onto(inputs(), DTYPE), onto(inputs(), DTYPE)
    begin = time.perf_counter()
    fast = tensorlogic.optimize(model, example(first))
    ready = time.perf_counter() - begin
    report = fast.report
    wide = torch.float64
    twin = copy.deepcopy(model).to(wide)
    errors = []
    for given in (first, second, first):
        ref = outputs(twin, given, wide)
        plain = max(error(outputs(model, given), ref), torch.finfo(DTYPE).eps / 4)
        errors.append(error(outputs(fast, given), ref) / plain)
    del twin
    record = {
        "outcome": report.outcome,
        "reason": report.reason,
        "notes": report.notes,
        "regions": sum(r.count for r in report.regions),
        "ops": sorted({r.op for r in report.regions}),
        "error_over_eager": max(errors),
        "ready_s": ready,
    }
    if fast is not model:
        calls = {"eager": lambda: outputs(model, first), "ours": lambda: outputs(fast, first)}
        samples = measure.wall_samples(calls, DEVICE, 0.6)
        record |= {f"{n}_us": samples.median(n) for n in calls}
        record["speed"] = 1 / samples.ratio("ours", "eager")[0]
    return record


def main() -> int:
    """Try the models that were asked for, print a line for each, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ZOO))
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    records: dict[str, Any] = {}
    for name in chosen.names:
        try:
            record = tried(ZOO[name])
            bad = not record["error_over_eager"] <= WORST or record.get("speed", 1.0) < 0.97
        except Exception as problem:  # what a model raises is what is recorded
            traceback.print_exc()
            record, bad = {"exception": f"{type(problem).__name__}: {problem}"}, True
        records[name] = {**record, "ok": not bad}
        shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in record.items()}
        print(f"{'FAIL' if bad else 'ok  '} {name}: {shown}", flush=True)
        gc.collect()
    versions = {m.__name__: m.__version__ for m in (torch, timm, hf)}
    device = (
        torch.cuda.get_device_name() if CUDA else f"{platform.processor()} {platform.machine()}"
    )
    whole = {"device": device, "dtype": str(DTYPE), "versions": versions, "models": records}
    if chosen.out:
        chosen.out.write_text(json.dumps(whole, indent=1) + "\n")
    return 0 if all(r["ok"] for r in records.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
