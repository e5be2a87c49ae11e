"""Case C12: V4.1's drafter, after a whole small model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anymla.layers.dspark import BlockGuess
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.sampler import best_tokens
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.tiny_model import tiny_model
from anymla.testing.conformance.v41 import OPTIONS, STEP_OPERATIONS
from anymla.testing.oracle.check import hidden_error
from anymla.testing.oracle.dspark import DSparkOracle
from anymla.testing.oracle.judge import Judge
from anymla.testing.oracle.model import OracleModel, OracleResult
from anymla.testing.oracle.recording import RecordedModel, Recorder, Recording
from anymla.testing.tolerance import assert_close

_OPTIONS = dataclasses.replace(
    OPTIONS, experts_per_token=3, drafter="dspark", stages=2, markov_rank=16,
    draft_experts=6, draft_experts_per_token=2,
)  # fmt: skip
_PROMPT, _NEW = 23, 16


class _HeardModel(RecordedModel):
    """A recorded model that also keeps its drafter's logits and predictions."""

    def __init__(self, model: Any, recorder: Recorder) -> None:
        super().__init__(model, recorder)
        self.logits_of_block: Tensor | None = None
        self.survival: Tensor | None = None

    def guess_best_block(self, h: Tensor, anchors: Tensor) -> Tensor:
        """Guess as the drafter does, from logits that are kept."""
        return self.guess_block(h, anchors, lambda logits, _: best_tokens(logits)).tokens

    def guess_block(
        self, h: Tensor, anchors: Tensor, choose: Callable[[Tensor, int], Tensor]
    ) -> BlockGuess:
        """Guess, and keep the logits that the guesses are chosen from."""
        heard: list[Tensor] = []

        def listening(logits: Tensor, i: int) -> Tensor:
            heard.append(logits[0].cpu())
            return choose(logits, i)

        guess: BlockGuess = self._model.guess_block(h, anchors, listening)
        self.logits_of_block, self.survival = torch.stack(heard), guess.survival[0].cpu()
        return guess


def _backbone(directory: str, recording: Recording, tokens: list[int]) -> OracleResult:
    """Run the float64 oracle on the rows and selections of a recorded run."""
    model = OracleModel(directory)
    layers = range(model.config.layers + 1)
    errors = [hidden_error(torch.float32, layer, _OPTIONS.hidden) for layer in layers]
    ran = recording.token_ids[: len(tokens) - 1]
    return model.run(ran, judge=Judge(recording, errors), keep_layers=True)


@case(
    "C12",
    "V4.1's drafter: taps where layers begin, blocks whose rows see each other behind the window "
    "of the newest token, guesses that follow each other; the text is the one without drafts",
    *STEP_OPERATIONS,
    "window_rows",
)
def drafter_of_v41(ops: Ops) -> None:
    with tiny_model(ops, _OPTIONS) as (model, directory):
        prompt = tuple(torch.randint(2, model.config.vocab_size, (_PROMPT,)).tolist())
        request = Request("one", prompt, max_new_tokens=_NEW)
        options = EngineOptions(kv_cache="fp32", chunk_size=9, decode="plain")
        alone = Engine.for_requests(model, options, [request])
        (plain,) = alone.run([request])
        text = [*prompt, *plain.token_ids]

        recorder = Recorder()
        heard = _HeardModel(model, recorder)
        oracle = DSparkOracle(directory)
        options = dataclasses.replace(options, draft_tokens=oracle.dspark.block_size)
        engine = Engine.for_requests(heard, options, [request])  # type: ignore[arg-type]
        engine.submit(request)
        said: dict[int, tuple[list[int], Tensor, Tensor]] = {}
        finished: list[Any] = []
        while engine.busy:
            heard.logits_of_block = heard.survival = None
            finished += engine.step().finished
            for state in engine.scheduler.running:
                if heard.logits_of_block is None or heard.survival is None:
                    continue
                known = len(state.tokens)
                said[known] = (list(state.drafts), heard.logits_of_block, heard.survival)
                # As many guesses are right as blocks came before, so that every count occurs once.
                right = text[known : known + len(said) - 1]
                state.drafts = [*right, *state.drafts[len(right) :]][: len(state.drafts)]
        expect(list(finished[0].token_ids) == text[_PROMPT:], "other tokens with drafts")
        expect(finished[0].accepted >= 6, f"only {finished[0].accepted} drafts were accepted")

        (recording,) = recorder.recordings
        context = oracle.context(oracle.taps(_backbone(directory, recording, text)))
        error = hidden_error(torch.float32, len(_OPTIONS.ratios) + _OPTIONS.stages, _OPTIONS.hidden)
        for known, (drafts, logits, survival) in said.items():
            name = f"block behind {known} tokens"
            rows = [each[: known - 1] for each in context]
            want = oracle.block(rows, text[known - 1], tokens=logits.argmax(1).tolist())
            largest = want.logits.abs().max()
            assert_close(logits, want.logits, atol=error, scale=largest, name=f"{name}: logits")
            assert want.confidence is not None
            sure = want.confidence.sigmoid().cumprod(0)
            # A confidence's logit is a sum over the model's width, and the sigmoid's slope is at
            # most 1/4.
            spread = want.confidence.abs().clamp(min=1).cumsum(0)
            assert_close(survival, sure, atol=error, scale=spread, name=f"{name}: confidence")
            chosen = logits.argmax(1).tolist()[: len(drafts)]
            expect(drafts == chosen, f"{name}: drafts {drafts}, expected {chosen}")
