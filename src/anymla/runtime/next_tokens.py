"""Choice of the tokens that follow a step, and scores of prompt tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from anymla.model.transformer import Transformer
from anymla.runtime.forwarded import Forwarded, rows_of
from anymla.runtime.sampler import Sampling, choose_tokens, require_tokens
from anymla.runtime.scoring import chosen_logprobs, next_token_logprobs
from anymla.runtime.span import Span


def score_prompts(model: Transformer, spans: Sequence[Span], forwarded: Forwarded) -> None:
    """Add the log-probabilities of prompt tokens to the states that ask for them.

    Raises:
        FloatingPointError: a token's log-probability is NaN or infinite.
    """
    for span, first_row in zip(spans, forwarded.first_rows, strict=True):
        state = span.state
        if state.request.prompt_logprobs and not span.is_decode:
            targets = state.request.token_ids[span.start + 1 : span.stop + 1]
            rows = forwarded.hidden[first_row : first_row + len(targets)]
            logprobs = next_token_logprobs(model.logits, rows, targets, model.config.vocab_size)
            for position, logprob in enumerate(logprobs, start=span.start + 1):
                if not math.isfinite(logprob):
                    raise FloatingPointError(f"the logits for position {position} are not numbers")
            state.prompt_logprobs += logprobs


def choose_next(
    model: Transformer, spans: Sequence[Span], forwarded: Forwarded
) -> dict[str, list[int]]:
    """Choose the tokens that follow each span, and advance the requests.

    Returns:
        The accepted tokens in order, by request id.
    """
    rows: list[int] = []
    samplings: list[Sampling] = []
    positions: list[int] = []
    for span, first_row in zip(spans, forwarded.first_rows, strict=True):
        state, count = span.state, span.num_choices
        end = first_row + len(span.token_ids)
        rows += range(end - count, end)
        samplings += [state.request.sampling] * count
        positions += range(len(state.tokens), len(state.tokens) + count)
        if not span.is_decode:
            state.computed = span.stop
            if not (state.is_prefill or count):
                state.finish_reason = "length"
    if not rows:
        return {}
    choosing = [span for span in spans if span.num_choices]
    tokens, logprobs = _pick(model, forwarded, choosing, rows, samplings, positions)
    new_tokens = {}
    for span in spans:
        if count := span.num_choices:
            accepted = span.state.accept(tokens[:count], logprobs[:count])
            new_tokens[span.state.request.request_id] = accepted
            span.state.computed = len(span.state.tokens) - 1
            del tokens[:count], logprobs[:count]
    return new_tokens


def _pick(
    model: Transformer,
    forwarded: Forwarded,
    spans: Sequence[Span],
    rows: Sequence[int],
    samplings: Sequence[Sampling],
    positions: Sequence[int],
) -> tuple[list[int], list[float]]:
    """Return the tokens that follow some rows, and their log-probabilities."""
    best = None if forwarded.best is None else rows_of(forwarded.best, rows)
    plain = all(each.takes_best_logit for each in samplings)
    if plain and best is not None and forwarded.best_logprobs is not None:
        tokens = best.tolist()
        require_tokens(tokens, positions, model.config.vocab_size)
        return tokens, rows_of(forwarded.best_logprobs, rows).tolist()
    if forwarded.logits is None:
        logits = model.logits(rows_of(forwarded.hidden, rows))
    else:
        logits = rows_of(forwarded.logits, rows)
    if any(each.is_penalised for each in samplings):
        counts = [span.num_choices for span in spans]
        parts = zip(spans, logits.split(counts), strict=True)
        penalised = [span.state.penalised(part, _drafts(span)) for span, part in parts]
        tokens = choose_tokens(torch.cat(penalised), samplings, positions)
    else:
        tokens = choose_tokens(logits, samplings, positions, best)
    tokens = model.ranks.agree(tokens, model.device)
    return tokens, chosen_logprobs(logits, tokens)


def _drafts(span: Span) -> list[int]:
    return span.token_ids[1:] if span.is_decode else []
