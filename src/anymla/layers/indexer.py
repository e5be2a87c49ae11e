"""The lightning indexer: a cheap score for every compressed entry, of which the best are kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from anymla.formats.page_layout import INDEX_FP8, INDEX_MXFP4
from anymla.layers.compressor import Compressor
from anymla.layers.linear import Linear
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import INDEX_GROUP, INDEX_STATE_GROUP
from anymla.layers.step import Step
from anymla.ops.indexer import indexer_q_rope_quant, paged_mqa_logits, topk_per_row

# Scores of one call stay below this many elements (64 MiB of float32).
_LOGITS_ELEMENTS = 1 << 24


class Indexer(nn.Module):
    """``score[t, w] = sum_h weight[t, h] * relu(q[t, h] . key[w])``, best ``width`` entries.

    Attributes:
        wq_b: query projection from the normalised latent.
        weights_proj: head weights from the layer's input.
        compressor: writes the index keys.
        heads: number of index heads.
        width: entries kept for a query.
        quantize_q: quantise queries like the keys; False where activations stay unquantised.
    """

    def __init__(
        self,
        *,
        wq_b: Linear,
        weights_proj: Linear,
        compressor: Compressor,
        heads: int,
        width: int,
        rope: RopeTable,
        quantize_q: bool,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.wq_b = wq_b
        self.weights_proj = weights_proj
        self.compressor = compressor
        self.heads = heads
        self.width = width
        self.rope = rope
        self.quantize_q = quantize_q
        self.backend = backend

    def forward(
        self, x: Tensor, latent: Tensor, step: Step, cache: Tensor, state: Tensor, layout: str
    ) -> Tensor:
        """Write the step's index keys, then choose entries for every token.

        Args:
            x: [T, hidden], the layer's normalised input.
            latent: [T, q_lora_rank], the normalised query latent.
            step: the batch.
            cache: index pages of ``layout``, written.
            state: partial states of the index compressor, written.
            layout: layout id of ``cache``.

        Returns:
            int32 [T, width], request-local entries, valid ones first, then -1.
        """
        self.write_keys(x, step, cache, state, layout)
        assert step.index_lens is not None
        group = step.groups[INDEX_GROUP]
        most = step.max_seq_len // self.compressor.ape.shape[0]
        if most <= self.width:
            return all_entries(step.index_lens, self.width)

        q, weights = self.wq_b(latent), self.weights_proj(x)
        q = q.unflatten(-1, (self.heads, -1))
        quant = {INDEX_FP8: "fp8", INDEX_MXFP4: "mxfp4"}.get(layout, "none")
        q, q_scales, weights = indexer_q_rope_quant(
            q,
            weights,
            step.positions,
            self.rope.upto(step.max_seq_len),
            softmax_scale=q.shape[-1] ** -0.5,
            head_scale=self.heads**-0.5,
            quant=quant if self.quantize_q else "none",
            hadamard=layout == INDEX_MXFP4,
            backend=self.backend,
        )
        return select_entries(
            q,
            q_scales if q_scales.numel() else None,
            weights,
            step.index_lens,
            cache,
            group.block_table,
            query_lens=step.query_lens,
            num_decodes=step.num_decodes,
            max_context=most,
            max_elements=_LOGITS_ELEMENTS,
            layout=layout,
            out=torch.full((len(x), self.width), -1, dtype=torch.int32, device=x.device),
            backend=self.backend,
        )

    def write_keys(self, x: Tensor, step: Step, cache: Tensor, state: Tensor, layout: str) -> None:
        """Write the step's index keys and choose nothing; arguments of ``forward``."""
        self.compressor(
            x,
            step,
            state,
            step.groups[INDEX_STATE_GROUP],
            cache,
            step.groups[INDEX_GROUP],
            layout,
            hadamard=layout == INDEX_MXFP4,
        )


@dataclasses.dataclass(frozen=True)
class ScoreSpan:
    """Consecutive tokens scored in one call: ``requests`` requests of ``tokens`` tokens each."""

    first_token: int
    first_request: int
    requests: int
    tokens: int


def score_spans(
    query_lens: tuple[int, ...], num_decodes: int, most_rows: int
) -> Iterator[ScoreSpan]:
    """Cut a step into calls that share a block table row, or a query length among decodes.

    Args:
        query_lens: query lengths of the requests, in batch order.
        num_decodes: how many of the first requests are decodes.
        most_rows: tokens of one call, at most, unless a single decode has more.
    """
    token = request = 0
    decode_lens = set(query_lens[:num_decodes])
    if len(decode_lens) == 1:
        (tokens,) = decode_lens
        together = max(1, most_rows // max(tokens, 1))
        while request < num_decodes:
            requests = min(together, num_decodes - request)
            yield ScoreSpan(token, request, requests, tokens)
            request += requests
            token += requests * tokens
    for single in range(request, len(query_lens)):
        end = token + query_lens[single]
        while token < end:
            tokens = min(most_rows, end - token)
            yield ScoreSpan(token, single, 1, tokens)
            token += tokens


def select_entries(
    q: Tensor,
    q_scales: Tensor | None,
    weights: Tensor,
    visible: Tensor,
    cache: Tensor,
    block_table: Tensor,
    *,
    query_lens: tuple[int, ...],
    num_decodes: int,
    max_context: int,
    max_elements: int,
    layout: str,
    out: Tensor,
    backend: str | None,
) -> Tensor:
    """Score every visible entry of every token and keep the best.

    Args:
        q: [T, H, 128] (or packed) index queries, from ``indexer_q_rope_quant``.
        q_scales: of packed queries, from there.
        weights: [T, H] float32, from there.
        visible: int32 [T], entries that each token may select.
        cache: index pages of ``layout``.
        block_table: int32 [R, P], pages of each request.
        query_lens: tokens of each request, in batch order.
        num_decodes: how many of the first requests are decodes.
        max_context: at least the largest of ``visible``.
        max_elements: of the scores of one call, unless a single row has more.
        layout: layout id of ``cache``.
        out: int32 [T or more, width] to write into.
        backend: of the operations.

    Returns:
        ``out``: request-local entries, best first, then -1.
    """
    for span in score_spans(query_lens, num_decodes, max(1, max_elements // max_context)):
        tokens = slice(span.first_token, span.first_token + span.requests * span.tokens)
        shape = (span.requests, span.tokens)
        lengths = visible[tokens]
        logits = paged_mqa_logits(
            q[tokens].unflatten(0, shape),
            cache,
            weights[tokens],
            lengths.unflatten(0, shape),
            block_table[span.first_request : span.first_request + span.requests],
            max_context=max_context,
            layout=layout,
            q_scales=None if q_scales is None else q_scales[tokens].unflatten(0, shape),
            backend=backend,
        )
        width = out.shape[1]
        starts = torch.zeros_like(lengths)
        topk_per_row(logits, starts, lengths, width, out=out[tokens], backend=backend)
    return out


def all_entries(visible: Tensor, width: int) -> Tensor:
    """The selection where every visible entry fits: 0, 1, ... then -1.

    Args:
        visible: int32 [T], entries visible to each token, at most ``width``.
        width: columns of the result.

    Returns:
        int32 [T, width].
    """
    entry = torch.arange(width, dtype=torch.int32, device=visible.device)
    return torch.where(entry < visible.unsqueeze(1), entry, -1)
