from __future__ import annotations

import pytest
import torch

from anymla.formats.page_layout import (
    INDEX_FP8,
    MAIN_FP8,
    V41_COMPRESSED_NVFP4,
    V41_MAIN_FP8,
    get_layout,
)
from anymla.layers.caches import CacheFormat, LayerCache
from anymla.layers.prefill_rows import prefill_rows
from anymla.layers.rows import GroupStep, Rows
from anymla.layers.step import Step
from anymla.ops.attention import CacheRows, prefill_attention, sparse_attention
from anymla.ops.step_indices import (
    compressed_rows,
    compute_global_topk_indices_and_lens,
    window_rows,
)

WINDOW, PAGE, ENTRY_PAGE = 16, 8, 4
# (tokens before, tokens of the step): a decode, the middle and the start of prompts.
SPANS = ((37, 1), (30, 23), (0, 5), (5, 40), (0, 1))


def cache_of(pages: int, entries: int, layout_id: str) -> torch.Tensor:
    layout = get_layout(layout_id)
    cache = layout.allocate(pages, entries)
    layout.write(cache, torch.arange(pages * entries), torch.randn(pages * entries, 512))
    return cache


def tables(lengths: list[int], page: int) -> tuple[torch.Tensor, int]:
    """A block table of shuffled pages, and how many there are."""
    width = -(-max(lengths) // page)
    pages = torch.randperm(len(lengths) * width).view(len(lengths), width).int()
    return pages, pages.numel()


@pytest.mark.parametrize("ratio", [0, 4, 16], ids=["window", "selected", "all"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "layouts",
    [(MAIN_FP8, MAIN_FP8), (MAIN_FP8, V41_COMPRESSED_NVFP4), (V41_MAIN_FP8, V41_COMPRESSED_NVFP4)],
    ids=["fp8", "4-bit entries", "V4.1"],
)
def test_a_chunk_sees_what_its_lists_say(ratio, padded, layouts):
    torch.manual_seed(ratio)
    lengths = [before + count for before, count in SPANS]
    counts = tuple(count for _, count in SPANS)
    positions = torch.cat([torch.arange(b, b + c) for b, c in SPANS])
    request = torch.repeat_interleave(torch.arange(len(SPANS)), torch.tensor(counts)).int()
    if padded:
        positions = torch.cat((positions, torch.zeros(3, dtype=torch.int64)))
        request = torch.cat((request, torch.full((3,), -1, dtype=torch.int32)))
    table, pages = tables(lengths, PAGE)
    window_cache = cache_of(pages, PAGE, layouts[0])
    indices, window_lens = window_rows(positions, request, table, block_size=PAGE, window=WINDOW)
    group = GroupStep(table, torch.empty(0), PAGE)
    step = Step(
        token_ids=positions,
        positions=positions,
        token_to_req=request,
        is_valid=request >= 0,
        seq_lens=torch.tensor(lengths).int(),
        query_start_loc=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int(),
        query_lens=counts,
        num_decodes=1,
        max_seq_len=max(lengths),
        groups={},
        window=Rows(indices, window_lens),
        dense={},
        index_lens=None,
    )
    lists = more = more_lens = entry_cache = compressed = None
    if ratio:
        entry_table, entry_pages = tables([max(n // ratio, 1) for n in lengths], ENTRY_PAGE)
        entry_cache = cache_of(entry_pages, ENTRY_PAGE, layouts[1])
        compressed = GroupStep(entry_table, torch.empty(0), ENTRY_PAGE)
        width = max(lengths) // ratio
        more, local, more_lens = compressed_rows(
            positions, request, entry_table, ratio=ratio, block_size=ENTRY_PAGE, width=width
        )
        if ratio == 4:
            shuffled = local[:, torch.randperm(width)][:, :5]
            order = (shuffled < 0).to(torch.int8).sort(dim=1, stable=True).indices
            lists = shuffled.gather(1, order).contiguous()
            more, more_lens = compute_global_topk_indices_and_lens(
                lists, request, entry_table, ENTRY_PAGE, step.is_valid
            )
    q = torch.randn(len(positions), 3, 512)
    want, want_lse = sparse_attention(
        q,
        [
            CacheRows(window_cache, layouts[0], indices, window_lens),
            *([CacheRows(entry_cache, layouts[1], more, more_lens)] if ratio else []),
        ],
        sink=torch.ones(3),
    )

    plan = prefill_rows(step, lengths, group, window=WINDOW, compressed=compressed, ratio=ratio)
    assert plan.first_token == 1
    held = sum(n // ratio for n in lengths[1:]) if ratio else 0
    seen = sum(min(count + WINDOW - 1, n) for count, n in zip(counts[1:], lengths[1:], strict=True))
    kinds = CacheFormat(layouts[0], INDEX_FP8, layouts[1])
    rows = plan.decode(LayerCache(kinds, window_cache, entry_cache), torch.float32)
    assert len(rows) == seen + held, "no longer than what can be seen"
    out, lse = prefill_attention(
        q[1:],
        rows,
        plan.ranges,
        None if lists is None else lists[1:],
        window=plan.window,
        entries=plan.entries,
        sink=torch.ones(3),
    )
    torch.testing.assert_close(out, want[1:], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse, want_lse[1:], atol=2e-5, rtol=2e-5)
