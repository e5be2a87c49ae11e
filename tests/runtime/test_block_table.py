import torch
from fake_model import SPECS
from hypothesis import given
from hypothesis import strategies as st

from anymla.runtime.block_table import BlockTable, joint_tables
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.page_pool import PagePool

GROUPS = {group.name: group for group in cache_groups(SPECS)}
MAX_SEQ_LEN = 700


def _table(name, max_requests=3):
    pool = PagePool(name, 1 + 3 * (MAX_SEQ_LEN // 4 + 1))
    pool.reserve(pool.capacity)
    tables, columns = joint_tables(
        list(GROUPS.values()),
        max_requests=max_requests,
        max_seq_len=MAX_SEQ_LEN,
        device=torch.device("cpu"),
    )
    return BlockTable(GROUPS[name], pool, tables, columns[name])


actions = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["run", "clear", "look"]), st.integers(1, 200)),
    max_size=40,
)


@given(name=st.sampled_from(sorted(GROUPS)), actions=actions)
def test_tables_name_exactly_the_pages_held(name, actions):
    group, table = GROUPS[name], _table(name)
    lengths = [0, 0, 0]
    for row, action, count in actions:
        if action == "run" and lengths[row] + count <= MAX_SEQ_LEN:
            table.slide(row, lengths[row])
            lengths[row] += count
            table.extend(row, lengths[row])
        elif action == "clear":
            table.clear(row)
            lengths[row] = 0
        elif action == "look":
            _check(group, table, lengths)
    _check(group, table, lengths)
    for row in range(3):
        table.clear(row)
    assert table.pool.held == 0
    assert not table.rows(torch.arange(3), MAX_SEQ_LEN).any()


def _check(group, table, lengths):
    order = torch.tensor([2, 0, 1])
    shown = table.rows(order, MAX_SEQ_LEN)
    assert shown.dtype == torch.int32
    pages = []
    for place, row in enumerate(order.tolist()):
        held = table.held(row)
        expected = [held.get(column, 0) for column in range(shown.shape[1])]
        assert shown[place].tolist() == expected
        pages += held.values()
        # Every token that the next one may read has its page.
        first = 0 if group.retention is None else max(0, lengths[row] - group.retention + 1)
        for position in range(first, lengths[row]):
            if (position + 1) % group.ratio == 0:
                assert position // group.tokens_per_page in held
    assert 0 not in pages
    assert len(set(pages)) == len(pages) == table.pool.held


def test_pages_leave_behind_the_window():
    table = _table("window")
    table.extend(0, 128 + 64)
    table.slide(0, 128 + 62)  # reads positions 63 .. 190
    assert list(table.held(0)) == [0, 1, 2]
    table.slide(0, 128 + 63)  # reads positions 64 .. 191
    assert list(table.held(0)) == [1, 2]
    assert table.rows(torch.tensor([0]), 192)[0].tolist()[0] == 0


def test_width_follows_the_longest_request():
    """In steps of 16 columns."""
    table = _table("state_c128")  # 8 tokens a page
    assert table.rows(torch.tensor([0, 1]), 100).shape == (2, 16)
    assert table.rows(torch.tensor([0, 1]), 128).shape == (2, 16)
    assert table.rows(torch.tensor([0, 1]), 129).shape == (2, 32)
    assert table.rows(torch.tensor([], dtype=torch.int64), 256).shape == (0, 32)
    assert table.rows(torch.tensor([0]), 10 * MAX_SEQ_LEN).shape == (1, 96)
    assert _table("c128").rows(torch.tensor([0]), 1).shape == (1, 16)
