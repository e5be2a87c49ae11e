"""Selection: every backend against a brute-force reading of the contracts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.ops.device import has_triton
from anymla.ops.step_indices import (
    combine_topk_swa_indices,
    compressed_rows,
    compute_global_topk_indices_and_lens,
    slot_mapping,
    token_to_request,
    window_rows,
)

INT32, INT64 = torch.int32, torch.int64

# No tokens seen; around the first entry of ratio 4; around the window; a page edge; 512 entries.
POSITIONS = [0, 1, 2, 3, 4, 7, 62, 63, 64, 126, 127, 128, 129, 255, 256, 2046, 2047, 2051]


no_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


backends = pytest.mark.parametrize("backend", BACKENDS)


def i32(values):
    return torch.tensor(values, dtype=INT32)


def table_of(requests, pages, *, cache_pages=10_000):
    """A block table of distinct pages in random order."""
    chosen = torch.randperm(cache_pages)[: requests * pages]
    return chosen.view(requests, pages).int()


def slot(table, request, entry, page_size):
    rows, pages = table.shape
    if not 0 <= request < rows or entry < 0 or entry >= pages * page_size:
        return -1
    page = table[request, entry // page_size].item()
    return -1 if page < 0 else page * page_size + entry % page_size


# slot_mapping ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "ratio"), [(64, 1), (4, 1), (64, 4), (2, 128), (1, 2)])
def test_slot_mapping_of_every_position(backend, page_size, ratio):
    length = 517
    table = table_of(2, -(-length // (page_size * ratio)))
    positions = torch.arange(length).repeat(2)
    requests = i32([0] * length + [1] * length)
    got = slot_mapping(
        positions, requests, table, page_size=page_size, ratio=ratio, backend=backend
    )
    want = [
        slot(table, r, p // ratio, page_size) if p % ratio == ratio - 1 else -1
        for r in (0, 1)
        for p in range(length)
    ]
    assert got.dtype == INT64
    assert got.tolist() == want
    assert sum(s >= 0 for s in want) == 2 * (length // ratio)


def test_slot_mapping_skips_padding_and_hostile_tables(backend):
    table = i32([[5, -1, -7]])
    positions = torch.tensor([0, 1, 2, 3, 6, 7, 10**12, -1, 0, 0])
    requests = i32([0, 0, 0, 0, 0, 0, 0, 0, -1, 1])
    got = slot_mapping(positions, requests, table, page_size=2, backend=backend)
    assert got.tolist() == [10, 11, -1, -1, -1, -1, -1, -1, -1, -1]


def test_slot_mapping_is_64_bit(backend):
    table = i32([[2**31 - 1]])
    got = slot_mapping(torch.tensor([63]), i32([0]), table, page_size=64, backend=backend)
    assert got.tolist() == [(2**31 - 1) * 64 + 63]


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_empty_tables_give_no_slot(backend, shape):
    table = torch.zeros(shape, dtype=INT32)
    got = slot_mapping(torch.arange(2), i32([0, 0]), table, page_size=4, backend=backend)
    assert got.tolist() == [-1, -1]


# token_to_request -----------------------------------------------------------------------------


@backends
@given(lengths=st.lists(st.integers(0, 5), max_size=6), padding=st.integers(0, 4))
def test_token_to_request(backend, lengths, padding):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    got = token_to_request(starts, sum(lengths) + padding, backend=backend)
    want = [r for r, n in enumerate(lengths) for _ in range(n)] + [-1] * padding
    assert got.dtype == INT32
    assert got.tolist() == want


# compute_global_topk_indices_and_lens ---------------------------------------------------------


def test_global_topk_against_brute_force(backend):
    tokens, width, block_size = 7, 40, 64
    table = table_of(3, 5)
    topk = torch.randint(0, 5 * block_size, (tokens, width), dtype=INT32)
    counts = [40, 0, 1, 39, 17, 40, 5]
    for row, count in enumerate(counts):
        topk[row, count:] = -1
    requests = i32([0, 0, 1, 2, 2, 1, 2, 0, 0])  # longer than topk_indices: a padded batch
    valid = torch.tensor([True, True, True, True, False, True, True, True, True])
    slots, lens = compute_global_topk_indices_and_lens(
        topk, requests, table, block_size, valid, backend=backend
    )
    want = [
        [slot(table, requests[t].item(), e, block_size) if t != 4 else -1 for e in row]
        for t, row in enumerate(topk.tolist())
    ]
    assert slots.tolist() == want
    assert lens.tolist() == [n if t != 4 else 0 for t, n in enumerate(counts)]
    assert slots.dtype == lens.dtype == INT32


def test_global_topk_does_not_compact_holes(backend):
    slots, lens = compute_global_topk_indices_and_lens(
        i32([[3, -1, 0, -2147483648]]),
        i32([0]),
        i32([[9]]),
        4,
        torch.tensor([True]),
        backend=backend,
    )
    assert slots.tolist() == [[39, -1, 36, -1]]
    assert lens.tolist() == [2]


def test_global_topk_of_hostile_entries_and_tables(backend):
    topk = i32([[0, 4, 8, 2147483647], [0, 1, 2, 3], [0, 1, 2, 3]])
    slots, lens = compute_global_topk_indices_and_lens(
        topk,
        i32([0, 7, -1]),
        i32([[3, -1]]),
        4,
        torch.ones(3, dtype=torch.bool),
        backend=backend,
    )
    assert slots.tolist() == [[12, -1, -1, -1], [-1] * 4, [-1] * 4]
    assert lens.tolist() == [4, 0, 0]


def test_slots_beyond_int32_do_not_wrap_into_the_cache(backend):
    table = i32([[2**26, 2**25, 2**25 - 1]])
    slots, lens = compute_global_topk_indices_and_lens(
        i32([[0, 64, 191]]), i32([0]), table, 64, torch.ones(1) > 0, backend=backend
    )
    assert slots.tolist() == [[-1, -1, 2**31 - 1]]
    assert lens.tolist() == [3]
    slots, _ = window_rows(
        torch.tensor([191]), i32([0]), table, block_size=64, window=192, backend=backend
    )
    assert slots[0, [0, 64, 191]].tolist() == [-1, -1, 2**31 - 1]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_global_topk_of_nothing(backend, shape):
    tokens = shape[0]
    slots, lens = compute_global_topk_indices_and_lens(
        torch.full(shape, -1, dtype=INT32),
        torch.zeros(tokens, dtype=INT32),
        i32([[0]]),
        4,
        torch.ones(tokens, dtype=torch.bool),
        backend=backend,
    )
    assert slots.shape == shape
    assert lens.tolist() == [0] * tokens


# combine_topk_swa_indices ---------------------------------------------------------------------


def combine_by_hand(topk_indices, starts, seq_lens, gather_lens, window, ratio, topk, m, n):
    """The rows as sets: entries then window, each as workspace rows."""
    rows = []
    for b, (seq_len, gathered) in enumerate(zip(seq_lens, gather_lens, strict=True)):
        query = starts[b + 1] - starts[b]
        for i in range(query):
            p = seq_len - query + i
            token = starts[b] - starts[0] + i
            count = min((p + 1) // ratio, topk)
            row = [m * b + w for w in topk_indices[token][:count]]
            first = seq_len - gathered
            row += [m * b + n + s - first for s in range(p + 1) if s > p - window]
            rows.append(row)
    return rows


@backends
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([0, 1, 3, 4, 127, 128, 300])),
        min_size=1,
        max_size=4,
    ),
    window=st.sampled_from([1, 5, 128]),
    ratio=st.sampled_from([1, 4, 128]),
    topk=st.sampled_from([0, 1, 12]),
    base=st.integers(0, 50),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**31),
)
def test_combine_against_brute_force(backend, requests, window, ratio, topk, base, padding, seed):
    torch.manual_seed(seed)
    queries = [query for query, _ in requests]
    seq_lens = [query + prefix for query, prefix in requests]
    gather_lens = [query + min(prefix, window - 1) for query, prefix in requests]
    starts = torch.tensor([base, *queries]).cumsum(0).tolist()
    n = max(max(seq_lens) // ratio, 1)
    m = n + max(gather_lens)
    tokens = sum(queries) + padding
    topk_indices = torch.randint(0, n, (tokens, max(topk, 1)), dtype=INT32)
    indices, lens = combine_topk_swa_indices(
        topk_indices,
        i32(starts),
        i32(seq_lens),
        i32(gather_lens),
        window_size=window,
        compress_ratio=ratio,
        topk=topk,
        M=m,
        N=n,
        backend=backend,
    )
    want = combine_by_hand(
        topk_indices.tolist(), starts, seq_lens, gather_lens, window, ratio, topk, m, n
    )
    want += [[]] * padding
    assert indices.shape == (tokens, -(-(topk + window) // 128) * 128)
    assert indices.dtype == lens.dtype == INT32
    assert lens.tolist() == [len(row) for row in want]
    for got, row in zip(indices.tolist(), want, strict=True):
        assert got[: len(row)] == row
        assert set(got[len(row) :]) <= {-1}


def test_combine_skips_hostile_entries(backend):
    # Entries outside [0, N) would name window rows or another request's rows.
    indices, lens = combine_topk_swa_indices(
        i32([[1, -5, 4, 2**31 - 1]]),
        i32([0, 1]),
        i32([20]),
        i32([2]),
        window_size=4,
        compress_ratio=4,
        topk=4,
        M=8,
        N=4,
        backend=backend,
    )
    # Positions 16 and 17 were not gathered: -1 in their place, never a compressed row.
    assert indices[0, :8].tolist() == [1, -1, -1, -1, -1, -1, 4, 5]
    assert lens.tolist() == [8]


def test_combine_without_requests_or_tokens(backend):
    empty = torch.zeros(0, dtype=INT32)
    for tokens in (0, 2):
        indices, lens = combine_topk_swa_indices(
            torch.zeros(tokens, 3, dtype=INT32),
            i32([0]),
            empty,
            empty,
            window_size=4,
            compress_ratio=4,
            topk=3,
            M=8,
            N=4,
            backend=backend,
        )
        assert indices.shape == (tokens, 128)
        assert bool((indices == -1).all())
        assert lens.tolist() == [0] * tokens


# compressed_rows and window_rows --------------------------------------------------------------


@pytest.mark.parametrize(("ratio", "block_size"), [(4, 64), (128, 2), (1, 3)])
@pytest.mark.parametrize("width", [0, 1, 16, 600])
def test_compressed_rows_against_brute_force(backend, ratio, block_size, width):
    table = table_of(2, -(-2052 // (ratio * block_size)))
    positions = torch.tensor(POSITIONS * 2)
    requests = i32([0] * len(POSITIONS) + [1] * len(POSITIONS))
    valid = torch.rand(len(positions)) > 0.2
    slots, local, lens = compressed_rows(
        positions,
        requests,
        table,
        ratio=ratio,
        block_size=block_size,
        width=width,
        is_valid_token=valid,
        backend=backend,
    )
    for t, p in enumerate(positions.tolist()):
        # Conformance C2: entry w is visible iff (w + 1) * ratio <= p + 1.
        seen = [w for w in range(2052) if (w + 1) * ratio <= p + 1][:width] if valid[t] else []
        row = [slot(table, requests[t].item(), w, block_size) for w in seen]
        tail = [-1] * (width - len(seen))
        assert lens[t].item() == len(seen)
        assert local[t].tolist() == seen + tail
        assert slots[t].tolist() == row + tail
    assert slots.dtype == local.dtype == lens.dtype == INT32


@pytest.mark.parametrize(("block_size", "window"), [(64, 128), (256, 128), (3, 5), (64, 1)])
def test_window_rows_against_brute_force(backend, block_size, window):
    table = table_of(2, -(-2052 // block_size))
    positions = torch.tensor(POSITIONS * 2)
    requests = i32([0] * len(POSITIONS) + [1] * len(POSITIONS))
    valid = torch.rand(len(positions)) > 0.2
    slots, lens = window_rows(
        positions,
        requests,
        table,
        block_size=block_size,
        window=window,
        is_valid_token=valid,
        backend=backend,
    )
    for t, p in enumerate(positions.tolist()):
        seen = [s for s in range(p + 1) if s > p - window] if valid[t] else []
        row = [slot(table, requests[t].item(), s, block_size) for s in seen]
        assert lens[t].item() == len(seen)
        assert slots[t].tolist() == row + [-1] * (window - len(seen))
    assert slots.dtype == lens.dtype == INT32


def test_window_ignores_freed_pages(backend):
    # Pages wholly older than the window are freed: their table entries may be anything.
    table = i32([[-3, 2**31 - 1, 4, 6]])
    slots, lens = window_rows(
        torch.tensor([15]), i32([0]), table, block_size=4, window=8, backend=backend
    )
    assert slots.tolist() == [[16, 17, 18, 19, 24, 25, 26, 27]]
    assert lens.tolist() == [8]


def test_rows_of_padding_tokens_are_empty(backend):
    table = table_of(1, 4)
    positions, requests = torch.tensor([9, 9, -1]), i32([-1, 1, 0])
    slots, lens = window_rows(positions, requests, table, block_size=4, window=3, backend=backend)
    assert slots.tolist() == [[-1] * 3] * 3
    assert lens.tolist() == [0] * 3
    slots, local, lens = compressed_rows(
        positions, requests, table, ratio=4, block_size=4, width=3, backend=backend
    )
    assert slots.tolist() == local.tolist() == [[-1] * 3] * 3
    assert lens.tolist() == [0] * 3


def test_no_tokens(backend):
    table, positions, requests = table_of(1, 1), torch.zeros(0, dtype=INT64), i32([])
    slots, lens = window_rows(positions, requests, table, block_size=4, window=3, backend=backend)
    assert (slots.shape, lens.shape) == ((0, 3), (0,))
    slots, local, lens = compressed_rows(
        positions, requests, table, ratio=4, block_size=4, width=3, backend=backend
    )
    assert (slots.shape, local.shape, lens.shape) == ((0, 3), (0, 3), (0,))


# errors ---------------------------------------------------------------------------------------


def test_errors_name_the_argument():
    positions, requests, table = torch.arange(3), i32([0, 0, 0]), i32([[0]])
    with pytest.raises(TypeError, match="slot_mapping: positions must be int64"):
        slot_mapping(positions.int(), requests, table, page_size=4)
    with pytest.raises(ValueError, match="slot_mapping: token_to_req must be int32"):
        slot_mapping(positions, requests[:2], table, page_size=4)
    with pytest.raises(ValueError, match="slot_mapping: page_size must be >= 1, got 0"):
        slot_mapping(positions, requests, table, page_size=0)
    with pytest.raises(ValueError, match="slot_mapping: ratio must be >= 1, got 0"):
        slot_mapping(positions, requests, table, page_size=4, ratio=0)
    with pytest.raises(ValueError, match="token_to_request: num_tokens must be >= 0"):
        token_to_request(i32([0]), -1)
    with pytest.raises(ValueError, match="query_start_loc must be"):
        token_to_request(i32([]), 1)
    with pytest.raises(ValueError, match="is_valid_token must be bool"):
        compute_global_topk_indices_and_lens(
            i32([[0], [0]]), requests, table, 4, torch.tensor([True])
        )
    with pytest.raises(ValueError, match="block_size must be >= 1"):
        compute_global_topk_indices_and_lens(i32([[0]]), requests, table, 0, torch.ones(1) > 0)
    lengths = {"query_start_loc": i32([0, 1]), "seq_lens": i32([1]), "gather_lens": i32([1])}
    numbers = {"window_size": 4, "compress_ratio": 4, "topk": 1, "M": 4, "N": 2}
    for change, message in (
        ({"topk": 2}, r"topk must be in \[0, K=1\], got 2"),
        ({"window_size": 0}, "window_size must be >= 1"),
        ({"N": 5}, r"N must be in \[0, M=4\], got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            combine_topk_swa_indices(i32([[0]]), **lengths, **{**numbers, **change})
    with pytest.raises(ValueError, match=r"query_start_loc must be \[2\], got \[3\]"):
        combine_topk_swa_indices(
            i32([[0]]), **{**lengths, "query_start_loc": i32([0, 1, 1])}, **numbers
        )
    with pytest.raises(ValueError, match="ratio must be >= 1"):
        compressed_rows(positions, requests, table, ratio=0, block_size=4, width=3)
    with pytest.raises(ValueError, match="width must be >= 0"):
        compressed_rows(positions, requests, table, ratio=4, block_size=4, width=-1)
    with pytest.raises(ValueError, match="window must be >= 1"):
        window_rows(positions, requests, table, block_size=4, window=0)
