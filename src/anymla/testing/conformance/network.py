"""Cases C5 .. C7: a whole model with speculation, rewinds, and requests one after the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Completion, Request
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.tiny_model import tiny_model
from anymla.testing.oracle.check import hidden_error
from anymla.testing.oracle.recording import RecordedModel, Recorder, Recording
from anymla.testing.tiny_checkpoint import TinyOptions
from anymla.testing.tolerance import assert_close

_OPTIONS = TinyOptions(
    weights="bf16",
    ratios=(0, 4, 128),
    hidden=128,
    heads=2,
    o_lora=32,
    q_lora=64,
    index_topk=8,
    index_heads=4,
    experts=4,
    experts_per_token=2,
    moe_size=64,
)
_OPERATIONS = (
    "qnorm_rope_kv_insert",
    "save_partial_states",
    "compress_norm_rope_insert",
    "paged_mqa_logits",
    "topk_per_row",
    "sparse_attention",
    "grouped_output_projection",
    "linear",
    "experts",
    "hc_post_pre_norm",
)
_PROMPT, _NEW = 121, 20  # generation completes an entry of 128 tokens and several of 4


class ScriptedDrafts:
    """A model whose draft layer knows the text, and is wrong at given places.

    Its "streams" carry positions: at position p the layer guesses token p + 2.
    """

    def __init__(self, model: Any, text: list[int], wrong_every: int) -> None:
        self._model = model
        self._text = text
        self._wrong_every = wrong_every

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def mtp_forward(self, h: Tensor, next_ids: Tensor, step: Any, cache: Any) -> Tensor:
        """Run the real layer for its cache writes; return positions."""
        self._model.mtp_forward(h, next_ids, step, cache)
        return step.positions.to(h.dtype).view(-1, 1, 1).expand(h.shape).contiguous()

    def mtp_logits(self, h: Tensor) -> Tensor:
        """Return logits that are certain of one token."""
        logits = torch.zeros(len(h), self._model.config.vocab_size, device=h.device)
        for row, position in enumerate(h[:, 0, 0].long().tolist()):
            guess = position + 2
            token = self._text[guess] if guess < len(self._text) else 0
            if guess % self._wrong_every == 0:
                token = (token + 1) % logits.shape[1]
            logits[row, token] = 100.0
        return logits


def _prompt(model: Any) -> tuple[int, ...]:
    return tuple(torch.randint(2, model.config.vocab_size, (_PROMPT,)).tolist())


def _run(model: Any, prompt: tuple[int, ...], **options: Any) -> tuple[Completion, Recording]:
    recorder = Recorder()
    request = Request("one", prompt, max_new_tokens=_NEW)
    sizes = EngineOptions(kv_cache="fp32", chunk_size=64, decode="plain", **options)
    engine = Engine.for_requests(RecordedModel(model, recorder), sizes, [request])  # type: ignore[arg-type]
    (done,) = engine.run([request])
    (recording,) = recorder.recordings
    return done, recording


def _same_rows(got: Recording, want: Recording, tokens: int, name: str) -> None:
    """Compare rows computed by steps of other sizes, within the error of their layer."""
    for layer, ratio in enumerate(_OPTIONS.ratios):
        kinds = {"window": tokens}
        if ratio:
            kinds["compressed"] = tokens // ratio
        if ratio == 4:
            kinds["index"] = tokens // ratio
        for kind, count in kinds.items():
            rows, others = got.rows(layer, kind, count), want.rows(layer, kind, count)
            error = 2 * hidden_error(torch.float32, layer, _OPTIONS.hidden)
            assert_close(
                rows.decode(),
                others.decode(),
                atol=error,
                rtol=error,
                name=f"{name}, layer {layer} {kind} rows",
            )


def _check_speculation(ops: Ops, runs: tuple[tuple[int, int], ...]) -> None:
    """Run with (most drafts, period of wrong drafts) and compare with one token a step."""
    with tiny_model(ops, _OPTIONS) as (model, _):
        prompt = _prompt(model)
        plain, want = _run(model, prompt)
        text = [*prompt, *plain.token_ids]
        for count, period in runs:
            name = f"{count} drafts, every {period} wrong"
            scripted = ScriptedDrafts(model, text, period)
            done, got = _run(scripted, prompt, draft_tokens=count)
            expect(done.token_ids == plain.token_ids, f"{name}: other tokens")
            expect(done.drafted > 0, f"{name}: nothing was drafted")
            rejected = done.drafted - done.accepted
            expect(rejected > 0 or period > len(text), f"{name}: nothing was rejected")
            expect(done.accepted > 0 or period == 1, f"{name}: nothing was accepted")
            _same_rows(got, want, len(text) - 1, name)


@case(
    "C5",
    "verifying 2 to 9 tokens with any number accepted leaves the caches as sequential decoding",
    *_OPERATIONS,
)
def verify_windows(ops: Ops) -> None:
    _check_speculation(ops, ((1, 2), (2, 3), (4, 2), (8, 5), (8, 1000)))


@case("C6", "going back by 1 to 8 tokens leaves no trace", *_OPERATIONS)
def roll_back(ops: Ops) -> None:
    _check_speculation(ops, ((1, 1), (5, 1), (8, 1)))


@case("C7", "an engine whose pages other requests have used answers as a fresh one", *_OPERATIONS)
def warm_equals_cold(ops: Ops) -> None:
    # There is no prefix cache, so requests share pages only one after the other.
    with tiny_model(ops, _OPTIONS) as (model, _):
        prompt = _prompt(model)
        cold, want = _run(model, prompt)
        recorder = Recorder()
        options = EngineOptions(
            kv_cache="fp32",
            chunk_size=50,
            max_requests=2,
            max_seq_len=_PROMPT + _NEW,
            decode="plain",
        )
        engine = Engine(RecordedModel(model, recorder), options)  # type: ignore[arg-type]
        before = [
            Request(f"before {i}", prompt[i : i + length], max_new_tokens=5)
            for i, length in enumerate((1, 3, 60, 115))
        ]
        engine.run(before)
        (done,) = engine.run([Request("again", prompt, max_new_tokens=_NEW)])
        expect(done.token_ids == cold.token_ids, "other tokens after other requests")
        _same_rows(recorder.recordings[-1], want, _PROMPT + _NEW - 1, "warm engine")
