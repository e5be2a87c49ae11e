"""Cases I1, I2 and I5 .. I8: index scores, and selection by them."""

from __future__ import annotations

import torch

from anymla.formats.page_layout import INDEX_FP8, ROWS_FP32_128
from anymla.testing.allocation import LargestAllocation
from anymla.testing.conformance.expected import (
    EPS,
    index_scale,
    index_scores,
    table,
    v4_config,
)
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.scene import coded
from anymla.testing.generate import guarded_cache, hostile_indices, scattered_pages
from anymla.testing.oracle.attention import IndexQueries
from anymla.testing.oracle.rope import frequencies, rotate
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.oracle.selection import Selections
from anymla.testing.tolerance import accumulation, assert_close

_SLACK = accumulation(128, torch.float32)


@case(
    "I1",
    "Hadamard on queries and keys, or on neither",
    "indexer_q_rope_quant",
    "mqa_logits",
    "compress_norm_rope_insert",
)
def hadamard_on_both(ops: Ops) -> None:
    q, weights = torch.randn(6, 8, 128), torch.randn(6, 8)
    positions = torch.arange(100, 106)
    states = torch.randn(1, 40, 512)
    starts, ends = torch.zeros(6, dtype=torch.int32), torch.full((6,), 10, dtype=torch.int32)
    scores = []
    for hadamard in (False, True):
        keys = guarded_cache(ROWS_FP32_128, 1, 10)
        closing = torch.arange(3, 40, 4)
        ops.compress_norm_rope_insert(
            states,
            torch.zeros(1, 1, dtype=torch.int32),
            closing,
            torch.zeros(10, dtype=torch.int32),
            closing,
            torch.ones(128),
            EPS,
            table(40, compressed=True),
            keys.cache,
            torch.arange(10),
            compress_ratio=4,
            overlap=True,
            layout=ROWS_FP32_128,
            hadamard=hadamard,
        )
        rotated, _, scaled = ops.indexer_q_rope_quant(
            q,
            weights,
            positions,
            table(128, compressed=True),
            softmax_scale=128**-0.5,
            head_scale=8**-0.5,
            quant="none",
            hadamard=hadamard,
        )
        scores.append(ops.mqa_logits(rotated, keys.cache[0], None, scaled, starts, ends))
        if not hadamard:
            want = rotate(q.double(), positions, frequencies(v4_config(), compressed=True))
            assert_close(rotated, want, atol=_SLACK, scale=4.0, name="rotated queries")
            size = index_scale(rotated, keys.cache[0], scaled)
    # Both transforms are sums of 128 terms, as the products are.
    assert_close(scores[1], scores[0], atol=4 * _SLACK, scale=size, name="scores with Hadamard")


@case(
    "I2",
    "the sum over heads of weight * relu(q . k), raw weights",
    "mqa_logits",
    "paged_mqa_logits",
    quick=True,
)
def score_formula(ops: Ops) -> None:
    q, weights = coded(5, 16, 128), torch.randn(5, 16)
    keys = coded(30, 128)
    starts = torch.tensor([0, 3, 10, 30, 0], dtype=torch.int32)
    ends = torch.tensor([30, 20, 11, 30, 0], dtype=torch.int32)
    scale = torch.rand(30) + 0.5
    got = ops.mqa_logits(q, keys, scale, weights, starts, ends)
    scaled = keys.double() * scale.double().unsqueeze(1)
    column = torch.arange(30)
    inside = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
    want = torch.where(inside, index_scores(q, scaled, weights), -torch.inf)
    size = index_scale(q, scaled, weights)
    assert_close(got, want, atol=ops.dot_error, scale=size, name="dense scores")

    # Two requests of two rows over the same pages, the second page before the first.
    guarded = guarded_cache(INDEX_FP8, 3, 64)
    slots = torch.cat((torch.arange(128, 192), torch.arange(0, 6)))
    keys = coded(70, 128)
    guarded.write(slots, keys)
    rows = ROW_FORMATS[INDEX_FP8].decode(*read_entries(guarded.cache, slots, INDEX_FP8))
    lens = torch.tensor([[67, 70], [0, 17]], dtype=torch.int32)
    pages = torch.tensor([[2, 0], [2, 0]], dtype=torch.int32)
    q, weights = q[:4], weights[:4]
    got = ops.paged_mqa_logits(
        q.unflatten(0, (2, 2)), guarded.cache, weights, lens, pages, max_context=70
    )
    inside = torch.arange(70) < lens.view(4, 1)
    want = torch.where(inside, index_scores(q, rows, weights), -torch.inf)
    size = index_scale(q, rows, weights)
    assert_close(got, want, atol=ops.dot_error, scale=size, name="paged scores")


