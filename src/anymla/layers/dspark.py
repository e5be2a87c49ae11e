"""The DSpark drafter: a few window-only layers that guess a block of tokens in one forward.

A block is the newest token, the anchor, and behind it a noise token in place of each token that is
not known. Its rows see each other, whatever their order, and the context: rows that are computed
from the backbone's streams at the W positions before the block. Row i guesses the token after
position i; a low-rank bias of the token before each makes the guesses one text.

Source: DeepSeek-V4-Flash-0731, inference/model.py; the DSpark paper (arXiv 2607.05147).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from anymla.layers.caches import LayerCache
from anymla.layers.decoder import DecoderLayer
from anymla.layers.hyper_connection import DelayedHead, HyperConnectionHead, Streams
from anymla.layers.linear import Linear
from anymla.layers.step import Step
from anymla.ops.linear import linear_float32
from anymla.ops.linear.config import plain_backend
from anymla.ops.norm_rope import rms_norm

Choose = Callable[[Tensor, int], Tensor]


@dataclasses.dataclass(frozen=True)
class Taps:
    """Means over the backbone's streams where some layers begin, which the context is made of.

    Attributes:
        layers: those layers; one past the last stands for the end of the backbone.
        out: [n, layers, hidden], written by the backbone's forward.
        rows: int32 [n], rows of the step that are wanted, or None for all.
    """

    layers: tuple[int, ...]
    out: Tensor
    rows: Tensor | None = None

    @staticmethod
    def nothing(layer: int) -> None:
        """As ``entering``, where nothing is wanted."""

    def entering(self, layer: int) -> Callable[[Tensor], None] | None:
        """What takes the streams [T, N, hidden] at a layer's first site; None: not wanted."""
        if layer not in self.layers:
            return None
        return functools.partial(self._take, self.out[:, self.layers.index(layer)])

    def _take(self, out: Tensor, h: Tensor) -> None:
        h = h if self.rows is None else h.index_select(0, self.rows)
        out.copy_(h.mean(1, dtype=torch.float32))


@dataclasses.dataclass(frozen=True)
class BlockGuess:
    """What a block guesses.

    Attributes:
        tokens: int64 [R, n], the tokens after the anchor and each guess, as ``choose`` gave them.
        survival: float32 [R, n], predicted chance that a guess and all before it are right; ones
            without a confidence head.
    """

    tokens: Tensor
    survival: Tensor


class MarkovHead(nn.Module):
    """What the token before adds to the logits of a guess, and how sure the guess is.

    Attributes:
        w1: [vocab, rank], a row for the token before.
        w2: [vocab, rank], float32 or the activations' dtype, or this rank's part of the vocabulary;
            its products with that row are added.
        confidence: float32 [1, hidden + rank], or None.
    """

    def __init__(
        self, *, w1: Tensor, w2: Tensor, confidence: Tensor | None, backend: str | None = None
    ) -> None:
        super().__init__()
        self.w1 = w1
        self.w2 = w2
        self.confidence = confidence
        self.backend = backend

    def guess(self, anchors: Tensor, count: int, choose: Choose) -> tuple[Tensor, list[Tensor]]:
        """Guess from left to right; each choice is the token before the next.

        Args:
            anchors: int64 [R].
            count: number of guesses.
            choose: from the row [R, rank] of the token before guess i, and i, to ids int64 [R]. An
                id past the vocabulary counts as its last one here, and is returned as it is.

        Returns:
            The guesses [R, count], and the rows that they were made with.
        """
        tokens, rows, before = [], [], anchors
        for i in range(count):
            # Where launches are only compiled, nobody has written a choice.
            rows.append(self.w1[before.clamp(0, len(self.w1) - 1)])
            before = choose(rows[i], i)
            tokens.append(before)
        return torch.stack(tokens, 1), rows

    def survival(self, h: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Predicted chances that guesses and all before them are right, float32 [R, n].

        Args:
            h: [R, n, hidden], the block's collapsed streams, not normed.
            rows: as ``guess`` returned them.
        """
        if self.confidence is None:
            return torch.ones(h.shape[:2], device=h.device)
        features = torch.cat((h, torch.stack(list(rows), 1)), -1).float()
        sure = linear_float32(features, self.confidence, backend=plain_backend(self.backend))
        return sure.squeeze(-1).sigmoid().cumprod(1)

    def product(self, row: Tensor) -> Tensor:
        """What the token before adds to the logits here, float32 [R, vocab], by its row."""
        out: Tensor = linear_float32(row, self.w2, backend=plain_backend(self.backend))
        return out


class BlockDrafter(nn.Module):
    """The drafter; the embedding and the lm head are the backbone's.

    Attributes:
        main_proj: [hidden, taps * hidden], of the taps of a position side by side.
        main_norm: RMSNorm weight [hidden] behind it.
        stages: ordinary decoder layers, window only.
        head: collapses the streams behind the last stage, with the norm in front of the lm head.
        markov: makes tokens of them.
        block_size: rows of a block, as it was trained.
        noise_token_id: id of every row of a block but the first.
        tapped: see ``Taps.layers``.
        streams: how many a token has.
    """

    def __init__(
        self,
        *,
        main_proj: Linear,
        main_norm: Tensor,
        stages: Sequence[DecoderLayer],
        head: HyperConnectionHead | DelayedHead,
        markov: MarkovHead,
        block_size: int,
        noise_token_id: int,
        tapped: tuple[int, ...],
        streams: int,
        eps: float,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.main_proj = main_proj
        self.main_norm = main_norm
        self.stages = nn.ModuleList(stages)
        self.head = head
        self.markov = markov
        self.block_size = block_size
        self.noise_token_id = noise_token_id
        self.tapped = tapped
        self.streams = streams
        self.eps = eps
        self.backend = backend

    def write_context(self, taps: Tensor, step: Step, caches: Sequence[LayerCache]) -> None:
        """Write the context's rows of all stages, at positions whose tokens are final.

        Args:
            taps: [T, taps, hidden].
            step: the batch at their positions; padding writes nothing.
            caches: one a stage; ``window`` is written.
        """
        x = self.main_proj(taps.flatten(1))
        x = rms_norm(x, self.main_norm, self.eps, backend=self.backend)
        for stage, cache in zip(self.stages, caches, strict=True):
            assert isinstance(stage, DecoderLayer)
            stage.attention.write_rows(x, step, cache)

    def forward(self, embedding: Tensor, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Run blocks.

        Args:
            embedding: [T, hidden], of the blocks' tokens.
            step: all rows of a block list the same context (``Step.dense``) and the block's own
                rows (``Step.window``).
            caches: one a stage; ``window`` holds the blocks' rows and is written, ``compressed``
                the context's.

        Returns:
            [T, hidden], the streams behind the last stage, collapsed and not normed.
        """
        streams = Streams(embedding.unsqueeze(1).expand(-1, self.streams, -1))
        for stage, cache in zip(self.stages, caches, strict=True):
            streams = stage(streams, step, cache)
        return self.head.collapse(Streams(streams.flush(self.backend), pre=streams.pre))
