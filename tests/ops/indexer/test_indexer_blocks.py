"""Selection within the blocks of entries that each token lists."""

import dataclasses

import pytest
import torch
from index_scores import D, i32, key_cache
from index_selection import a_call, arbitrary_scores, by_rule, keys_in
from paged import (
    ALL_BACKENDS,
    ARC_A,
    DEVICE_BACKENDS,
    INDEX_LAYOUTS,
    INTEL,
    TRITON,
    a_device,
    use_backend,
    use_device_backend,
    without_waiting,
)

from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4, ROWS_FP32_128, get_layout
from anymla.ops import device as device_facts
from anymla.ops.indexer import (
    mask_candidates,
    paged_mqa_logits,
    select_candidate_blocks,
    select_topk,
    topk_per_row,
    torch_select,
)
from anymla.ops.indexer.config import choose_select_config
from anymla.ops.step_indices import compute_global_topk_indices_and_lens


@pytest.fixture(params=(*ALL_BACKENDS, INTEL, ARC_A))
def run(request, monkeypatch):
    return use_backend(request.param, monkeypatch)


def lists(lengths, count, size, *, newest=True):
    """Random blocks [T, count] of entries that there are, ascending, then -1."""
    rows = torch.full((len(lengths), count), -1, dtype=torch.int32)
    for row, length in zip(rows, lengths, strict=True):
        blocks = -(-max(0, length) // size)
        some = torch.randperm(blocks)[:count].sort().values
        if newest and blocks:
            some[-1] = blocks - 1
        row[: len(some)] = some.int()
    return rows


def by_hand(call, blocks, size):
    """What a call of ``a_call`` selects within blocks."""
    given, k = call.arguments, call.arguments["k"]
    cache, table, owners = given["index_cache"], given["block_table"], given["token_to_req"]
    page, rows = cache.shape[1], []
    for token, length in enumerate(given["lengths"].tolist()):
        request, chosen = int(owners[token]), []
        if 0 <= request < len(table):
            listed = set(blocks[token].tolist())
            seen = [w for w in range(min(length, table.shape[1] * page)) if w // size in listed]
            seen = [w for w in seen if 0 <= int(table[request, w // page]) < len(cache)]
            slots = torch.tensor([int(table[request, w // page]) * page + w % page for w in seen])
            keys = get_layout(given["layout"]).read(cache, slots.long(), torch.float64)
            dots = given["q"][token].double() @ keys.T
            scores = given["weights"][token].double() @ dots.relu()
            chosen = [seen[place] for place in by_rule(scores.tolist(), k)]
        rows.append(chosen + [-1] * (k - len(chosen)))
    return i32(rows)


def check(run, call, blocks, size, **options):
    call.want = by_hand(call, blocks, size)
    call.check(run, blocks=blocks, block_size=size, **options)
    return call.want


@pytest.mark.parametrize("layout", INDEX_LAYOUTS)
def test_every_layout(run, layout):
    lengths = [141, 9, 130, 77]
    call = a_call(4, lengths, [0, 1, 0, 1], 12, layout=layout)
    want = check(run, call, lists(lengths, 7, 8), 8)
    assert (want >= 0).sum(1).tolist() == [12, 9, 12, 12]


@pytest.mark.parametrize(
    ("page", "size"), [(16, 8), (8, 8), (64, 8), (256, 8), (12, 4), (6, 3), (5, 1)]
)
def test_pages_and_blocks_of_any_size(run, page, size):
    lengths = [150, 70, 0, 149, 1, 33]
    call = a_call(6, lengths, [0, 1, 1, 0, 1, 0], 20, entries=page)
    check(run, call, lists(lengths, 11, size), size)


@pytest.mark.parametrize("heads", [1, 3, 64])
def test_rows_with_fewer_and_with_no_blocks(run, heads):
    lengths = [90, 40, 8, 7, -3, 90]
    call = a_call(6, lengths, [0] * 6, 10, heads=heads)
    blocks = lists(lengths, 9, 8)
    blocks[5] = -1
    check(run, call, blocks, 8)
    check(run, call, blocks[:, :1], 8)
    check(run, call, blocks[:, :0], 8)


def test_lists_in_rows_that_lie_apart(run):
    lengths = [90, 77]
    call = a_call(2, lengths, [0, 1], 9)
    wide = torch.full((2, 31), 3, dtype=torch.int32)
    wide[:, :8] = lists(lengths, 8, 8)
    check(run, call, wide[:, :8], 8)
    check(run, call, wide[:, :8].T.contiguous().T, 8)


def test_what_names_no_block_and_absent_pages(run):
    lengths = [60, 60, 2**31 - 1, 60]
    call = a_call(4, [64] * 4, [0, 1, 0, 0], 30)
    call.arguments["lengths"] = i32(lengths)
    call.arguments["block_table"][0, 1] = -1
    call.arguments["block_table"][1, 2] = 10**6
    blocks = i32([[0, 2, 3, 7, 8, -1], [0, 1, 4, 5, 6, 2**31 - 1], [1, 5, 6, 7, 9, 10**8],
                  [-1, -1, -1, -1, -1, -(2**31)]])  # fmt: skip
    want = check(run, call, blocks, 8)
    assert (want >= 0).sum(1).tolist() == [12, 24, 30, 0]


def test_requests_that_there_are_not(run):
    lengths = [60, 33, 60, 41]
    call = a_call(4, lengths, [0, 1, 1, 0], 8)
    call.arguments["token_to_req"] = i32([1, -1, 7, 0])
    check(run, call, lists(lengths, 5, 8), 8)


def test_requests_of_as_many_tokens_each(run):
    lengths = [37, 0, 5, 20, 90, 19]
    blocks = lists(lengths, 3, 8)
    call = a_call(6, lengths, [0, 0, 0, 1, 1, 1], 8, each=True)
    owners = call.arguments["token_to_req"]
    assert owners is None
    call.arguments["token_to_req"] = i32([0, 0, 0, 1, 1, 1])
    call.want = by_hand(call, blocks, 8)
    call.arguments["token_to_req"] = None
    call.check(run, blocks=blocks, block_size=8)


def test_a_context_that_ends_before_the_entries(run):
    call = a_call(2, [90, 40], [0, 0], 30)
    blocks = lists([90, 40], 12, 8)
    call.arguments["lengths"] = i32([45, 40])
    want = by_hand(call, blocks, 8)
    call.arguments["lengths"] = i32([90, 40])
    got = select_topk(**call.arguments, max_context=45, blocks=blocks, block_size=8, backend=run)
    assert torch.equal(got, want)


def test_slots_counts_and_the_callers_memory(run):
    lengths, owners = [140, 9, 131, 0, 122, 40], [0, 1, 1, 1, -1, 0]
    call = a_call(6, lengths, [max(o, 0) for o in owners], 12)
    call.arguments["token_to_req"] = i32(owners)
    blocks = lists(lengths, 6, 8)
    tables = torch.randint(-1, 50, (2, 20), dtype=torch.int32)  # covers 80 entries of 140
    slots, counts = torch.full((6, 12), 77, dtype=torch.int32), torch.full((6,), 77).int()
    out = torch.full((6, 24), 77, dtype=torch.int32)
    given = {"slot_table": tables, "slot_page_size": 4, "slots": slots, "counts": counts}
    want = check(run, call, blocks, 8, out=out[:, :12], **given)
    assert torch.equal(out[:, :12], want)
    assert bool((out[:, 12:] == 77).all())
    reference = compute_global_topk_indices_and_lens(
        want, i32(owners).clamp(min=0), tables, 4, torch.tensor(owners) >= 0, backend="reference"
    )
    assert torch.equal(slots, reference[0])
    assert torch.equal(counts, reference[1])


def test_nan_and_infinities(run):
    # Conformance I10: NaN first, then higher, then earlier; also among few blocks.
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, nan, -inf, 3.0, 3.0, inf, nan, -1.0] * 2, [-inf] * 16]
    q, keys, weights = arbitrary_scores(rows)
    table = i32([[1, 0], [3, 2]])
    cache, _ = keys_in(ROWS_FP32_128, table, 8, 16, keys=keys)
    blocks = i32([[1, 3, -1], [0, 2, 3]])
    got = select_topk(
        q, cache, weights, i32([16, 15]), table, 5, layout=ROWS_FP32_128, blocks=blocks,
        block_size=4, backend=run,
    )  # fmt: skip
    want = []
    for row, listed, last in zip(rows, blocks.tolist(), (16, 15), strict=True):
        seen = [n for n in range(last) if n // 4 in listed]
        want.append([seen[place] for place in by_rule([row[n] for n in seen], 5)])
    assert got.tolist() == want


def test_the_cache_is_empty(run):
    call = a_call(2, [40, 9], [0, 0], 4)
    call.arguments["index_cache"] = call.arguments["index_cache"][:0]
    counts = i32([7, 7])
    got = select_topk(
        **call.arguments, blocks=lists([40, 9], 3, 8), block_size=8, counts=counts, backend=run
    )
    assert got.tolist() == [[-1] * 4] * 2
    assert counts.tolist() == [0, 0]


def masked(q, cache, weights, lengths, table, k, blocks, size, **options):
    """The selection among all scores of which those outside of the blocks are hidden."""
    context = table.shape[1] * cache.shape[1]
    named = {"layout": options["layout"], "backend": options["backend"]}
    scales = options.get("q_scales")
    by_request = (len(table), -1)
    logits = paged_mqa_logits(
        q.unflatten(0, by_request), cache, weights, lengths.unflatten(0, by_request), table,
        max_context=context,
        q_scales=None if scales is None else scales.unflatten(0, by_request), **named,
    )  # fmt: skip
    mask_candidates(logits, blocks, block_size=size, backend=options["backend"])
    starts = torch.zeros_like(lengths)
    best = topk_per_row(logits, starts, lengths, k, backend=options["backend"])
    last = torch.iinfo(torch.int32).max
    ordered = torch.where(best < 0, last, best).sort(1).values
    return torch.where(ordered == last, -1, ordered)


@pytest.mark.parametrize("name", [*TRITON, INTEL, ARC_A])
@pytest.mark.parametrize("heads", [2, 64])
@pytest.mark.parametrize("layout", [INDEX_MXFP4, INDEX_FP8])
def test_scores_are_those_of_all_entries_to_the_bit(name, heads, layout, monkeypatch):
    """Keys of any value: a rounding that differed would choose others among 600 near ones."""
    backend = use_backend(name, monkeypatch)
    lengths = [640, 601, 23]
    table = torch.randperm(30).view(3, 10).int()
    cache, _ = key_cache(layout, 30, 64, table, lengths)
    q, weights = torch.randn(3, heads, D), torch.randn(3, heads)
    scales = None
    if layout == INDEX_MXFP4:
        q, scales = quantize_mxfp4(q)
    blocks = lists(lengths, 40, 8)
    given = (q, cache, weights, i32(lengths), table, 40)
    options = {"layout": layout, "q_scales": scales, "backend": backend}
    want = masked(*given, blocks, 8, **options)
    got = select_topk(*given, **options, blocks=blocks, block_size=8)
    assert torch.equal(got, want)


def random_case(layout, contexts, each, count, device):
    """Queries, scales, keys, weights, lengths, pages and blocks of ``each`` tokens a request."""
    random = torch.Generator().manual_seed(len(contexts))
    pages, tokens = -(-max(contexts) // 64), len(contexts) * each
    table = torch.randperm(len(contexts) * pages, generator=random).int().view(len(contexts), -1)
    cache, _ = key_cache(layout, table.numel(), 64, table, list(contexts))
    lengths = [n - each + 1 + j for n in contexts for j in range(each)]
    codes, scales = quantize_mxfp4(torch.randn(tokens, 32, D, generator=random))
    weights = torch.randn(tokens, 32, generator=random)
    case = (codes, scales, cache, weights, i32(lengths), table, lists(lengths, count, 8))
    return [one.to(device) for one in case]


def check_scores(contexts, each, count, device):
    """Scores of blocks side by side are those of their entries among all, bit for bit."""
    from anymla.ops.indexer.inputs import paged_inputs
    from anymla.ops.indexer.triton_blocks import ListedBlocks
    from anymla.ops.indexer.triton_scores import write_scores

    target, requests = device_facts.target_of(device), len(contexts)
    q, scales, cache, weights, lengths, table, blocks = random_case(
        INDEX_MXFP4, contexts, each, count, device
    )
    inputs = paged_inputs(
        q.unflatten(0, (requests, each)), scales.unflatten(0, (requests, each)), weights, cache,
        INDEX_MXFP4, lengths.view(requests, each), table, table.shape[1] * 64,
    )  # fmt: skip
    every = torch.full((len(q), inputs.covered), torch.nan, device=device)
    write_scores(inputs, every, None, target)
    listed = ListedBlocks.of(blocks, 8, len(q))
    columns = listed.columns_of(inputs, 0, target)
    alone = torch.full((len(q), columns.covered), torch.nan, device=device)
    write_scores(columns, alone, None, target)
    for row, held in enumerate(listed.counts.tolist()):
        numbers = blocks[row][blocks[row] >= 0].long()
        entries = (numbers[:, None] * 8 + torch.arange(8, device=device)).flatten()
        entries = entries[entries < lengths[row]]
        assert len(entries) == held
        assert torch.equal(alone[row, :held], every[row, entries])
        assert bool(alone[row, held:].isnan().all())


@pytest.mark.parametrize("name", TRITON)
@pytest.mark.parametrize(("contexts", "each"), [((700, 300, 5), 1), ((333, 640), 3)])
def test_scores_have_the_bits_of_all_entries(name, contexts, each, monkeypatch):
    use_backend(name, monkeypatch)
    check_scores(contexts, each, 30, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize(("contexts", "each"), [((20_000, 9000, 70), 1), ((20_000, 17_000), 6)])
def test_scores_have_the_bits_of_all_entries_on_a_device(contexts, each):
    check_scores(contexts, each, 2048, a_device())


@pytest.mark.gpu
@pytest.mark.parametrize("backend", DEVICE_BACKENDS[1:])
@pytest.mark.parametrize(
    ("contexts", "each", "count", "k"),
    [
        ((70_000, 16_500, 300, 65_537), 1, 2048, 512), ((9000,), 1, 700, 512),
        ((40_000,) * 3, 1, 4000, 1024), ((40_000, 16_385), 6, 2048, 512),
    ],
)  # fmt: skip
def test_a_device_gives_what_hidden_scores_do_without_waiting(
    backend, contexts, each, count, k, monkeypatch
):
    backend = use_device_backend(backend, monkeypatch)
    device = a_device()
    case = random_case(INDEX_MXFP4, contexts, each, count, device)
    q, scales, cache, weights, lengths, table, blocks = case
    given = (q, cache, weights, lengths, table, k)
    options = {"layout": INDEX_MXFP4, "q_scales": scales, "backend": backend}
    want = masked(*given, blocks, 8, **options)
    with without_waiting(device):
        got = select_topk(*given, **options, blocks=blocks, block_size=8)
    assert torch.equal(got, want)


def test_blocks_that_were_kept_hold_the_selection(run):
    """With the blocks of the best scores, the selection is that among all entries."""
    lengths = [150, 90]
    call = a_call(2, lengths, [0, 1], 6)
    given = call.arguments
    logits = paged_mqa_logits(
        given["q"].unsqueeze(1), given["index_cache"], given["weights"], given["lengths"],
        given["block_table"], max_context=160, backend="reference",
    )  # fmt: skip
    blocks = select_candidate_blocks(logits, given["lengths"], 8, block_size=8, backend="reference")
    call.check(run, blocks=blocks, block_size=8)


def test_a_few_rows_at_a_time(run, monkeypatch):
    lengths, owners = [150, 90, 130, 77, 20, 91, 5], [0, 1, 0, 1, 0, 1, 1]
    call = a_call(7, lengths, owners, 9)
    if run == "triton":
        from anymla.ops.indexer import triton_select

        choose = triton_select.choose_select_config
        monkeypatch.setattr(
            triton_select,
            "choose_select_config",
            lambda *args, **named: dataclasses.replace(choose(*args, **named), chunk=3),
        )
    monkeypatch.setattr(torch_select, "rows_at_once", lambda *args: 3)
    slots, counts = torch.full((7, 9), 77, dtype=torch.int32), torch.full((7,), 77).int()
    table = call.arguments["block_table"]
    given = {"slot_table": table, "slot_page_size": 16, "slots": slots, "counts": counts}
    want = check(run, call, lists(lengths, 8, 8), 8, **given)
    assert counts.tolist() == (want >= 0).sum(1).tolist()
    page = table[i32(owners)[:, None], want.clamp(min=0) // 16]
    assert torch.equal(slots, torch.where(want < 0, -1, page * 16 + want % 16))


def test_scratch_holds_the_lists_as_well():
    """Rows of a chunk take scores, maxima and both lists of their blocks."""
    target = device_facts.TARGETS["sm_90"]
    plain = choose_select_config(4096, 16_384, 512, target=target, scratch_bytes=1 << 24)
    more = choose_select_config(
        4096, 16_384, 512, target=target, scratch_bytes=1 << 24, further_row_bytes=8 * 2048 + 4
    )
    assert more.chunk < plain.chunk
    assert more.chunk * (more.row_bytes(16_384) + 8 * 2048 + 4) <= 1 << 24


def test_block_sizes_that_are_refused():
    call = a_call(2, [40, 9], [0, 0], 4).arguments
    blocks = lists([40, 9], 3, 8)
    for size in (0, -8, 5, 32):
        with pytest.raises(ValueError, match="block_size must be a divisor of 16"):
            select_topk(**call, blocks=blocks, block_size=size)
    with pytest.raises(ValueError, match="select_topk: blocks"):
        select_topk(**call, blocks=blocks[:1], block_size=8)
    with pytest.raises(TypeError, match="select_topk: blocks"):
        select_topk(**call, blocks=blocks.long(), block_size=8)
