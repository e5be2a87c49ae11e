"""DeepGEMM: FP8 products, and the indexer's scores, which torch or vLLM selects from.

Its functions of scores have new names and arguments since 2.8, which sgl-deep-gemm 0.2.5 has; vLLM
0.26 ships 2.5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anymla.ops.step_indices import compute_global_topk_indices_and_lens
from lab.peers import Peer

if TYPE_CHECKING:
    from anymla.ops.indexer.shapes import SelectShape
    from lab.cases.indexer import Inputs

# It reads the scales of a quant block of channels in multiples of 16 bytes.
_TOKEN_STEP = 4
# Scores, with -inf written where nothing is visible if asked.
Scores = Callable[[bool], Tensor]


class DeepGemm(Peer):
    """DeepGEMM's functions."""

    name, title = "deep_gemm", "DeepGEMM"
    modules = ("deep_gemm",)

    def scores(self, shape: SelectShape, given: Inputs) -> Scores:
        """Compute index scores, for which schedules and gathered keys are prepared beforehand."""
        return self._prefill(given) if shape.prefill else self._decode(shape, given)

    def _decode(self, shape: SelectShape, given: Inputs) -> Scores:
        lengths = given.lengths.view(shape.requests, shape.queries)
        plan = self._plan(lengths, given.cache.shape[1])
        q = given.q.view(shape.requests, shape.queries, *given.q.shape[1:])
        cache = given.cache.unsqueeze(2)

        def call(_: bool) -> Tensor:
            return self._paged_logits(
                q, cache, given.weights, lengths, given.table, plan, shape.keys
            )

        return call

    def _paged_logits(self, *given: Any) -> Tensor:
        """Return scores over pages; those of entries that are not visible may be anything."""
        logits: Tensor
        if hasattr(self.module, "fp8_paged_mqa_logits"):
            logits = self.module.fp8_paged_mqa_logits(*given, False)
        else:
            logits = self.module.fp8_fp4_paged_mqa_logits(*given)
        return logits

    def _prefill(self, given: Inputs) -> Scores:
        page, width = given.cache.shape[1], given.q.shape[-1]
        pages = given.cache.view(len(given.cache), -1)[given.table[0].long()]
        keys = pages[:, : page * width].contiguous().view(torch.float8_e4m3fn).view(-1, width)
        scale = pages[:, page * width :].contiguous().view(torch.float32).view(-1)
        starts = torch.zeros_like(given.lengths)

        ends = given.lengths

        def call(clean: bool) -> Tensor:
            logits: Tensor
            if hasattr(self.module, "fp8_mqa_logits"):
                logits = self.module.fp8_mqa_logits(
                    given.q, (keys, scale), given.weights, starts, ends, clean
                )
                return logits
            logits = self.module.fp8_fp4_mqa_logits(
                given.q, (keys, scale), given.weights, starts, ends, len(keys)
            )
            if clean:  # what 2.5 does in a kernel of its own
                place = torch.arange(logits.shape[1], device=logits.device)
                logits.masked_fill_(place >= ends[:, None], -torch.inf)
            return logits

        return call

    def _plan(self, lengths: Tensor, page: int) -> Any:
        sms = self.module.get_num_sms()
        return self.module.get_paged_mqa_logits_metadata(lengths, page, sms)

    def product(
        self, x: Tensor, weight: Tensor, scale: Tensor, *, quantize_activations: bool = False
    ) -> Tensor:
        """Call DeepGEMM's product like ``fp8_block_linear``."""
        from anymla.ops._triton_quantize import quantize_rows_mn_major

        assert quantize_activations
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        codes, x_scales = quantize_rows_mn_major(rows, _TOKEN_STEP)
        out = torch.empty(len(codes), len(weight), dtype=x.dtype, device=x.device)
        self.module.fp8_gemm_nt(
            (codes.view(torch.float8_e4m3fn), x_scales),
            (weight.contiguous().view(torch.float8_e4m3fn), scale.contiguous()),
            out,
        )
        return out[: len(rows)].view(*x.shape[:-1], -1)

    def select(
        self,
        plans: dict[tuple[object, ...], Any],
        q: Tensor,
        index_cache: Tensor,
        weights: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        k: int,
        *,
        max_context: int,
        out: Tensor,
        slot_table: Tensor,
        slot_page_size: int,
        slots: Tensor,
        counts: Tensor,
        backend: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Call ``select_topk`` of one token a request by torch's top-k; a step shares its plans."""
        tokens = len(q)
        lengths = lengths.view(-1, 1)
        key = (tokens, max_context, lengths.data_ptr())
        if key not in plans:
            everyone = torch.arange(tokens, dtype=torch.int32, device=q.device)
            plans[key] = self._plan(lengths, index_cache.shape[1]), everyone, everyone >= 0
        plan, everyone, is_valid = plans[key]
        logits = self._paged_logits(
            q.unsqueeze(1), index_cache.unsqueeze(2), weights, lengths, block_table, plan,
            max_context,
        )  # fmt: skip
        out.copy_(logits.topk(k).indices)
        where = compute_global_topk_indices_and_lens(
            out, everyone, slot_table, slot_page_size, is_valid, backend=backend
        )
        slots.copy_(where[0])
        counts.copy_(where[1])
        return out
