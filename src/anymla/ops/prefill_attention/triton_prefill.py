"""Attention during prefill by the portable kernels: the runs written out, their rows gathered."""

from __future__ import annotations

from anymla.ops.prefill_attention.named_rows import by
from anymla.ops.sparse_attention.triton_launch import sparse_attention_rows

prefill_attention = by(sparse_attention_rows)
