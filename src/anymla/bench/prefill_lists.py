"""Attention to listed rows of one tensor on a GPU: random rows, lists of one length, and a peer."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from anymla.bench.gpu_timing import time_us
from anymla.bench.prefill import Peer
from anymla.bench.report import Result
from anymla.ops.sparse_attention import sparse_attention_rows

ROWS = 32768
_ASKED = 1.05
# Queries, heads, width of the lists.
SHAPES = ((4096, 64, 640), (4096, 64, 2048), (4096, 128, 1152), (4096, 128, 2048))


def measure_lists(
    shapes: Sequence[tuple[int, int, int]], backend: str, peer: Peer | None, repetitions: int = 10
) -> Iterator[Result]:
    """Time ``sparse_attention_rows`` as ``flash_mla_sparse_fwd`` calls it; one result each."""
    for tokens, heads, width in shapes:
        torch.manual_seed(1)
        q = torch.randn((tokens, heads, 512), device="cuda").bfloat16()
        kv = torch.randn((ROWS, 512), device="cuda").bfloat16()
        lists = torch.randint(0, ROWS, (tokens, width), device="cuda").int()
        lengths = torch.full((tokens,), width, device="cuda", dtype=torch.int32)
        sink = torch.randn(heads, device="cuda")
        peaks = torch.empty((tokens, heads), device="cuda")
        ours = functools.partial(
            sparse_attention_rows, q, kv, lists, lengths,
            sink=sink, empty_lse=torch.inf, max_logits=peaks, backend=backend,
        )  # fmt: skip
        row: dict[str, Any] = {"us": time_us([ours] * 2, repetitions), "backend": backend}
        row["teraflops"] = 4 * tokens * heads * 512 * width / row["us"] * 1e-6
        asked, met = None, None
        if peer is not None:
            theirs = functools.partial(peer, q, kv, lists, lengths, sink)
            row["peer_us"] = time_us([theirs] * 2, repetitions)
            row["ratio"] = row["peer_us"] / row["us"]
            asked, met = f"{_ASKED}x", row["ratio"] >= _ASKED
        label = f"h{heads} T={tokens} K={width} of {ROWS} rows"
        yield Result("flash_mla_sparse_fwd", label, row, asked, met)
