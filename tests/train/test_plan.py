from __future__ import annotations

import itertools

import pytest
import torch

from anymla.train import Plan

LENGTHS = (0, 1, 3, 4, 5, 0, 127, 128, 129, 0)


def starts(lengths):
    return list(itertools.accumulate(lengths, initial=0))


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("known", [True, False], ids=["host", "device"])
def test_each_token_sees_its_own_sequence(monkeypatch, ratio, known):
    cu = torch.tensor(starts(LENGTHS), dtype=torch.int32)
    if known:
        plan = Plan(cu, ratio, 128)
        assert plan.num_entries == sum(n // ratio if ratio else 0 for n in LENGTHS)
        assert plan.most_entries == (129 // ratio if ratio else 0)
    else:  # as if it were on another device
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        plan = Plan(cu, ratio, 128, tokens=sum(LENGTHS))
        assert plan.num_entries >= sum(n // ratio if ratio else 0 for n in LENGTHS)
    token, entry = 0, sum(LENGTHS)
    for number, length in enumerate(LENGTHS):
        for position in range(length):
            seen = min(position + 1, 128)
            visible = (position + 1) // ratio if ratio else 0
            want = [token - seen + 1, seen, entry, visible]
            assert plan.ranges[token].tolist() == want
            assert (plan.sequence[token], plan.positions[token]) == (number, position)
            token += 1
        entry += length // ratio if ratio else 0
    assert plan.cu_entries[-1] == entry - sum(LENGTHS)


def test_padding_sees_nothing():
    plan = Plan([0, 3], 4, tokens=5)
    assert plan.ranges[3:, 1].tolist() == [0, 0]
    assert plan.ranges[3:, 3].tolist() == [0, 0]
    assert len(Plan([0], 4).ranges) == 0
    assert Plan([0], 4, tokens=2).ranges[:, [1, 3]].sum() == 0


def test_wrong_arguments_are_named():
    for wrong, message in (([1, 3], "ascend"), ([0, 3, 2], "ascend"), ([[0]], "B \\+ 1")):
        with pytest.raises(ValueError, match=message):
            Plan(wrong)
    with pytest.raises(ValueError, match="end by tokens=2"):
        Plan([0, 3], tokens=2)
    with pytest.raises(ValueError, match="tokens must be given"):
        Plan(torch.zeros(2, dtype=torch.int32, device="meta"))
    with pytest.raises(TypeError, match="int32 or int64"):
        Plan(torch.zeros(2))
