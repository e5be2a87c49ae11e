"""The two steps one after the other, by any backend that has both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.output_projection import inverse_rope_fp8_quant
from anymla.ops.prefill_attention import prefill_attention
from anymla.ops.sparse_attention import sparse_attention

Composed = Callable[..., Any]


def by(backend: str) -> tuple[Composed, Composed]:
    """``sparse_attention_fp8_quant`` and ``prefill_attention_fp8_quant`` by one backend's steps."""

    def sparse_attention_fp8_quant(
        q: Tensor,
        k_cache: Tensor,
        indices: Tensor,
        lengths: Tensor | None,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        n_groups: int,
        sink: Tensor | None = None,
        scale: float | None = None,
        extra_cache: Tensor | None = None,
        extra_indices: Tensor | None = None,
        extra_lengths: Tensor | None = None,
        layout: str = MAIN_FP8,
        extra_layout: str = MAIN_FP8,
        batch_invariant: bool = False,
        plan: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, _ = sparse_attention(
            q,
            k_cache,
            indices,
            lengths,
            sink=sink,
            scale=scale,
            extra_cache=extra_cache,
            extra_indices=extra_indices,
            extra_lengths=extra_lengths,
            layout=layout,
            extra_layout=extra_layout,
            batch_invariant=batch_invariant,
            plan=plan,
            backend=backend,
        )
        return quantised(out, positions, cos_sin_cache, n_groups)

    def prefill_attention_fp8_quant(
        q: Tensor,
        rows: Tensor,
        runs: Tensor,
        lists: Tensor | None,
        positions: Tensor,
        cos_sin_cache: Tensor,
        *,
        n_groups: int,
        window: int,
        entries: int = 0,
        sink: Tensor | None = None,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        out, _ = prefill_attention(
            q,
            rows,
            runs,
            lists,
            window=window,
            entries=entries,
            sink=sink,
            scale=scale,
            backend=backend,
        )
        return quantised(out, positions, cos_sin_cache, n_groups)

    def quantised(
        out: Tensor, positions: Tensor, cos_sin_cache: Tensor, n_groups: int
    ) -> tuple[Tensor, Tensor]:
        codes, scales = inverse_rope_fp8_quant(
            out, positions, cos_sin_cache, n_groups=n_groups, backend=backend
        )
        return codes, scales

    return sparse_attention_fp8_quant, prefill_attention_fp8_quant
