"""More models of timm and transformers through `tensorlogic.optimize`, batch 1 and 8, in several processes within a time that is given.

python benchmarks/zoo_more.py [name[@batch] ...] [--seconds 110] [--processes 3] [--compile] [--wait 0] [--out FILE.json]

Each comes back faster or as it was, never wrong and never with an exception; ends with 1 if one does not. What no time was
left for is named. With --compile beside torch.compile, too; with --wait N, again after what competes in the background has been
compared, at most N seconds later. Processes compile side by side and use the device one at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import timm
import torch
import transformers as hf
import zoo
from beside import CUDA, DEVICE, DTYPE, Inputs, machine, right, tried
from torch import Tensor, nn

BATCHES = (1, 8)
SIDE = 224 if CUDA else 96
TOKENS = 64 if CUDA else 8
Made = tuple[nn.Module, Inputs]
Entry = Callable[[int], Made]


def ids(rows: int, length: int = TOKENS) -> Tensor:
    """Random token numbers."""
    return torch.randint(3, 120, (rows, length))


def small(**more: Any) -> dict[str, Any]:
    """Two layers, in the words that most configurations share."""
    d = 256 if CUDA else 64
    sizes = {"hidden_size": d, "num_attention_heads": 4, "intermediate_size": 2 * d}
    return {"vocab_size": 500, "num_hidden_layers": 2, "pad_token_id": 0, **sizes, **more}


def text(kind: str, config: str, **more: Any) -> Entry:
    """A model on token numbers."""

    def make(batch: int) -> Made:
        given = small(**more)
        return getattr(hf, kind)(getattr(hf, config)(**given)), {"input_ids": ids(batch)}

    return make


def step(kind: str, config: str, **more: Any) -> Entry:
    """One step of a decoder whose cache holds a prompt."""

    def make(batch: int) -> Made:
        model = getattr(hf, kind)(getattr(hf, config)(**small(**more))).to(DEVICE, DTYPE).eval()
        with torch.no_grad():
            cache = model(ids(batch).to(DEVICE), use_cache=True).past_key_values
        return model, {"input_ids": ids(batch, 1), "past_key_values": cache, "use_cache": True}

    return make


def both(kind: str, config: str, **more: Any) -> Entry:
    """An encoder and a decoder on token numbers."""

    def make(batch: int) -> Made:
        d = 256 if CUDA else 64
        sides = {"encoder": 2, "decoder": 2}
        given: dict[str, Any] = {"vocab_size": 500, "d_model": d, "max_position_embeddings": 128}
        for side, layers in sides.items():
            given |= {f"{side}_layers": layers, f"{side}_attention_heads": 4}
            given[f"{side}_ffn_dim"] = 2 * d
        model = getattr(hf, kind)(getattr(hf, config)(**given, **more))
        return model, {"input_ids": ids(batch), "decoder_input_ids": ids(batch, 4)}

    return make


def image(name: str, side: int = 0, **more: Any) -> Entry:
    """A model of timm."""

    def make(batch: int) -> Made:
        size = side or SIDE
        return timm.create_model(name, **more), {"x": torch.randn(batch, 3, size, size)}

    return make


def pixels(kind: str, config: str, **more: Any) -> Entry:
    """A vision model of transformers."""

    def make(batch: int) -> Made:
        given = small(image_size=SIDE, **more)
        model = getattr(hf, kind)(getattr(hf, config)(**given))
        return model, {"pixel_values": torch.randn(batch, 3, SIDE, SIDE)}

    return make


def clip(batch: int) -> Made:
    """Two towers, texts beside images."""
    d, sizes = (256 if CUDA else 64), small()
    vision = {**sizes, "image_size": SIDE, "patch_size": 16}
    words = {**sizes, "max_position_embeddings": 77, "eos_token_id": 2}
    model = hf.CLIPModel(hf.CLIPConfig(text_config=words, vision_config=vision, projection_dim=d))
    return model, {"input_ids": ids(batch), "pixel_values": torch.randn(batch, 3, SIDE, SIDE)}


def whisper(batch: int) -> Made:
    """Sound in, tokens out."""
    d = 256 if CUDA else 64
    given: dict[str, Any] = {"vocab_size": 500, "d_model": d, "num_mel_bins": 80}
    for side in ("encoder", "decoder"):
        given |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 2 * d}
    given |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    model = hf.WhisperModel(hf.WhisperConfig(**given, max_source_positions=100))
    sound = torch.randn(batch, 80, 200)
    return model, {"input_features": sound, "decoder_input_ids": ids(batch, 4)}


def segformer(batch: int) -> Made:
    """A pyramid of attention."""
    config = hf.SegformerConfig(depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 128])
    model = hf.SegformerForSemanticSegmentation(config)
    return model, {"pixel_values": torch.randn(batch, 3, 128, 128)}


def recurrent(batch: int) -> Made:
    """A state-space model, written in PyTorch."""
    sizes = {"hidden_size": 128 if CUDA else 32, "state_size": 8, "num_hidden_layers": 2}
    model = hf.MambaForCausalLM(hf.MambaConfig(vocab_size=500, use_mambapy=False, **sizes))
    return model, {"input_ids": ids(batch, 16), "use_cache": False}


GROUPED = {"num_key_value_heads": 2}
MORE: dict[str, Entry] = {
    "roberta": text("RobertaModel", "RobertaConfig"),
    "distilbert": text("DistilBertModel", "DistilBertConfig", dim=128, n_heads=4, n_layers=2),
    "electra": text("ElectraModel", "ElectraConfig", embedding_size=128),
    "albert": text("AlbertModel", "AlbertConfig", embedding_size=64),
    "mpnet": text("MPNetModel", "MPNetConfig"),
    "modernbert": text("ModernBertModel", "ModernBertConfig"),
    "mistral step": step("MistralForCausalLM", "MistralConfig", **GROUPED),
    "opt step": step("OPTForCausalLM", "OPTConfig", ffn_dim=128, word_embed_proj_dim=None),
    "gpt-neox step": step("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "phi step": step("PhiForCausalLM", "PhiConfig"),
    "gemma2 step": step("Gemma2ForCausalLM", "Gemma2Config", head_dim=64, **GROUPED),
    "qwen3 step": step("Qwen3ForCausalLM", "Qwen3Config", head_dim=64, **GROUPED),
    "bloom": text("BloomForCausalLM", "BloomConfig", n_layer=2, n_head=4),
    "falcon": text("FalconForCausalLM", "FalconConfig", new_decoder_architecture=True),
    "mixtral": text("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **GROUPED),
    "mamba": recurrent,
    "bart": both("BartModel", "BartConfig"),
    "marian": both("MarianModel", "MarianConfig", pad_token_id=0, decoder_start_token_id=1),
    "whisper": whisper,
    "clip": clip,
    "dinov2": pixels("Dinov2Model", "Dinov2Config", patch_size=16),
    "beit": pixels("BeitModel", "BeitConfig", patch_size=16),
    "segformer": segformer,
    "mobilenetv2": image("mobilenetv2_050"),
    "regnety": image("regnety_002"),
    "mobilevit": image("mobilevit_xxs"),
    "ghostnet": image("ghostnet_050"),
    "inception": image("inception_v3", 128),
    "levit": image("levit_128s", 224),
    "edgenext": image("edgenext_xx_small"),
    "poolformer": image("poolformer_s12"),
    "repvgg": image("repvgg_a0"),
    "res2net": image("res2net50_26w_4s"),
    "hrnet": image("hrnet_w18_small"),
    "deit": image("deit_tiny_patch16_224", 224),
    "resmlp": image("resmlp_12_224", 224),
    "convmixer": image("convmixer_768_32"),
    "fastvit": image("fastvit_t8"),
}


def made(name: str, batch: int) -> tuple[nn.Module, Inputs, Inputs]:
    """A model of this table, or of zoo.py's, and inputs twice."""
    torch.manual_seed(0)
    if name in zoo.ZOO:
        model, inputs = zoo.ZOO[name]()
        return model, inputs(), inputs()
    model, first = MORE[name](batch)
    return model, first, MORE[name](batch)[1]


