"""vLLM's builders, as the plugin extends them, on a step padded for a graph:
``padded_builders.py ANSWER.json``.

Five requests decode, one token each; the batch is padded to eight requests and tokens as vLLM's
model runner pads it: further requests of no tokens, slots -1, positions of an earlier step. The
answer has what the metadata list for each token, of a step that is built after one that filled all
buffers.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

from anymla.engines.vllm import model
from anymla.engines.vllm.metadata import CompressedBuilder, IndexBuilder, WindowBuilder

model.exchange()  # has the metadata kernels registered
REAL, LONGEST, BLOCK, PAGE = 5, 512, 256, 64
POSITIONS = (3, 7, 127, 255, 130)
STALE = (511, 127, 383)
EARLIER = (511, 500, 400, 383, 511, 511, 127, 383)  # eight requests, none of them padding


def config() -> Any:
    """What the builders read of vLLM's configuration."""
    hf = types.SimpleNamespace(sliding_window=128, index_topk=16, compress_ratios=[0, 4, 128])
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=LONGEST, hf_config=hf),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=16, max_num_seqs=8),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
    )


def batch(positions: tuple[int, ...], stale: tuple[int, ...], page: int) -> Any:
    """A step of requests that decode, and padding, in the cache of pages of so many tokens."""
    count, tokens = len(positions), len(positions) + len(stale)
    table = torch.arange(tokens * LONGEST // page, dtype=torch.int32).view(tokens, -1)
    slots = [token * LONGEST + position for token, position in enumerate(positions)]
    starts = torch.arange(tokens + 1, dtype=torch.int32).clamp(max=count)
    lengths = torch.tensor([p + 1 for p in positions] + [0] * len(stale), dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=tokens,
        num_actual_tokens=tokens,
        max_query_len=1,
        max_seq_len=max(positions) + 1,
        block_table_tensor=table,
        slot_mapping=torch.tensor(slots + [-1] * len(stale)),
        positions=torch.tensor(positions + stale),
    )


def built(kind: type, spec: Any) -> tuple[Any, list[str]]:
    """The metadata of the padded step, and its tensors that lie elsewhere than the earlier's."""
    builder = kind(spec, ["layer"], config(), torch.device("cpu"))
    earlier = builder.build(0, batch(EARLIER, (), spec.block_size))
    found = builder.build(0, batch(POSITIONS, STALE, spec.block_size))
    moved = [
        name
        for name in ("visible", "c128a_global_decode_topk_indices", "c128a_decode_topk_lens")
        if isinstance(getattr(found, name, None), Tensor)
        and getattr(found, name).data_ptr() != getattr(earlier, name).data_ptr()
    ]
    return found, moved


def listed(indices: Tensor, lengths: Tensor) -> list[list[int]]:
    """Of each token: how many rows it lists, and how many it says it lists."""
    return [(indices.flatten(1) >= 0).sum(-1).tolist(), lengths.tolist()]


def compressed(ratio: int) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=BLOCK, num_kv_heads=1, head_size=512, dtype=torch.uint8, tokens_per_state=ratio
    )


if __name__ == "__main__":
    span = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    window, _ = built(WindowBuilder, SlidingWindowMLASpec(**span, sliding_window=128))
    dense, moved = built(CompressedBuilder, compressed(128))
    index, also_moved = built(IndexBuilder, compressed(4))
    entries = dense.c128a_global_decode_topk_indices, dense.c128a_decode_topk_lens
    answer = {
        "window": listed(window.decode_swa_indices, window.decode_swa_lens),
        "ratio 128": listed(*entries),
        "visible": index.visible.tolist(),
        "closed": [index.slot_mapping.tolist(), dense.slot_mapping.tolist()],
        "moved": moved + also_moved,
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))
