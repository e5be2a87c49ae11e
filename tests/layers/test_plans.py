from unittest import mock

import torch

from anymla.layers import plans
from anymla.layers.rows import Rows


def rows(tokens: int, width: int) -> Rows:
    return Rows(torch.zeros(tokens, width).int(), torch.ones(tokens).int())


def test_layers_that_list_alike_share_a_plan(monkeypatch):
    made = []

    def make(lengths, extra_lengths, **sizes):
        made.append((lengths, extra_lengths, sizes))
        return torch.tensor(len(made))

    monkeypatch.setattr(plans, "sparse_attention_plan", make)
    step, window = plans.Plans(), rows(3, 128)
    some = [step.of("C4", 8, window, rows(3, 512)) for _ in range(3)]
    assert some[0] is some[1] is some[2]
    others = [
        step.of("C128", 8, window, rows(3, 512)),
        step.of("C4", 8, window.first(2), rows(2, 512)),
        step.of(None, 8, window, None),
        step.of("C4", 4, window, rows(3, 512)),
    ]
    assert [int(each) for each in (some[0], *others)] == [1, 2, 3, 4, 5]
    assert made[3] == (window.lengths, None, {"heads": 8, "width": 128, "extra_width": None})
    assert plans.Plans().of(None, 8, window, None) is not others[2]


def test_a_graph_follows_plans_of_its_own(monkeypatch):
    made, capturing = [], [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(plans, "sparse_attention_plan", lambda *_, **__: made.append(0) or made)
    step, window = plans.Plans(), Rows(torch.zeros(3, 128), mock.Mock(is_cuda=True))
    for capturing[0], count in ((False, 1), (True, 2), (True, 2), (False, 2)):
        step.of("C4", 8, window, None)
        assert len(made) == count
