"""Steps of a DSpark drafter: context rows of final tokens, and blocks after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anymla.formats.page_layout import get_layout
from anymla.layers.caches import LayerCache
from anymla.layers.dspark import Taps
from anymla.layers.rows import GroupStep
from anymla.layers.side_stream import INLINE, SideStream
from anymla.layers.spec import WINDOW_GROUP
from anymla.layers.step import Step
from anymla.model.transformer import Transformer
from anymla.runtime.block_step import block_step
from anymla.runtime.bucket import Bucket
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.fixed_step import FixedStep
from anymla.runtime.forwarded import place_rows
from anymla.runtime.options import EngineOptions
from anymla.runtime.sampler import Sampling, best_tokens, noise_key, sample_tokens
from anymla.runtime.sizing import block_size
from anymla.runtime.span import Span
from anymla.runtime.upload import to_device


@dataclasses.dataclass(frozen=True)
class DraftNoise:
    """Sampling noise of the guesses, equal to the noise of the target's choices.

    Attributes:
        temperatures: float32 [R]; 0 takes the best guess.
        keys: int64 [R, n] noise keys, see ``noise_key``.
    """

    temperatures: Tensor
    keys: Tensor

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        positions: Sequence[int],
        count: int,
        device: torch.device,
    ) -> DraftNoise | None:
        """Build the noise for ``count`` guesses a request, the first of which is at its position.

        Returns None if no request samples. A request's top-p is not applied to its guesses.
        """
        if all(sampling.is_greedy for sampling in samplings):
            return None
        keys = [
            [0 if each.is_greedy else noise_key(each.seed, first + i) for i in range(count)]
            for each, first in zip(samplings, positions, strict=True)
        ]
        temperatures = torch.tensor([each.temperature for each in samplings], dtype=torch.float32)
        return cls(to_device(temperatures, device), to_device(torch.tensor(keys), device))


@dataclasses.dataclass(frozen=True)
class Followed:
    """Last token that a step made final, and the guesses after it.

    Attributes:
        anchors: int64 [R], the last token that each request's choices have made final.
        drafts: int64 [R, count] guesses, see ``DraftBlocks.guess``.
        right: int64 [R], number of the step's drafts that were right.
    """

    anchors: Tensor
    drafts: Tensor
    right: Tensor


class DraftBlocks:
    """The sizes and caches of a drafter's blocks, and their computation.

    Attributes:
        count: number of guesses of a block that are wanted.
        size: rows of a block: the size that it was trained with, or more if more guesses are
            wanted. All rows see each other, so a shorter block would compute another function.
        least_survival: least probability, 0 to 1, that a guess and all before it are right; less
            likely guesses are dropped.
        window: number of context positions that a block sees.
        stages: caches of the drafter's layers, which hold the context.
    """

    def __init__(self, model: Transformer, store: CacheStore, options: EngineOptions) -> None:
        """Allocate the cache of the blocks' own rows, which all stages use one after the other."""
        assert model.dspark is not None
        self.count = options.draft_tokens
        self.size = block_size(model.dspark.block_size, options)
        self.least_survival = options.least_survival
        backbone = model.config.num_hidden_layers
        self.window = model.layer_specs[backbone].window
        self.stages = store.layers[backbone:]
        self._model = model
        # Blocks and windows use the same row format, even if compressed entries use another one.
        cache_format = dataclasses.replace(self.stages[0].format, compressed=None)
        own = get_layout(cache_format.main).allocate(options.max_requests, self.size, store.device)
        self._caches = [
            LayerCache(format=cache_format, window=own, compressed=stage.window)
            for stage in self.stages
        ]

    def taps(self, rows: int, index: Tensor | None = None) -> Taps:
        """Return the taps that a step of the backbone must record.

        Args:
            rows: number of rows to record.
            index: int32 [rows], row of the step for each; None for all rows.
        """
        model = self._model
        assert model.dspark is not None
        layers = model.dspark.tapped
        shape = (rows, len(layers), model.config.hidden_size)
        return Taps(layers, torch.empty(shape, dtype=model.dtype, device=model.device), index)

    def write_context(self, taps: Tensor, step: Step) -> None:
        """Write the context rows of final tokens.

        Args:
            taps: [T, taps, hidden], outputs of the backbone's tapped layers.
            step: step of those tokens at their positions.
        """
        self._model.write_context(taps, step, self.stages)

    def follow(self, step: Step, best: Tensor, taps: Tensor) -> Followed:
        """Draft after the choices of a step in which every request takes the best tokens.

        The host takes no part: the number of right drafts follows from the choices, which are the
        context's final tokens.

        Args:
            step: step of fixed size with the same number of rows a request: its newest token, then
                drafts.
            best: int64 [T], token chosen after each row.
            taps: [T, taps, hidden], outputs of the backbone's tapped layers.

        """
        ids, best, positions, is_valid = (
            each.view(step.num_decodes, -1)
            for each in (step.token_ids, best, step.positions, step.is_valid)
        )
        right = (best[:, :-1] == ids[:, 1:]).cumprod(1).sum(1)
        last = right.unsqueeze(1)
        is_final = is_valid & (torch.arange(ids.shape[1], device=ids.device) <= last)
        context = step.groups[WINDOW_GROUP]
        slots = torch.where(is_final.flatten(), context.slot_mapping, -1)
        final = dataclasses.replace(context, slot_mapping=slots)
        self.write_context(taps, dataclasses.replace(step, groups={WINDOW_GROUP: final}))
        chosen = best.gather(1, last).squeeze(1)
        guess = self.guess(
            context,
            chosen.clamp(max=self._model.config.vocab_size - 1),
            positions.gather(1, last).squeeze(1),
            step.max_seq_len,
            present=is_valid[:, 0],
            side=step.side,
        )
        return Followed(chosen, guess, right)

    def guess(
        self,
        context: GroupStep,
        anchors: Tensor,
        last: Tensor,
        max_seq_len: int,
        *,
        noise: DraftNoise | None = None,
        present: Tensor | None = None,
        side: SideStream = INLINE,
    ) -> Tensor:
        """Run one block a request.

        Args:
            context: step metadata of the window group, one row of its block table a request.
            anchors: int64 [R], newest token of each request.
            last: int64 [R], position before each newest token.
            max_seq_len: longest request in tokens.
            noise: sampling noise of the requests; None to take the best guesses.
            present: bool [R], False for padding requests; None if there is no padding.
            side: further streams, see ``Step``.

        Returns:
            int64 [R, count], V where the logits have no finite best, and where a guess is not
            wanted; the same on all ranks.
        """
        assert self._model.dspark is not None
        step = block_step(
            context,
            anchors,
            last,
            size=self.size,
            noise_token_id=self._model.dspark.noise_token_id,
            window=self.window,
            max_seq_len=max_seq_len,
            present=present,
            backend=self._model.backend,
        )
        h = self._model.block_forward(dataclasses.replace(step, side=side), self._caches)
        h = h.unflatten(0, (len(anchors), self.size))[:, : self.count].contiguous()

        if noise is None and not self.least_survival:
            return self._model.guess_best_block(h, anchors)

        def choose(logits: Tensor, i: int) -> Tensor:
            if noise is None:
                return best_tokens(logits)
            return sample_tokens(logits, noise.temperatures, noise.keys[:, i])

        guess = self._model.guess_block(h, anchors, choose)
        vocab = self._model.config.vocab_size
        wanted = torch.where(guess.survival >= self.least_survival, guess.tokens, vocab)
        return self._model.ranks.agreed(wanted)


