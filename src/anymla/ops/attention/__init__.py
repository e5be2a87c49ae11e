"""Attention over listed slots or over a decoded workspace, with one learned sink per head."""

from anymla.ops._epilogue import InverseRopeQuant
from anymla.ops.attention.cache_rows import CacheRows
from anymla.ops.attention.interface import (
    prefill_attention,
    prefill_attention_backward,
    sparse_attention,
    sparse_attention_plan,
    sparse_attention_rows,
)

__all__ = [
    "CacheRows",
    "InverseRopeQuant",
    "prefill_attention",
    "prefill_attention_backward",
    "sparse_attention",
    "sparse_attention_plan",
    "sparse_attention_rows",
]
