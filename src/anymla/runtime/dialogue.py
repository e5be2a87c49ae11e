"""Answers of a dialogue as they are generated, and an engine that keeps caches between turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from anymla.model.answers import AnswerStream, Part
from anymla.model.encoding import DSML, THINK, THOUGHT
from anymla.model.tokenizer import Tokenizer
from anymla.model.transformer import Transformer
from anymla.ops.memory import NotEnoughMemory
from anymla.runtime.engine import Engine
from anymla.runtime.generation import Generation
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Completion, Request
from anymla.runtime.stop_text import StopText

# Caches for this many tokens take a few hundred megabytes for the largest model.
_FIRST_ROOM = 32_768
# Marks that separate the parts of an answer; a tokenizer may hide them as special tokens.
_ANSWER_MARKS = (THINK, THOUGHT, DSML)


class Dialogue:
    """An engine for one dialogue, whose caches stay between the turns.

    Each turn computes new tokens only: the engine continues where the prompt differs from what it
    has read and said before. Generated token ids are reused, so that encoding the text again cannot
    change them.
    """

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer,
        options: EngineOptions,
        *,
        ends: frozenset[int],
    ) -> None:
        """Allocate nothing yet.

        Args:
            model: network that answers.
            tokenizer: tokenizer of the checkpoint.
            options: options of an engine; the dialogue itself sets the number of requests and the
                room.
            ends: ids of tokens that end an answer.
        """
        self._model = model
        self._tokenizer = tokenizer
        # One of these tokens follows an answer, or its thinking.
        self._behind_answers = {*ends, tokenizer.token_id(THOUGHT)}
        self._options = dataclasses.replace(
            options, max_requests=1, keep_caches=True, pages=None, max_batch_tokens=None
        )
        self._room = min(_FIRST_ROOM, model.config.max_position_embeddings)
        self._engine: Engine | None = None
        self._text = ""
        self._tokens: tuple[int, ...] = ()

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, with the last answer's ids if it continues the answer.

        If anything but the end of an answer follows, the whole prompt is encoded as text: a word
        could be split between the two parts.
        """
        if self._text and text.startswith(self._text):
            more = self._encode(text[len(self._text) :])
            if more and more[0] in self._behind_answers:
                return (*self._tokens, *more)
        return tuple(self._encode(text))

    def _encode(self, text: str) -> list[int]:
        most = self._model.config.max_position_embeddings
        return self._tokenizer.encode(text, leading=False, most=most)

    def engine(self, request: Request) -> Engine:
        """Return an engine with room for the request, which is not submitted yet.

        If a dialogue outgrows its engine, a new one has twice the room and reads the dialogue from
        the start.
        """
        if self._engine is not None and request.max_length > self._engine.options.max_seq_len:
            self._room = min(2 * self._room, self._model.config.max_position_embeddings)
            self._engine = None
        if self._engine is None:
            try:
                self._engine = self._sized(max(self._room, request.max_length))
            except NotEnoughMemory:
                self._engine = self._sized(request.max_length)
        return self._engine

    def note(self, text: str, tokens: Sequence[int]) -> None:
        """Remember a prompt and its answer, as text and as tokens."""
        self._text, self._tokens = text, tuple(tokens)

    def forget(self) -> None:
        """Drop the engine, because its last step failed."""
        self._engine = None
        self.note("", ())

    def _sized(self, room: int) -> Engine:
        return Engine(self._model, dataclasses.replace(self._options, max_seq_len=room))


class ChatAnswer:
    """An answer that is being generated: iterate over its parts, then read ``result``.

    Attributes:
        completion: completion of the request; set when the answer has ended.
    """

    def __init__(
        self,
        engine: Engine,
        request: Request,
        tokenizer: Tokenizer,
        *,
        prompt: str,
        thinks: bool,
        stop: Sequence[str] = (),
        dialogue: Dialogue | None = None,
    ) -> None:
        """Submit the request.

        Args:
            engine: engine with room for the request.
            request: prompt and generation parameters.
            tokenizer: tokenizer of the checkpoint.
            prompt: text of the prompt.
            thinks: True if the answer begins inside the thinking.
            stop: strings that end the answer, which stops before them.
            dialogue: dialogue that remembers the answer; None for none.

        Raises:
            ValueError: the engine refuses the request, or a stop string is empty.
        """
        self._tokenizer = tokenizer
        self._text = StopText(tokenizer.stream(_ANSWER_MARKS), stop)
        self._answer = AnswerStream(thinking=thinks)
        self._prompt = prompt
        self._dialogue = dialogue
        self._parts: list[Part] = []
        self._interrupted = False
        self._result: Generation | None = None
        self.completion: Completion | None = None
        engine.submit(request)
        self._coming = self._run(engine, request)

    def __iter__(self) -> Iterator[Part]:
        """Iterate over the parts that have not been read yet."""
        return self._coming

    def stop(self) -> None:
        """End the answer before its next step; parts generated so far remain."""
        self._interrupted = True

    @property
    def result(self) -> Generation:
        """Return the whole answer.

        Raises:
            RuntimeError: the answer has not ended.
        """
        if self._result is None:
            raise RuntimeError("the answer has not ended: iterate over its parts first")
        return self._result

    def _run(self, engine: Engine, request: Request) -> Iterator[Part]:
        name = request.request_id
        try:
            while self.completion is None:
                if self._interrupted:
                    self.completion = engine.cancel(name)
                    break
                report = engine.step()
                text = "".join(map(self._text.push, report.new_tokens.get(name, ())))
                self.completion = next(iter(report.finished), None)
                if self._text.stopped:
                    self.completion = (self.completion or engine.cancel(name)).cut(
                        self._text.tokens
                    )
                yield from self._note(self._answer.push(text))
        except BaseException as error:
            if isinstance(error, GeneratorExit) and self.completion is None:
                engine.cancel(name)  # nobody reads on
            elif self._dialogue is not None:
                self._dialogue.forget()
            raise
        yield from self._note(self._answer.push(self._text.finish()))
        yield from self._note(self._answer.finish())
        self._finish(self.completion)

    def _note(self, parts: list[Part]) -> list[Part]:
        self._parts += parts
        return parts

    def _finish(self, done: Completion) -> None:
        answer = self._answer.answer(self._parts)
        self._result = Generation.of(
            done, answer.text, reasoning=answer.reasoning, tool_calls=answer.tool_calls
        )
        if self._dialogue is not None:
            said = done.token_ids
            if said and said[-1] in done.request.stop_ids:
                said = said[:-1]
            stream = self._tokenizer.stream(_ANSWER_MARKS)
            text = "".join(map(stream.push, said)) + stream.finish()
            self._dialogue.note(self._prompt + text, (*done.request.token_ids, *said))
