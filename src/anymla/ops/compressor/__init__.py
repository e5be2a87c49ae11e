"""The compressor: pools windows of tokens into entries of the compressed caches."""

from anymla.ops.compressor.interface import (
    compress_norm,
    compress_norm_rope_insert,
    save_partial_states,
)

__all__ = ["compress_norm", "compress_norm_rope_insert", "save_partial_states"]
