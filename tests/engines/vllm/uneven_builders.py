"""A step in which requests verify different numbers of drafts: ``uneven_builders.py ANSWER.json``.

vLLM has trimmed drafts on the device: the host knows their sum, and spreads it evenly.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import padded_builders
import torch
from padded_builders import LONGEST, PAGE, compressed
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import SlidingWindowMLASpec
from vllm.v1.worker.gpu.attn_utils import get_varlen_cudagraph_unsupported_backend

from anymla.engines.vllm.metadata import CompressedBuilder, IndexBuilder, WindowBuilder

LENGTHS, TOKENS, PADDING, DRAFTS = (130, 8, 257), (3, 1, 2), 2, 2


def config() -> Any:
    """Of an engine that drafts."""
    made = padded_builders.config()
    made.speculative_config = types.SimpleNamespace(
        num_speculative_tokens=DRAFTS, parallel_drafting=False, use_dspark=lambda: False
    )
    made.num_speculative_tokens = DRAFTS
    return made


def batch(page: int) -> Any:
    """The step, and two tokens and a request of padding, in the cache of such pages."""
    positions = [n - k + i for n, k in zip(LENGTHS, TOKENS, strict=True) for i in range(k)]
    owners = [request for request, count in enumerate(TOKENS) for _ in range(count)]
    slots = [r * LONGEST + at for r, at in zip(owners, positions, strict=True)]
    requests, tokens = len(LENGTHS) + 1, len(positions) + PADDING
    starts = torch.tensor([0, *torch.tensor(TOKENS).cumsum(0).tolist(), sum(TOKENS)])
    lengths = torch.tensor([*LENGTHS, 0], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.int(),
        query_start_loc_cpu=torch.tensor([0, 2, 4, 6, 6], dtype=torch.int32),
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths + DRAFTS,
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=1 + DRAFTS,
        max_seq_len=max(LENGTHS) + DRAFTS,
        block_table_tensor=torch.arange(requests * LONGEST // page).int().view(requests, -1),
        slot_mapping=torch.tensor([*slots, *[-1] * PADDING]),
        positions=torch.tensor([*positions, *[383] * PADDING]),
    )


if __name__ == "__main__":
    span = {"block_size": PAGE, "num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    specs = {
        WindowBuilder: SlidingWindowMLASpec(**span, sliding_window=128),
        CompressedBuilder: compressed(128),
        IndexBuilder: compressed(4),
    }
    built, groups = {}, []
    for kind, spec in specs.items():
        builder = kind(spec, ["layer"], config(), torch.device("cpu"))
        built[kind] = builder.build(0, batch(spec.block_size))
        backend, get = type(kind.__name__, (), {}), lambda _, builder=builder: builder
        groups.append(types.SimpleNamespace(
            layer_names=["layer"], backend=backend, kv_cache_spec=spec, get_metadata_builder=get
        ))  # fmt: skip
    window, dense, index = built.values()
    first = window.decode_swa_indices.flatten(1)[: sum(TOKENS)].amax(1)
    answer = {
        "requests": (first // LONGEST).tolist(),
        "window": (window.decode_swa_indices.flatten(1) >= 0).sum(-1).tolist(),
        "entries": dense.c128a_decode_topk_lens.tolist(),
        "visible": index.visible.tolist(),
        "accepted": get_varlen_cudagraph_unsupported_backend([groups], config(), 1 + DRAFTS),
    }
    Path(sys.argv[1]).write_text(json.dumps(answer))
