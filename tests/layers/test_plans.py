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
