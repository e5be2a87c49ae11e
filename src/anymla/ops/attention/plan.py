"""The plan of attention: rows read by their slots, or from a workspace into which they are decoded.

Layers and engines ask here, so that they know neither devices nor backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.ops.attention.cache_rows import CacheRows
from anymla.ops.attention.interface import sparse_attention
from anymla.ops.attention.prefill_config import CHANNELS, HEADS, runs_on
from anymla.ops.device import target_of

# Decoding an entry into a workspace moves 1.6 KB; so many entries a query take as long as attention
# by slots takes longer. 64 heads, 512 selected of 8,192 entries: 64 queries take 26 us by slots, 28
# decoded; 512 take 117, 86; of 32,768 entries 128 queries take 35, 48; 512 take 124, 107 ("Decoded,
# or by slots" in docs/performance/prefill.md).
ENTRIES_PER_QUERY = 128


def has_workspace_kernel(device: torch.device) -> bool:
    """Return True if the device has a kernel that gains by reading a decoded workspace."""
    return bool(runs_on(device))


def reads_workspaces(channels: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the device's kernel reads workspaces of such rows.

    Args:
        channels: number of channels of a row.
        dtype: dtype of a decoded row; float16 does not hold every FP8 row.
        device: device of the workspaces.
    """
    return channels == CHANNELS and dtype == torch.bfloat16 and has_workspace_kernel(device)


def decoding_pays(tokens: int, seq_lens: Sequence[int], ratio: int) -> bool:
    """Return True if prefill queries attend to decoded rows faster than to rows in their pages.

    Args:
        tokens: number of queries of all prefill requests.
        seq_lens: lengths of these requests, in tokens including the queries.
        ratio: tokens per compressed entry; 1 for layers without entries.
    """
    entries = sum(length // ratio for length in seq_lens) if ratio > 1 else 0
    return entries <= ENTRIES_PER_QUERY * tokens


# Least share of the SMs that a verification step's waves must occupy: for lists of two or three
# blocks, and for longer ones, which by slots are cut to fill the last wave.
_SHORT_FILL, _LONG_FILL = 0.7, 0.9
_SHORT_ENTRIES = 64
# More entries have not been measured, and each takes 1 KB of every request's workspace.
_MOST_ENTRIES = 2048


def decoding_pays_in_steps(
    requests: int, queries: int, heads: int, entries: int, sm_count: int
) -> bool:
    """Return True if decode steps of several queries a request are faster with decoded rows.

    All queries of a request then attend to the same decoded rows: its window with the rows that
    only later queries see, and its first entries. By slots, each query decodes them for itself.

    Measured on an H200, us by slots and decoded (docs/performance/verification.md): 32 requests of
    8 queries, 64 heads: window 20.9, 18.3; with 64 entries 25.9, 23.6; with 1,024 94.8, 91.2; of 6
    queries 20.4, 18.2; 24.8, 22.8; 84.8, 89.1. 128 heads, 8 queries, 32 requests: 44.8, 33.5; with
    1,024 183, 151; 8 requests: 11.8, 11.9; with 1,024 47.4, 41.0. 8 requests of 64 heads and one
    request: no gain, or a loss.

    Args:
        requests: number of requests.
        queries: number of queries of each request.
        heads: number of query heads.
        entries: number of compressed entries that a request's queries see; 0 for windows alone.
        sm_count: number of SMs of the device.
    """
    if queries < 2 or heads % HEADS or entries > _MOST_ENTRIES:
        return False
    tiles = requests * queries * (heads // HEADS)
    fill = tiles / (-(-tiles // sm_count) * sm_count)
    if entries <= _SHORT_ENTRIES:
        return tiles > sm_count and fill >= _SHORT_FILL
    return fill >= _LONG_FILL


def step_reads_workspaces(
    requests: int, queries: int, heads: int, entries: int, device: torch.device
) -> bool:
    """Return ``decoding_pays_in_steps`` for a device."""
    sm_count = target_of(device).sm_count
    return decoding_pays_in_steps(requests, queries, heads, entries, sm_count)


def quantises_in_one_kernel(q: Tensor, rows: Sequence[CacheRows], **named: Any) -> bool:
    """Return True if ``sparse_attention`` with an epilogue is one kernel for these arguments."""
    return sparse_attention.resolve(q, rows, **named).name == "gluon_sm90"
