"""Decode steps at fixed sizes: the backbone's step, and the drafter's after it."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.layers.side_stream import INLINE, SideStream
from anymla.layers.step import Step
from anymla.model.transformer import Transformer
from anymla.runtime.bucket import Bucket, decode_buckets, smallest
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.draft_step import DraftStep
from anymla.runtime.draft_width import draft_widths
from anymla.runtime.dspark_step import DraftBlocks, DraftNoise, DSparkStep
from anymla.runtime.fixed_step import Carry, FixedStep
from anymla.runtime.forwarded import Forwarded, rows_of
from anymla.runtime.ngrams import NgramBuffers, NgramReader
from anymla.runtime.options import EngineOptions
from anymla.runtime.span import Span
from anymla.runtime.workspaces import reads_in


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step that was launched on the device; ``DecodeRunner.collect`` waits for its results.

    Attributes:
        step: fixed step that was launched.
        bucket: sizes of the step.
        requests: number of requests in the step.
        follows: True if the results include guesses after the step's own choices.
        hidden: streams [rows, N, D] on the device, valid until the next launch, as are logits and
            taps.
        logits: float32 [rows, V]; None where the step follows its own choices.
        taps: [rows, taps, D]; None without a DSpark drafter.
        chosen: best tokens, their log-probabilities and, where the step drafts, guesses; on the
            host, valid once ``ready``.
        ready: event recorded after the copies to the host; None where there is nothing to wait for.
    """

    step: FixedStep
    bucket: Bucket
    requests: int
    follows: bool
    hidden: Tensor
    logits: Tensor | None
    taps: Tensor | None
    chosen: tuple[Tensor, ...]
    ready: torch.cuda.Event | None


