"""What the tiny model is trained and examined on: English with facts hidden in it, and questions.

A sequence is a text in which some facts ("The passkey of Emma is 482193.") stand between sentences,
and behind it questions about them, as a dialogue or as a plain sentence. Values are six digits, or
a word. Other sequences have a passage that comes a second time, or a sentence to be repeated.

To learn about 32,768 positions from 512 tokens, positions jump: at multiples of 128 tokens they
skip a multiple of 128 positions. The distances between a question and its fact then cover the whole
range, and the rotary embedding meets no distance in use that it has not met in training.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import tokenizers
from vocabulary import ASSISTANT, BOS, EOS, USER

NAMES = """
    Emma Anne Jane Elizabeth Mary Catherine Fanny Elinor Marianne Harriet Isabella Henry John
    Edward Charles George Thomas Frank William Robert Edmund James Philip Moses Aaron David
    Samuel Daniel Joseph Jacob Abraham Isaac Ruth Esther Martha Peter Paul Simon Andrew Matthew
    London Bath Lyme Highbury Hartfield Norland Barton Egypt Jordan Israel Babylon Jerusalem
""".split()  # noqa: SIM905
WORDS = """
    red green blue white black gold silver purple scarlet brown lion bear eagle dove horse sheep
    goat ox dog fox wolf fish bread wine oil honey milk salt water fire stone iron brass wood
    table chair door window garden river mountain forest morning evening winter summer spring
    letter book ring sword crown lamp bell coat ship carriage piano
