"""Attention whose output leaves as FP8, ready for the grouped output projection."""

from anymla.ops.attention_output.interface import (
    prefill_attention_fp8_quant,
    sparse_attention_fp8_quant,
)

__all__ = ["prefill_attention_fp8_quant", "sparse_attention_fp8_quant"]