class DSparkStep:
    """Step of the drafter for one bucket: maps the taps of final tokens to guesses."""

    def __init__(
        self,
        model: Transformer,
        store: CacheStore,
        blocks: DraftBlocks,
        bucket: Bucket,
        *,
        record: bool,
        pool: Any = None,
        side: SideStream = INLINE,
    ) -> None:
        """Allocate the buffers.

        Args:
            model: network with a DSpark drafter.
            store: caches of the engine.
            blocks: sizes, caches and computation of the blocks.
            bucket: sizes of the step; a request's rows are its final tokens.
            record: True to replay a CUDA graph.
            pool: memory pool shared by graphs, see ``Graph``.
            side: further streams, see ``Step``.
        """
        assert model.dspark is not None
        self._blocks = blocks
        self._bucket = bucket
        device, requests = store.device, bucket.requests
        shape = (bucket.rows, len(model.dspark.tapped), model.config.hidden_size)
        self._taps = torch.zeros(shape, dtype=model.dtype, device=device)
        self._first_rows = torch.arange(0, bucket.rows, bucket.tokens, device=device)
        self._noise = DraftNoise(
            torch.zeros(requests, device=device),
            torch.zeros(requests, blocks.count, dtype=torch.int64, device=device),
        )
        self._step = FixedStep(
            store,
            bucket,
            self._body,
            record=record,
            window_only=True,
            backend=model.backend,
            pool=pool,
            side=side,
        )

    def prepare(self) -> None:
        """Record the step, unless that has been done."""
        self._step.prepare()

    def run(
        self, spans: Sequence[Span], taps: Tensor, rows: Sequence[int], noise: DraftNoise | None
    ) -> Tensor:
        """Run ``DecodeRunner.draft_blocks`` in this bucket; the results last until the next run."""
        place_rows(taps, rows, spans, self._bucket, self._taps)
        if noise is None:
            self._noise.temperatures.zero_()
        else:
            self._noise.temperatures[: len(spans)].copy_(noise.temperatures)
            self._noise.keys[: len(spans)].copy_(noise.keys)
        (guesses,) = self._step(spans)
        return guesses[: len(spans)]

    def _body(self, step: Step) -> tuple[Tensor, ...]:
        self._blocks.write_context(self._taps, step)
        counts = step.is_valid.view(self._bucket.requests, -1).sum(1)
        # A request's last final token is at the position before its anchor; its last row holds the
        # anchor's id.
        anchors = step.token_ids.index_select(0, self._first_rows + (counts - 1).clamp(min=0))
        guess = self._blocks.guess(
            step.groups[WINDOW_GROUP],
            anchors.clamp(min=0),
            (step.seq_lens.long() - 1).clamp(min=0),
            self._bucket.max_seq_len,
            noise=self._noise,
            present=counts > 0,
            side=step.side,
        )
        return (guess,)
