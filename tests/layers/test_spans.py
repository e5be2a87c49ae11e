"""How a step's tokens are cut into scoring calls."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.layers.selection import SelectionCall, all_entries, selection_calls
from anymla.layers.spec import LayerSpec


@given(
    decodes=st.lists(st.integers(1, 5), max_size=6),
    prefills=st.lists(st.integers(0, 40), max_size=4),
    ragged=st.booleans(),
)
def test_every_token_selects_once_by_its_own_request(decodes, prefills, ragged):
    lens = tuple(decodes + prefills)
    owner = [request for request, n in enumerate(lens) for _ in range(n)]
    seen = []
    for call in selection_calls(lens, len(decodes), ragged=ragged):
        tokens = range(call.first_token, call.end_token)
        requests = range(call.first_request, call.end_request)
        assert [n for r in requests for n in [r] * lens[r]] == [owner[t] for t in tokens]
        assert call.ragged == (len({lens[r] for r in requests}) > 1)
        assert ragged or not call.ragged
        seen += tokens
    assert seen == list(range(len(owner)))


def test_equal_decodes_share_a_call():
    calls = list(selection_calls((2, 2, 2, 9, 5), 3, ragged=True))
    assert calls == [SelectionCall(0, 3, 0, 6, False), SelectionCall(3, 5, 6, 20, True)]
    calls = list(selection_calls((2, 2, 2, 9, 9), 3, ragged=False))
    assert [(c.first_request, c.end_request) for c in calls] == [(0, 3), (3, 4), (4, 5)]


def test_all_entries_are_a_prefix():
    got = all_entries(torch.tensor([0, 2, 3], dtype=torch.int32), 3)
    assert got.tolist() == [[-1, -1, -1], [0, 1, -1], [0, 1, 2]]
    assert got.dtype == torch.int32


@pytest.mark.parametrize(
    ("ratio", "overlap", "selects", "groups", "pooled"),
    [
        (0, False, False, ("window",), 0),
        (4, True, True, ("window", "c4", "state_c4", "index", "state_index"), 8),
        (128, False, False, ("window", "c128", "state_c128"), 128),
        (2, False, False, ("window", "c2", "state_c2"), 2),
    ],
)
def test_groups_follow_from_the_ratio(ratio, overlap, selects, groups, pooled):
    spec = LayerSpec(0, "backbone", ratio, overlap, selects, 128, 512)
    assert spec.groups == groups
    assert spec.pooled_tokens == pooled