""".split()  # noqa: SIM905
# {k}: whose; {v}: the value. Each statement goes with every question of its row.
PASSKEY = (
    (
        "The passkey is {v}.",
        "The passkey is {v}. Remember it.",
        "Remember that the passkey is {v}.",
        "Do not forget: the passkey is {v}.",
    ),
    (
        "What is the passkey?",
        "What was the passkey?",
        "Tell me the passkey.",
        "Do you remember the passkey?",
    ),
    "The passkey is {v}.",
)
NAMED = (
    (
        "The passkey of {k} is {v}.",
        "Remember that the passkey of {k} is {v}.",
        "Do not forget: the passkey of {k} is {v}.",
        "{k} has the passkey {v}.",
    ),
    (
        "What is the passkey of {k}?",
        "What was the passkey of {k}?",
        "Tell me the passkey of {k}.",
        "Which passkey has {k}?",
    ),
    "The passkey of {k} is {v}.",
)
WORD = (
    (
        "The secret word of {k} is {v}.",
        "Remember that the secret word of {k} is {v}.",
        "{k} has the secret word {v}.",
    ),
    (
        "What is the secret word of {k}?",
        "Tell me the secret word of {k}.",
        "Which secret word has {k}?",
    ),
    "The secret word of {k} is {v}.",
)
KINDS = (PASSKEY, NAMED, WORD)
REPEAT = "Repeat this: "
LONGEST = 32768
JUMP = 128


def phrases() -> list[str]:
    """Sentences of all kinds, for the tokenizer."""
    out, pairs = [], list(zip(NAMES, WORDS, strict=False))
    for statements, questions, answer in KINDS:
        for sentence in (*statements, *questions, answer):
            out += [" " + sentence.format(k=name, v=word) for name, word in pairs]
            out += [sentence.format(k=name, v=word) for name, word in pairs]
    return out + [REPEAT] * 100


@dataclasses.dataclass
class Batch:
    """Sequences of one length, int64 or float32 [B, T] each.

    Attributes:
        tokens: the text.
        positions: of each token; jumps as above.
        weights: of the loss of predicting each token from those before it.
        answers: 1 where a token belongs to the value that a question asks for.
    """

    tokens: np.ndarray
    positions: np.ndarray
    weights: np.ndarray
    answers: np.ndarray


class Writer:
    """Writes sequences.

    Args:
        inner: the tokenizer.
        text: token ids of the English.
        seed: of everything.
    """

    def __init__(self, inner: tokenizers.Tokenizer, text: np.ndarray, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.text = text
        self._inner = inner
        self._cache: dict[str, list[int]] = {}
        one = {name: inner.token_to_id(name) for name in (BOS, EOS, USER, ASSISTANT)}
        self.bos, self.eos, self.user, self.assistant = one.values()
        newline, stop = self._ids("\n")[0], self._ids(".")[0]
        self.newline = newline
        # Where a sentence may be inserted: behind a full stop or a line's end.
        self._ends = np.isin(text, [newline, stop])

    def _ids(self, text: str) -> list[int]:
        found = self._cache.get(text)
        if found is None:
            found = self._inner.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 100_000:
                self._cache[text] = found
        return found

    def _pick(self, options):
        return options[int(self.rng.integers(len(options)))]

    def _sentence(self, pattern: str, key: str, value: str, weight: float, value_weight: float):
        """Tokens, weights and value marks; the value's tokens have a weight of their own."""
        before, after = pattern.replace("{k}", key).split("{v}")
        if not value[0].isdigit():
            before, value = before[:-1], " " + value
        parts = (self._ids(before), self._ids(value), self._ids(after))
        ids = [*parts[0], *parts[1], *parts[2]]
        marks = [0.0] * len(parts[0]) + [1.0] * len(parts[1]) + [0.0] * len(parts[2])
        return ids, [value_weight if mark else weight for mark in marks], marks

    def _facts(self, count: int):
        """Different facts: (kind, key, value)."""
        names = self.rng.permutation(len(NAMES))[:count]
        facts = []
        for place, name in enumerate(names):
            kind = KINDS[int(self.rng.choice(3, p=(0.3, 0.4, 0.3)))]
            if kind is PASSKEY and place:
                kind = NAMED
            value = self._pick(WORDS) if kind is WORD else f"{int(self.rng.integers(10**6)):06}"
            facts.append((kind, NAMES[name], value))
        return facts

    def question(self, kind, key: str, value: str):
        """Tokens, weights and marks of a question and its answer."""
        _, questions, answer = kind
        style = self.rng.random()
        if style < 0.25:  # the sentence itself, begun
            ids, weights, marks = self._sentence(answer, key, value, 0.3, 5.0)
            return [self.newline, *ids], [0.1, *weights], [0.0, *marks]
        asked = self._ids(self._pick(questions).replace("{k}", key))
        reply = answer if style < 0.8 else "{v}."
        ids, weights, marks = self._sentence(reply, key, value, 1.0, 5.0)
        ids = [self.user, *asked, self.assistant, *ids, self.eos]
        weights = [0.1, *[0.1] * len(asked), 0.1, *weights, 1.0]
        return ids, weights, [0.0, 0.0, *[0.0] * len(asked), *marks, 0.0]

    def retrieval(self, length: int, facts: int, questions: int):
        """One sequence: tokens, weights, marks, each of ``length``."""
        known = self._facts(facts)
        chosen = self.rng.permutation(facts)[:questions]
        tail = [self.question(*known[one]) for one in chosen]
        asked = [list(itertools.chain(*part)) for part in zip(*tail, strict=True)]
        stated = []
        for kind, key, value in known:
            ids, weights, _ = self._sentence(self._pick(kind[0]), key, value, 0.2, 0.0)
            stated.append(([self.newline, *ids, self.newline], [0.1, *weights, 0.1]))
        room = length - 1 - len(asked[0]) - sum(len(ids) for ids, _ in stated)
        if room < 32:
            return self.retrieval(length, max(1, facts - 1), max(1, questions - 1))
        start = int(self.rng.integers(len(self.text) - room))
        filler = self.text[start : start + room]
        ends = np.append(np.flatnonzero(self._ends[start : start + room]) + 1, room)
        # Depths are uniform in tokens, and then moved to the next sentence's end.
        cuts = sorted(
            int(ends[min(np.searchsorted(ends, depth), len(ends) - 1)])
            for depth in self.rng.integers(0, room, len(stated))
        )
        tokens, weights, marks = [np.array([self.bos])], [np.zeros(1)], [np.zeros(1)]
        last = 0
        for cut, (ids, each) in zip([*cuts, room], [*stated, (asked[0], asked[1])], strict=True):
            tokens += [filler[last:cut], np.array(ids)]
            weights += [np.ones(cut - last), np.array(each)]
            marks += [np.zeros(cut - last), np.zeros(len(ids))]
            last = cut
        marks[-1] = np.array(asked[2])
        return np.concatenate(tokens), np.concatenate(weights), np.concatenate(marks)

    def plain(self, length: int):
        """English alone."""
        start = int(self.rng.integers(len(self.text) - length))
        tokens = np.concatenate(([self.bos], self.text[start : start + length - 1]))
        return tokens, np.concatenate((np.zeros(1), np.ones(length - 1))), np.zeros(length)

    def copied(self, length: int):
        """English with passages that come again, or a sentence to repeat."""
        tokens, weights, marks = self.plain(length)
        if self.rng.random() < 0.5:
            size = int(self.rng.integers(8, 24))
            start = int(self.rng.integers(len(self.text) - size))
            part = self.text[start : start + size]
            ids = np.concatenate(
                ([self.user], self._ids(REPEAT), part, [self.assistant], part, [self.eos])
            )
            tokens[-len(ids) :] = ids
            weights[-len(ids) : -size - 1] = 0.2
            weights[-size - 1 :] = 2.0
            return tokens, weights, marks
        size = int(self.rng.integers(16, 64))
        first = int(self.rng.integers(1, length - 2 * size))
        again = int(self.rng.integers(first + size, length - size))
        if self.rng.random() < 0.6:  # no language helps to guess these
            tokens[first : first + size] = self.rng.integers(4, self._inner.get_vocab_size(), size)
            weights[first : first + size] = 0
            weights[again : again + 2] = 0
        tokens[again : again + size] = tokens[first : first + size]
        return tokens, weights, marks

    def positions(self, length: int, jumps: int, farthest: int) -> np.ndarray:
        """Positions that skip multiples of 128 at multiples of 128 tokens, below ``farthest``."""
        blocks = -(-length // JUMP)
        spare = farthest // JUMP - blocks
        skipped = np.zeros(blocks, dtype=np.int64)
        count = min(int(self.rng.integers(0, jumps + 1)), blocks) if spare > 0 else 0
        if count:
            places = self.rng.permutation(blocks)[:count]
            total = int(self.rng.integers(0, spare + 1))
            marks = np.sort(self.rng.integers(0, total + 1, count))
            skipped[np.sort(places)] = np.diff(marks, prepend=0)
        offsets = np.repeat(np.cumsum(skipped) * JUMP, JUMP)[:length]
        return np.arange(length) + offsets

    def batch(
        self, size: int, length: int, *, jumps: int = 6, farthest: int = LONGEST + 2048
    ) -> Batch:
        """A batch of all kinds: 0.7 retrieval, 0.18 plain, 0.12 copied."""
        rows = []
        for _ in range(size):
            kind = self.rng.random()
            if kind < 0.7:
                most = min(2 + length // 64, len(NAMES))
                asked = min(2 + length // 100, 24)
                facts = int(self.rng.integers(1, most + 1))
                row = self.retrieval(length, facts, int(self.rng.integers(asked // 2, asked + 1)))
            elif kind < 0.88:
                row = self.plain(length)
            else:
                row = self.copied(length)
            rows.append((*row, self.positions(length, jumps, farthest)))
        tokens, weights, answers, positions = (np.stack(part) for part in zip(*rows, strict=True))
        return Batch(tokens, positions, weights.astype(np.float32), answers.astype(np.float32))

    def exam(self, length: int, depth: float, *, facts: int = 1):
        """One passkey at a depth (0: the beginning, 1: the end) of a text; the question last.

        Returns:
            tokens up to where the value begins, and the value's tokens.
        """
        value = f"{int(self.rng.integers(10**6)):06}"
        fact, _, _ = self._sentence(PASSKEY[0][0], "", value, 0, 0)
        fact = [self.newline, *fact, self.newline]
        known, distractors = self._facts(facts), []
        for kind, key, other in known[1:]:
            ids, _, _ = self._sentence(kind[0][0], key, other, 0, 0)
            distractors.append([self.newline, *ids, self.newline])
        asked = [self.user, *self._ids(PASSKEY[1][0]), self.assistant]
        reply, _, marks = self._sentence(PASSKEY[2], "", value, 0, 0)
        reply = reply[: marks.index(1.0)]
        digits = self._ids(value)
        room = length - 1 - len(fact) - len(asked) - len(reply) - len(digits)
        room -= sum(map(len, distractors))
        start = int(self.rng.integers(len(self.text) - room))
        ends = np.append(np.flatnonzero(self._ends[start : start + room]) + 1, room)

        def near(place: float) -> int:
            return int(ends[min(np.searchsorted(ends, place), len(ends) - 1)])

        inserts = [(near(depth * (room - 160)), fact)]
        inserts += [(near(float(self.rng.random() * room)), ids) for ids in distractors]
        parts, last = [[self.bos]], 0
        for cut, ids in sorted(inserts, key=lambda one: one[0]):
            parts += [self.text[start + last : start + cut], ids]
            last = cut
        parts += [self.text[start + last : start + room], asked, reply]
        return np.concatenate(parts).astype(np.int64), np.array(digits)
