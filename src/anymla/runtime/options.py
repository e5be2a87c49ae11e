"""Options of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

# Largest number of rows for which further streams gain time (measured on H200).
_MOST_ROWS_BESIDE = 128

DecodeMode = Literal["auto", "graph", "fixed", "plain"]


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """Sizes of an engine, in tokens unless stated otherwise.

    Attributes:
        kv_cache: cache format: "fp8" (DeepSeek-V4's own records), "fp8-mxfp4-index" (its index keys
            in FP4), "fp8-nvfp4" (its compressed entries in FP4: half the bytes and less exact),
            "nvfp4" (V4.1's own: entries and index keys in FP4), "bf16" or "fp32" (plain rows).
        chunk_size: most prompt tokens of one request in a step.
        max_requests: number of requests that run at once.
        max_seq_len: tokens of prompt and output of the longest request.
        max_batch_tokens: most tokens of a step, decode first; None: one token (and its drafts) for
            every request plus one chunk.
        draft_tokens: number of tokens that the drafter guesses ahead; 0 turns speculation off.
        adapt_drafts: True to verify the number of drafts that has brought most tokens a second
            lately; False to verify all. In graphs, every width has its own.
        least_survival: least probability, 0 to 1, with which a guess and all before it must be
            right to be verified, for a DSpark drafter with a confidence head.
        decode: way to run steps when no request has prompt tokens left. "graph": at a few fixed
            sizes, each recorded once as a CUDA graph and replayed; "fixed": the same steps at the
            same sizes, called directly; "plain": at the size of the batch. "auto" is "graph" on
            NVIDIA devices and "plain" elsewhere.
        run_ahead: in steps of fixed size, launch the next step before this one's tokens are on the
            host, if those tokens alone determine it: with greedy requests, and with a DSpark
            drafter or none. A request that ends by a stop token may then be computed for one step
            more.
        side_stream: in graphs, compress and index in parallel with the query's projections, and run
            the shared expert in parallel with the routed ones. None: for row counts that gain by
            it.
        pages: number of usable pages by cache group, for groups that differ from the default, which
            lets ``max_requests`` requests of ``max_seq_len`` run at once.
        keep_caches: True to keep a request's caches after it has ended, for a request whose prompt
            begins with the same tokens; they are dropped when their place is needed.
    """

    kv_cache: str = "fp8"
    chunk_size: int = 512
    max_requests: int = 8
    max_seq_len: int = 4096
    max_batch_tokens: int | None = None
    draft_tokens: int = 0
    adapt_drafts: bool = False
    least_survival: float = 0.0
    decode: DecodeMode = "auto"
    run_ahead: bool = True
    side_stream: bool | None = None
    pages: Mapping[str, int] | None = None
    keep_caches: bool = False

    def __post_init__(self) -> None:
        for name, least in (
            ("chunk_size", 1),
            ("max_requests", 1),
            ("max_seq_len", 1),
            ("draft_tokens", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.least_survival <= 1:
            raise ValueError(f"least_survival must be in [0, 1], got {self.least_survival}")
        if self.decode not in get_args(DecodeMode):
            known = ", ".join(get_args(DecodeMode))
            raise ValueError(f"decode must be one of {known}, got {self.decode!r}")
        decode = self.max_requests * (1 + self.draft_tokens)
        if self.max_batch_tokens is not None and self.max_batch_tokens < decode:
            raise ValueError(
                f"max_batch_tokens must be at least {decode}, the decode tokens of "
                f"{self.max_requests} requests, got {self.max_batch_tokens}"
            )

    def runs_beside(self, rows: int) -> bool:
        """True if steps of ``rows`` rows use further streams."""
        return rows <= _MOST_ROWS_BESIDE if self.side_stream is None else self.side_stream

    @property
    def batch_tokens(self) -> int:
        """``max_batch_tokens`` or its default."""
        if self.max_batch_tokens is not None:
            return self.max_batch_tokens
        return self.max_requests * (1 + self.draft_tokens) + self.chunk_size

    def step_tokens(self, prompt_length: int) -> int:
        """Return the most tokens of a request with this prompt in the steps in flight."""
        decode = 1 + self.draft_tokens
        if self.run_ahead and self.decode != "plain":
            decode *= 2
        return max(min(self.chunk_size, prompt_length), decode)
