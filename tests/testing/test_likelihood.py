"""What faults of a whole run do to a text's own log-probabilities."""

import pathlib

import pytest
import torch

from anymla import LLM
from anymla.testing.likelihood import LASTING, Moved, compare, logprobs

TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TINY / "checkpoint", dtype="fp32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def text(llm) -> list[int]:
    return llm.tokenizer.encode((TINY / "persuasion.txt").read_text("utf-8"))


def test_a_run_is_measured_against_another() -> None:
    right, other = torch.tensor([-1.0, -2.0, -3.0]).double(), torch.tensor([-1.5, -2, -2]).double()
    moved = Moved.between(right, other)
    assert (moved.tokens, moved.nats, moved.typical, moved.largest) == (3, 5.5 / 3, 0.5, 1.0)
    assert moved.lost == pytest.approx(-0.5 / 3)
    assert moved.error == pytest.approx(float((right - other).std()) / 3**0.5)


def test_faults_move_every_token_that_they_can_reach_and_hardly_the_mean(llm, text) -> None:
    """The window is short from the 128th token on; the model is as it was afterwards."""
    ids = text[:200]
    right = logprobs(llm, ids)
    assert [fault.name for fault in LASTING] == ["sink dropped", "window off by one"]
    sink, window = (logprobs(llm, ids, fault) for fault in LASTING)
    assert torch.equal(right[:126], window[:126])
    assert not torch.equal(right[127:], window[127:])
    assert (right != sink).float().mean() > 0.9
    assert torch.equal(logprobs(llm, ids), right)
    found = dict(compare(llm, ids))
    assert list(found) == ["none", "sink dropped", "window off by one"]
    assert found["none"].largest == 0
    for name in ("sink dropped", "window off by one"):
        assert found[name].largest > 0.01  # float32's own error is below 10^-5
        assert abs(found[name].lost) < 0.1
