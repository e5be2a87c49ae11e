"""How a step's tokens are cut into scoring calls."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anymla.layers.indexer import all_entries, score_spans
from anymla.layers.spec import LayerSpec


@given(
    decodes=st.lists(st.integers(1, 5), max_size=6),
    prefills=st.lists(st.integers(1, 40), max_size=4),
    most_rows=st.integers(1, 50),
)
def test_every_token_is_scored_once_by_its_own_request(decodes, prefills, most_rows):
    lens = tuple(decodes + prefills)
    owner = [request for request, n in enumerate(lens) for _ in range(n)]
    seen = []
    for span in score_spans(lens, len(decodes), most_rows):
        for place in range(span.requests * span.tokens):
            assert owner[span.first_token + place] == span.first_request + place // span.tokens
            seen.append(span.first_token + place)
        assert span.requests * span.tokens <= max(most_rows, *lens[: len(decodes)], 1)
    assert seen == list(range(len(owner)))


def test_equal_decodes_share_a_call():
    spans = list(score_spans((2, 2, 2, 9), 3, 100))
    assert [(s.first_token, s.first_request, s.requests, s.tokens) for s in spans] == [
        (0, 0, 3, 2),
        (6, 3, 1, 9),
    ]


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
