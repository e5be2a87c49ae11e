"""Comparison of a run's cache rows and decisions with the oracle that follows the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.testing.oracle.attention import AttentionOracle, IndexQueries, LayerRows
from anymla.testing.oracle.recording import COMPRESSED, INDEX, WINDOW, Recording, StoredRows
from anymla.testing.oracle.rounding import hadamard
from anymla.testing.oracle.row_formats import ROW_FORMATS
from anymla.testing.oracle.selection import Selections


@dataclasses.dataclass
class RowFindings:
    """Comparison of stored rows of one kind with the oracle's.

    Attributes:
        layout_id: layout id of the rows.
        rows: number of rows compared.
        channels: number of channels compared.
        identical: number of channels whose stored value is the rounding of the oracle's.
        unexplained: number of channels that no value within the error bound rounds to.
        first: description of the first unexplained channel.
    """

    layout_id: str
    rows: int = 0
    channels: int = 0
    identical: int = 0
    unexplained: int = 0
    first: str = ""


class Judge:
    """Follows and judges a recording of one request.

    Attributes:
        recording: cache rows and decisions of the run.
        error: bound on the relative error of each layer's results. A channel of a cache row may
            deviate by this fraction of its value and of the row's root mean square, and for pooled
            rows of ``pooled_error``, which adds as squares; an index score by this fraction of
            ``IndexQueries.magnitudes``; an expert's score by this fraction of the largest.
        more: further error of single tokens: a number, or [T] for the layers so far.
        found: findings by kind of row.
        selections: findings about selections, by "topk" and "experts", and "candidates" in models
            that select in two levels.
    """

    def __init__(self, recording: Recording, error: Sequence[float]) -> None:
        self.recording = recording
        self.error = error
        self.more: Tensor = torch.zeros((), dtype=torch.float64)
        self.found: dict[str, RowFindings] = {}
        self.selections = {"topk": Selections(), "experts": Selections()}

    def add_error(self, more: Tensor) -> None:
        """Add an error [T] of tokens from here on; their streams keep such errors."""
        self.more = self.more + more

    def _error(self, layer: int, tokens: slice = slice(None)) -> Tensor:
        """Return the error bound of tokens [T], or one for all."""
        return (self.more[tokens] if self.more.ndim else self.more) + float(self.error[layer])

    def _pooled(self, layer: int, ratio: int, count: int) -> Tensor:
        """Return the error bound of entries [count], the largest of their tokens', or of all."""
        found = self._error(layer)
        return found[: count * ratio].unflatten(0, (count, ratio)).amax(1) if found.ndim else found

    def rows(
        self, layer: int, exact: LayerRows, ratio: int = 0, *, rotates: bool = True
    ) -> tuple[LayerRows, bool]:
        """Judge and return the recorded rows, and tell if the index keys are Hadamard-transformed.

        MXFP4 keys are, unless the model has no transform (``rotates``). An entry has ``ratio``
        tokens.
        """
        window = self._stored(layer, WINDOW, exact.window, None)
        compressed = index = None
        rotated = False
        if exact.compressed is not None:
            error = exact.pooled_error.get(COMPRESSED)
            compressed = self._stored(layer, COMPRESSED, exact.compressed, error, ratio)
        if exact.index is not None:
            layout = self._layout(layer, INDEX, len(exact.index))
            rotated = rotates and layout == "v4_index_mxfp4"
            keys, error = exact.index, exact.pooled_error.get(INDEX)
            if rotated:
                # Each transformed channel has the independent errors of all channels.
                keys = hadamard(keys)
                if error is not None:
                    error = error.square().mean(1, keepdim=True).sqrt()
            index = self._stored(layer, INDEX, keys, error, ratio)
        return LayerRows(window, compressed, index), rotated

    def entries(
        self,
        layer: int,
        attention: AttentionOracle,
        queries: IndexQueries,
        keys: Tensor,
        chosen: Tensor,
        tokens: slice,
    ) -> None:
        """Judge the selections of a block of tokens by the scores of the recorded keys."""
        block = IndexQueries(queries.q[tokens], queries.weights[tokens])
        keys = keys[: tokens.stop // attention.ratio]
        self.selections["topk"].judge(
            queries.scores(tokens, keys),
            attention.visible(tokens, len(keys)),
            chosen[tokens],
            attention.config.index_topk,
            self._error(layer, tokens) * block.magnitudes(keys),
            f"layer {layer} topk from position {tokens.start}",
        )

    def candidates(self, layer: int, scores: Tensor, blocks: int, magnitudes: Tensor) -> Tensor:
        """Judge the recorded blocks of entries [T, n] by their best scores, and return them.

        Args:
            layer: index of the layer that keeps them.
            scores: block scores [T, blocks] of ``AttentionOracle.block_scores``.
            blocks: number of blocks that are kept.
            magnitudes: [T], result of ``IndexQueries.magnitudes``.
        """
        chosen = self.recording.decisions(layer, "candidates", len(scores))
        self.selections.setdefault("candidates", Selections()).judge(
            scores,
            scores > -torch.inf,
            chosen,
            blocks,
            self._error(layer) * magnitudes,
            f"layer {layer} candidates",
        )
        return chosen

    def experts(self, layer: int, biased: Tensor, k: int) -> Tensor:
        """Judge the recorded experts [T, k] by their biased scores, and return them."""
        chosen = self.recording.decisions(layer, "experts", len(biased))
        self.selections["experts"].judge(
            biased,
            torch.ones_like(biased, dtype=torch.bool),
            chosen,
            k,
            self._error(layer) * biased.abs().amax(1),
            f"layer {layer} experts",
        )
        return chosen

    def hashed_experts(self, layer: int, table: Tensor) -> Tensor:
        """Return a hash layer's recorded experts [T, k], which must equal the table's."""
        chosen = self.recording.decisions(layer, "experts", len(table))
        wrong = (chosen.sort(1).values != table.sort(1).values).any(1)
        findings = self.selections["experts"]
        findings.checked += len(table)
        findings.violations += [
            f"layer {layer} experts, row {row}: not those of the token's table entry"
            for row in wrong.nonzero().flatten().tolist()
        ]
        return chosen

    def _layout(self, layer: int, kind: str, n: int) -> str:
        return self.recording.rows(layer, kind, n).layout_id if n else ""

    def _stored(
        self, layer: int, kind: str, exact: Tensor, pooled: Tensor | None, ratio: int = 1
    ) -> Tensor:
        if not len(exact):
            return exact
        stored = self.recording.rows(layer, kind, len(exact))
        findings = self.found.setdefault(kind, RowFindings(stored.layout_id))
        error = self._pooled(layer, ratio, len(exact)).unsqueeze(-1)
        self._compare(findings, layer, kind, stored, exact, pooled, error)
        return stored.decode()

    def _compare(
        self,
        findings: RowFindings,
        layer: int,
        kind: str,
        stored: StoredRows,
        exact: Tensor,
        pooled: Tensor | None,
        error: Tensor,
    ) -> None:
        row_format = ROW_FORMATS[stored.layout_id]
        size = exact.square().mean(1, keepdim=True).sqrt()
        unit = size + exact.abs()
        if pooled is not None:
            unit = torch.hypot(unit, pooled)
        slack = unit * error
        explained = row_format.explains(stored.data, stored.scales, exact - slack, exact + slack)
        values, expected = stored.decode(), row_format.round(exact)
        findings.rows += len(exact)
        findings.channels += exact.numel()
        findings.identical += int((values == expected).sum())
        findings.unexplained += int((~explained).sum())
        if not findings.first and not explained.all():
            row, channel = (int(i) for i in (~explained).nonzero()[0])
            findings.first = (
                f"layer {layer} {kind} row {row} channel {channel}: stored "
                f"{float(values[row, channel]):.6g}, the oracle's {float(exact[row, channel]):.6g}"
            )
