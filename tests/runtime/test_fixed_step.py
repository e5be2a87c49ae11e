"""Steps of fixed size: their metadata is that of the batch, and padding touches nothing."""

import pytest
import torch
from fake_model import SPECS
from hypothesis import given, settings
from hypothesis import strategies as st

from anymla.layers.caches import CACHE_FORMATS
from anymla.runtime.bucket import Bucket, context_ceilings, decode_buckets, request_counts, smallest
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.fixed_step import FixedStep
from anymla.runtime.graphs import Graph
from anymla.runtime.host_step import host_step
from anymla.runtime.request import Request, RequestState
from anymla.runtime.span import Span

GROUPS = cache_groups(SPECS)
MAX_SEQ_LEN = 700
CPU = torch.device("cpu")


def _store(requests):
    pages = {g.name: requests * g.worst_case_pages(MAX_SEQ_LEN, 512) for g in GROUPS}
    return CacheStore(
        GROUPS,
        SPECS,
        CACHE_FORMATS["fp8"],
        pages,
        max_requests=requests,
        max_seq_len=MAX_SEQ_LEN,
        device=CPU,
    )


def _admitted(store, name, length):
    """A request that has computed ``length`` tokens in one step."""
    state = RequestState(Request(name, (0,) * MAX_SEQ_LEN))
    assert store.admit(state, {g.name: g.worst_case_pages(MAX_SEQ_LEN, 512) for g in GROUPS})
    for table in store.tables.values():
        table.extend(state.row, length)
    state.computed = length
    store.slide(state)
    return state


batches = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 3)), min_size=1, max_size=4)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("window_only", [False, True])
@settings(max_examples=8)
@given(batches=st.lists(batches, min_size=1, max_size=2), spare=st.integers(0, 2))
def test_metadata_is_that_of_the_batch(backend, window_only, batches, spare):
    """One fixed step after the other against steps that the host writes down."""
    if backend == "triton":
        pytest.importorskip("triton")
    store = _store(4)
    steps = []
    bucket = Bucket(MAX_SEQ_LEN, 3, 4 + spare)
    fixed = FixedStep(
        store,
        bucket,
        lambda step: steps.append(step) or (),
        record=False,
        window_only=window_only,
        backend=backend,
    )
    for number, batch in enumerate(batches):
        states = [_admitted(store, f"{number}.{i}", length) for i, (length, _) in enumerate(batch)]
        spans = [
            Span(state, state.computed, [7 + 3 * i + j for j in range(count)], True)
            for i, (state, (_, count)) in enumerate(zip(states, batch, strict=True))
        ]
        fixed(spans)
        expected = host_step(store, spans, len(spans), window_only=window_only)
        _check(steps[-1], expected, bucket)
        for state in states:
            store.release(state)


def _check(step, expected, bucket):
    requests = len(expected.seq_lens)
    real = [
        r * bucket.tokens + j for r, count in enumerate(expected.query_lens) for j in range(count)
    ]
    padding = [row for row in range(bucket.rows) if row not in real]
    assert step.is_valid.nonzero().flatten().tolist() == real
    assert step.padded
    for name in ("token_ids", "positions", "token_to_req"):
        assert torch.equal(getattr(step, name)[real], getattr(expected, name)), name
        assert getattr(step, name).dtype == getattr(expected, name).dtype
    assert (step.token_ids[padding] == -1).all()
    assert (step.token_to_req[padding] == -1).all()
    assert torch.equal(step.seq_lens[:requests], expected.seq_lens)
    assert not step.seq_lens[requests:].any()
    assert step.query_lens == (bucket.tokens,) * bucket.requests
    assert step.num_decodes == bucket.requests
    assert step.max_seq_len == bucket.max_seq_len
    assert step.groups.keys() == expected.groups.keys()
    for name, group in expected.groups.items():
        columns = group.block_table.shape[1]
        assert torch.equal(step.groups[name].block_table[:requests, :columns], group.block_table)
        assert not step.groups[name].block_table[requests:].any()
        assert torch.equal(step.groups[name].slot_mapping[real], group.slot_mapping)
        assert (step.groups[name].slot_mapping[padding] == -1).all()
    rows = {"window": (step.window, expected.window)}
    rows |= {name: (step.dense[name], expected.dense[name]) for name in expected.dense}
    for name, (got, want) in rows.items():
        width = want.indices.shape[1]
        assert torch.equal(got.lengths[real], want.lengths), name
        assert torch.equal(got.indices[real, :width], want.indices), name
        assert (got.indices[real, width:] == -1).all()
        assert (got.indices[padding] == -1).all()
        assert not got.lengths[padding].any()
    assert step.index_lens.keys() == expected.index_lens.keys()
    for group, lens in expected.index_lens.items():
        assert torch.equal(step.index_lens[group][real], lens)
        assert not step.index_lens[group][padding].any()


def test_results_stay_in_place():
    source = torch.zeros(3)
    graph = Graph(lambda: (source + 1,), CPU, record=False)
    (first,) = graph()
    assert first.tolist() == [1, 1, 1]
    source.fill_(4)
    (second,) = graph()
    assert second.data_ptr() == first.data_ptr()
    assert first.tolist() == [5, 5, 5]


def test_buckets_are_tried_from_the_cheapest():
    buckets = decode_buckets(GROUPS, 6, 5000, (2,))
    assert {b.requests for b in buckets} == {1, 2, 4, 6}
    assert {b.tokens for b in buckets} == {1, 3}
    # 512 entries of 4 tokens are all selected up to 2051 tokens.
    assert {b.max_seq_len for b in buckets} == {2051, 5000}
    state = RequestState(Request("a", (0,) * 9))

    def bucket(requests, tokens, stop):
        spans = [Span(state, stop - tokens, [0] * tokens, True)] * requests
        return smallest(buckets, spans)

    assert bucket(1, 1, 1) == Bucket(2051, 1, 1)
    assert bucket(3, 1, 2051) == Bucket(2051, 1, 4)
    assert bucket(3, 2, 2051) == Bucket(2051, 3, 4)
    assert bucket(5, 3, 2052) == Bucket(5000, 3, 6)
    assert bucket(7, 1, 9) is None
    assert bucket(1, 4, 9) is None
    assert bucket(1, 1, 5001) is None


def test_counts_and_ceilings():
    assert request_counts(1) == [1]
    assert request_counts(8) == [1, 2, 4, 8]
    assert context_ceilings(GROUPS, 1 << 20) == [2051, 16408, 131264, 1 << 20]
    assert context_ceilings(GROUPS, 100) == [100]
    assert context_ceilings(GROUPS[:1], 9000) == [4096, 9000]
