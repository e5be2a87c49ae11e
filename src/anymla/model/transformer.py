"""The whole network: embedding, decoder layers, head, and draft layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from anymla.layers.attention import AttentionLayer
from anymla.layers.caches import LayerCache
from anymla.layers.decoder import DecoderLayer
from anymla.layers.dspark import BlockDrafter, BlockGuess, Taps
from anymla.layers.engram import Engram
from anymla.layers.hyper_connection import DelayedHead, HyperConnectionHead, Streams
from anymla.layers.mtp import DraftLayer
from anymla.layers.ranks import ALONE, Best, Ranks
from anymla.layers.spec import LayerSpec
from anymla.layers.step import Step
from anymla.model.config import ModelConfig
from anymla.ops.choice import best_logits
from anymla.ops.linear import linear_float32
from anymla.ops.linear.config import plain_backend


class Transformer(nn.Module):
    """The DeepSeek-V4 or V4.1 network.

    Attributes:
        config: configuration of the checkpoint.
        layer_specs: one spec a layer, backbone first, then draft layers.
        dtype: dtype of the activations.
        embedding: embedding weight of all tokens, [vocab, hidden].
        layers: decoder layers of the backbone.
        head: collapses the streams after the last layer.
        lm_head: [vocab, hidden] in float32 or the activations' dtype; with several ranks, this
            rank's equal part of the rows, or all.
        drafts: MTP layers; may be empty.
        dspark: the DSpark drafter, or None.
        ranks: ranks that share the network.
    """

    def __init__(
        self,
        *,
        config: ModelConfig,
        layer_specs: tuple[LayerSpec, ...],
        dtype: torch.dtype,
        embedding: Tensor,
        layers: Sequence[DecoderLayer],
        head: HyperConnectionHead | DelayedHead,
        lm_head: Tensor,
        drafts: Sequence[DraftLayer] = (),
        dspark: BlockDrafter | None = None,
        ranks: Ranks = ALONE,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_specs = layer_specs
        self.dtype = dtype
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.head = head
        self.lm_head = lm_head
        self.drafts = nn.ModuleList(drafts)
        self.dspark = dspark
        self.ranks = ranks
        self.backend = backend
        first = ranks.rank * len(lm_head) if len(lm_head) < config.vocab_size else 0
        images = [i - first for i in config.image_token_ids if 0 <= i - first < len(lm_head)]
        self._images = torch.tensor(images, device=embedding.device) if images else None

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def engrams(self) -> list[Engram]:
        """Modules that read n-grams: each needs its rows in ``Step.ngrams``."""
        return [module for module in self.modules() if isinstance(module, Engram)]

    @property
    def leaving_streams(self) -> int:
        """Number of streams of a token that ``forward`` returns."""
        return 1 if self.config.family.delayed else self.config.hc_mult

    def reserve(self, max_seq_len: int) -> list[Tensor]:
        """Make the rotary tables cover a length, so that shorter steps never replace them.

        Returns:
            The tables, which must stay alive wherever their addresses are recorded.
        """
        return [
            module.rope.table_for(max_seq_len)
            for module in self.modules()
            if isinstance(module, AttentionLayer)
        ]

    @torch.no_grad()
    def forward(
        self,
        step: Step,
        caches: Sequence[LayerCache],
        *,
        only: Sequence[int] | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Run the backbone.

        Args:
            step: metadata of the batch.
            caches: one for each backbone layer, written.
            only: indices of the layers to run; None for all.
            taps: taps of a DSpark drafter, written; undefined for layers that do not run.

        Returns:
            [T, N, hidden], streams after the last layer; [T, 1, hidden] if the head needs only one.
        """
        # All streams start equal, so they are a view of one row.
        h = self.embed(step.token_ids).unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        streams = Streams(h)
        tapped = Taps.nothing if taps is None else taps.entering
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if only is None or index in only:
                # The next layer's first site returns a layer's output to the streams.
                streams = layer(streams, step, cache, tapped(index))
        streams = Streams(streams.flush(self.backend), pre=streams.pre)
        if (leaving := tapped(len(self.layers))) is not None:
            leaving(streams.h)
        return self.head.leave(streams)

    def kinds_of_layers(self) -> list[int]:
        """Return one layer of every kind of attention and routing.

        The layers whose caches or selections they share are included.
        """
        first: dict[tuple[object, ...], int] = {}
        needed: set[int] = set()
        for index, (layer, spec) in enumerate(zip(self.layers, self.layer_specs, strict=False)):
            assert isinstance(layer, DecoderLayer)
            hashed = layer.ffn.router.token_experts is not None
            engram = layer.engram is not None
            kind = (spec.ratio, spec.selects, spec.compresses, hashed, engram)
            if first.setdefault(kind, index) == index:
                sources = {spec.kv_source, spec.index_source}
                if spec.candidates is not None:
                    sources.add(spec.candidates.source)
                needed |= {source for source in sources if source is not None}
        return sorted(needed.union(first.values()))

    @torch.no_grad()
    def logits(self, h: Tensor) -> Tensor:
        """Compute next-token logits, float32 [n, vocab], from backbone streams [n, N, hidden]."""
        return self._logits(self.head(h))

    @torch.no_grad()
    def best(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most probable next tokens of backbone streams, the same on all ranks.

        Args:
            h: streams after the backbone's last layer, [n, N, hidden].

        Returns:
            Tokens int64 [n], ``vocab_size`` if no finite logit is the largest, and their natural
            log-probabilities [n].
        """
        return self._best(self._logits_here(self.head(h)))

    @torch.no_grad()
    def best_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ``best`` tokens of logits [n, vocab]."""
        choice = self._choice(logits)
        tokens, logprobs = ALONE.best(choice, first=0, vocab=self.config.vocab_size)
        return tokens if self._shares_vocabulary else self.ranks.agreed(tokens), logprobs

    @torch.no_grad()
    def mtp_forward(
        self, h: Tensor, next_ids: Tensor, step: Step, cache: LayerCache, draft: int = 0
    ) -> Tensor:
        """Run a draft layer.

        Args:
            h: [T, N, hidden], backbone streams, or this layer's own output for a further draft.
            next_ids: int64 [T], the token that follows each position.
            step: metadata of the batch at the positions of ``h``.
            cache: caches of the draft layer, written.
            draft: index of the draft layer.

        Returns:
            [T, N, hidden] streams, the input of ``mtp_logits``.
        """
        out: Tensor = self.drafts[draft](h, self.embed(next_ids), step, cache)
        return out

    @torch.no_grad()
    def mtp_logits(self, h: Tensor, draft: int = 0) -> Tensor:
        """Compute logits, float32 [n, vocab], from a draft layer's streams [n, N, hidden]."""
        layer = self.drafts[draft]
        assert isinstance(layer, DraftLayer)
        return self._logits(layer.head(h))

    @torch.no_grad()
    def write_context(self, taps: Tensor, step: Step, caches: Sequence[LayerCache]) -> None:
        """Write the DSpark drafter's context; see ``BlockDrafter.write_context``."""
        assert self.dspark is not None
        self.dspark.write_context(taps, step, caches)

    @torch.no_grad()
    def block_forward(self, step: Step, caches: Sequence[LayerCache]) -> Tensor:
        """Run the DSpark drafter's blocks; see ``BlockDrafter.forward``.

        Args:
            step: metadata whose token ids are an anchor and noise tokens, block after block.
            caches: one for each stage.

        Returns:
            Streams collapsed to one row per token, [T, hidden].
        """
        assert self.dspark is not None
        out: Tensor = self.dspark(self.embed(step.token_ids), step, caches)
        return out

    @torch.no_grad()
    def guess_block(
        self, h: Tensor, anchors: Tensor, choose: Callable[[Tensor, int], Tensor]
    ) -> BlockGuess:
        """Guess the tokens after the anchors.

        Args:
            h: [R, n, hidden], first rows of each block's result of ``block_forward``.
            anchors: int64 [R], token id of each block's anchor.
            choose: function from logits [R, vocab] of guess i, and i, to ids int64 [R]; see
                ``MarkovHead.guess``.
        """
        assert self.dspark is not None
        markov = self.dspark.markov
        base = self._logits(self.dspark.head.normed(h))

        def chosen(row: Tensor, i: int) -> Tensor:
            return choose(base[:, i] + self._whole(markov.product(row)), i)

        tokens, rows = markov.guess(anchors, h.shape[1], chosen)
        return BlockGuess(tokens, markov.survival(h, rows))

    @torch.no_grad()
    def guess_best_block(self, h: Tensor, anchors: Tensor) -> Tensor:
        """Return the best guesses after the anchors, int64 [R, n]; see ``guess_block``.

        No rank assembles the logits of the whole vocabulary.
        """
        assert self.dspark is not None
        markov = self.dspark.markov
        base = self._logits_here(self.dspark.head.normed(h))

        def best(row: Tensor, i: int) -> Tensor:
            return self._best(base[:, i], row, markov.w2)[0]

        tokens: Tensor = markov.guess(anchors, h.shape[1], best)[0]
        return tokens

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return embeddings [T, hidden] of int64 ids [T], in the activations' dtype."""
        return self.embedding[token_ids].to(self.dtype)

    @property
    def _shares_vocabulary(self) -> bool:
        """True if each rank has the logits of a part of the vocabulary."""
        return len(self.lm_head) < self.config.vocab_size

    def _logits_here(self, x: Tensor) -> Tensor:
        """Compute this rank's logits, float32, from normed streams [..., hidden]."""
        out: Tensor = linear_float32(x, self.lm_head, backend=plain_backend(self.backend))
        # A piece of an image is never generated.
        return out if self._images is None else out.index_fill_(-1, self._images, -torch.inf)

    def _logits(self, x: Tensor) -> Tensor:
        return self._whole(self._logits_here(x))

    def _whole(self, logits: Tensor) -> Tensor:
        """Gather the logits of the whole vocabulary from all ranks' parts."""
        return self.ranks.gathered(logits) if self._shares_vocabulary else logits

    def _choice(self, logits: Tensor, *term: Tensor) -> Best:
        return best_logits(logits, *term, backend=self.backend)

    def _best(self, logits: Tensor, *term: Tensor) -> tuple[Tensor, Tensor]:
        """Return the best tokens over all ranks' logits, with a low-rank term added."""
        choice, vocab = self._choice(logits, *term), self.config.vocab_size
        if self._shares_vocabulary:
            first = self.ranks.rank * len(self.lm_head)
            return self.ranks.best(choice, first=first, vocab=vocab)
        tokens, logprobs = ALONE.best(choice, first=0, vocab=vocab)
        return self.ranks.agreed(tokens), logprobs
