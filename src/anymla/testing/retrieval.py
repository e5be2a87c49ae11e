"""A passkey in a long text: the test if a model finds it, intact and with one thing broken.

This is an end-to-end question: every number of a broken run looks fine, but the answer is wrong. A
run reads the text once. Each fault then gets a copy of the engine with its caches, so that the
fault is the only difference.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence

import torch

from anymla.formats.page_layout import get_layout
from anymla.layers.attention import AttentionLayer
from anymla.model.config_fields import ConfigError
from anymla.runtime.cache_groups import CacheGroup, CacheKind
from anymla.runtime.engine import Engine
from anymla.runtime.llm import LLM
from anymla.runtime.request import Request

FACT = "The passkey is {}."
QUESTION = "What is the passkey?"
DIGITS = 6
# Largest number of tokens of an answer, and fewest tokens of the text around the fact.
ANSWER, _LEAST = 16, 64
_ID = "passkey"


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A text with a passkey in it, followed by a question.

    Attributes:
        token_ids: token ids of text and question.
        digits: digits of the passkey.
        place: index of the token at which the fact begins.
        question: number of tokens of the question, at the end.
    """

    token_ids: tuple[int, ...]
    digits: str
    place: int
    question: int


@dataclasses.dataclass(frozen=True)
class Answer:
    """Answer of a run.

    Attributes:
        text: text of the answer.
        found: True if the text contains the passkey.
        confidence: geometric mean of its tokens' probabilities, a number that looks fine in broken
            runs.
        drafted: number of draft tokens that were verified.
        accepted: number of draft tokens that were right.
    """

    text: str
    found: bool
    confidence: float
    drafted: int
    accepted: int


def hide(llm: LLM, text: str, length: int, depth: float, seed: int = 0) -> Hidden:
    """Hide a passkey in the beginning of a text.

    If the checkpoint has a chat template, the question is a dialogue's; else it is the beginning of
    the fact's own sentence. The result is token ids, which any engine of the checkpoint can run.

    Args:
        llm: model whose tokenizer and template are used.
        text: text without a passkey.
        length: number of tokens of the text with the fact; the question is extra.
        depth: position of the fact, from 0 (the beginning) to 1 (the end of the text).
        seed: seed of the passkey.

    Raises:
        ValueError: the text has too few tokens.
    """
    digits = f"{random.Random(seed).randrange(10**DIGITS):0{DIGITS}}"
    fact = llm.tokenizer.encode(f"\n{FACT.format(digits)}\n", leading=False)
    question = _question(llm)
    # No tokenizer makes fewer tokens of this text than one for eight characters.
    whole = llm.tokenizer.encode(text[: 8 * length])
    room = length - len(fact)
    if not _LEAST <= room <= len(whole):
        raise ValueError(
            f"a text of {len(whole)} tokens cannot be made {length}, "
            f"only {_LEAST + len(fact)} to {len(whole) + len(fact)}"
        )
    ends = set(llm.tokenizer.encode(".", leading=False))
    stops = [at + 1 for at in range(room) if whole[at] in ends] or [room]
    place = min(stops, key=lambda at: abs(at - depth * room))
    ids = (*whole[:place], *fact, *whole[place:room], *question)
    return Hidden(ids, digits, place, len(question))


def _question(llm: LLM) -> list[int]:
    try:
        ids = llm.chat_prompt([{"role": "user", "content": QUESTION}])
    except ConfigError:
        return llm.tokenizer.encode("\n" + FACT.partition(" {}")[0], leading=False)
    return ids[1:] if ids[0] == llm.tokenizer.bos_token_id else ids


def read(llm: LLM, hidden: Hidden, on_tokens: Callable[[int], object] = lambda _: None) -> Engine:
    """Run the text without the question, if its length is a multiple of the chunks'.

    Args:
        llm: model that reads the text.
        hidden: text with the passkey.
        on_tokens: callback with the number of tokens of each step.
    """
    request = Request(
        _ID,
        hidden.token_ids,
        max_new_tokens=ANSWER,
        stop_ids=frozenset(llm.config.eos_token_ids),
    )
    engine = llm.engine([request])
    engine.submit(request)
    before = len(hidden.token_ids) - hidden.question
    while engine.state(_ID).computed + engine.options.chunk_size <= before:
        on_tokens(engine.step().prompt_tokens)
    return engine


def ask(llm: LLM, engine: Engine, hidden: Hidden, fault: Fault | None = None) -> Answer:
    """Answer from a copy of the engine, broken or not; the engine itself is unchanged."""
    engine = copy.deepcopy(engine, {id(llm.model): llm.model})
    with contextlib.nullcontext() if fault is None else fault.broken(engine, hidden):
        done = engine.run()[0]
    return judge(llm, hidden, done.token_ids, done.logprobs, done.drafted, done.accepted)


