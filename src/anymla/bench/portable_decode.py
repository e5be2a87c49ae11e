"""Decode attention by portable Triton beside vLLM's path of that kind, which it has for Intel XPU.

That path gathers every listed row into a bfloat16 workspace and attends to it there. In one
process, on the same bytes, replayed over rotating lists, medians.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.bench.flash_mla_decode import Decode, Inputs, caches, error, ours
from anymla.bench.gpu_timing import time_us
from anymla.bench.report import Result

PART = "portable decode attention beside vLLM's"
_MODULES = ("vllm.models.deepseek_v4.xpu.xpu_sparse_decode_fp8", "xpu_sparse_decode_fp8")
_LEAST = 2.0


def shapes() -> Iterator[Decode]:
    """Flash with 64 heads, one query a request."""
    for batch in (1, 8, 32, 64, 128, 256):
        yield Decode(batch, 1, 64, 512)


def xpu_module(find: Callable[[str], Any]) -> Any:
    """The module, from vLLM's package or by itself.

    Args:
        find: imports a module by name.

    Raises:
        ImportError: there is neither.
    """
    try:
        return find(_MODULES[0])
    except ImportError:
        return find(_MODULES[1])


def theirs(inputs: Inputs, module: Any) -> list[Callable[[], Tensor]]:
    """Calls of vLLM's function, one for each set of lists."""
    shape = inputs.shape
    q = inputs.q.flatten(0, 1)
    out = torch.empty_like(q)
    repeat = functools.partial(torch.repeat_interleave, repeats=shape.rows)
    assert inputs.lengths is not None
    assert inputs.extra_lengths is not None
    given = {
        "q": q,
        "swa_only": False,
        "topk_lens": repeat(inputs.extra_lengths),
        "swa_lens": repeat(inputs.lengths),
        "attn_sink": inputs.sink,
        "softmax_scale": 512**-0.5,
        "head_dim": 512,
        "nope_head_dim": 448,
        "rope_head_dim": 64,
        "out": out,
    }
    window_rows, entry_rows = caches(shape)

    def call(window: Tensor, entries: Tensor) -> Tensor:
        module.xpu_sparse_decode_fp8(
            kv_cache=entry_rows,
            swa_kv_cache=window_rows,
            topk_indices=entries,
            swa_indices=window,
            **given,
        )
        return out

    return [
        functools.partial(call, window.flatten(0, 1)[:, None], entries.flatten(0, 1)[:, None])
        for window, entries in inputs.lists
        if entries is not None
    ]


def compare(shape: Decode, module: Any, repetitions: int = 20) -> Result:
    """A row: microseconds and errors of both."""
    inputs = Inputs.draw(shape)
    mine, peers = ours(inputs, "triton"), theirs(inputs, module)
    row: dict[str, Any] = dataclasses.asdict(shape) | {"backend": "triton"}
    row["error"] = error(mine[0](), inputs)
    row["xpu_error"] = error(peers[0](), inputs)
    row["us"] = time_us(mine, repetitions)
    row["xpu_us"] = time_us(peers, repetitions)
    row["ratio"] = row["xpu_us"] / row["us"]
    target = f"at least {_LEAST:g} times the speed of vLLM's path"
    return Result(PART, shape.label, row, target, row["ratio"] >= _LEAST)
