"""Operations that store rows in paged caches and read them back."""

from anymla.ops.kv_cache.interface import (
    dequant_gather_slots,
    dequantize_and_gather_k_cache,
    quantize_and_insert_k_cache,
)

__all__ = [
    "dequant_gather_slots",
    "dequantize_and_gather_k_cache",
    "quantize_and_insert_k_cache",
]
