"""The DSpark drafter: a few window-only layers that guess a block of tokens in one forward.

A block is the newest token, the anchor, followed by a noise token in place of each unknown token.
Its rows see each other, in both directions, and the context: rows that are computed from the
backbone's streams at the W positions before the block. Row i guesses the token after position i. A
low-rank bias that depends on the token before each guess makes the guesses consistent.

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
    """Means over the backbone's streams at the inputs of some layers, the source of the context.

    Attributes:
        layers: indices of those layers; one past the last stands for the end of the backbone.
        out: [n, layers, hidden], written by the backbone's forward.
        rows: int32 [n], rows of the step to record, or None for all.
    """

    layers: tuple[int, ...]
    out: Tensor
    rows: Tensor | None = None

    @staticmethod
    def nothing(layer: int) -> None:
        """Do nothing; the ``entering`` of a layer that is not tapped."""

    def entering(self, layer: int) -> Callable[[Tensor], None] | None:
        """Return the function that records a layer's input streams [T, N, hidden], or None."""
        if layer not in self.layers:
            return None
        return functools.partial(self._take, self.out[:, self.layers.index(layer)])

    def _take(self, out: Tensor, h: Tensor) -> None:
        h = h if self.rows is None else h.index_select(0, self.rows)
        out.copy_(h.mean(1, dtype=torch.float32))


@dataclasses.dataclass(frozen=True)
class BlockGuess:
    """Guesses of a block.

    Attributes:
        tokens: int64 [R, n], tokens after the anchor and after each guess, as ``choose`` returned
            them.
        survival: float32 [R, n], predicted probability that a guess and all before it are right;
            ones without a confidence head.
    """

    tokens: Tensor
    survival: Tensor


class MarkovHead(nn.Module):
    """Bias of a guess's logits by the token before it, and the confidence of the guess.

    Attributes:
        w1: [vocab, rank], one row for each preceding token.
        w2: [vocab, rank], float32 or the activations' dtype, or this rank's part of the vocabulary;
            its products with the row of ``w1`` are added to the logits.
        confidence: float32 [1, hidden + rank], weight of the confidence head, or None.
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
        """Guess from left to right; each choice is the token before the next guess.

        Args:
            anchors: int64 [R] token ids before the first guess.
            count: number of guesses.
            choose: function from the row [R, rank] of the token before guess i, and i, to ids int64
                [R]. An id past the vocabulary counts as its last one here, and is returned
                unchanged.

        Returns:
            The guesses int64 [R, count], and the rows of ``w1``, [R, rank] each, that they were
            made with.
        """
        tokens, rows, before = [], [], anchors
        for i in range(count):
            # In a run that only compiles launches, the choices are uninitialised.
            rows.append(self.w1[before.clamp(0, len(self.w1) - 1)])
            before = choose(rows[i], i)
            tokens.append(before)
        return torch.stack(tokens, 1), rows

    def survival(self, h: Tensor, rows: Sequence[Tensor]) -> Tensor:
        """Predict the probability that a guess and all before it are right, float32 [R, n].

        Args:
            h: [R, n, hidden], collapsed streams of the block, not normed.
            rows: rows that ``guess`` returned.
        """
        if self.confidence is None:
            return torch.ones(h.shape[:2], device=h.device)
        features = torch.cat((h, torch.stack(list(rows), 1)), -1).float()
        sure = linear_float32(features, self.confidence, backend=plain_backend(self.backend))
        return sure.squeeze(-1).sigmoid().cumprod(1)

    def product(self, row: Tensor) -> Tensor:
        """Return the logit bias float32 [R, vocab] of the token before, given its row of ``w1``."""
        out: Tensor = linear_float32(row, self.w2, backend=plain_backend(self.backend))
        return out


class BlockDrafter(nn.Module):
    """The drafter; the embedding and the lm head are the backbone's.

    Attributes:
        main_proj: [hidden, taps * hidden], projection of a position's concatenated taps.
        main_norm: RMSNorm weight [hidden] after it.
        stages: ordinary decoder layers, window only.
        head: collapses the streams after the last stage, with the norm before the lm head.
        markov: head that turns logits into tokens.
        block_size: rows of a block, as trained.
        noise_token_id: token id of every row of a block but the first.
        tapped: indices of the tapped layers, see ``Taps.layers``.
        streams: number of streams of a token.
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
        """Write the context rows of all stages, at positions whose tokens are final.

        Args:
            taps: [T, taps, hidden], outputs of the backbone's tapped layers.
            step: step of those tokens at their positions; padding writes nothing.
            caches: one for each stage; ``window`` is written.
        """
        x = self.main_proj(taps.flatten(1))
        x = rms_norm(x, self.main_norm, self.eps, backend=self.backend)
        for stage, cache in zip(self.stages, caches, strict=True):
            assert isinstance(stage, DecoderLayer)
            stage.attention.write_rows(x, step, cache)

    def forward(self, embedding: Tensor, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Run blocks through all stages.

        Args:
            embedding: [T, hidden], embeddings of the blocks' tokens.
            step: metadata in which all rows of a block list the same context (``Step.dense``) and
                the block's own rows (``Step.window``).
            caches: one for each stage; ``window`` holds the blocks' rows and is written,
                ``compressed`` holds the context's rows.

        Returns:
            [T, hidden], streams after the last stage, collapsed and not normed.
        """
        streams = Streams(embedding.unsqueeze(1).expand(-1, self.streams, -1))
        for stage, cache in zip(self.stages, caches, strict=True):
            streams = stage(streams, step, cache)
        return self.head.collapse(Streams(streams.flush(self.backend), pre=streams.pre))
