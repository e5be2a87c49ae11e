"""The way in which steps read rows that queries share: by slots or from decoded workspaces."""

from __future__ import annotations

import functools

import torch

from anymla.layers.attention import AttentionLayer
from anymla.model.transformer import Transformer
from anymla.ops.attention.plan import reads_workspaces, step_reads_workspaces
from anymla.runtime.bucket import Bucket
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import ChooseReads, Reads


def attends_to_workspaces(model: Transformer) -> bool:
    """True if a kernel that reads runs of one workspace can run."""
    if model.backend is not None:
        return False
    return reads_workspaces(model.config.head_dim, model.dtype, model.device)


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
        model.device,
    )


def _choice(requests: int, queries: int, heads: int, device: torch.device, entries: int) -> Reads:
    decoded = step_reads_workspaces(requests, queries, heads, entries, device)
    return Reads.DECODED if decoded else Reads.SLOTS
