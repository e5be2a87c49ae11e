"""Memory: caches against their layouts, loading against the checkpoint's size."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import torch

from anymla.bench.report import Result
from anymla.child_process import python_command
from anymla.formats.page_layout import get_layout
from anymla.formats.state_layout import state_page_stride_bytes
from anymla.runtime.engine import Engine
from anymla.runtime.request import Request
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from lab.cpu.tiny_model import engine_with, load, prompt, tiny

PART = "memory"
_CACHE_TARGET = 0.02
_LOAD_TARGET = 1.3
_CONTEXT = 65536

# Runs in a process of its own, because the peak of a process never sinks. Memory that was there
# before loading (torch, the package) does not count; mapped pages of the file that were touched do.
_LOAD = """
import json, sys, torch
from pathlib import Path
from anymla.model.load import load_model
torch.set_num_threads(1)
def field(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith(name + ":"))
dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[sys.argv[2]]
before = field("VmRSS")
model = load_model(sys.argv[1], dtype=dtype, progress=False)
print(json.dumps({"peak": field("VmHWM") - before, "after": field("VmRSS") - before}))
"""


def cache_bytes(directory: Path) -> list[Result]:
    """Return the bytes of an engine's caches for one request of 65,536 tokens, by row format."""
    model = load(tiny(directory), torch.bfloat16)
    results = []
    for kv_cache in ("fp8", "bf16", "fp32"):
        request = Request("bench", prompt(model, _CONTEXT - 16), max_new_tokens=16)
        engine = engine_with(model, request, kv_cache)
        held, wanted = engine.store.nbytes, _layout_bytes(engine)
        excess = held / wanted - 1
        results.append(
            Result(
                PART,
                f"caches, one request of {_CONTEXT} tokens, {kv_cache}",
                {"mb": held / 1e6, "layout_mb": wanted / 1e6, "excess": excess},
                target=f"within {_CACHE_TARGET:.0%} of the layout's pages",
                met=abs(excess) <= _CACHE_TARGET,
            )
        )
    return results


def _layout_bytes(engine: Engine) -> int:
    """Return the bytes of the pages that the request needs, by the layouts' page strides."""
    total = 0
    for group in engine.store.groups:
        pages = engine.store.pools[group.name].capacity
        for layer, cache in zip(group.layers, engine.store.tensors(group), strict=True):
            if group.kind in ("state", "index_state"):
                stride = state_page_stride_bytes(group.page_size, cache.shape[2] // 2)
            else:
                formats = engine.store.layers[layer].format
                layout = get_layout(formats.of(group.kind))
                stride = layout.page_stride_bytes(group.page_size)
            total += pages * stride
    return total


def loading(directory: Path) -> list[Result]:
    """Measure the peak memory of loading checkpoints of some hundred MB."""
    results = []
    for weights, dtype in (("fp4", "bf16"), ("fp8", "bf16"), ("bf16", "bf16")):
        checkpoint = directory / weights
        write_tiny_checkpoint(checkpoint, _large(weights))
        size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
        done = subprocess.run(
            python_command("-c", _LOAD, str(checkpoint), dtype),
            check=True,
            capture_output=True,
            text=True,
        )
        measured = json.loads(done.stdout)
        peak = measured["peak"] / size
        results.append(
            Result(
                PART,
                f"loading {weights} weights, {dtype} activations",
                {
                    "checkpoint_mb": size / 1e6,
                    "peak_mb": measured["peak"] / 1e6,
                    "after_mb": measured["after"] / 1e6,
                    "peak_of_size": peak,
                },
                target=f"peak < {_LOAD_TARGET} x the checkpoint",
                met=peak < _LOAD_TARGET,
            )
        )
    return results


def _large(weights: str) -> TinyOptions:
    """Return options for a checkpoint of some hundred MB."""
    return TinyOptions(weights=weights, ratios=(0, 4, 128, 4), hidden=1024, heads=16, moe_size=256)
