"""Workspaces of decoded rows, to which prefill requests attend.

vLLM says which prefills of a step share a workspace, so that none exceeds the memory seen by its
profile run (``get_prefill_chunk_plan``). Each request has as many rows as the longest of the chunk:
rows of its compressed entries, then the window rows of all its tokens in the step.

    request 0 | entries .. | window .. | request 1 | entries .. | window .. |
              |<---- N --->|           |
              |<--------- M ---------->|
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from anymla.engines.vllm.step import once
from anymla.layers.plans import Plans
from anymla.ops.attention.plan import decoding_pays, has_workspace_kernel
from anymla.ops.streams import Workspace


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Consecutive prefill requests of a step that share a workspace.

    Attributes:
        requests: range of the step's requests.
        tokens: range of the step's tokens.
        entries: N, number of a request's entry rows, which precede its window rows.
        rows: M, number of rows of a request.
        seq_lens: int32 [R], lengths of the requests including the step's tokens.
        entry_lens: int32 [R], number of compressed entries, if the layer has any.
        gather_lens: int32 [R], number of window rows.
        window: largest number of rows of a token's window.
        ranges: int32 [T, 4] row ranges in the form of ``prefill_attention``.
    """

    requests: slice
    tokens: slice
    entries: int
    rows: int
    seq_lens: Tensor
    entry_lens: Tensor
    gather_lens: Tensor
    window: int
    ranges: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Number of requests, and rows of each."""
        return self.requests.stop - self.requests.start, self.rows


class StepPlans(Plans):
    """Plans of attention by slots, and chunks of prefills, shared by the layers of a step."""

    def __init__(self) -> None:
        """Start without plans and chunks."""
        super().__init__()
        self._chunks: dict[Any, list[Chunk]] = {}

    def of_pass(self) -> StepPlans:
        """Return empty plans for another pass over the same metadata."""
        return StepPlans()

    def chunks(
        self, window: Any, positions: Tensor, ratio: int, requests_a_chunk: int
    ) -> list[Chunk]:
        """Return the chunks of a layer; none if the step's prefills are faster by slots.

        Args:
            window: vLLM's metadata of the window cache.
            positions: int64 [T], positions of the step's tokens.
            ratio: tokens per compressed entry; 1 for layers without entries.
            requests_a_chunk: number of requests of the greatest length that memory allows in a
                chunk.
        """
        if ratio not in self._chunks:
            self._chunks[ratio] = _chunks(window, positions, ratio, requests_a_chunk)
        return self._chunks[ratio]


def plans_of_step(attn_metadata: dict[str, Any], window: Any) -> StepPlans:
    """Return the shared plans of a forward pass; the first caller creates them.

    A draft model's passes may share their metadata, whose lengths change in place, so each pass has
    plans of its own.

    Layers' windows are in several groups of pages. Their metadata differ only in page numbers, on
    which no plan depends.

    Args:
        attn_metadata: metadata of the step.
        window: metadata of the layer's window cache.
    """
    plans: StepPlans = once("plans", lambda: window.tile_sched_swaonly.of_pass(), of=attn_metadata)
    return plans


@contextlib.contextmanager
def scratch_memory(num_bytes: int) -> Iterator[None]:
    """Take operations' scratch memory from vLLM's workspace, which its memory profile counts.

    The profile run must request the same number of bytes, because the workspace is locked after it.
    A graph under capture has memory of its own, which must not move.
    """
    captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if not num_bytes or captured or not is_workspace_manager_initialized():
        yield
        return
    (buffer,) = current_workspace_manager().get_simultaneous(((num_bytes,), torch.uint8))
    with Workspace.over(buffer).active():
        yield


def workspace_rows(
    max_model_len: int, max_tokens: int, window: int, ratio: int, requests_a_chunk: int
) -> int:
    """Return the number of rows of the largest workspace that vLLM plans."""
    entries = -(-max_model_len // ratio) if ratio > 1 else 0
    return requests_a_chunk * (entries + window + max_tokens)


def _chunks(window: Any, positions: Tensor, ratio: int, requests_a_chunk: int) -> list[Chunk]:
    if not window.num_prefill_tokens or not has_workspace_kernel(window.is_valid_token.device):
        return []
    before, count = window.num_decodes, window.num_prefills
    starts = window.query_start_loc_cpu[before : before + count + 1].tolist()
    lengths = window.prefill_seq_lens_cpu[:count].tolist()
    if not decoding_pays(window.num_prefill_tokens, lengths, ratio):
        return []
    plan = window.get_prefill_chunk_plan(compress_ratio=ratio, prefill_chunk_size=requests_a_chunk)
    made = []
    for first, end, entries, rows in plan:
        tokens = slice(starts[first], starts[end])
        if tokens.start == tokens.stop:
            continue  # a padded batch has requests without tokens
        seq_lens = window.prefill_seq_lens[first:end]
        chunk = Chunk(
            requests=slice(before + first, before + end),
            tokens=tokens,
            entries=entries,
            rows=rows,
            seq_lens=seq_lens,
            entry_lens=seq_lens // ratio,
            gather_lens=window.prefill_gather_lens[first:end],
            window=window.prefill_window_size,
            ranges=_ranges(window, positions, tokens, before + first, ratio, (entries, rows)),
        )
        made.append(chunk)
    return made


def _ranges(
    window: Any,
    positions: Tensor,
    tokens: slice,
    first: int,
    ratio: int,
    sizes: tuple[int, int],
) -> Tensor:
    """Return row ranges of the window and the entries that tokens see; ``first`` is the request."""
    entries, rows = sizes
    request = window.token_to_req_indices[tokens].long()
    base = (request - first) * rows
    # Position of the first token of a request that the workspace holds.
    gathered = window.prefill_gather_lens
    held = (window.prefill_seq_lens[: len(gathered)] - gathered)[request - window.num_decodes]
    end = positions[tokens] + 1
    lowest = (end - window.prefill_window_size).maximum(held)
    ranges = torch.stack((base + entries + lowest - held, end - lowest, base, end // ratio), 1)
    return torch.where(window.is_valid_token[tokens, None], ranges, 0).int()
