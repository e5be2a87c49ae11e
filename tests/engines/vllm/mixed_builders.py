"""A step that mixes decodes and prefills, with vLLM's metadata builders as the plugin extends them:
``mixed_builders.py ANSWER.json``.

Attention to decoded workspaces, and by slots, beside vLLM's own CPU kernel.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measures import ulps
from mixed_batch import BLOCK, DECODES, PADDING, PAGE, RATIOS, WINDOW, Step
from torch import Tensor
from vllm.models.deepseek_v4.cpu import cpu_sparse
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

from anymla.engines.vllm import attention, model
from anymla.engines.vllm import step as shared
from anymla.engines.vllm.metadata import CompressedBuilder, WindowBuilder
from anymla.ops.attention import plan

LONGEST, MOST_TOKENS = 768, 512
model.exchange()  # has the metadata kernels registered


def config() -> Any:
    """What the builders read of vLLM's configuration."""
    hf = types.SimpleNamespace(sliding_window=WINDOW, index_topk=16, compress_ratios=[0, 4, 128])
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(max_model_len=LONGEST, hf_config=hf),
        scheduler_config=types.SimpleNamespace(max_num_batched_tokens=MOST_TOKENS, max_num_seqs=16),
        parallel_config=types.SimpleNamespace(decode_context_parallel_size=1),
        speculative_config=None,
    )


def common(step: Step, ratio: int) -> Any:
    """What vLLM hands to the builder of a cache, which it pads for a graph."""
    page = PAGE if ratio == 1 else BLOCK
    table = step.tables[ratio]
    pages = table[step.request.long(), step.positions // page]
    slots = torch.where(step.valid, pages * page + step.positions % page, -1)
    return CommonAttentionMetadata(
        query_start_loc=step.starts,
        query_start_loc_cpu=step.starts,
        seq_lens=step.lengths,
        seq_lens_cpu_upper_bound=step.lengths,
        num_reqs=step.requests,
        num_actual_tokens=len(step.q),
        max_query_len=int(step.starts.diff().max()),
        max_seq_len=step.longest,
        block_table_tensor=table.clone(),
        slot_mapping=slots,
        positions=step.positions,
    )


def metadata(step: Step) -> dict[str, Any]:
    """Of the three caches, by vLLM's builders."""
    span = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    specs = {1: SlidingWindowMLASpec(block_size=PAGE, sliding_window=WINDOW, **span)}
    for ratio in (4, 128):
        specs[ratio] = MLAAttentionSpec(block_size=BLOCK, tokens_per_state=ratio, **span)
    made = {}
    for ratio in RATIOS:
        kind = WindowBuilder if ratio == 1 else CompressedBuilder
        builder = kind(specs[ratio], ["layer"], config(), torch.device("cpu"))
        made["window" if ratio == 1 else f"main{ratio}"] = builder.build(0, common(step, ratio))
    return made


def attended(layer: Any, forward: Any, step: Step, built: dict[str, Any]) -> Tensor:
    """Outputs of the real tokens."""
    held = built.setdefault("held", {})  # of the step, whose layers share plans
    context = types.SimpleNamespace(attn_metadata=built, additional_kwargs=held)
    output = torch.full_like(step.q, torch.nan)
    with (
        mock.patch.object(attention, "get_forward_context", return_value=context),
        mock.patch.object(shared, "get_forward_context", return_value=context),
        mock.patch.object(cpu_sparse, "get_forward_context", return_value=context),
    ):
        forward(layer, step.q, None, step.positions, output)
    return output[: step.tokens]


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    step = Step(torch.device("cpu"))
    answer: dict[str, Any] = {"decoded": [], "by slots": [], "chunks": [], "listed": []}
    for has_workspaces in (True, False):
        with mock.patch.object(plan, "runs_on", return_value=has_workspaces):
            built = metadata(step)
            for ratio in RATIOS:
                layer = step.layer(ratio, requests_a_chunk=1)
                layer.window_size, layer.max_model_len = WINDOW, LONGEST
                ours = attended(layer, attention.AnymlaAttention.forward_mqa, step, built)
                theirs = attended(layer, cpu_sparse.DeepseekV4CPUAttention.forward_mqa, step, built)
                way = "decoded" if has_workspaces else "by slots"
                answer[way].append(ulps(ours.flatten(1), theirs.flatten(1)))
            window, dense = built["window"], built["main128"]
            chunks = built["held"]["anymla"]["plans"][1]._chunks
            answer["chunks"].append([len(chunks[ratio]) for ratio in RATIOS])
            answer["listed"].append(len(dense.c128a_decode_topk_lens))
            assert (window.num_decodes, window.num_prefills) == (DECODES, step.requests - DECODES)
            assert window.num_prefill_tokens == step.tokens + PADDING - DECODES
    Path(sys.argv[1]).write_text(json.dumps(answer))
