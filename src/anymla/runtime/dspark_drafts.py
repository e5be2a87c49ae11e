"""Drafting with a DSpark drafter, which guesses a block of tokens at once.

Once the backbone has verified its step, the taps of the positions that turned out final enter the
drafter's context; then one block after the newest token guesses the next ones. No other state is
carried over, and nothing reads the rows of a rejected guess.

Source: the serving loop of the DSpark paper (arXiv 2607.05147).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import Tensor

from anymla.layers.dspark import Taps
from anymla.layers.spec import WINDOW_GROUP
from anymla.model.transformer import Transformer
from anymla.runtime.decode_runner import DecodeRunner
from anymla.runtime.dspark_step import DraftBlocks, DraftNoise
from anymla.runtime.forwarded import Forwarded, rows_of
from anymla.runtime.request import RequestState
from anymla.runtime.span import Span
from anymla.runtime.speculation import can_draft, final_tokens
from anymla.runtime.step_plan import StepPlanner
from anymla.runtime.upload import upload


class DSparkDrafter:
    """Keeps the drafter's context in step with the requests, and drafts from it."""

    def __init__(
        self,
        model: Transformer,
        planner: StepPlanner,
        blocks: DraftBlocks,
        *,
        runner: DecodeRunner | None = None,
    ) -> None:
        """Start without drafts.

        Args:
            model: network with a DSpark drafter.
            planner: step planner of the engine.
            blocks: sizes, caches and computation of the blocks.
            runner: the engine's runner of steps of fixed size; None to run at the batch's size.
        """
        self._model = model
        self._planner = planner
        self._blocks = blocks
        self._runner = runner

    def taps(self, spans: Sequence[Span]) -> tuple[Taps | None, list[int]]:
        """Return the taps that a backbone step must record, and for each span its first tapped row.

        The context reaches a window back, so older tokens of a prompt need no taps.
        """
        rows: list[int] = []
        firsts = []
        row = 0
        for span in spans:
            firsts.append(len(rows))
            start = max(span.start, span.state.drafted_from - self._blocks.window)
            count = len(span.token_ids)
            rows += range(row + max(0, start - span.start), row + count)
            row += count
        if not rows:
            return None, firsts
        index = None if len(rows) == row else upload([rows], self._model.device)[0]
        return self._blocks.taps(len(rows), index), firsts

    def run(self, spans: Sequence[Span], forwarded: Forwarded) -> None:
        """Process the step's final tokens, and set the drafts of requests that go on.

        Args:
            spans: spans of the last step; their requests hold the chosen tokens.
            forwarded: results of the backbone.
        """
        if forwarded.drafts is not None:
            rows = [row for row, span in enumerate(spans) if can_draft(span.state)]
            self._set_drafts([spans[row].state for row in rows], rows, forwarded.drafts)
            return
        followed: list[Span] = []
        source: list[int] = []
        for span, first in zip(spans, forwarded.first_taps, strict=True):
            final = final_tokens(span, self._blocks.window)
            if final is not None:
                followed.append(final)
                source += range(first, first + len(final.token_ids))
        if not followed:
            return
        assert forwarded.taps is not None
        drafting = [place for place, span in enumerate(followed) if can_draft(span.state)]
        states = [followed[place].state for place in drafting]
        noise = DraftNoise.of(
            [state.request.sampling for state in states],
            [len(state.tokens) for state in states],
            self._blocks.count,
            self._model.device,
        )
        guess = None
        if self._runner is not None and all(span.is_decode for span in followed):
            guess = self._runner.draft_blocks(followed, forwarded.taps, source, noise)
        if guess is None:
            taps = rows_of(forwarded.taps, source)
            guess = self._at_the_size_of_the_batch(followed, taps, drafting, noise)
        if guess is not None:
            self._set_drafts(states, range(len(states)), guess)

    def _at_the_size_of_the_batch(
        self,
        followed: Sequence[Span],
        taps: Tensor,
        drafting: Sequence[int],
        noise: DraftNoise | None,
    ) -> Tensor | None:
        """Write the context of all requests that are followed, and guess for some of them."""
        # No query attends in this step, so prompts need no workspaces.
        step = self._planner.build(
            [dataclasses.replace(span, is_decode=True) for span in followed], window_only=True
        )
        self._blocks.write_context(taps, step)
        if not drafting:
            return None
        context = step.groups[WINDOW_GROUP]
        anchors, last = upload(
            [
                [followed[place].token_ids[-1] for place in drafting],
                [followed[place].stop - 1 for place in drafting],
            ],
            self._model.device,
        )
        return self._blocks.guess(
            dataclasses.replace(context, block_table=rows_of(context.block_table, drafting)),
            anchors.long(),
            last.long(),
            step.max_seq_len,
            noise=noise,
        )

    def _set_drafts(
        self, states: Sequence[RequestState], rows: Sequence[int], guesses: Tensor
    ) -> None:
        """Give each request its row of guesses, as far as they are worth verifying.

        Drafts end before the last token that may be generated, before a guess that is no token, and
        before a guess that is too unlikely.
        """
        vocab = self._model.config.vocab_size
        listed = guesses.tolist()
        for state, row in zip(states, rows, strict=True):
            tokens = listed[row]
            end = tokens.index(vocab) if vocab in tokens else len(tokens)
            state.drafts = tokens[: min(state.remaining - 1, end)]
