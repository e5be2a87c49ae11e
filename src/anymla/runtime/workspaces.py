"""The way in which steps read rows that queries share: by slots or from decoded workspaces."""

from __future__ import annotations

import functools

import torch

from anymla.layers.attention import AttentionLayer
from anymla.model.transformer import Transformer
from anymla.ops.attention.prefill_config import CHANNELS, decoding_pays_in_steps, runs_on
from anymla.ops.device import target_of
from anymla.runtime.bucket import Bucket
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import ChooseReads, Reads


def attends_to_workspaces(model: Transformer) -> bool:
    """True if a kernel that reads runs of one workspace can run."""
    # float16 would not hold every FP8 row.
    fits = model.config.head_dim == CHANNELS and model.dtype == torch.bfloat16
    return model.backend is None and fits and bool(runs_on(model.device))


def reads_in(model: Transformer, store: CacheStore, bucket: Bucket) -> ChooseReads | None:
    """Return the choice for ``device_step`` in a bucket's steps; None if all is by slots."""
    if bucket.tokens < 2 or not attends_to_workspaces(model):
        return None
    attention = next(each for each in model.modules() if isinstance(each, AttentionLayer))
    return functools.partial(
        _choice,
        bucket.requests,
        bucket.tokens,
        attention.heads.count,
        target_of(model.device).sm_count,
    )


def _choice(requests: int, queries: int, heads: int, sm_count: int, entries: int) -> Reads:
    pays = decoding_pays_in_steps(requests, queries, heads, entries, sm_count)
    return Reads.DECODED if pays else Reads.SLOTS