class DecodeRunner:
    """Runs steps of decoding requests in the smallest bucket that holds them.

    Attributes:
        buckets: sizes of the steps, the cheapest first.
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
        # Graphs hold the rotation tables' addresses, so the tables must not grow later. A block
        # extends past its request's end.
        self._tables = model.reserve(options.max_seq_len + (blocks.size if blocks else 0))
        self._pool = torch.cuda.graph_pool_handle() if record else None
        self._ngrams = NgramBuffers.allocate(
            NgramReader(model.engrams, store.device), max(bucket.rows for bucket in self.buckets)
        )
        self._options = options
        self._side = SideStream(store.device) if record else INLINE
        self._steps: dict[tuple[Bucket, bool], FixedStep] = {}
        self._host: dict[FixedStep, list[tuple[Tensor, ...]]] = {}
        self._drafts: dict[Bucket, DraftStep] = {}
        self._block_steps: dict[Bucket, DSparkStep] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodeRunner:
        """Return a runner of copied caches without steps: graphs hold the addresses of their own.

        Neither graphs nor streams can be copied.
        """
        copied = functools.partial(copy.deepcopy, memo=memo)
        return DecodeRunner(
            copied(self._model),
            copied(self._store),
            self._options,
            record=self._record,
            blocks=copied(self._blocks),
        )

    def rehearse(self, buckets: Sequence[Bucket]) -> None:
        """Run the widest bucket of every ceiling, so that the workspace reaches its full size.

        Steps with further streams are run as well as those on one stream.
        """
        beside = self._options.runs_beside
        widest = {(b.max_seq_len, b.tokens, beside(b.rows)): b for b in buckets}
        for bucket in widest.values():
            self._step(bucket, follows=self._blocks is not None).rehearse()

    def prepare(self, buckets: Sequence[Bucket]) -> None:
        """Set up buckets, the largest first, so that smaller ones fit in its memory."""
        drafts = len(self._store.layers) > self._backbone_layers
        for bucket in reversed(buckets):
            for follows in (False, True)[: 1 + (self._blocks is not None)]:
                step = self._step(bucket, follows=follows)
                self._keep(step, self._chosen(follows, step.prepare()))
            if self._blocks is not None:
                self._block_step(self._blocks, bucket).prepare()
            elif drafts:
                self._draft_step(bucket).prepare()

    def launch(self, spans: Sequence[Span]) -> Launched | None:
        """Run the backbone; None if no bucket holds the spans, or prompts are among them."""
        if not all(span.is_decode for span in spans):
            return None
        bucket = smallest(self.buckets, spans)
        if bucket is None:
            return None
        # Tokens of sampled and penalised requests are chosen after the graph has run.
        plain = all(span.state.request.sampling.takes_best_logit for span in spans)
        follows = self._blocks is not None and plain
        step = self._step(bucket, follows=follows)
        return self._launched(step, bucket, len(spans), follows, step(spans))

    def launch_next(self, launched: Launched, spans: Sequence[Span]) -> Launched | None:
        """Run the step after one whose results the host does not know yet, for the same requests.

        Its tokens are those which the earlier step chooses and guesses; they are on the device.

        Args:
            launched: the last step launched.
            spans: spans of those of its requests that go on.

        Returns:
            The launched step. None if requests have ended, if the step may not fit the same bucket,
            or if tokens are chosen on the host.
        """
        bucket = launched.bucket
        if len(spans) < launched.requests or not self._carries(bucket):
            return None
        if not all(span.state.request.sampling.takes_best_logit for span in spans):
            return None
        stops = [
            (span.state.row, min(span.stop + bucket.tokens, span.state.request.max_written))
            for span in spans
        ]
        if any(stop > bucket.max_seq_len for _, stop in stops):
            return None
        results = launched.step.advance(stops)
        return self._launched(launched.step, bucket, len(spans), launched.follows, results)

    def collect(self, launched: Launched, rows: Sequence[int]) -> Forwarded:
        """Wait for a step's results.

        Args:
            launched: step to wait for. If it drafts by itself, another step may have been launched
                since, and its tensors on the device are overwritten.
            rows: indices of the step's requests whose results are wanted.
        """
        if launched.ready is not None:
            launched.ready.synchronize()
        best, logprobs, *drafts = launched.chosen
        first_rows = [row * launched.bucket.tokens for row in rows]
        return Forwarded(
            launched.hidden,
            first_rows,
            launched.logits,
            best,
            logprobs,
            launched.taps,
            first_rows,
            *(rows_of(guesses, rows) for guesses in drafts),
        )

    def _carries(self, bucket: Bucket) -> bool:
        """True if a step's results determine the next step's tokens without the host."""
        options = self._options
        return (
            options.run_ahead
            and bucket.tokens == 1 + options.draft_tokens
            and not (options.adapt_drafts or options.least_survival)
            and not self._model.engrams
            and (self._blocks is not None or not options.draft_tokens)
        )

    def _launched(
        self,
        step: FixedStep,
        bucket: Bucket,
        requests: int,
        follows: bool,
        results: tuple[Tensor, ...],
    ) -> Launched:
        hidden, _, _, *more = results
        logits = None if follows else more[0]
        taps = None if self._blocks is None else more[0 if follows else 1]
        chosen, ready = self._chosen(follows, results), None
        if step not in self._host:
            self._keep(step, chosen)
        # Two buffers alternate: the host reads one step's results while the next one's arrive.
        self._host[step].reverse()
        kept = self._host[step][0]
        for mine, each in zip(kept, chosen, strict=True):
            mine.copy_(each, non_blocking=True)
        if self._store.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._store.device))
        return Launched(step, bucket, requests, follows, hidden, logits, taps, kept, ready)

    @staticmethod
    def _chosen(follows: bool, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Select the results for the host: best tokens, log-probabilities and guesses."""
        return (*results[1:3], *results[4:]) if follows else results[1:3]

    def _keep(self, step: FixedStep, chosen: tuple[Tensor, ...]) -> None:
        """Allocate the host's buffers of a step's results and those of the step after it."""
        on_gpu = self._store.device.type == "cuda"
        self._host[step] = [
            tuple(torch.empty_like(each, device="cpu", pin_memory=on_gpu) for each in chosen)
            for _ in range(2)
        ]

    def draft(
        self, spans: Sequence[Span], hidden: Tensor, rows: Sequence[int]
    ) -> tuple[Tensor, Tensor] | None:
        """Run the draft layer; None if the spans fit no bucket.

        Args:
            spans: tokens that follow those which ``hidden`` belongs to.
            hidden: streams [n, N, D] of the backbone.
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
    ) -> Tensor | None:
        """Write the context of final tokens and guess after them; None if they fit no bucket.

        Args:
            spans: token ids that follow each final token.
            taps: [n, taps, D], outputs of the backbone's tapped layers.
            rows: row of ``taps`` for each token of the spans.
            noise: sampling noise of the spans' requests; None if all are greedy.

        Returns:
            Guesses int64 [R, n] of span i in row i, see ``DraftBlocks.guess``, until the next run.
        """
        bucket = smallest(self.buckets, spans)
        if bucket is None:
            return None
        assert self._blocks is not None
        return self._block_step(self._blocks, bucket).run(spans, taps, rows, noise)

    def _step(self, bucket: Bucket, *, follows: bool) -> FixedStep:
        """Return the backbone's step, with the block drafter in the same graph if it follows."""
        if (bucket, follows) not in self._steps:
            self._steps[bucket, follows] = FixedStep(
                self._store,
                bucket,
                functools.partial(
                    self._backbone_and_drafts if follows else self._backbone, self._carries(bucket)
                ),
                record=self._record,
                backend=self._model.backend,
                pool=self._pool,
                side=self._queue(bucket),
                reads=reads_in(self._model, self._store, bucket),
                ngrams=self._ngrams.first(bucket.rows),
                carries=self._carries(bucket) and (follows or self._blocks is None),
            )
        return self._steps[bucket, follows]

    def _backbone(self, carries: bool, step: Step) -> tuple[Any, ...]:
        hidden, *taps = self._forward(step)
        logits = self._model.logits(hidden)
        best, logprobs = self._model.best_of(logits)
        out = hidden, best, logprobs, logits, *taps
        if not carries or self._blocks is not None:
            return out
        tokens = best.view(step.num_decodes, -1)
        return *out, Carry(self._token_or_end(tokens), torch.ones_like(tokens[:, 0]))

    def _backbone_and_drafts(self, carries: bool, step: Step) -> tuple[Any, ...]:
        assert self._blocks is not None
        hidden, taps = self._forward(step)
        best, logprobs = self._model.best(hidden)
        followed = self._blocks.follow(step, best, taps)
        out = hidden, best, logprobs, taps, followed.drafts
        if not carries:
            return out
        tokens = torch.cat((followed.anchors.unsqueeze(1), followed.drafts), 1)
        return *out, Carry(self._token_or_end(tokens), followed.right + 1)

    def _forward(self, step: Step) -> tuple[Tensor, ...]:
        """Compute the backbone's streams, and the taps if a drafter wants them."""
        taps = None if self._blocks is None else self._blocks.taps(len(step.token_ids))
        caches = self._store.layers[: self._backbone_layers]
        hidden = self._model.forward(step, caches, taps=taps)
        return (hidden,) if taps is None else (hidden, taps.out)

    def _token_or_end(self, tokens: Tensor) -> Tensor:
        """Replace choices that are no tokens (V) by a negative id, which ends a ``Carry``."""
        return torch.where(tokens < self._model.config.vocab_size, tokens, -1)

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
    """Resolve ``options.decode``: "auto" depends on the device."""
    if options.decode != "auto":
        return options.decode
    # ROCm's graphs have not been tried; the option "graph" selects them.
    return "graph" if device.type == "cuda" and torch.version.hip is None else "plain"


def decode_runner(
    model: Transformer,
    store: CacheStore,
    options: EngineOptions,
    blocks: DraftBlocks | None = None,
) -> DecodeRunner | None:
    """Build the runner that ``options.decode`` names; None for "plain".

    Args:
        model: network whose steps it runs.
        store: caches of the engine.
        options: the engine's sizes.
        blocks: blocks of a DSpark drafter; None without one.

    Raises:
        ValueError: graphs are asked for, and the model is not on a CUDA device.
    """
    mode = decode_mode(options, store.device)
    if mode == "plain":
        return None
    if mode == "graph" and store.device.type != "cuda":
        raise ValueError(f"decode='graph' needs a CUDA device, and the model is on {store.device}")
    return DecodeRunner(model, store, options, record=mode == "graph", blocks=blocks)
