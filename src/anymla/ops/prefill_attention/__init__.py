"""Attention of a chunk's queries to decoded rows that mostly lie side by side."""

from anymla.ops.prefill_attention.interface import prefill_attention, prefill_attention_fp8_quant

__all__ = ["prefill_attention", "prefill_attention_fp8_quant"]
