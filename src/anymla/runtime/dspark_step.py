"""A DSpark drafter's steps: the context's rows of final tokens, and blocks behind them."""

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
from anymla.runtime.options import EngineOptions
from anymla.runtime.sampler import Sampling, best_tokens, noise_key, sample_tokens
from anymla.runtime.sizing import block_size
from anymla.runtime.span import Span
from anymla.runtime.upload import to_device, upload


@dataclasses.dataclass(frozen=True)
class DraftNoise:
    """What the guesses of sampled requests are drawn with: the noise of the target's choices.

    Attributes:
        temperatures: float32 [R]; 0 takes the best guess.
        keys: int64 [R, n], see ``noise_key``.
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
        """For ``count`` guesses a request, the first of which is at its position.

        None where no request samples. A request's top-p is not applied to its guesses.
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
    """The end of a step's verified tokens, and the guesses behind it.

    Attributes:
        anchors: int64 [R], the last token that each request's choices have made final.
        drafts: int64 [R, count], see ``DraftBlocks.guess``.
        right: int64 [R], drafts of the step that were right.
    """

    anchors: Tensor
    drafts: Tensor
    right: Tensor


class DraftBlocks:
    """The sizes and caches of a drafter's blocks, and how they run.

    Attributes:
        count: guesses of a block that are wanted.
        size: rows of a block: as it was trained, or more where more guesses are wanted. All rows
            see each other, so that a shorter block would be another function.
        least_survival: guesses that are less likely to be right are not wanted.
        window: positions of the context.
        stages: the caches of the drafter's layers, which hold the context.
    """

    def __init__(self, model: Transformer, store: CacheStore, options: EngineOptions) -> None:
        """Allocate the cache of the blocks' own rows, which all stages share in turn."""
        assert model.dspark is not None
        self.count = options.draft_tokens
        self.size = block_size(model.dspark.block_size, options)
        self.least_survival = options.least_survival
        backbone = model.config.num_hidden_layers
        self.window = model.layer_specs[backbone].window
        self.stages = store.layers[backbone:]
        self._model = model
        # Blocks and windows are rows of the same record, whatever compressed entries are.
        cache_format = dataclasses.replace(self.stages[0].format, compressed=None)
        own = get_layout(cache_format.main).allocate(options.max_requests, self.size, store.device)
        self._caches = [
            LayerCache(format=cache_format, window=own, compressed=stage.window)
            for stage in self.stages
        ]

    def taps(self, rows: int, index: Tensor | None = None) -> Taps:
        """What a step of the backbone shall leave.

        Args:
            rows: how many rows of it.
            index: int32, which ones; None for all.
        """
        model = self._model
        assert model.dspark is not None
        layers = model.dspark.tapped
        shape = (rows, len(layers), model.config.hidden_size)
        return Taps(layers, torch.empty(shape, dtype=model.dtype, device=model.device), index)

    def write_context(self, taps: Tensor, step: Step) -> None:
        """Write the context's rows of tokens that are final.

        Args:
            taps: [T, taps, hidden].
            step: the batch at their positions.
        """
        self._model.write_context(taps, step, self.stages)

    def follow(self, step: Step, best: Tensor, taps: Tensor) -> Followed:
        """Draft behind what a step has just chosen, in which every request takes the best tokens.

        Nothing is asked of the host: how many drafts were right follows from the choices, which
        are the context's final tokens.

        Args:
            step: of fixed size, as many rows a request, its drafts behind its newest token.
            best: int64 [T], chosen behind each row.
            taps: [T, taps, hidden].

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
            context: the window group, one row of its table a request.
            anchors: int64 [R], the newest tokens.
            last: int64 [R], the positions before them.
            max_seq_len: no request is longer.
            noise: of sampled requests; None: the best guesses.
            present: bool [R], requests that are no padding; None: all.
            side: see ``Step``.

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
    """One bucket of the drafter: the final tokens' taps in, guesses out."""

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
            model: the model.
            store: the caches.
            blocks: how blocks run.
            bucket: the sizes; a request's rows are its tokens that are final.
            record: replay a CUDA graph.
            pool: see ``Graph``.
            side: see ``Step``.
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
        """Record, if it has not been done."""
        self._step.prepare()

    def run(
        self, spans: Sequence[Span], taps: Tensor, rows: Sequence[int], noise: DraftNoise | None
    ) -> Tensor:
        """See ``DecodeRunner.draft_blocks``; the results last until the next run."""
        index = [0] * self._bucket.rows
        source = iter(rows)
        for i, span in enumerate(spans):
            first = i * self._bucket.tokens
            for row in range(first, first + len(span.token_ids)):
                index[row] = next(source)
        (where,) = upload([index], taps.device)
        torch.index_select(taps, 0, where, out=self._taps)
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
        # A request's last final token stands before its anchor, which its last row names.
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
