"""Attention with gradients: what training frameworks call, forward as it serves."""

from anymla.train.attention import attention, sparse_attention
from anymla.train.compressor import compress
from anymla.train.hyper_connection import (
    hyper_collapse,
    hyper_gates,
    hyper_head,
    hyper_post,
    hyper_pre,
)
from anymla.train.indexer import index_loss, select_entries
from anymla.train.layer import Attended, Attention, Shared
from anymla.train.norm_rope import rms_norm, rope
from anymla.train.plan import Plan
from anymla.train.projection import FrozenLinear, grouped_projection
from anymla.train.rows import heads_and_rows, round_rows

__all__ = [
    "Attended",
    "Attention",
    "FrozenLinear",
    "Plan",
    "Shared",
    "attention",
    "compress",
    "grouped_projection",
    "heads_and_rows",
    "hyper_collapse",
    "hyper_gates",
    "hyper_head",
    "hyper_post",
    "hyper_pre",
    "index_loss",
    "rms_norm",
    "rope",
    "round_rows",
    "select_entries",
    "sparse_attention",
]