def pairs(asked: list[str]) -> list[tuple[str, int]]:
    """Models and batches: "bart" is bart at every batch, "bart@8" at one; zoo.py's have a batch of their own."""
    found = []
    for word in asked:
        name, _, batch = word.partition("@")
        if name in zoo.ZOO:
            found.append((name, zoo.BATCH))
        else:
            found += [(name, b) for b in ((int(batch),) if batch else BATCHES)]
    return found


def taken(queue: Path) -> str | None:
    """The next of what the processes share out among them; None where nothing is left."""
    with queue.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        first, *rest = [*file.read().splitlines(), ""]
        file.seek(0)
        file.truncate()
        file.write("\n".join(rest))
    return first or None


def worked(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Records of models, one after the other, until the time is over."""
    warnings.simplefilter("ignore")
    hf.logging.set_verbosity_error()
    end = time.perf_counter() + given.seconds
    while time.perf_counter() < end and (word := taken(given.worker / "queue")):
        name, _, batch = word.partition("@")
        try:
            model = made(name, int(batch))
            record = tried(*model, given.compile, given.wait, given.worker / "alone")
            fine = right(record)
        except Exception as problem:  # what a model raises is what is recorded
            traceback.print_exc()
            record, fine = {"exception": f"{type(problem).__name__}: {problem}"}, False
        yield {"name": name, "batch": int(batch), **record, "ok": fine}
        gc.collect()


def work(given: argparse.Namespace) -> None:
    """What one process does."""
    with (given.worker / f"{os.getpid()}.json").open("w") as out:
        for record in worked(given):
            print(json.dumps(record), file=out, flush=True)
            shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in record.items()}
            print(f"{'ok' if record['ok'] else 'FAIL':<5}{shown}", flush=True)


class Cut(Exception):
    """The time that somebody else gave is over."""


def cut(*_: Any) -> None:
    """What `timeout` ends tells what it has found."""
    raise Cut


def main() -> int:
    """Share the models out, print a line for each, write the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(MORE))
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--processes", type=int, default=3 if CUDA else 1)
    parser.add_argument("--compile", action="store_true", help="beside torch.compile, too")
    parser.add_argument("--wait", type=float, default=0.0, help="for what competes later, seconds")
    parser.add_argument("--grace", type=float, default=30.0, help="for what is begun by then")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return 0
    signal.signal(signal.SIGTERM, cut)
    asked = pairs(given.names)
    command = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
    command += ["--seconds", str(given.seconds), "--wait", str(given.wait)]
    command += ["--compile"] * given.compile
    records, end = list[dict[str, Any]](), time.perf_counter() + given.seconds
    with tempfile.TemporaryDirectory() as shared:
        folder = Path(shared)
        (folder / "queue").write_text("\n".join(f"{n}@{b}" for n, b in asked))
        workers = [subprocess.Popen([*command, "--worker", shared]) for _ in range(given.processes)]
        with contextlib.suppress(Cut):
            for process in workers:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, end - time.perf_counter()) + given.grace)
        for process in workers:  # what they have found so far counts
            process.kill()
        for path in folder.glob("*.json"):
            records += [json.loads(line) for line in path.read_text().splitlines()]
        left = set((folder / "queue").read_text().split())
    records.sort(key=lambda r: asked.index((r["name"], r["batch"])))
    seen = {(r["name"], r["batch"]) for r in records}
    records += [{"name": n, "batch": b, "ok": None} for n, b in asked if (n, b) not in seen]
    if given.out:
        versions = {m.__name__: m.__version__ for m in (torch, timm, hf)}
        about = {"device": machine(), "date": str(datetime.date.today()), "dtype": str(DTYPE)}
        about |= {"versions": versions, "processes": given.processes}
        given.out.write_text(json.dumps({**about, "models": records}, indent=1) + "\n")
    lost = [f"{n}@{b}" for n, b in asked if (n, b) not in seen]
    if lost:
        print(f"not done in the time given: {lost} (begun: {sorted(set(lost) - left)})")
    failed = [r for r in records if r["ok"] is False]
    print(f"{sum(r['ok'] is True for r in records)} ok, {len(failed)} failed, of {len(asked)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
