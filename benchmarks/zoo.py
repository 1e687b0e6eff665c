"""Models of timm and transformers with random weights through `tensorlogic.optimize`: errors against higher precision, times, outcomes.

python benchmarks/zoo.py [name ...] [--compile] [--seconds 600] [--out FILE.json]

On a GPU at usual sizes in float16, elsewhere at small sizes in float32; with --compile beside torch.compile, too.

Every model comes back faster or as it was, never wrong and never with an exception; the script ends with 1 if one does not.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
import transformers as hf
from beside import CUDA, DEVICE, DTYPE, Inputs, machine, right, tried
from torch import Tensor, nn

BATCH = 4 if CUDA else 2
TOKENS = 128 if CUDA else 12

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


def main() -> int:
    """Try the models that were asked for, print a line for each, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ZOO))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compile", action="store_true", help="beside torch.compile, too")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further one after")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    records: dict[str, Any] = {}
    begin = time.perf_counter()
    for name in chosen.names:
        if time.perf_counter() - begin > chosen.seconds:
            records[name] = {"ok": None}
            continue
        torch.manual_seed(0)
        try:
            model, inputs = ZOO[name]()
            record = tried(model, inputs(), inputs(), chosen.compile)
            fine = right(record)
        except Exception as problem:  # what a model raises is what is recorded
            traceback.print_exc()
            record, fine = {"exception": f"{type(problem).__name__}: {problem}"}, False
        records[name] = {**record, "ok": fine}
        shown = {k: f"{v:.2f}" if isinstance(v, float) else v for k, v in record.items()}
        print(f"{'ok  ' if fine else 'FAIL'} {name}: {shown}", flush=True)
        gc.collect()
    versions = {m.__name__: m.__version__ for m in (torch, timm, hf)}
    whole = {"device": machine(), "date": str(datetime.date.today()), "dtype": str(DTYPE)}
    if chosen.out:
        whole = {**whole, "versions": versions, "models": records}
        chosen.out.write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if any(r["ok"] is False for r in records.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main())
