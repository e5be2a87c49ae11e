"""Engram: table rows, indexed by hashed n-grams of tokens and added to the streams by gates."""

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
    """Hash of the n-grams that end in a token to rows of a table.

    With t_k the normalised token k places before, m the multipliers and p the moduli::

        R_1 = t_0 m_0;   R_{k+1} = R_k xor t_k m_k      (64 bits)
        row of column (k - 1) * heads + j = R_{k+1} mod p + the sum of the moduli before, k = 1 ..

    If a request has no text token t_k, that token and all before it are replaced by the padding
    token.

    Attributes:
        token_map: int64 [vocab], token ids after normalisation.
        pad: id of the padding token after normalisation.
        multipliers: int64 [n] factors of the hash, n the longest n-gram.
        moduli: int64 [n - 1, heads], number of rows of each column.
        offsets: int64 [n - 1, heads], first row of each column.
    """

    token_map: Tensor
    pad: int
    multipliers: Tensor
    moduli: Tensor
    offsets: Tensor

    def __call__(self, token_ids: Tensor, previous: Tensor) -> Tensor:
        """Return the row numbers int64 [T, (n - 1) * heads] of tokens.

        Args:
            token_ids: int64 [T] token ids; -1 for padding.
            previous: int64 [T, n - 1], tokens before each, nearest first; -1 where there is none.
        """
        tokens = torch.cat((token_ids.unsqueeze(1), previous), 1)
        # A gap hides the tokens before it.
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
    """The rows of a table as stored; few are read, so the table may be on the host.

    Attributes:
        weight: floating point [rows, D], or uint8 e4m3 codes.
        scale: uint8 ue8m0 [rows, D / block] scales of codes, else None.
    """

    weight: Tensor
    scale: Tensor | None

    def rows(self, numbers: Tensor) -> NgramRows:
        """Return the rows with int64 numbers [T, columns], on the table's device."""
        found = [
            None if each is None else each.index_select(0, numbers.flatten())
            for each in (self.weight, self.scale)
        ]
        weight, scale = (None if each is None else each.view(*numbers.shape, -1) for each in found)
        assert weight is not None
        return NgramRows(weight, scale)


def decoded(rows: NgramRows, dtype: torch.dtype, backend: str | None = None) -> Tensor:
    """Decode rows to values [T, columns * D]."""
    if rows.scale is None:
        return rows.weight.to(dtype).flatten(1)
    tokens, columns, width = rows.weight.shape
    values = torch.empty(tokens, columns * width, dtype=dtype, device=rows.weight.device)
    engram_rows(values, rows.weight, rows.scale, backend=backend)
    return values


class Engram(nn.Module):
    """Adds a value, projected from the token's n-gram rows, to every stream (``engram_gate``).

    The rows are read before the layer runs: the tokens alone determine them, and a table too large
    for a device is on the host.

    Attributes:
        layer: index of the layer, its key in ``Step.ngrams``.
        ngrams: hash that selects the rows.
        table: table of the rows.
        wkv: [(N + 1) * hidden, columns * D], projection to the keys, then to the value.
        weight: float32 [N, hidden], product of the norm weights of streams and keys.
        eps: epsilon of the norms.
        backend: name of the operations' backend; None for the best.
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
        """Read the rows of tokens on the table's device; arguments as for ``NgramHash``."""
        return self.table.rows(self.ngrams(token_ids, previous))

    def forward(self, h: Tensor, step: Step) -> Tensor:
        """Map streams [T, N, hidden] to the same shape; needs the layer's ``Step.ngrams``."""
        rows = decoded(step.ngrams[self.layer], h.dtype, self.backend)
        gated: Tensor = engram_gate(
            h, self.wkv(rows), self.weight, eps=self.eps, backend=self.backend
        )
        return gated
