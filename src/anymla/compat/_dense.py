"""FlashMLA's dense functions, none of which is provided."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """Raise NotImplementedError, because dense attention is not provided."""
    not_provided("flash_attn_varlen_func")


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """Raise NotImplementedError, because dense attention is not provided."""
    not_provided("flash_attn_varlen_qkvpacked_func")


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_qo: Tensor,
    cu_seqlens_kv: Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
) -> tuple[Tensor, Tensor]:
    """Raise NotImplementedError, because dense attention is not provided."""
    not_provided("flash_attn_varlen_kvpacked_func")


def not_provided(name: str, call: str = "(dense attention)") -> NoReturn:
    """Raise NotImplementedError with a message that names an alternative."""
    raise NotImplementedError(
        f"anymla.compat.flash_mla: {name} {call} is not provided, anymla's attention is sparse; "
        "list the slots in indices, or use FlashMLA itself or "
        "torch.nn.functional.scaled_dot_product_attention"
    )
