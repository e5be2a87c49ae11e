"""Results of the backbone's forward pass, from which tokens are chosen and drafted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from anymla.runtime.bucket import Bucket
from anymla.runtime.span import Span
from anymla.runtime.upload import upload


@dataclasses.dataclass(frozen=True)
class Forwarded:
    """Results of a step, one row a token.

    Attributes:
        hidden: streams [rows, N, D] of the backbone.
        first_rows: row of each span's first token; its other tokens follow.
        logits: float32 [rows, V], or None if they are not computed for all rows.
        best: int64 [rows], best token after each row, the same on all ranks, or V if no logit is
            finite; it may be on the host, as may the two below. None if it is not known.
        best_logprobs: float32 [rows], log-probabilities of ``best``; set together with it.
        taps: backbone taps [rows, taps, D], see ``layers.dspark.Taps``, or None.
        first_taps: row of each span's first token in ``taps``; its other tokens follow.
        drafts: int64 [R, n], guesses after each span, see ``DraftBlocks.guess``; None if none were
            made.
    """

    hidden: Tensor
    first_rows: Sequence[int]
    logits: Tensor | None = None
    best: Tensor | None = None
    best_logprobs: Tensor | None = None
    taps: Tensor | None = None
    first_taps: Sequence[int] = ()
    drafts: Tensor | None = None

    @classmethod
    def packed(
        cls,
        hidden: Tensor,
        spans: Sequence[Span],
        taps: Tensor | None = None,
        first_taps: Sequence[int] = (),
    ) -> Forwarded:
        """Build the results of a step whose rows are the spans' tokens one after the other."""
        *first_rows, _ = accumulate((len(span.token_ids) for span in spans), initial=0)
        return cls(hidden, first_rows, taps=taps, first_taps=first_taps)


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the given rows; a view if they are the leading ones."""
    if list(rows) == list(range(len(rows))):
        return values[: len(rows)]
    (index,) = upload([rows], values.device)
    return values.index_select(0, index)


def place_rows(
    values: Tensor, rows: Sequence[int], spans: Sequence[Span], bucket: Bucket, out: Tensor
) -> None:
    """Copy rows of the spans' tokens, one after the other, to the tokens' places in a bucket.

    Padding gets row 0.
    """
    index, source = [0] * bucket.rows, iter(rows)
    for i, span in enumerate(spans):
        first = i * bucket.tokens
        for row in range(first, first + len(span.token_ids)):
            index[row] = next(source)
    (where,) = upload([index], values.device)
    torch.index_select(values, 0, where, out=out)
