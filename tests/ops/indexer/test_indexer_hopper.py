"""Hopper's scores and maxima, by its kernel's text on the host."""

import pytest
import torch
from index_scores import D, i32
from index_scores_on_host import PAGE, H, in_pages, score
from paged import make_cache

from anymla.formats.page_layout import INDEX_FP8, get_layout
from anymla.ops.indexer import support
from anymla.ops.indexer.config import GROUP

NOTHING = -(2**31)


def ordered(x):
    """What maxima are made of; scores here are integers, -inf or NaN."""
    bits = (x + 0.0).view(torch.int32)
    return torch.where(x.isnan(), 0x7F800001, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@pytest.mark.parametrize("stride", [8448, 8640])
@pytest.mark.parametrize(
    ("together", "owners"),
    [
        (1, [0, 1, 1, 0, -1, 1]),
        (2, [0, 0, 0, 1, 1]),
        (2, [0, 1, -1, 1, 0, 0]),
        (2, None),
        (1, None),
    ],
)
@pytest.mark.parametrize(
    ("span", "overlap", "programs"), [(192, False, None), (256, True, None), (256, True, 2)]
)
def test_scores_and_maxima(stride, together, owners, span, overlap, programs):
    rows, k = len(owners or [0] * 4), 40
    padded = make_cache(INDEX_FP8, 9, PAGE, gap=0).tensor
    packed = torch.full((9 * stride + 64,), 0xFF, dtype=torch.uint8)
    cache = packed.as_strided((9, PAGE, D + 4), (stride, D + 4, 1))
    cache.copy_(padded)
    table = i32([[3, 0, 8, 5], [1, -1, 7, 900]])
    keys = torch.randint(-2, 3, (2, 256, D)).float()
    for request in range(2):
        for number, page in enumerate(table[request].tolist()):
            if 0 <= page < 9:
                slots = page * PAGE + torch.arange(PAGE)
                part = keys[request, number * PAGE : (number + 1) * PAGE]
                get_layout(INDEX_FP8).write(cache, slots, part)
    q = torch.randint(-2, 3, (rows, H, D)).to(torch.float8_e4m3fn)
    weights = torch.randint(-2, 3, (rows, H)).float()
    weights[1, 3] = torch.nan
    lengths = torch.randint(100, 257, (rows,), dtype=torch.int32)
    lengths[0], lengths[rows - 1] = 256, 40
    starts = i32([0, 17, 90, 3, 64, 1][:rows]) if owners else None
    got, maxima = score(
        q,
        *in_pages(cache),
        weights,
        lengths,
        table,
        k,
        starts=starts,
        owners=None if owners is None else i32(owners),
        together=together,
        span=span,
        overlap=overlap,
        programs=programs,
    )
    entry = torch.arange(256)
    for row in range(rows):
        request = owners[row] if owners else row * 2 // rows
        first, last = int(starts[row]) if owners else 0, int(lengths[row])
        seen = (entry >= first) & (entry < last)
        if request < 0 or last - first <= k:
            seen[:] = False
        dots = q[row].float() @ keys[request].T
        want = weights[row] @ dots.relu()
        page = table[request].repeat_interleave(PAGE)
        want[(page < 0) | (page >= 9)] = -torch.inf
        # NaN is both what a weight makes and what nothing was written to.
        assert torch.equal(got[row, :256].nan_to_num(1e9)[seen], want.nan_to_num(1e9)[seen])
        assert got[row, :256][~seen].isnan().all()
        rank = torch.where(seen, ordered(want), NOTHING).view(-1, GROUP).amax(1)
        assert torch.equal(maxima[row, :16], torch.where(rank == NOTHING, 77, rank))


@pytest.mark.parametrize("overlap", [False, True])
def test_many_tiles(overlap):
    pages, rows = 9, 4
    codes = torch.randint(-2, 3, (pages, PAGE, D)).to(torch.float8_e4m3fn)
    scales = torch.randint(1, 4, (pages, PAGE)).float()
    words = torch.cat((torch.zeros(pages, PAGE * D // 4), scales), 1)
    q = torch.randint(-2, 3, (rows, H, D)).to(torch.float8_e4m3fn)
    weights, lengths = torch.randint(-2, 3, (rows, H)).float(), i32([576, 575, 420, 30])
    table = torch.stack((torch.randperm(pages), torch.randperm(pages))).int()
    got, maxima = score(
        q, codes, words, weights, lengths, table, 40,
        starts=None, owners=None, together=2, span=576, overlap=overlap, programs=1,
    )  # fmt: skip
    for row, length in enumerate(lengths.tolist()):
        page = table[row // 2].long()
        want = weights[row] @ (q[row].float() @ codes[page].flatten(0, 1).float().T).relu()
        want = (want * scales[page].flatten())[: length if length > 40 else 0]
        assert torch.equal(got[row, : len(want)], want)
        assert got[row, len(want) :].isnan().all()
        best = [ordered(want[at : at + GROUP].amax()).item() for at in range(0, len(want), GROUP)]
        assert maxima[row].tolist() == best + [77] * (len(maxima[row]) - len(best))


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("table", [i32([[2, 0, 5]]), i32([[2, 0, 5], [4, -1, 1]]), None])
def test_what_is_not_seen_is_filled(together, table):
    requests, rows = 1 if table is None else len(table), 4
    context = 192 if table is None else 300
    codes = torch.randint(-2, 3, (6, PAGE, D)).to(torch.float8_e4m3fn)
    scales = torch.randint(1, 4, (6, PAGE)).float()
    words = scales if table is None else torch.cat((torch.zeros(6, PAGE * D // 4), scales), 1)
    if table is None:
        codes, scales, words = codes[:3], scales[:3], words[:3]
    q = torch.randint(-2, 3, (rows, H, D)).to(torch.float8_e4m3fn)
    weights = torch.randint(-2, 3, (rows, H)).float()
    lengths, starts = i32([192, 130, 0, 60]), i32([0, 70, 0, 7]) if table is None else None
    got, _ = score(
        q, codes, words, weights, lengths, table, 0,
        starts=starts, owners=None, together=together, span=128, context=context,
    )  # fmt: skip
    for row in range(rows):
        pages = [0, 1, 2] if table is None else table[row * requests // rows].tolist()
        want = torch.full((context,), -torch.inf)
        for number, page in enumerate(pages):
            dots = q[row].float() @ codes[page].float().T
            if page >= 0:
                want[number * PAGE : (number + 1) * PAGE] = (
                    weights[row] @ dots.relu() * scales[page]
                )
        want[lengths[row] :] = -torch.inf
        want[: 0 if starts is None else starts[row]] = -torch.inf
        assert torch.equal(got[row, :context], want)
        assert got[row, context:].isnan().all()


def test_other_machines_are_refused():
    cache = get_layout(INDEX_FP8).allocate(1, 64)
    given = (torch.randn(1, H, D), cache, torch.randn(1, H), i32([3]), i32([[0]]), 1)
    answer = support.sm90_select_support(*given)
    assert not answer
    assert "compute capability 9.0" in answer.reason
