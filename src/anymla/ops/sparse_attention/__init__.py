"""Sparse attention over listed slots, with one learned sink per head."""

from anymla.ops.sparse_attention.interface import (
    sparse_attention,
    sparse_attention_fp8_quant,
    sparse_attention_plan,
    sparse_attention_rows,
)

__all__ = [
    "sparse_attention",
    "sparse_attention_fp8_quant",
    "sparse_attention_plan",
    "sparse_attention_rows",
]
