"""The tokens of packed sequences that each entry is pooled from."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from anymla.train.plan import Plan


def windows_of(plan: Plan) -> Windows:
    """Return the windows of a plan.

    Raises:
        ValueError: the plan's ratio is 0.
    """
    if plan.windows is None:
        raise ValueError("compress: the plan must have a ratio, got 0")
    return plan.windows


@dataclasses.dataclass(frozen=True)
class Windows:
    """Whole windows of packed sequences; E is the plan's ``num_entries``, a bound of their number.

    Windows are numbered sequence after sequence. What lies behind the last one is marked by
    ``whole``; indices there are in range and mean nothing.

    Attributes:
        ratio: tokens of a window.
        sequence: int32 [T], sequence of each token; R for tokens of none.
        position: int64 [T], position of each token in its sequence.
        slot: int64 [T], ``window * ratio + offset`` of each token; -1 without a whole window.
        entry: int64 [T], window that each token closes; -1 for none.
        table: int32 [R, E], windows of each sequence in order, then -1.
        tokens: int64 [E, ratio], tokens of each window.
        start: int64 [E], position of each window's first token.
        last: int64 [E], token that closes each window.
        whole: bool [E], True if the window exists.
        follows: bool [E], True if a window of the same sequence precedes it.
    """

    ratio: int
    sequence: Tensor
    position: Tensor
    slot: Tensor
    entry: Tensor
    table: Tensor
    tokens: Tensor
    start: Tensor
    last: Tensor
    whole: Tensor
    follows: Tensor

    @classmethod
    def of(cls, plan: Plan) -> Windows:
        """Number the windows of the sequences of a plan that has a ratio."""
        ratio, tokens, most = plan.ratio, plan.tokens, plan.num_entries
        token = torch.arange(tokens, device=plan.positions.device)
        position, before = plan.positions.long(), plan.cu_entries.long()
        counts = before.diff()
        closed = torch.cat((counts, torch.zeros_like(before[:1])))  # none by tokens of no sequence
        whole = position // ratio < closed.index_select(0, plan.sequence)
        slot = torch.where(whole, before.index_select(0, plan.sequence) * ratio + position, -1)
        closes = whole & ((position + 1) % ratio == 0)
        number = torch.arange(most, device=token.device)
        table = torch.where(number < counts.unsqueeze(1), before[:-1].unsqueeze(1) + number, -1)
        # Tokens without a window write to a place behind the windows.
        order = torch.zeros(most * ratio + tokens, dtype=torch.int64, device=token.device)
        order.scatter_(0, torch.where(whole, slot, most * ratio + token), token)
        members = order[: most * ratio].view(most, ratio)
        exists = number < before[-1]
        start = position.index_select(0, members[:, 0])
        return cls(
            ratio=ratio,
            sequence=plan.sequence,
            position=position,
            slot=slot,
            entry=torch.where(closes, slot // ratio, -1),
            table=table.int(),
            tokens=members,
            start=start,
            last=members[:, -1],
            whole=exists,
            follows=exists & (start > 0),
        )

    def tensors(self) -> list[Tensor]:
        """Return all attributes after ``ratio``, in their order."""
        return [getattr(self, each.name) for each in dataclasses.fields(self)[1:]]

    def first(self, values: Tensor) -> Tensor:
        """Return the value [E] of each window's first token, of values [T] of all tokens."""
        return values.index_select(0, self.tokens[:, 0])
