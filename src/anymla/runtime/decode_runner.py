"""Decode steps at fixed sizes: the backbone's, and the drafter's behind it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.layers.dspark import BlockGuess
from anymla.layers.side_stream import INLINE, SideStream
from anymla.layers.step import Step
from anymla.model.transformer import Transformer
from anymla.runtime.bucket import Bucket, decode_buckets, smallest
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.draft_step import DraftStep
from anymla.runtime.draft_width import draft_widths
from anymla.runtime.dspark_step import DraftBlocks, DraftNoise, DSparkStep
from anymla.runtime.fixed_step import FixedStep
from anymla.runtime.forwarded import Forwarded
from anymla.runtime.ngrams import NgramBuffers, NgramReader
from anymla.runtime.options import EngineOptions
from anymla.runtime.sampler import best_tokens
from anymla.runtime.scoring import token_logprobs
from anymla.runtime.span import Span
from anymla.runtime.workspaces import reads_in


class DecodeRunner:
    """Runs steps of decoding requests in the smallest bucket that holds them.

    Attributes:
        buckets: sizes, the cheapest first.
    """

    def __init__(
        self,
        model: Transformer,
        store: CacheStore,
        options: EngineOptions,
        *,
        record: bool,
        blocks: DraftBlocks | None = None,
    ) -> None:
        drafts = options.draft_tokens
        self.buckets = decode_buckets(
            store.groups,
            options.max_requests,
            options.max_seq_len,
            draft_widths(drafts) if options.adapt_drafts else (drafts,),
        )
        self._model = model
        self._store = store
        self._record = record
        self._backbone_layers = model.config.num_hidden_layers
        self._blocks = blocks
        # Graphs know the tables by their addresses. A block reaches beyond its request.
        self._tables = model.reserve(options.max_seq_len + (blocks.size if blocks else 0))
        self._pool = torch.cuda.graph_pool_handle() if record else None
        self._ngrams = NgramBuffers.allocate(
            NgramReader(model.engrams, store.device), max(bucket.rows for bucket in self.buckets)
        )
        self._options = options
        self._side = SideStream(store.device) if record else INLINE
        self._steps: dict[tuple[Bucket, bool], FixedStep] = {}
        self._host: dict[tuple[Bucket, bool], tuple[Tensor, ...]] = {}
        self._drafts: dict[Bucket, DraftStep] = {}
        self._block_steps: dict[Bucket, DSparkStep] = {}

    def rehearse(self, buckets: Sequence[Bucket]) -> None:
        """Run the widest bucket of every ceiling once, for what it needs of the workspace.

        On one stream and on several, where there are.
        """
        beside = self._options.runs_beside
        widest = {(b.max_seq_len, b.tokens, beside(b.rows)): b for b in buckets}
        for bucket in widest.values():
            self._step(bucket, follows=self._blocks is not None).rehearse()

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Set up buckets, the largest first, so that the others fit in its memory."""
        drafts = len(self._store.layers) > self._backbone_layers
        for bucket in reversed(buckets):
            self._step(bucket, follows=False).prepare()
            if self._blocks is not None:
                self._step(bucket, follows=True).prepare()
                self._block_step(self._blocks, bucket).prepare()
            elif drafts:
                self._draft_step(bucket).prepare()

    def run(self, spans: Sequence[Span]) -> Forwarded | None:
        """Run the backbone; None if the spans fit no bucket, or prompts are among them.

        The results last until the next run. What was chosen is on the host.
        """
        if not all(span.is_decode for span in spans):
            return None
        bucket = smallest(self.buckets, spans)
        if bucket is None:
            return None
        # What sampled and penalised requests take is chosen behind the graph.
        plain = all(span.state.request.sampling.takes_best_logit for span in spans)
        follows = self._blocks is not None and plain
        hidden, logits, best, logprobs, *more = self._step(bucket, follows=follows)(spans)
        taps, *drafts = more or (None,)
        best, logprobs, *drafts = self._on_host((bucket, follows), (best, logprobs, *drafts))
        first_rows = range(0, bucket.tokens * len(spans), bucket.tokens)
        return Forwarded(hidden, first_rows, logits, best, logprobs, taps, first_rows, *drafts)

    def _on_host(self, key: tuple[Bucket, bool], results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Copies of a step's results on the host, good until its next run, in one wait."""
        if self._store.device.type != "cuda":
            return results
        if key not in self._host:
            self._host[key] = tuple(
                torch.empty_like(each, device="cpu", pin_memory=True) for each in results
            )
        for mine, each in zip(self._host[key], results, strict=True):
            mine.copy_(each, non_blocking=True)
        torch.cuda.current_stream(self._store.device).synchronize()
        return self._host[key]

    def draft(
        self, spans: Sequence[Span], hidden: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Run the draft layer; None if the spans fit no bucket.

        Args:
            spans: the tokens behind those that ``hidden`` belongs to.
            hidden: [n, N, D].
            rows: row of ``hidden`` for each token of the spans.

        Returns:
            Streams [R, N, D] and logits [R, V] at the last token of span i, in row i.
        """
        bucket = smallest(self.buckets, spans)
        if bucket is None:
            return None
        return self._draft_step(bucket).run(spans, hidden, rows)

    def draft_blocks(
        self, spans: Sequence[Span], taps: Tensor, rows: Sequence[int], noise: DraftNoise | None
    ) -> BlockGuess | None:
        """Write the context of final tokens and guess behind them; None if they fit no bucket.

        Args:
            spans: the ids behind each final token.
            taps: [n, taps, D].
            rows: row of ``taps`` for each token of the spans.
            noise: of the spans' requests.

        Returns:
            Of span i in row i. Lasts until the next run.
        """
        bucket = smallest(self.buckets, spans)
        if bucket is None:
            return None
        assert self._blocks is not None
        return self._block_step(self._blocks, bucket).run(spans, taps, rows, noise)

    def _step(self, bucket: Bucket, *, follows: bool) -> FixedStep:
        """The backbone's step; the block drafter's behind it in the same graph, if it follows."""
        if (bucket, follows) not in self._steps:
            self._steps[bucket, follows] = FixedStep(
                self._store,
                bucket,
                self._backbone_and_drafts if follows else self._backbone,
                record=self._record,
                backend=self._model.backend,
                pool=self._pool,
                side=self._queue(bucket),
                reads=reads_in(self._model, self._store, bucket),
                ngrams=self._ngrams.first(bucket.rows),
            )
        return self._steps[bucket, follows]

    def _backbone(self, step: Step) -> tuple[Tensor, ...]:
        taps = None if self._blocks is None else self._blocks.taps(len(step.token_ids))
        caches = self._store.layers[: self._backbone_layers]
        hidden = self._model.forward(step, caches, taps=taps)
        logits = self._model.logits(hidden)
        best = self._model.ranks.agreed(best_tokens(logits))
        results = hidden, logits, best, token_logprobs(logits, best)
        return results if taps is None else (*results, taps.out)

    def _backbone_and_drafts(self, step: Step) -> tuple[Tensor, ...]:
        assert self._blocks is not None
        *results, best, logprobs, taps = self._backbone(step)
        return (*results, best, logprobs, taps, self._blocks.follow(step, best, taps))

    def _draft_step(self, bucket: Bucket) -> DraftStep:
        if bucket not in self._drafts:
            self._drafts[bucket] = DraftStep(
                self._model,
                self._store,
                self._store.layers[self._backbone_layers],
                bucket,
                record=self._record,
                pool=self._pool,
                side=self._queue(bucket),
            )
        return self._drafts[bucket]

    def _block_step(self, blocks: DraftBlocks, bucket: Bucket) -> DSparkStep:
        if bucket not in self._block_steps:
            self._block_steps[bucket] = DSparkStep(
                self._model,
                self._store,
                blocks,
                bucket,
                record=self._record,
                pool=self._pool,
                side=self._queue(bucket),
            )
        return self._block_steps[bucket]

    def _queue(self, bucket: Bucket) -> SideStream:
        return self._side if self._options.runs_beside(bucket.rows) else INLINE


def decode_mode(options: EngineOptions, device: torch.device) -> str:
    """``options.decode``, which "auto" leaves to the device."""
    if options.decode != "auto":
        return options.decode
    # ROCm's graphs have not been tried; they can be asked for.
    return "graph" if device.type == "cuda" and torch.version.hip is None else "plain"


def decode_runner(
    model: Transformer,
    store: CacheStore,
    options: EngineOptions,
    blocks: DraftBlocks | None = None,
) -> DecodeRunner | None:
    """As ``options.decode`` says.

    Args:
        model: the model.
        store: the caches.
        options: the engine's sizes.
        blocks: of a DSpark drafter.

    Raises:
        ValueError: graphs are asked for, and the model is not on a CUDA device.
    """
    mode = decode_mode(options, store.device)
    if mode == "plain":
        return None
    if mode == "graph" and store.device.type != "cuda":
        raise ValueError(f"decode='graph' needs a CUDA device, and the model is on {store.device}")
    return DecodeRunner(model, store, options, record=mode == "graph", blocks=blocks)
