"""Calls that the Hopper kernels take with their output quantised."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.ops.prefill_attention import support
from anymla.ops.registry import Support
from anymla.ops.sparse_attention.support import gluon_attention_support

ROPE_DIM = 64
VALUES = 512
# Whether decode's kernels are chosen without having been named.
AUTOMATIC_DECODE = True


def gluon_support(
    q: Tensor,
    rows: Tensor,
    runs: Tensor,
    lists: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90``."""
    if cos_sin_cache.shape[1] != ROPE_DIM or cos_sin_cache.dtype != torch.float32:
        return Support(False, f"{ROPE_DIM} float32 angles a position")
    return support.gluon_support(q, rows)


def gluon_decode_support(
    q: Tensor,
    k_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    n_groups: int,
    **keywords: Any,
) -> Support:
    """``supports`` of backend ``gluon_sm90`` of ``sparse_attention_fp8_quant``."""
    found = gluon_attention_support(q, k_cache, **keywords)
    if found and q.shape[2] != VALUES:
        return Support(False, f"{VALUES} channels, got {q.shape[2]}")
    return dataclasses.replace(found, automatic=found.automatic and AUTOMATIC_DECODE)
