"""Calls of attention during prefill: ragged, hostile, in any mixture of block counts."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.ops.attention import prefill_attention


@dataclasses.dataclass
class Prefill:
    """Arguments of one call."""

    q: Tensor
    rows: Tensor
    ranges: Tensor
    lists: Tensor | None
    window: int
    entries: int
    sink: Tensor | None

    def run(self, backend: str, **more):
        return prefill_attention(
            self.q,
            self.rows,
            self.ranges,
            self.lists,
            window=self.window,
            entries=self.entries,
            sink=self.sink,
            **more,
            backend=backend,
        )

    def expected(self) -> tuple[Tensor, Tensor]:
        """The float64 result of the same numbers."""
        sink = None if self.sink is None else self.sink.double()
        wide = dataclasses.replace(self, q=self.q.double(), rows=self.rows.double(), sink=sink)
        return wide.run("reference")


def lengths(tokens: int, most: int, block: int = 64) -> Tensor:
    """Row counts whose block counts take every value up to ``most`` rows, edges of blocks often."""
    count = torch.randint(0, most // block + 1, (tokens,)) * block
    count += torch.tensor([0, 0, 1, -1, 17])[torch.randint(0, 5, (tokens,))]
    return count.clamp(-1, most + 1).int()


def prefill(
    seed: int,
    *,
    tokens: int,
    heads: int,
    dtype: torch.dtype,
    listed: bool,
    entries: int,
    window: int = 128,
    rows: int = 700,
    dim: int = 512,
    hostile: bool = True,
    holes: float = 0.1,
    sink: bool = True,
    device: str = "cpu",
) -> Prefill:
    """A random call.

    Args:
        seed: of the numbers.
        tokens: T.
        heads: H.
        dtype: of q and the rows.
        listed: the second scope is listed.
        entries: the most rows of the second scope.
        window: the most rows of the first.
        rows: N.
        dim: D.
        hostile: ranges that leave the rows, and lists of anything.
        holes: share of a list that is negative.
        sink: there is one.
        device: where.
    """
    torch.manual_seed(seed)
    start = torch.randint(0, max(rows - window, 1), (tokens,))
    base = torch.randint(0, max(rows // 2, 1), (tokens,))
    if hostile:
        odd = torch.tensor([-3, -70, rows - 5, rows + 9])
        start = torch.where(torch.rand(tokens) < 0.1, odd[torch.randint(0, 4, (tokens,))], start)
        base = torch.where(torch.rand(tokens) < 0.1, odd[torch.randint(0, 4, (tokens,))], base)
    ranges = torch.stack((start, lengths(tokens, window), base, lengths(tokens, entries)), 1).int()
    lists = None
    if listed:
        lists = torch.randint(0, max(rows // 2, 1), (tokens, entries)).int()
        lists[torch.rand(lists.shape) < holes] = -1
        if hostile:
            odd = torch.tensor([-(2**31), 2**31 - 1, -2, rows], dtype=torch.int32)
            wild = odd[torch.randint(0, 4, lists.shape)]
            lists = torch.where(torch.rand(lists.shape) < 0.02, wild, lists)
        lists[torch.rand(tokens) < 0.1] = -1
    given = Prefill(
        torch.randn(tokens, heads, dim).to(dtype),
        torch.randn(rows, dim).to(dtype),
        ranges,
        lists,
        window,
        entries,
        torch.randn(heads) if sink else None,
    )
    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(given)
        if isinstance(value := getattr(given, field.name), Tensor)
    }
    return dataclasses.replace(given, **moved)
