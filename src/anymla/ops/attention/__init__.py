"""Attention over listed slots or over a decoded workspace, with one learned sink per head."""

from anymla.ops.attention.interface import (
    prefill_attention,
    prefill_attention_fp8_quant,
    sparse_attention,
    sparse_attention_fp8_quant,
    sparse_attention_plan,
    sparse_attention_rows,
)

__all__ = [
    "prefill_attention",
    "prefill_attention_fp8_quant",
    "sparse_attention",
    "sparse_attention_fp8_quant",
    "sparse_attention_plan",
    "sparse_attention_rows",
]