def judge(
    llm: LLM,
    hidden: Hidden,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    drafted: int = 0,
    accepted: int = 0,
) -> Answer:
    """Judge an engine's answer from its tokens and their natural log-probabilities."""
    text = llm.tokenizer.decode(token_ids)
    mean = sum(logprobs) / len(logprobs) if logprobs else -math.inf
    return Answer(text, hidden.digits in text, math.exp(mean), drafted, accepted)


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one part of the engine.

    Attributes:
        name: name in a word or two.
        words: description in one line.
        broken: context manager that breaks an engine.
        lasting: True if the fault is everywhere, False if in the fact's page only.
    """

    name: str
    words: str
    broken: Callable[[Engine, Hidden], contextlib.AbstractContextManager[None]]
    lasting: bool = False


@contextlib.contextmanager
def _no_sink(engine: Engine, hidden: Hidden) -> Iterator[None]:
    sinks = [
        layer.heads.sink for layer in engine.model.modules() if isinstance(layer, AttentionLayer)
    ]
    kept = [sink.clone() for sink in sinks]
    for sink in sinks:
        sink.fill_(-torch.inf)
    try:
        yield
    finally:
        for sink, value in zip(sinks, kept, strict=True):
            sink.copy_(value)


@contextlib.contextmanager
def _short_window(engine: Engine, hidden: Hidden) -> Iterator[None]:
    store = engine.store
    store.groups = tuple(
        dataclasses.replace(group, retention=group.retention - 1)
        if group.kind == "window" and group.retention
        else group
        for group in store.groups
    )
    yield


def _pages(engine: Engine, hidden: Hidden, group: CacheGroup) -> list[int]:
    """Return the physical pages of a group that hold entries of the fact."""
    held = engine.store.tables[group.name].held(engine.state(_ID).row)
    tokens = group.page_size * group.ratio
    columns = {hidden.place // tokens, (hidden.place + ANSWER) // tokens}
    return [held[column] for column in sorted(columns) if column in held]


def _planes(engine: Engine, kind: CacheKind) -> Iterator[tuple[CacheGroup, list[torch.Tensor]]]:
    """Yield each layer's cache of this kind and ratio 4, with the parts of its pages."""
    for group in engine.store.groups:
        if group.kind != kind or group.ratio != 4:
            continue
        for layer in group.layers:
            cache_format = engine.store.layers[layer].format
            layout = get_layout(cache_format.of(kind))
            planes = layout.planes(getattr(engine.store.layers[layer], kind))
            yield group, [plane for plane in planes if plane is not None]


@contextlib.contextmanager
def _stale_index_rows(engine: Engine, hidden: Hidden) -> Iterator[None]:
    for group, planes in _planes(engine, "index"):
        held = engine.store.tables[group.name].held(engine.state(_ID).row).values()
        pages = _pages(engine, hidden, group)
        # Rows of other text, as another request would have left them.
        other = next(page for page in sorted(held, reverse=True) if page not in pages)
        for plane in planes:
            for page in pages:
                plane[page] = plane[other]
    yield


@contextlib.contextmanager
def _swapped_halves(engine: Engine, hidden: Hidden) -> Iterator[None]:
    for group, planes in _planes(engine, "compressed"):
        for plane in planes:
            for page in _pages(engine, hidden, group):
                plane[page] = plane[page].roll(group.page_size // 2, 0)
    yield


FAULTS = (
    Fault("sink dropped", "attention without the learned sink", _no_sink, lasting=True),
    Fault("window off by one", "127 tokens instead of 128", _short_window, lasting=True),
    Fault("stale index rows", "one page of index keys was never written", _stale_index_rows),
    Fault("half a page swapped", "one page of entries, its halves exchanged", _swapped_halves),
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result at one length and depth.

    Attributes:
        length: number of tokens of the text.
        depth: position of the fact, 0 to 1.
        fault: name of the fault, "none" without one.
        answer: answer of the run.
        engine: name of the engine that answered.
    """

    length: int
    depth: float
    fault: str
    answer: Answer
    engine: str = "anymla"

    def as_dict(self) -> dict[str, object]:
        """Convert to a row of a file."""
        own = {name: getattr(self, name) for name in ("length", "depth", "fault", "engine")}
        return own | dataclasses.asdict(self.answer)


def questions(
    llm: LLM, text: str, lengths: Sequence[int], depths: Sequence[float]
) -> Iterator[tuple[int, float, Hidden]]:
    """Yield a hidden passkey of its own for every length and depth.

    Raises:
        ValueError: the text has too few tokens.
    """
    for length in lengths:
        for depth in depths:
            yield length, depth, hide(llm, text, length, depth, seed=length + round(100 * depth))


def survey(
    llm: LLM,
    text: str,
    lengths: Sequence[int],
    depths: Sequence[float],
    faults: Sequence[Fault] = FAULTS,
) -> Iterator[Finding]:
    """Ask at every length and depth, intact and with every fault."""
    for length, depth, hidden in questions(llm, text, lengths, depths):
        engine = read(llm, hidden)
        yield Finding(length, depth, "none", ask(llm, engine, hidden))
        for fault in faults:
            yield Finding(length, depth, fault.name, ask(llm, engine, hidden, fault))
