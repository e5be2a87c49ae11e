"""FlashMLA's fused norm, RoPE, attention, RoPE and FP8 cast for DeepSeek-V4.1: not provided yet.

Every function raises NotImplementedError, whose message names the operations to call instead.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["decode", "permute_q_b_proj", "permute_wv_proj", "prefill"]

_IN_PLACE = (
    "call anymla.ops.norm_rope.qnorm_rope_kv_insert, then {attention} with an epilogue, which "
    "rotates back and casts to FP8 in blocks of 128 channels"
)
_UNPERMUTED = "anymla's projections take the weight as it is in the checkpoint"


def prefill(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError: sparse prefill with norm, RoPE and FP8 cast in one kernel."""
    _not_provided("prefill", _IN_PLACE.format(attention="prefill_attention"))


def decode(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError: sparse decode with norm, RoPE and FP8 cast in one kernel."""
    _not_provided("decode", _IN_PLACE.format(attention="sparse_attention"))


def permute_q_b_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError: the query projection in the order of FlashMLA's fused kernel."""
    _not_provided("permute_q_b_proj", _UNPERMUTED)


def permute_wv_proj(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise NotImplementedError: the output projection in the order of FlashMLA's fused kernel."""
    _not_provided("permute_wv_proj", _UNPERMUTED)


def _not_provided(name: str, instead: str) -> NoReturn:
    raise NotImplementedError(
        f"anymla.compat.flash_mla: fused_norm_rope_attn_rope_cast.{name} is not provided yet; "
        f"{instead}"
    )
