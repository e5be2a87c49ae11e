"""Engram: rows of a table that n-grams of tokens are hashed to, added to the streams by gates."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from anymla.layers.linear import Linear
from anymla.layers.rows import NgramRows
from anymla.layers.step import Step
from anymla.ops.engram import engram_gate, engram_rows


@dataclasses.dataclass(frozen=True)
class NgramHash:
    """Which rows of a table the n-grams that end in a token are hashed to.

    With t_k the normalised token k places before, m the multipliers and p the moduli::

        R_1 = t_0 m_0;   R_{k+1} = R_k xor t_k m_k      (64 bits)
        row of column (k - 1) * heads + j = R_{k+1} mod p + the sum of the moduli before, k = 1 ..

    Where a request has no token t_k, or holds none of the text there, that and all before it are
    the padding token.

    Attributes:
        token_map: int64 [vocab], token ids after normalisation.
        pad: the padding token after normalisation.
        multipliers: int64 [n], n the longest n-gram.
        moduli: int64 [n - 1, heads].
        offsets: int64 [n - 1, heads].
    """

    token_map: Tensor
    pad: int
    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor

    def __call__(self, token_ids: Tensor, previous: Tensor) -> Tensor:
        """Rows int64 [T, (n - 1) * heads].

        Args:
            token_ids: int64 [T]; -1 for padding.
            previous: int64 [T, n - 1], nearest first; -1 where there is none.
        """
        tokens = torch.cat((token_ids.unsqueeze(1), previous), 1)
        # A gap hides what lies behind it.
        there = (tokens >= 0).cumprod(1).bool()
        normalised = self.token_map[tokens.clamp(min=0)]
        terms = torch.where(there, normalised, self.pad) * self.multipliers
        rolling = terms[:, 0]
        columns = []
        for place in range(1, terms.shape[1]):
            rolling = rolling.bitwise_xor(terms[:, place])
            columns.append(
                rolling.unsqueeze(1).remainder(self.moduli[place - 1]) + self.offsets[place - 1]
            )
        return torch.cat(columns, 1)


@dataclasses.dataclass(frozen=True)
class EngramTable:
    """A table's rows as they are stored; few of them are read, wherever they lie.

    Attributes:
        weight: floating point [rows, D], or uint8 e4m3 codes.
        scale: uint8 ue8m0 [rows, D / block] of codes, else None.
    """

    weight: Tensor
    scale: Tensor | None

    def rows(self, numbers: Tensor) -> NgramRows:
        """Rows of int64 numbers [T, columns], on the table's device."""
        found = [
            None if each is None else each.index_select(0, numbers.flatten())
            for each in (self.weight, self.scale)
        ]
        weight, scale = (None if each is None else each.view(*numbers.shape, -1) for each in found)
        assert weight is not None
        return NgramRows(weight, scale)


def decoded(rows: NgramRows, dtype: torch.dtype, backend: str | None = None) -> Tensor:
    """Values [T, columns * D] of rows."""
    if rows.scale is None:
        return rows.weight.to(dtype).flatten(1)
    tokens, columns, width = rows.weight.shape
    values = torch.empty(tokens, columns * width, dtype=dtype, device=rows.weight.device)
    engram_rows(values, rows.weight, rows.scale, backend=backend)
    return values


class Engram(nn.Module):
    """Adds a value to every stream (``engram_gate``), projected from the token's n-grams' rows.

    The rows are read before the layer runs: which ones depends on tokens alone, and a table too
    large for a device lies on the host.

    Attributes:
        layer: whose rows of ``Step.ngrams`` it takes.
        ngrams: which rows.
        table: the rows.
        wkv: [(N + 1) * hidden, columns * D], the keys' projection, then the value's.
        weight: float32 [N, hidden], product of the streams' and the keys' norm weights.
        eps: of the norms.
        backend: of the operations.
    """

    def __init__(
        self,
        *,
        layer: int,
        ngrams: NgramHash,
        table: EngramTable,
        wkv: Linear,
        weight: Tensor,
        eps: float,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.ngrams = ngrams
        self.table = table
        self.wkv = wkv
        self.weight = weight
        self.eps = eps
        self.backend = backend

    def read(self, token_ids: Tensor, previous: Tensor) -> NgramRows:
        """The rows of tokens, on the table's device; arguments of ``NgramHash``, there as well."""
        return self.table.rows(self.ngrams(token_ids, previous))

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Map streams [T, N, hidden] to the same; needs the layer's ``Step.ngrams``."""
        rows = decoded(step.ngrams[self.layer], h.dtype, self.backend)
        gated: Tensor = engram_gate(
            h, self.wkv(rows), self.weight, eps=self.eps, backend=self.backend
        )
        return gated
