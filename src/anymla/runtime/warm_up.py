"""Warm-up runs on padding at the sizes that serving uses.

Triton compiles a kernel for every choice of tiles, which follow from the numbers of tokens and of
listed rows. After the warm-up all kernels are compiled, the memory of the largest step is allocated
and the graphs are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from anymla.layers.caches import LayerCache
from anymla.layers.spec import WINDOW_GROUP
from anymla.layers.step import Step
from anymla.model.transformer import Transformer
from anymla.ops.compile_ahead import Compiling, compiled_together
from anymla.runtime.bucket import Bucket, context_ceilings, request_counts
from anymla.runtime.device_step import Batch, BatchSizes, device_step
from anymla.runtime.dspark_step import DraftBlocks
from anymla.runtime.options import EngineOptions
from anymla.runtime.scoring import block_rows
from anymla.runtime.step_plan import StepPlanner
from anymla.runtime.upload import upload


class WarmUp:
    """Runs steps of any size that consist of padding."""

    def __init__(
        self,
        model: Transformer,
        planner: StepPlanner,
        options: EngineOptions,
        blocks: DraftBlocks | None = None,
    ) -> None:
        """Prepare nothing yet.

        Args:
            model: network to warm up.
            planner: step planner of the engine; nothing is written to its caches.
            options: sizes of the engine.
            blocks: blocks of a DSpark drafter; None without one.
        """
        self._blocks = blocks
        self._model = model
        self._planner = planner
        self._store = planner.store
        self._options = options
        self._backbone_layers = model.config.num_hidden_layers
        self._layers = model.kinds_of_layers()

    def run(self) -> None:
        """Run every size once, the largest first, and compile ahead where possible."""
        if self._store.device.type != "cpu":
            with self._compiled() as only_compiled:
                if only_compiled:
                    # Tensors are indexed with rows and slots, so their values must be right even
                    # when compiling.
                    self._sizes(selection="torch")
        self._sizes(selection=self._model.backend)

    def compile_decode(self, buckets: Sequence[Bucket]) -> None:
        """Compile the launches of decode steps of some sizes ahead of time, where possible."""
        if self._store.device.type == "cpu":
            return
        with self._compiled() as only_compiled:
            if not only_compiled:
                return
            for bucket in buckets:
                step = self._step(
                    (bucket.tokens,) * bucket.requests,
                    bucket.max_seq_len,
                    "torch",  # values must be right, as above
                    num_decodes=bucket.requests,
                )
                self._run(step)
                self._guess(bucket.requests, bucket.max_seq_len, "torch")
                self._choose(bucket.rows)

    def _compiled(self) -> contextlib.AbstractContextManager[Compiling]:
        ranks = self._model.ranks
        return compiled_together(rank=ranks.rank, ranks=ranks.size)

    def _sizes(self, selection: str | None) -> None:
        options = self._options
        counts = request_counts(options.batch_tokens)
        contexts = context_ceilings(self._store.groups, options.max_seq_len)
        for context in reversed(contexts):
            rounded = self._planner.rounded(context)
            for tokens in reversed(counts):
                for query_lens in self._mixtures(tokens):
                    self._forward(query_lens, rounded, selection)
            for requests in reversed(request_counts(options.max_requests)):
                self._guess(requests, rounded, selection)
            # The workspace sizes of prefill follow the context length, up to a length without
            # workspaces.
            for stop in self._planner.longest_chunks(counts[-1], context):
                self._forward((counts[-1],), rounded, selection, stop=stop)
        self._logits()

    def _mixtures(self, tokens: int) -> Iterator[tuple[int, ...]]:
        """Yield query lengths of one and two prompts, alone and after decoding requests.

        After one and after four of them, parts of a batch begin at addresses that are multiples of
        4 and of 16 bytes.
        """
        for decoding in (0, 1, 4):
            prompts = tokens - decoding
            requests = self._options.max_requests - decoding
            if prompts >= 1 and requests >= 1:
                yield (*(1,) * decoding, prompts)
            if prompts >= 3 and requests >= 2:
                yield (*(1,) * decoding, prompts - prompts // 3, prompts // 3)

    def _forward(
        self,
        query_lens: tuple[int, ...],
        context: int,
        selection: str | None,
        *,
        stop: int | None = None,
    ) -> None:
        step = self._step(query_lens, context, selection)
        step = self._planner.with_chunks(step, query_lens if stop is None else (stop,))
        hidden = self._run(step)
        if self._options.draft_tokens and self._blocks is None:
            step = self._step(query_lens, context, selection, window_only=True)
            step = self._planner.with_chunks(step, query_lens)
            self._model.mtp_forward(hidden, step.token_ids, step, self._draft_cache)

    def _run(self, step: Step) -> Tensor:
        """Run a layer of every kind, write a block drafter's context, and return the streams."""
        taps = None if self._blocks is None else self._blocks.taps(len(step.token_ids))
        hidden = self._model.forward(
            step, self._store.layers[: self._backbone_layers], only=self._layers, taps=taps
        )
        if self._blocks is not None:
            assert taps is not None
            self._blocks.write_context(taps.out, step)
        return hidden

    def _guess(self, requests: int, context: int, selection: str | None) -> None:
        """Run a block for each of ``requests`` requests."""
        if self._blocks is None:
            return
        step = self._step((1,) * requests, context, selection, window_only=True)
        nobody = torch.zeros(requests, dtype=torch.int64, device=self._store.device)
        present = torch.zeros(requests, dtype=torch.bool, device=self._store.device)
        self._blocks.guess(step.groups[WINDOW_GROUP], nobody, nobody, context, present=present)

    @property
    def _draft_cache(self) -> LayerCache:
        return self._store.layers[self._backbone_layers]

    def _step(
        self,
        query_lens: tuple[int, ...],
        context: int,
        selection: str | None,
        *,
        window_only: bool = False,
        num_decodes: int | None = None,
    ) -> Step:
        tokens, requests = sum(query_lens), len(query_lens)
        nobody = [0] * requests
        token_ids, first_rows, counts, starts, rows = upload(
            [
                [-1] * tokens,
                [0, *accumulate(query_lens)],
                nobody,
                nobody,
                [self._store.absent_row] * requests,
            ],
            self._store.device,
        )
        groups = self._store.step_groups(window_only=window_only)
        tables = {
            group.name: self._store.tables[group.name].rows(rows, context) for group in groups
        }
        step = device_step(
            Batch(token_ids, first_rows, counts, starts, tables),
            groups,
            BatchSizes(query_lens, num_decodes or query_lens.count(1), context),
            backend=selection,
        )
        return self._planner.with_ngrams(step, (), window_only=window_only)

    def _logits(self) -> None:
        """Compute logits of the row counts that are chosen from, drafted from, or scored."""
        model, options = self._model, self._options
        chosen = options.max_requests * (1 + options.draft_tokens)
        scored = min(options.batch_tokens, block_rows(model.config.vocab_size))
        for rows in sorted({*request_counts(chosen), *request_counts(scored)}, reverse=True):
            self._choose(rows)
            if options.draft_tokens and self._blocks is None:
                model.mtp_logits(self._streams(rows))

    def _choose(self, rows: int) -> None:
        """Choose from the logits of all ranks, and from each rank's own."""
        hidden = self._streams(rows)
        self._model.best_of(self._model.logits(hidden))
        self._model.best(hidden)

    def _streams(self, rows: int) -> Tensor:
        config = self._model.config
        shape = (rows, self._model.leaving_streams, config.hidden_size)
        return torch.zeros(shape, dtype=self._model.dtype, device=self._store.device)
