"""Engram: rows of a table that n-grams of tokens are hashed to, added to the streams by gates."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from anymla.formats.e4m3 import decode_e4m3
from anymla.formats.ue8m0 import decode_ue8m0
from anymla.layers.linear import Linear
from anymla.layers.rows import NgramRows
from anymla.layers.step import Step

# Least size of what a gate is the signed root of.
_LEAST_DOT = 1e-6


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


def decoded(rows: NgramRows, dtype: torch.dtype) -> Tensor:
    """Values [T, columns * D] of rows."""
    values = rows.weight
    if rows.scale is not None:
        scales = decode_ue8m0(rows.scale, torch.float32).unsqueeze(-1)
        blocks = decode_e4m3(values).unflatten(-1, (rows.scale.shape[-1], -1))
        values = (blocks * scales).flatten(-2)
    return values.to(dtype).flatten(1)


def add_gated(h: Tensor, projected: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Streams [T, N, hidden] with a value added to each, as much as the stream and its key agree.

    ``h_j += sigmoid(sgn(d) sqrt(max(|d|, 1e-6))) value`` with
    ``d = sum q_j k_j h_j key_j / (rms(h_j) rms(key_j) sqrt(hidden))`` per stream j.

    Args:
        h: [T, N, hidden].
        projected: [T, (N + 1) * hidden], the streams' keys, then the value.
        weight: float32 [N, hidden], product of the streams' and the keys' norm weights.
        eps: of the norms.
    """
    streams, hidden = h.shape[1:]
    wide = torch.promote_types(h.dtype, torch.float32)
    projected = projected.to(wide).unflatten(1, (streams + 1, hidden))
    keys, value = projected[:, :streams], projected[:, streams:]
    state = h.to(wide)
    dot = (state * weight * keys).sum(-1) * hidden**-0.5
    for each in (state, keys):
        dot = dot * torch.rsqrt(each.square().mean(-1) + eps)
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp(min=_LEAST_DOT).sqrt(), dot))
    return (state + gate.unsqueeze(-1) * value).to(h.dtype)


class Engram(nn.Module):
    """Adds a value to every stream (``add_gated``), projected from the token's n-grams' rows.

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
        rows = decoded(step.ngrams[self.layer], h.dtype)
        return add_gated(h, self.wkv(rows), self.weight, self.eps)
