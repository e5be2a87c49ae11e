"""The step's metadata against semantics written down with loops."""

import pytest
import torch
from fake_model import SPECS
from hypothesis import given
from hypothesis import strategies as st

from anymla.layers.caches import CACHE_FORMATS
from anymla.runtime import step_plan
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.request import Request, RequestState
from anymla.runtime.span import Span
from anymla.runtime.step_plan import StepPlanner

GROUPS = cache_groups(SPECS)
MAX_SEQ_LEN = 800


def _store(max_requests):
    pages = {g.name: max_requests * g.worst_case_pages(MAX_SEQ_LEN, 512) for g in GROUPS}
    return CacheStore(
        GROUPS,
        SPECS,
        CACHE_FORMATS["fp8"],
        pages,
        max_requests=max_requests,
        max_seq_len=MAX_SEQ_LEN,
        device=torch.device("cpu"),
    )


def _admitted(store, name):
    state = RequestState(Request(name, (0,) * MAX_SEQ_LEN))
    assert store.admit(state, {g.name: g.worst_case_pages(MAX_SEQ_LEN, 512) for g in GROUPS})
    return state


requests = st.lists(
    st.tuples(st.integers(0, 400), st.integers(1, 150), st.booleans()), min_size=1, max_size=4
)


@pytest.mark.parametrize("host_tokens", [0, 10_000], ids=["by operations", "on the host"])
@given(requests=requests)
def test_fields_by_brute_force(host_tokens, requests):
    # Not the monkeypatch fixture, which hypothesis would share between examples.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "HOST_TOKENS", host_tokens)
        _check_fields(requests)


def _check_fields(requests):
    store = _store(len(requests))
    planner = StepPlanner(store)
    spans = []
    for number, (start, count, is_decode) in enumerate(requests):
        state = _admitted(store, str(number))
        if start:  # earlier steps, so that the window's first pages are gone
            for table in store.tables.values():
                table.extend(state.row, start)
            state.computed = start
            store.slide(state)
        spans.append(Span(state, start, [7 * number + i for i in range(count)], is_decode))
    spans.sort(key=lambda span: not span.is_decode)
    step = planner.build(spans)

    token = 0
    for row, span in enumerate(spans):
        assert step.query_start_loc[row] == token
        assert step.query_lens[row] == len(span.token_ids)
        assert step.seq_lens[row] == span.stop
        for position, token_id in zip(range(span.start, span.stop), span.token_ids, strict=True):
            assert step.token_ids[token] == token_id
            assert step.positions[token] == position
            assert step.token_to_req[token] == row
            assert step.is_valid[token]
            _check_slots(store, step, span.state.row, token, position)
            token += 1
    assert step.query_start_loc[-1] == token == len(step.positions)
    assert step.num_decodes == sum(span.is_decode for span in spans)
    assert step.max_seq_len == max(span.stop for span in spans)


def _check_slots(store, step, row, token, position):
    pages = {group.name: store.tables[group.name].held(row) for group in GROUPS}

    def slot(group, entry):
        page = pages[group.name][entry // group.page_size]
        return page * group.page_size + entry % group.page_size

    for group in GROUPS:
        got = int(step.groups[group.name].slot_mapping[token])
        closes = (position + 1) % group.ratio == 0
        assert got == (slot(group, position // group.ratio) if closes else -1)
        assert step.groups[group.name].page_size == group.page_size
    by_name = {group.name: group for group in GROUPS}
    window = [slot(by_name["window"], p) for p in range(max(0, position - 127), position + 1)]
    _check_rows(step.window, token, window)
    # Up to MAX_SEQ_LEN tokens the indexers select every entry.
    assert sorted(step.dense) == ["c128", "c4"]
    for name in step.dense:
        ratio = by_name[name].ratio
        visible = [slot(by_name[name], w) for w in range((position + 1) // ratio)]
        _check_rows(step.dense[name], token, visible)
    assert step.index_lens["index"][token] == (position + 1) // 4


def _check_rows(rows, token, expected):
    width = rows.indices.shape[1]
    assert rows.lengths[token] == len(expected)
    assert rows.indices[token].tolist() == expected + [-1] * (width - len(expected))


@pytest.mark.parametrize("host_tokens", [0, 16], ids=["by operations", "on the host"])
def test_dtypes_are_those_that_the_operations_take(monkeypatch, host_tokens):
    monkeypatch.setattr(step_plan, "HOST_TOKENS", host_tokens)
    store = _store(1)
    step = StepPlanner(store).build([Span(_admitted(store, "a"), 0, [1, 2, 3], False)])
    for tensor in (step.token_ids, step.positions):
        assert tensor.dtype == torch.int64
    for tensor in (
        step.token_to_req,
        step.seq_lens,
        step.query_start_loc,
        step.index_lens["index"],
    ):
        assert tensor.dtype == torch.int32
    assert step.is_valid.dtype == torch.bool
    for group in step.groups.values():
        assert group.block_table.dtype == torch.int32
        assert group.slot_mapping.dtype == torch.int64


def test_only_dense_layers_list_more_entries_than_an_indexer_selects():
    groups = {group.name: group for group in GROUPS}
    assert groups["c4"].lists_entries(4 * 512 + 3)
    assert not groups["c4"].lists_entries(4 * 513)
    assert groups["c128"].lists_entries(1 << 20)
    assert not any(groups[name].lists_entries(1) for name in ("window", "state_c4", "index"))


def test_draft_layers_get_their_window_only():
    store = _store(1)
    state = _admitted(store, "a")
    step = StepPlanner(store).build([Span(state, 0, [1], True)], window_only=True)
    assert list(step.groups) == ["window"]
    assert not step.index_lens
    assert not step.dense
    assert not store.tables["c4"].held(state.row)
    assert not store.tables["state_c4"].held(state.row)


def test_workspaces_are_largest_where_a_queries_share_of_rows_is_used_up():
    store = _store(1)
    assert StepPlanner(store).longest_chunks(4, 1 << 20) == []
    planner = StepPlanner(store, chunks=True)
    # 128 rows a query: 512 entries for 4 tokens, which are 2048 or 65536 tokens of context.
    assert planner.longest_chunks(4, 1 << 20) == [1 << 20, 65536, 2048]
    assert planner.longest_chunks(4, 3000) == [3000, 2048]
    assert planner.longest_chunks(4, 3) == [4]
