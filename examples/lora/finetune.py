"""Fine-tune a DeepSeek-V4 of transformers with LoRA, on anymla's attention.

On a CPU, with the tiny checkpoint of this repository, within five minutes:

    pip install '.[transformers]' peft
    python examples/lora/finetune.py

On a GPU, with sequences of 32,768 tokens and a checkpoint that fits:

    python examples/lora/finetune.py --gpu --checkpoint CHECKPOINT --text FILE --out ADAPTER

With --dense, FP8 weights become bfloat16: FP8 products of transformers need kernels from a hub.

Prints the loss on text that is not trained on, before and after.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import anymla.engines.transformers  # noqa: F401
from anymla.model.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["q_a_proj", "q_b_proj", "kv_proj", "gate_proj", "o_b_proj"]


def main() -> None:
    """Read the options, train, and report."""
    options = parse()
    device = torch.device("cuda" if options.gpu else "cpu")
    length = options.tokens or (32768 if options.gpu else 256)
    torch.manual_seed(0)
    ids = Tokenizer.from_dir(options.checkpoint).encode(
        "\n".join(path.read_text("utf-8") for path in options.text)
    )
    pieces = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    held, pieces = pieces[::8], pieces[torch.arange(len(pieces)) % 8 > 0]
    if not len(pieces):
        raise SystemExit(f"{len(ids)} tokens of text are less than two sequences of {length}")

    settings = AutoConfig.from_pretrained(options.checkpoint)
    if options.dense and getattr(settings, "quantization_config", None):
        settings.quantization_config["dequantize"] = True
    model = AutoModelForCausalLM.from_pretrained(
        options.checkpoint,
        config=settings,
        dtype=torch.bfloat16 if options.gpu else torch.float32,
        attn_implementation="anymla",
    )
    config = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS)
    model = get_peft_model(model.to(device), config)
    if options.gpu:  # half as much again to compute, and only one layer's activations at a time
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    held = held[: options.held].to(device)
    print(f"held-out loss before: {evaluate(model, held):.3f}", flush=True)

    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), options.rate)
    model.train()
    for step, batch in zip(range(options.steps), shuffled(pieces, options.batch), strict=False):
        start = time.perf_counter()
        loss = model(batch.to(device), labels=batch.to(device), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took = time.perf_counter() - start
        print(f"step {step + 1}: loss {loss.item():.3f}, {took:.1f} s", flush=True)
    print(f"held-out loss after: {evaluate(model, held):.3f}")
    if options.gpu:
        print(f"peak memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if options.out is not None:
        model.save_pretrained(options.out)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "examples/tiny/checkpoint")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=sorted((ROOT / "docs").glob("*.md"))
    )
    parser.add_argument("--gpu", action="store_true", help="bfloat16 on a GPU, 32768 tokens")
    parser.add_argument(
        "--dense", action="store_true", help="FP8 weights in bfloat16, without FP8 kernels of a hub"
    )
    parser.add_argument("--tokens", type=int, help="tokens in a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--held", type=int, default=4, help="sequences that are not trained on")
    parser.add_argument("--out", type=Path, help="directory for the adapter")
    return parser.parse_args()


def shuffled(pieces: Tensor, batch: int) -> Iterator[Tensor]:
    """Yield batches of sequences in random order, without end."""
    while True:
        yield from pieces[torch.randperm(len(pieces))].split(batch)


@torch.no_grad()
def evaluate(model: Any, sequences: Tensor) -> float:
    """Return the mean loss of sequences, one at a time."""
    model.eval()
    losses = [model(one[None], labels=one[None], use_cache=False).loss for one in sequences]
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
