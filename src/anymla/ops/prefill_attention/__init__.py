"""Attention of a chunk's queries to decoded rows that mostly lie side by side."""

from anymla.ops.prefill_attention.interface import prefill_attention

__all__ = ["prefill_attention"]
