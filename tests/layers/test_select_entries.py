"""Selection within blocks of entries: keys of the blocks alone, and all scores that are hidden."""

import dataclasses

import pytest
import torch

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, ROWS_FP32_128, get_layout
from anymla.layers import selection
from anymla.layers.selection import SlotTarget, TwoLevels, select_entries
from anymla.ops.indexer import torch_select

HEADS, PAGE, BLOCK = 2, 16, 8


def _selected(monkeypatch, gathers, *, layout, each, contexts, blocks, width, absent=False):
    """Entries, slots and counts of tokens in either way, and how the cache was read."""
    random = torch.Generator().manual_seed(each)
    pages = -(-max(contexts) // PAGE)
    requests = len(contexts)
    cache = get_layout(layout).allocate(requests * pages, PAGE)
    table = torch.randperm(requests * pages, generator=random).int().view(requests, pages)
    # Keys of a few small integers: every sum is exact, and many scores are equal.
    rows = torch.randint(-2, 3, (requests * pages * PAGE, 128), generator=random).float()
    get_layout(layout).write(cache, torch.arange(len(rows)), rows)
    q = torch.randint(-2, 3, (requests * each, HEADS, 128), generator=random).float()
    weights = torch.ones(requests * each, HEADS)
    visible = torch.tensor([n - each + 1 + j for n in contexts for j in range(each)]).int()
    if absent:
        table[0, (contexts[0] - 1) // PAGE] = -1
    kept = torch.full((len(q), blocks), -1, dtype=torch.int32)
    for row, n in zip(kept, visible.tolist(), strict=True):
        count = -(-n // BLOCK)
        some = torch.randperm(max(0, count - 1), generator=random)[: blocks - 1]
        chosen = torch.cat([some, torch.tensor([count - 1])]).sort().values
        row[: len(chosen)] = chosen.int()
    out = torch.full((len(q), width), -7, dtype=torch.int32)
    target = SlotTarget(table.clamp(min=0), PAGE, out.clone(), out[:, 0].clone())
    monkeypatch.setattr(selection, "_within_blocks", lambda *_: gathers)
    select_entries(
        q, None, weights, visible, cache, table, query_lens=(each,) * requests,
        num_decodes=requests, max_context=max(contexts), layout=layout, out=out, target=target,
        levels=TwoLevels(kept, BLOCK, keeps=False),
    )  # fmt: skip
    return out, target.slots, target.counts


@pytest.mark.parametrize("layout", [INDEX_FP8, INDEX_MXFP4, ROWS_FP32_128])
@pytest.mark.parametrize("each", [1, 3])
def test_gathered_blocks_choose_what_hidden_scores_do(monkeypatch, layout, each):
    case = {"layout": layout, "each": each, "contexts": (900, 77, 40, 1027), "blocks": 21}
    want = _selected(monkeypatch, False, width=32, **case)
    got = _selected(monkeypatch, True, width=32, **case)
    assert int(want[2].min()) == 32
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_more_entries_than_the_blocks_of_the_model_hold(monkeypatch):
    case = {"layout": INDEX_MXFP4, "each": 1, "contexts": (60_001, 20_000, 300), "blocks": 2048}
    want = _selected(monkeypatch, False, width=512, **case)
    got = _selected(monkeypatch, True, width=512, **case)
    assert want[2].tolist() == [512, 512, 300]
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_a_block_whose_page_is_absent_is_not_read(monkeypatch):
    case = {"layout": INDEX_FP8, "each": 1, "contexts": (900, 501), "blocks": 21, "absent": True}
    want = _selected(monkeypatch, False, width=32, **case)
    got = _selected(monkeypatch, True, width=32, **case)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


FEWER_BYTES = [
    (65_536, 1, 2048, 64, 512, False, True), (49_152, 1, 2048, 64, 512, False, False),
    (262_144, 5, 2048, 64, 512, False, True), (65_536, 2, 2048, 64, 512, False, False),
    (65_536, 1, 2048, 64, 512, True, False), (65_536, 1, 2048, 12, 512, False, False),
    (65_536, 1, 64, 64, 512, False, False),
]  # fmt: skip
# Kernels read the keys of blocks once, where they lie.
FEWER_BYTES_ON_A_DEVICE = [
    (16_392, 1, 2048, 64, 512, False, True), (16_384, 1, 2048, 64, 512, False, False),
    (65_544, 4, 2048, 64, 512, False, True), (65_536, 4, 2048, 64, 512, False, False),
    (65_536, 1, 2048, 64, 512, True, False), (65_536, 1, 2048, 12, 512, False, False),
    (65_536, 1, 64, 64, 512, False, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "context", "each", "blocks", "page", "width", "keeps", "want"),
    [("cpu", *case) for case in FEWER_BYTES]
    + [("meta", *case) for case in FEWER_BYTES_ON_A_DEVICE],
)
def test_blocks_are_scored_alone_where_fewer_bytes_move(
    device, context, each, blocks, page, width, keeps, want
):
    cache = torch.empty(1, page, 68, dtype=torch.uint8)
    nothing = torch.empty(0)
    q = torch.empty(0, dtype=torch.uint8, device=device)
    scores = selection._Scores(q, nothing, nothing, nothing, cache, context, INDEX_MXFP4, None)
    levels = TwoLevels(torch.empty(1, blocks, dtype=torch.int32), 8, keeps)
    assert selection._within_blocks(levels, each, scores, width) is want
    # One kernel's sums of FP8 products need not be another's.
    fp8 = dataclasses.replace(scores, q=torch.empty(0, dtype=torch.float8_e4m3fn, device=device))
    assert selection._within_blocks(levels, each, fp8, width) is (want and device == "cpu")


@pytest.mark.parametrize("context", [65_536, 262_144])
def test_keys_that_are_scored_do_not_grow_with_the_context(monkeypatch, context):
    seen = []
    real = torch_select.gathered_keys

    def watched(*args):
        keys, table = real(*args)
        seen.append(keys.shape[0] * keys.shape[1])
        return keys, table

    def refused(*args, **named):
        raise AssertionError("all entries are scored")

    monkeypatch.setattr(torch_select, "gathered_keys", watched)
    monkeypatch.setattr(selection, "paged_mqa_logits", refused)
    _selected(
        monkeypatch, True, layout=INDEX_MXFP4, each=1, contexts=(context,), blocks=2048, width=512
    )
    assert seen == [16_384]
