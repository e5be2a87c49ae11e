"""Calls that the Hopper kernel takes with its output quantised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anymla.ops._operation import Support
from anymla.ops.prefill_attention import support

TURNED = 64


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
    if cos_sin_cache.shape[1] != TURNED or cos_sin_cache.dtype != torch.float32:
        return Support(False, f"{TURNED} float32 angles a position")
    return support.gluon_support(q, rows)
