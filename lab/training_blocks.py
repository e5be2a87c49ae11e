"""Check and time the blocks of ``anymla.train`` around attention on a device.

``python -m lab.training_blocks [TOKENS [ROWS.jsonl [BLOCK]]]`` runs each block, or those whose
names begin so, forward and backward at the sizes of V4-Flash, and keeps the times in a file. Before
that, 300 tokens of it run on the device and on the CPU; the table shows the largest relative L2
error of a gradient.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anymla import train
from anymla.bench.environment import environment
from anymla.bench.gpu import device_facts
from anymla.bench.report import append_lines
from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import LayerSpec
from anymla.testing.tolerance import relative_l2
from anymla.train.layer import Sizes

FLASH = Sizes(4096, 64, 512, 1024, 8, 1024, 64, 128, 1e-6)
SMALL = Sizes(128, 4, 512, 64, 2, 32, 4, 128, 1e-6)
TOPK, STREAMS = 512, 4
SITE: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}

# A block's function of the plan's tensors, and inputs that get gradients.
Block = tuple[Callable[..., Any], list[Tensor]]


def site(tokens: int, sizes: Sizes) -> Block:
    """A hyper-connection around a sub-layer that does nothing."""
    width = STREAMS * sizes.hidden_size
    h = torch.randn(tokens, STREAMS, sizes.hidden_size).bfloat16()
    fn, base, scale = torch.randn(24, width) / width**0.5, torch.randn(24), torch.ones(3)

    def run(h: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> Tensor:
        y, post, comb = train.hyper_pre(h, fn, base, scale, **SITE)
        return train.hyper_post(y, h, post, comb)

    return run, [h, fn, base, scale]


def pool(tokens: int, sizes: Sizes, ratio: int) -> Block:
    """A compressor behind its projection, rounded as a cache is."""
    wide = sizes.head_dim * (2 if ratio == 4 else 1)
    kv, gate = torch.randn(2, tokens, wide)
    table = RopeTable(64, 160000.0, None, torch.device("cpu")).table_for(tokens)

    def run(kv: Tensor, gate: Tensor, ape: Tensor, weight: Tensor) -> Tensor:
        plan = train.Plan([0, tokens], ratio, device=kv.device)
        rope = table.to(kv.device)
        entries = train.compress(kv, gate, ape, weight, plan, eps=1e-6, rope=rope)
        return train.round_rows(entries, "v4_main_fp8", dtype=torch.bfloat16)

    return run, [kv, gate, torch.randn(ratio, wide), torch.ones(sizes.head_dim)]


def layer(tokens: int, sizes: Sizes, ratio: int, stage: Any = "frozen") -> Block:
    """The attention of a layer in bfloat16, and its indexer's loss if that learns."""
    chooses = ratio == 4
    spec = LayerSpec(0, "backbone", ratio, chooses, chooses, 128, TOPK if chooses else 0)
    rope = RopeTable(64, 160000.0, None, torch.device("cpu"))
    module = train.Attention(
        spec, sizes, rope, CACHE_FORMATS["fp8"], index_stage=stage, dtype=torch.bfloat16
    )
    names = [name for name, _ in module.named_parameters()]
    values = [value.detach() for value in module.parameters()]
    x = torch.randn(tokens, sizes.hidden_size).bfloat16()

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        module.rope = RopeTable(64, 160000.0, None, x.device)
        plan = train.Plan([0, tokens], ratio, device=x.device)
        given = dict(zip(names, weights, strict=True))
        out, loss, _ = torch.func.functional_call(module, given, (x, plan))
        return out if loss is None else torch.cat((out.flatten().float(), loss.view(1)))

    return run, [x, *values]


BLOCKS: dict[str, Callable[[int, Sizes], Block]] = {
    "hyper-connection": site,
    "entries of ratio 4": lambda tokens, sizes: pool(tokens, sizes, 4),
    "entries of ratio 128": lambda tokens, sizes: pool(tokens, sizes, 128),
    "layer, window only": lambda tokens, sizes: layer(tokens, sizes, 0),
    "layer of ratio 128": lambda tokens, sizes: layer(tokens, sizes, 128),
    "layer of ratio 4": lambda tokens, sizes: layer(tokens, sizes, 4),
    "layer of ratio 4, indexer learns": lambda tokens, sizes: layer(tokens, sizes, 4, "sparse"),
    "layer of ratio 4, warm-up": lambda tokens, sizes: layer(tokens, sizes, 4, "dense"),
}


def gradients(block: Block, device: str) -> tuple[list[Tensor | None], float, float]:
    """Run a block on a device; return gradients, and forward and backward seconds."""
    run, given = block
    inputs = [each.to(device).requires_grad_() for each in given]

    def now() -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()

    start = now()
    out = run(*inputs)
    forward = now() - start
    pull = torch.linspace(-1, 1, out.numel()).sin().view_as(out).to(out)
    start = now()
    found = torch.autograd.grad(out, inputs, pull, allow_unused=True)
    return list(found), forward, now() - start


def main(tokens: int, sizes: Sizes, device: str, path: Path | None = None, only: str = "") -> None:
    """Print a line for each block whose name begins with ``only``, and append rows to a file."""
    print(f"{tokens} tokens on {device}")
    for name, make in BLOCKS.items():
        if not name.startswith(only):
            continue
        torch.manual_seed(0)
        few = make(300, SMALL)
        pairs = zip(gradients(few, device)[0], gradients(few, "cpu")[0], strict=True)
        errors = [relative_l2(a.cpu(), b) for a, b in pairs if a is not None and b is not None]
        block = make(tokens, sizes)
        for _ in range(3):
            forward, backward = gradients(block, device)[1:]
        peak = 0.0
        if device != "cpu":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            gradients(block, device)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(
            f"{name:34s} forward {1e3 * forward:8.2f} ms  backward {1e3 * backward:8.2f} ms  "
            f"peak {peak:7.0f} MiB  error {max(errors):.1e}",
            flush=True,
        )
        if path is not None:
            row = {
                "part": "blocks of training", "case": f"{name}, {tokens} tokens",
                "forward_ms": round(1e3 * forward, 2), "backward_ms": round(1e3 * backward, 2),
                "peak_mib": round(peak), "relative_l2": float(f"{max(errors):.2g}"),
            }  # fmt: skip
            append_lines(
                path, [row | environment("python -m lab.training_blocks") | device_facts()]
            )


if __name__ == "__main__":
    here = "cuda" if torch.cuda.is_available() else "cpu"
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4096
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    main(count, FLASH if here == "cuda" else SMALL, here, file, "".join(sys.argv[3:4]))
