"""Which width a step is given, from scripted steps."""

import dataclasses

import pytest
import torch

from anymla.layers.ranks import ALONE, Ranks
from anymla.runtime.draft_width import DraftWidth, draft_widths

CPU = torch.device("cpu")


def _run(width, steps, requests, right, seconds, rng):
    """Steps of which draft i is right, with those before it, with probability right ** i."""
    taken = []
    for _ in range(steps):
        drafts = width.next(requests)
        taken.append(drafts)
        verified = []
        for _ in range(requests):
            accepted = 0
            while accepted < drafts and torch.rand((), generator=rng) < right:
                accepted += 1
            verified.append((drafts, accepted))
        width.observe(requests, verified, seconds(drafts))
    return taken


def test_widths_end_with_all_drafts():
    assert draft_widths(5) == (0, 1, 2, 3, 5)
    assert draft_widths(2) == (0, 1, 2)
    assert draft_widths(1) == (0, 1)


@pytest.mark.parametrize(
    ("right", "row", "best"),
    [
        (0.9, 0.05, 5),  # tokens 1, 1.9, 2.71, 3.44, 4.69 at 1, 1.05, 1.1, 1.15, 1.25
        (0.5, 0.4, 1),  # 1, 1.5, 1.75, 1.88, 1.97 at 1, 1.4, 1.8, 2.2, 3
        (0.5, 0.2, 2),  # at 1, 1.2, 1.4, 1.6, 2: 1, 1.25, 1.25, ...
        (0.1, 0.3, 0),
    ],
)
def test_the_width_of_most_tokens_a_second(right, row, best):
    width, rng = DraftWidth(5, ALONE, CPU), torch.Generator().manual_seed(3)
    taken = _run(width, 600, 8, right, lambda drafts: 1 + row * drafts, rng)
    assert set(taken[:15]) == {0, 1, 2, 3, 5}  # each has been tried
    last = taken[-320:]
    near = {best, 1, 2} if row == 0.2 else {best}
    assert sum(drafts in near for drafts in last) >= 300
    assert last.count(5) >= 10  # what wide steps would bring is looked at now and then


def test_another_number_of_requests_has_times_of_its_own():
    width, rng = DraftWidth(5, ALONE, CPU), torch.Generator().manual_seed(0)
    few = _run(width, 200, 1, 0.7, lambda drafts: 1 + 0.01 * drafts, rng)
    many = _run(width, 200, 32, 0.7, lambda drafts: 1 + 2.0 * drafts, rng)
    assert few[-20:].count(5) >= 19
    assert many[-20:].count(0) >= 19
    assert _run(width, 20, 1, 0.7, lambda drafts: 1.0, rng).count(5) >= 19


def test_rates_follow_the_text():
    width, rng = DraftWidth(5, ALONE, CPU), torch.Generator().manual_seed(0)
    cost = lambda drafts: 1 + 0.1 * drafts  # noqa: E731
    assert _run(width, 300, 4, 0.95, cost, rng)[-20:].count(5) >= 19
    assert _run(width, 900, 4, 0.02, cost, rng)[-20:].count(0) >= 18


def test_ranks_choose_what_rank_0_does():
    """Whose steps take as long as they may: only the choice is exchanged."""
    told = []

    @dataclasses.dataclass(frozen=True)
    class Follower(Ranks):
        def agree(self, numbers, device):
            return [told.pop(0)]

    class Teller(Ranks):
        def agree(self, numbers, device):
            told.append(numbers[0])
            return numbers

    first, second = DraftWidth(5, Teller(0, 2), CPU), DraftWidth(5, Follower(1, 2), CPU)
    taken = []
    for number in range(400):
        widths = first.next(3), second.next(3)
        assert widths[0] == widths[1]
        taken.append(widths[0])
        verified = [(widths[0], min(widths[0], number % 3))] * 3
        first.observe(3, verified, 1 + 0.01 * widths[0])
        second.observe(3, verified, 5 - 0.5 * widths[0] + number % 7)
    assert not told
    assert len(set(taken[-100:])) > 1


def test_steps_beside_prompts_have_no_time():
    width = DraftWidth(1, ALONE, CPU)
    for _ in range(10):
        assert width.next(2) == 1
        width.observe(3, [(1, 1), (1, 0)], None)
    for _ in range(3):
        width.observe(2, [(1, 1), (1, 0)], 0.5)
    assert width.next(2) == 0
