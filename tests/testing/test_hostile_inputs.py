import pytest
import torch

from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, ROWS_FP32_128
from anymla.testing.allocation import LargestAllocation
from anymla.testing.generate import (
    INT32_MAX,
    INT32_MIN,
    guarded_cache,
    hostile_indices,
    scatter_hostile,
    scattered_pages,
    slots_of,
)


def test_hostile_indices_are_all_outside_and_of_every_kind() -> None:
    indices = hostile_indices(10, 40, 20)
    assert indices.dtype == torch.int32
    assert set(indices.flatten().tolist()) == {INT32_MIN, -2, -1, 10, 11, INT32_MAX}


def test_scattered_hostile_columns_keep_the_valid_ones() -> None:
    valid = torch.arange(12, dtype=torch.int32).view(3, 4)
    mixed = scatter_hostile(valid, 5, 12)
    assert mixed.shape == (3, 9)
    inside = (mixed >= 0) & (mixed < 12)
    assert mixed[inside].view(3, 4).sort(1).values.tolist() == valid.tolist()
    places = {tuple(row.tolist()) for row in inside}
    assert len(places) > 1


@pytest.mark.parametrize("layout_id", [MAIN_FP8, INDEX_FP8, ROWS_FP32_128])
def test_a_guarded_cache_sees_writes_and_knows_its_entries(layout_id: str) -> None:
    guarded = guarded_cache(layout_id, 3, 5)
    rows = torch.randn(2, guarded.layout.channels)
    guarded.write(torch.tensor([0, 7]), rows)
    assert not len(guarded.changed())
    guarded.layout.write(guarded.cache, torch.tensor([13]), rows[:1])
    changed = set(guarded.changed().tolist())
    assert changed
    assert changed <= guarded.entry_bytes(13)
    assert not changed & guarded.entry_bytes(12)
    assert guarded.cache.stride(0) * guarded.cache.element_size() % 16 == 0


def test_unwritten_rows_of_a_guarded_cache_are_nan() -> None:
    for layout_id in (MAIN_FP8, INDEX_FP8, ROWS_FP32_128):
        guarded = guarded_cache(layout_id, 2, 4)
        row = guarded.layout.read(guarded.cache, torch.tensor([5]), torch.float32)
        assert row.isnan().all()


def test_pages_of_requests_are_distinct_and_never_the_null_page() -> None:
    table, pages = scattered_pages([5, 0, 17], 4, spare=2)
    counts = [2, 0, 5]
    used = [int(page) for row, count in zip(table, counts, strict=True) for page in row[:count]]
    assert len(set(used)) == 7
    assert min(used) >= 1
    assert max(used) < pages == 10
    for row, count in zip(table, counts, strict=True):
        rest = row[count:]
        assert len(rest) >= 2
        assert ((rest < 0) | (rest >= pages)).all()
    slots = slots_of(table, 2, torch.arange(17), 4)
    assert len(set(slots.tolist())) == 17
    assert slots[9] == table[2, 2] * 4 + 1


def test_the_largest_allocation_is_seen_and_views_are_free() -> None:
    x = torch.ones(1000)
    with LargestAllocation() as largest:
        views = (x.view(10, 100).T, x.expand(50, 1000))
    assert largest.num_bytes == 0
    assert len(views) == 2
    with LargestAllocation() as largest:
        (x.unsqueeze(1) * x[:20]).sum()
    assert largest.num_bytes == 1000 * 20 * 4
