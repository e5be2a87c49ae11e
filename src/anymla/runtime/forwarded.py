"""What a forward pass of the backbone leaves for choosing and drafting tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from anymla.runtime.span import Span
from anymla.runtime.upload import upload


@dataclasses.dataclass(frozen=True)
class Forwarded:
    """Results of a step, by row.

    Attributes:
        hidden: [rows, N, D], the backbone's streams.
        first_rows: row of each span's first token; its other tokens follow.
        logits: float32 [rows, V], or None where they are not computed for all rows.
        best: int64 [rows], the best token behind each row, the same on all ranks, or V without a
            finite logit; it may be on the host, as may the two below. None where it is not known.
        best_logprobs: with best, those tokens' log-probabilities.
        taps: [rows, taps, D], see ``layers.dspark.Taps``, or None.
        first_taps: with taps, the row of each span's first that is there; its others follow.
        drafts: int64 [R, n], behind each span, where they have been made; see
            ``DraftBlocks.guess``.
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
        """Of a step whose rows are the spans' tokens one after the other."""
        *first_rows, _ = accumulate((len(span.token_ids) for span in spans), initial=0)
        return cls(hidden, first_rows, taps=taps, first_taps=first_taps)


def rows_of(values: Tensor, rows: Sequence[int]) -> Tensor:
    """The given rows; a view if they are the leading ones."""
    if list(rows) == list(range(len(rows))):
        return values[: len(rows)]
    (index,) = upload([rows], values.device)
    return values.index_select(0, index)
