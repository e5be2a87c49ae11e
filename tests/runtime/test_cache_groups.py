import dataclasses

import pytest
from fake_model import SPECS
from hypothesis import given
from hypothesis import strategies as st

from anymla.runtime.cache_groups import cache_groups


def test_groups_of_a_hybrid_model():
    groups = {group.name: group for group in cache_groups(SPECS)}
    assert {
        name: (g.kind, g.page_size, g.ratio, g.retention, g.layers, g.dense)
        for name, g in groups.items()
    } == {
        "window": ("window", 64, 1, 128, (0, 1, 2, 3, 4), False),
        "c4": ("compressed", 64, 4, None, (1, 3), False),
        "state_c4": ("state", 4, 1, 8, (1, 3), False),
        "index": ("index", 64, 4, None, (1, 3), False),
        "state_index": ("index_state", 4, 1, 8, (1, 3), False),
        "c128": ("compressed", 2, 128, None, (2,), True),
        "state_c128": ("state", 8, 1, 128, (2,), False),
    }


def test_window_only_model_has_one_group():
    assert [group.name for group in cache_groups(SPECS[:1])] == ["window"]


@pytest.mark.parametrize(("ratio", "entries"), [(1, 256), (2, 128), (100, 2), (512, 1)])
def test_any_ratio(ratio, entries):
    spec = dataclasses.replace(SPECS[2], ratio=ratio)
    groups = {group.name: group for group in cache_groups([spec])}
    assert groups[f"c{ratio}"].page_size == entries
    assert groups[f"state_c{ratio}"].retention == ratio


def test_layers_that_cannot_share_are_refused():
    with pytest.raises(ValueError, match="the same sliding window"):
        cache_groups([SPECS[0], dataclasses.replace(SPECS[1], window=64)])
    with pytest.raises(ValueError, match="the same overlap at ratio 4"):
        cache_groups([SPECS[1], dataclasses.replace(SPECS[3], overlap=False)])


def test_index_keys_of_every_ratio_are_a_group():
    other = dataclasses.replace(SPECS[3], ratio=8)
    groups = {group.name: group for group in cache_groups([SPECS[1], other])}
    assert [name for name in groups if "index" in name] == [
        "index", "state_index", "index_c8", "state_index_c8",
    ]  # fmt: skip
    assert groups["index_c8"].ratio == 8


def test_layers_that_read_what_others_write_keep_nothing():
    latent = {"latent_keys": True, "overlap": False}
    own = dataclasses.replace(SPECS[1], index=0, ratio=2, shares_selection=True, **latent)
    again = dataclasses.replace(own, index=1, kv_source=0)
    reuse = dataclasses.replace(again, index=2, selects=False, selection_width=0, index_source=1)
    single = dataclasses.replace(own, index=3, ratio=1)
    groups = {group.name: group for group in cache_groups([own, again, reuse, single])}
    assert {name: (g.kind, g.page_size, g.layers, g.dense) for name, g in groups.items()} == {
        "window": ("window", 64, (0, 1, 2, 3), False),
        "c1": ("compressed", 256, (3,), False),
        "index_c1": ("index", 256, (3,), False),
        "c2": ("compressed", 128, (0,), False),
        "state_c2": ("state", 8, (0,), False),
        "index_c2": ("index", 128, (0,), False),
    }
    assert groups["c2"].lists_entries(1024)
    assert not groups["c2"].lists_entries(1026)


def _first_needed(group, position):
    """The oldest token whose row a token at ``position`` reads."""
    return 0 if group.retention is None else max(0, position - group.retention + 1)


@given(confirmed=st.integers(0, 3000))
def test_obsolete_pages_are_those_nobody_reads(confirmed):
    for group in cache_groups(SPECS):
        obsolete = group.obsolete_pages(confirmed)
        covered = obsolete * group.tokens_per_page
        assert covered <= _first_needed(group, confirmed)
        if group.retention is not None:
            assert covered + group.tokens_per_page > _first_needed(group, confirmed)


def _held(group, confirmed, stop):
    """Pages held while a request runs tokens confirmed .. stop - 1."""
    return max(0, group.pages(stop) - group.obsolete_pages(confirmed))


@given(length=st.integers(1, 1500), step_tokens=st.integers(1, 300), data=st.data())
def test_no_walk_exceeds_the_worst_case(length, step_tokens, data):
    drawn = data.draw(st.lists(st.integers(1, step_tokens), max_size=20))
    whole = [step_tokens] * (length // step_tokens + 1)
    for group in cache_groups(SPECS):
        bound = group.worst_case_pages(length, step_tokens)
        for counts in (drawn, whole, [1] * length):
            confirmed = 0
            for count in counts:
                stop = min(length, confirmed + count)
                assert _held(group, confirmed, stop) <= bound
                confirmed = stop


@given(step_tokens=st.integers(1, 300))
def test_some_walk_reaches_the_worst_case(step_tokens):
    length = 1000
    for group in cache_groups(SPECS):
        held = [
            _held(group, confirmed, min(length, confirmed + step_tokens))
            for confirmed in range(length)
        ]
        assert max(held) == group.worst_case_pages(length, step_tokens)


def test_worst_case_of_decoding_is_small():
    groups = {group.name: group for group in cache_groups(SPECS)}
    needs = {name: group.worst_case_pages(1_000_000, 1) for name, group in groups.items()}
    assert needs["window"] == 3
    assert needs["state_c4"] == needs["state_index"] == 3
    assert needs["state_c128"] == 17
    assert needs["c4"] == needs["index"] == -(-1_000_000 // 256)
