"""A step that mixes decodes and prefills, for layers of the plugin's.

Import ``stand_ins`` and install it first where there is no vLLM.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from kept_layer import bare, cache_of
from torch import Tensor

from anymla.engines.vllm import attention, prefill
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.step_indices import compressed_rows, window_rows

WINDOW, PAGE, BLOCK, CHOSEN, HEADS = 128, 64, 256, 16, 8
RATIOS = (1, 4, 128)
DECODES = 3
# Tokens before, tokens of the step: decodes; prompts that begin and chunks that continue; a short
# extension; a request of padding. Three tokens of padding follow.
SPANS = ((130, 1), (0, 1), (700, 1), (0, 5), (20, 41), (600, 70), (0, 150), (513, 2), (0, 0))
PADDING = 3


class Step:
    """Caches that are full, and the metadata of a step as vLLM's builders make them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        lengths = [before + count for before, count in SPANS]
        counts = torch.tensor([count for _, count in SPANS])
        self.longest, self.requests = max(lengths), len(SPANS)
        self.starts = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
        self.tokens = int(self.starts[-1])
        padded = torch.zeros(PADDING, dtype=torch.int64)
        positions = torch.cat([torch.arange(b, b + c) for b, c in SPANS] + [padded + 77])
        self.positions = positions.to(device)
        request = torch.repeat_interleave(torch.arange(self.requests), counts)
        self.request = torch.cat((request, padded)).int().to(device)
        self.valid = torch.arange(self.tokens + PADDING, device=device) < self.tokens
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.caches, self.tables = {}, {}
        for ratio in RATIOS:
            page = PAGE if ratio == 1 else BLOCK // ratio
            columns = -(-self.longest // (page * ratio))
            table = torch.randperm(self.requests * columns).view(self.requests, columns)
            self.tables[ratio] = table.int().to(device)
            size = (table.numel(), page, 584)
            cache = cache_of(size, (page * 584 + 64, 584, 1), "uint8", device)
            slots = torch.arange(size[0] * page, device=device)
            rows = torch.randn(len(slots), 512, device=device)
            get_layout(MAIN_FP8).write(cache, slots, rows)
            self.caches[ratio] = cache
        self.q = torch.randn(self.tokens + PADDING, HEADS, 512, device=device).bfloat16()
        self.sink = torch.randn(HEADS, device=device)
        self.chosen = self._chosen()

    def _chosen(self) -> Tensor:
        """Some of the entries that each token sees, in order, then -1."""
        visible = (self.positions + 1) // 4
        scores = torch.rand(len(visible), self.longest // 4, device=self.device)
        entry = torch.arange(self.longest // 4, device=self.device)
        scores = torch.where(entry < visible[:, None], scores, -1.0)
        best = scores.topk(CHOSEN, dim=1)
        kept = torch.where(best.values >= 0, best.indices, self.longest).sort(dim=1).values
        return torch.where(kept < self.longest, kept, -1).int()

    def metadata(self, requests_a_chunk: int) -> dict[str, Any]:
        """Of the three caches."""
        split, before = int(self.starts[DECODES]), DECODES
        common = (self.positions, self.request)
        slots, lens = window_rows(
            *common, self.tables[1], block_size=PAGE, window=WINDOW, is_valid_token=self.valid
        )
        seq_lens, counts = self.lengths[before:], self.starts.diff()[before:]
        gathered = torch.minimum(seq_lens, counts + WINDOW - 1)
        window = types.SimpleNamespace(
            block_table=self.tables[1],
            is_valid_token=self.valid,
            token_to_req_indices=self.request,
            query_start_loc_cpu=self.starts,
            num_decodes=before,
            num_prefills=self.requests - before,
            num_decode_tokens=split,
            num_prefill_tokens=len(self.q) - split,
            decode_swa_indices=slots[:split, None],
            decode_swa_lens=lens[:split],
            prefill_swa_indices=slots[split:, None],
            prefill_swa_lens=lens[split:],
            prefill_seq_lens=seq_lens.to(self.device),
            prefill_seq_lens_cpu=seq_lens,
            prefill_gather_lens=gathered.to(self.device),
            prefill_window_size=WINDOW,
            tile_sched_swaonly=prefill.StepPlans(),
        )

        def plan(compress_ratio: int, prefill_chunk_size: int) -> list[tuple[int, int, int, int]]:
            held = seq_lens // compress_ratio if compress_ratio > 1 else 0 * seq_lens
            made = []
            for first in range(0, len(seq_lens), prefill_chunk_size):
                end = min(first + prefill_chunk_size, len(seq_lens))
                entries = int(held[first:end].max())
                made.append((first, end, entries, entries + int(gathered[first:end].max())))
            return made

        window.get_prefill_chunk_plan = plan
        slots, _, lens = compressed_rows(
            *common, self.tables[128], ratio=128, block_size=BLOCK // 128,
            width=self.longest // 128, is_valid_token=self.valid,
        )  # fmt: skip
        main = {
            ratio: types.SimpleNamespace(
                block_table=self.tables[ratio],
                block_size=BLOCK,
                req_id_per_token=self.request,
                c128a_global_decode_topk_indices=slots,
                c128a_decode_topk_lens=lens,
            )
            for ratio in (4, 128)
        }
        return {"window": window, "main4": main[4], "main128": main[128]}

    def layer(self, ratio: int, requests_a_chunk: int) -> Any:
        """A layer of the plugin's."""
        rows = prefill.workspace_rows(
            self.longest, len(self.q), WINDOW, ratio, self.requests - DECODES
        )
        return bare(
            attention.AnymlaAttention,
            prefix=f"main{ratio}",
            compress_ratio=ratio,
            head_dim=512,
            scale=512**-0.5,
            attn_sink=self.sink,
            PREFILL_CHUNK_SIZE=requests_a_chunk,
            scratch_bytes=rows * 1024,
            swa_cache_layer=types.SimpleNamespace(prefix="window", kv_cache=self.caches[1]),
            kv_cache=self.caches[ratio],
            indexer="some" if ratio == 4 else None,
            topk_indices_buffer=self.chosen,
        )