@case(
    "I5",
    "indices of several requests are local, and moved into the cache once",
    "compute_global_topk_indices_and_lens",
    "combine_topk_swa_indices",
    quick=True,
)
def several_requests(ops: Ops) -> None:
    table_ = torch.tensor([[4, 9, -1], [2, 7, 5]], dtype=torch.int32)
    local = torch.tensor([[0, 65, -1], [3, -1, -1], [64, 130, 1], [5, 6, 7]], dtype=torch.int32)
    owner = torch.tensor([0, 0, 1, 1], dtype=torch.int32)
    valid = torch.tensor([True, True, True, False])
    slots, lens = ops.compute_global_topk_indices_and_lens(local, owner, table_, 64, valid)
    want = [[4 * 64, 9 * 64 + 1, -1], [4 * 64 + 3, -1, -1], [7 * 64, 5 * 64 + 2, 2 * 64 + 1]]
    expect(slots[:3].tolist() == want, f"slots {slots[:3].tolist()}")
    expect(lens.tolist() == [2, 1, 3, 0], f"lens {lens.tolist()}")

    # Two requests of 2 and 3 new tokens with 9 and 140 tokens in all; a workspace row each.
    starts = torch.tensor([10, 12, 15], dtype=torch.int32)
    seq_lens = torch.tensor([9, 140], dtype=torch.int32)
    gathered = torch.tensor([9, 130], dtype=torch.int32)
    local = torch.tensor([[1, 0], [0, 1], [33, 0], [34, 7], [2, 34]], dtype=torch.int32)
    rows, lens = ops.combine_topk_swa_indices(
        local,
        starts,
        seq_lens,
        gathered,
        window_size=128,
        compress_ratio=4,
        topk=2,
        M=200,
        N=50,
    )
    for token, (request, position) in enumerate(((0, 7), (0, 8), (1, 137), (1, 138), (1, 139))):
        count = min((position + 1) // 4, 2)
        first = int(seq_lens[request] - gathered[request])
        window = range(max(0, position - 127), position + 1)
        want_row = [200 * request + int(entry) for entry in local[token, :count]]
        want_row += [200 * request + 50 + p - first for p in window]
        expect(int(lens[token]) == len(want_row), f"token {token}: {int(lens[token])} rows")
        expect(rows[token, : len(want_row)].tolist() == want_row, f"token {token}: rows")
        expect(bool((rows[token, len(want_row) :] == -1).all()), f"token {token}: -1 behind")


@case("I6", "rows of length zero read nothing", "paged_mqa_logits", "topk_per_row")
def zero_lengths(ops: Ops) -> None:
    guarded = guarded_cache(INDEX_FP8, 2, 64)
    q, weights = coded(3, 2, 4, 128), torch.randn(6, 4)
    lens = torch.zeros(3, 2, dtype=torch.int32)
    pages = hostile_indices(2, 3, 4)
    got = ops.paged_mqa_logits(q, guarded.cache, weights, lens, pages, max_context=40)
    expect(bool((got == -torch.inf).all()), "rows of length zero must be -inf")
    zeros = torch.zeros(6, dtype=torch.int32)
    chosen = ops.topk_per_row(got, zeros, zeros, 7)
    expect(bool((chosen == -1).all()), "rows of length zero select nothing")
    chosen = ops.topk_per_row(torch.full((6, 40), torch.nan), zeros + 3, zeros + 3, 7)
    expect(bool((chosen == -1).all()), "empty ranges select nothing")


@case("I7", "scratch does not grow with tokens times context", "paged_mqa_logits", bulk=True)
def bounded_scratch(ops: Ops) -> None:
    tokens, context, heads = 64, 8192, 32
    table_, pages = scattered_pages([context], 64)
    guarded = guarded_cache(INDEX_FP8, pages, 64)
    guarded.cache.fill_(0)
    rows = torch.randn(context, 128)
    slots = table_[0, : context // 64].long().repeat_interleave(64) * 64
    guarded.write(slots + torch.arange(context) % 64, rows)
    q, weights = coded(1, tokens, heads, 128), torch.randn(tokens, heads)
    lens = torch.randint(context // 2, context + 1, (1, tokens), dtype=torch.int32)
    with LargestAllocation() as largest:
        got = ops.paged_mqa_logits(q, guarded.cache, weights, lens, table_, max_context=context)
    # Scores of all heads at once would take 64 MiB; a tile takes 4, decoded keys 4.
    expect(largest.num_bytes <= 1 << 24, f"one tensor takes {largest.num_bytes / 2**20:.1f} MiB")
    for token in (0, 17, 63):
        alone = ops.paged_mqa_logits(
            q[:, token : token + 1],
            guarded.cache,
            weights[token : token + 1],
            lens[:, token : token + 1],
            table_,
            max_context=context,
        )
        keys = ROW_FORMATS[INDEX_FP8].round(rows.double())
        size = index_scale(q[0, token : token + 1], keys, weights[token : token + 1])
        assert_close(alone, got[token : token + 1], atol=_SLACK, scale=size, name="alone")


@case(
    "I8",
    "quantised queries may swap near-ties only",
    "indexer_q_rope_quant",
    "paged_mqa_logits",
    "topk_per_row",
    quick=True,
)
def accepted_by_score(ops: Ops) -> None:
    entries, heads, k = 1500, 16, 256
    table_, pages = scattered_pages([entries], 64)
    guarded = guarded_cache(INDEX_FP8, pages, 64)
    numbers = torch.arange(entries)
    slots = table_[0].long()[numbers // 64] * 64 + numbers % 64
    guarded.write(slots, torch.randn(entries, 128))
    keys = ROW_FORMATS[INDEX_FP8].decode(*read_entries(guarded.cache, slots, INDEX_FP8))
    q, weights = torch.randn(4, heads, 128).bfloat16(), torch.randn(4, heads).bfloat16()
    positions = torch.arange(900, 904)
    coded, _, scaled = ops.indexer_q_rope_quant(
        q,
        weights,
        positions,
        table(1024, compressed=True),
        softmax_scale=128**-0.5,
        head_scale=heads**-0.5,
        quant="fp8",
    )
    lens = torch.full((4,), entries, dtype=torch.int32)
    tables = table_.repeat(4, 1)
    scores = ops.paged_mqa_logits(
        coded.unsqueeze(1), guarded.cache, scaled, lens, tables, max_context=entries
    )
    chosen = ops.topk_per_row(scores, torch.zeros_like(lens), lens, k)
    exact = IndexQueries(
        rotate(q.double(), positions, frequencies(v4_config(), compressed=True)),
        weights.double() * 128**-0.5 * heads**-0.5,
    )
    want = exact.scores(slice(0, 4), keys)
    selections = Selections()
    # Rounding to bfloat16 and to e4m3 moves a channel by at most 2^-9 + 2^-4 of itself.
    bound = exact.magnitudes(keys) * (2**-9 + 2**-4)
    visible = torch.ones_like(want, dtype=torch.bool)
    selections.judge(want, visible, chosen.long(), k, bound, "fp8 queries")
    expect(not selections.violations, "; ".join(selections.violations))
    best = want.topk(k).indices
    recall = (
        sum(len(set(a.tolist()) & set(b.tolist())) for a, b in zip(chosen, best, strict=True))
        / best.numel()
    )
    print(f"recall {recall:.4f}, worst gap {selections.worst:.2f} of the bound")
    expect(recall > 0.9, f"recall {recall:.3f}")
