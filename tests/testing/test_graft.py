"""A trained checkpoint with a drafter that was put on it."""

import pathlib
import shutil

import pytest
import torch

from anymla import LLM
from anymla.runtime.request import Request
from anymla.testing.graft import graft_dspark, graft_passing_layer, markov_tables

TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"
PROMPT, NEW = 200, 40


@pytest.fixture(scope="module")
def grafted(tmp_path_factory) -> pathlib.Path:
    place = tmp_path_factory.mktemp("grafted") / "checkpoint"
    shutil.copytree(TINY / "checkpoint", place)
    llm = LLM(place, device="cpu")
    text = (TINY / "persuasion.txt").read_text("utf-8")
    graft_dspark(place, llm.tokenizer.encode(text))
    return place


def test_text_is_the_models_and_some_guesses_are_right(grafted) -> None:
    """Greedy text in float32 with the drafter is the checkpoint's own without one."""
    done = []
    for place in (TINY / "checkpoint", grafted):
        drafts = "dspark" if place == grafted else "off"
        llm = LLM(place, dtype="fp32", device="cpu", threads=1, drafts=drafts)
        text = (TINY / "persuasion.txt").read_text("utf-8")
        prompt = tuple(llm.tokenizer.encode(text)[:PROMPT])
        request = Request("text", prompt, max_new_tokens=NEW)
        done.append(llm.engine([request]).run([request])[0])
    plain, drafted = done
    assert drafted.token_ids == plain.token_ids
    assert plain.drafted == 0
    assert 5 < drafted.accepted < drafted.drafted


def test_a_grafted_checkpoint_is_refused(grafted) -> None:
    with pytest.raises(ValueError, match="has a DSpark drafter"):
        graft_dspark(grafted, [1, 2])


def test_a_passing_layer_changes_no_text(tmp_path) -> None:
    """The text's log-probabilities are those of the checkpoint, with one layer more."""
    place = tmp_path / "checkpoint"
    shutil.copytree(TINY / "checkpoint", place)
    graft_passing_layer(place, 2)
    scores = []
    for each in (TINY / "checkpoint", place):
        llm = LLM(each, dtype="fp32", device="cpu", threads=1, drafts="off")
        text = (TINY / "persuasion.txt").read_text("utf-8")
        tokens = llm.tokenizer.encode(text)[:PROMPT]
        request = Request("text", tuple(tokens), max_new_tokens=0, prompt_logprobs=True)
        (done,) = llm.engine([request]).run([request])
        scores.append(torch.tensor(done.prompt_logprobs[1:]))
    assert llm.config.backbone_ratios == (0, 4, 128, 128, 4)
    torch.testing.assert_close(*scores, rtol=0, atol=5e-3)


def test_a_layer_that_chooses_by_token_id_is_not_copied() -> None:
    with pytest.raises(ValueError, match="no layer 0 that chooses experts by score"):
        graft_passing_layer(TINY / "checkpoint", 0)


def test_tables_hold_the_pairs_of_a_text() -> None:
    """What follows most often has the largest bias, by the logarithm of how often."""
    token_ids = [1, 2, 1, 2, 1, 3, 4, 1, 2]
    first, second = markov_tables(token_ids, 6, 6)
    bias = first @ second.T
    expected = torch.zeros(6, 6)
    for (before, after), seen in {(1, 2): 3, (2, 1): 2, (1, 3): 1, (3, 4): 1, (4, 1): 1}.items():
        expected[before, after] = torch.tensor((seen + 0.05) / 0.05).log()
    torch.testing.assert_close(bias, expected, atol=1e-5, rtol=0)
