"""Passkeys in the trained tiny checkpoint's text, right and with one thing broken."""

import copy
import dataclasses
import pathlib

import pytest

from anymla import LLM
from anymla.runtime.engine import Engine
from anymla.runtime.request import Request
from anymla.testing.retrieval import ANSWER, FAULTS, ask, hide, read, survey
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"
BREAKS_THE_ANSWER = {"stale index rows", "half a page swapped"}


class NotCopied:
    """Something of a device that exists once."""

    def __deepcopy__(self, memo: object) -> None:
        raise TypeError("cannot copy it")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(TINY / "checkpoint", dtype="fp32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def text() -> str:
    return (TINY / "persuasion.txt").read_text("utf-8")


@pytest.mark.parametrize("depth", [0, 0.5, 1])
def test_a_fact_is_hidden_where_it_was_asked_for(llm, text, depth) -> None:
    hidden = hide(llm, text, 1024, depth, seed=7)
    assert len(hidden.token_ids) == 1024 + hidden.question
    assert abs(hidden.place - depth * 1024) < 220  # the first sentence is long
    words = llm.tokenizer.decode(hidden.token_ids)
    assert words.count(f"\nThe passkey is {hidden.digits}.\n") == 1
    assert words.endswith("What is the passkey?")
    assert hide(llm, text, 1024, depth, seed=8).digits != hidden.digits


def test_a_text_that_is_too_short_is_refused(llm) -> None:
    with pytest.raises(ValueError, match=r"a text of \d+ tokens cannot be made 1024"):
        hide(llm, "Too short.", 1024, 0.5)


def test_caches_that_are_broken_lose_it_and_the_right_ones_do_not(llm, text) -> None:
    """The engine that read the text stays as it was, whatever was broken in its copies."""
    hidden = hide(llm, text, 1024, 0.25, seed=1)
    steps: list[int] = []
    engine = read(llm, hidden, steps.append)
    assert sum(steps) == 1024
    right = ask(llm, engine, hidden)
    answers = {fault.name: ask(llm, engine, hidden, fault) for fault in FAULTS}
    assert right.found
    assert {name for name, answer in answers.items() if not answer.found} == BREAKS_THE_ANSWER
    # Nothing that is printed beside it gives that away.
    assert all(0.2 < answer.confidence <= 1 for answer in answers.values())
    assert ask(llm, engine, hidden) == right
    assert right.drafted >= right.accepted > 0


def test_an_engine_with_steps_of_fixed_sizes_is_copied(llm, text) -> None:
    """A copy has steps of its own: graphs hold addresses, and streams exist once."""
    hidden = hide(llm, text, 512, 0.5, seed=2)
    request = Request("one", hidden.token_ids, max_new_tokens=ANSWER)
    options = dataclasses.replace(llm.engine([request]).options, decode="fixed")
    engine = Engine(llm.model, options)
    before = engine.run([request])[0].token_ids
    engine._runner._side = NotCopied()
    copied = copy.deepcopy(engine, {id(llm.model): llm.model})
    assert copied.run([request])[0].token_ids == before
    assert engine._runner._steps


@pytest.mark.gpu
def test_passkeys_are_found_by_graphs(text) -> None:
    llm = LLM(TINY / "checkpoint", device="cuda")
    assert all(each.answer.found for each in survey(llm, text, [8192], [0.5], ()))


def test_a_survey_goes_through_all_cells(llm, text) -> None:
    found = list(survey(llm, text, [512, 1024], [0.3], FAULTS[2:3]))
    cells = [(each.length, each.fault) for each in found]
    assert cells == [
        (512, "none"),
        (512, "stale index rows"),
        (1024, "none"),
        (1024, "stale index rows"),
    ]
    assert all(each.answer.found for each in found if each.fault == "none")
    assert found[0].as_dict()["found"] is True


def test_a_checkpoint_without_a_chat_template_is_asked_by_the_sentence_itself(
    tmp_path, text
) -> None:
    options = TinyOptions(
        ratios=(0, 4), hidden=128, heads=2, o_groups=1, experts=8, moe_size=64, vocab=258
    )  # whose tokenizer lacks the tokens of a dialogue
    write_tiny_checkpoint(tmp_path, options)
    random = LLM(tmp_path, dtype="fp32", device="cpu")
    hidden = hide(random, text, 700, 0.5)
    assert random.tokenizer.decode(hidden.token_ids).endswith("\nThe passkey is")
    assert not ask(random, read(random, hidden), hidden).found
