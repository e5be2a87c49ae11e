"""One decoder layer of real size with a batch of decoding requests, ready to run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from anymla.bench.random_caches import fill_randomly
from anymla.bench.random_weights import RandomWeights
from anymla.layers.caches import CACHE_FORMATS, LayerCache
from anymla.layers.decoder import DecoderLayer
from anymla.layers.hyper_connection import Mix, Streams
from anymla.layers.ranks import ALONE, Ranks
from anymla.layers.side_stream import INLINE, SideStream
from anymla.layers.spec import LayerSpec
from anymla.layers.step import Step
from anymla.model.build import Builder
from anymla.model.config import ModelConfig
from anymla.model.layer_specs import layer_specs
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import Batch, BatchSizes, Reads, device_step
from anymla.testing.published import FLASH, PRO

MODELS: dict[str, dict[str, Any]] = {"flash": FLASH, "pro": PRO}
# Pages of a cache that all requests' tables point into: more rows than any L2 holds.
_MOST_PAGES = 4096


@dataclasses.dataclass(frozen=True)
class LayerCase:
    """Sizes of a measured decode layer.

    Attributes:
        model: "flash" or "pro".
        ratio: compression ratio of the layer; 0 for a window alone.
        batch: number of decoding requests.
        context: tokens of each.
        experts: routed experts that the layer has.
        queries: tokens of each that are run.
        reads: way in which a request's queries read the rows that they share.
        share: number of GPUs that share the layer by tensor parallelism; one GPU's part is
            measured, without the sums over them.
    """

    model: str
    ratio: int
    batch: int
    context: int
    experts: int = 32
    queries: int = 1
    reads: Reads = Reads.SLOTS
    share: int = 1


def shared_sizes(model: str, share: int) -> dict[str, int]:
    """Return the sizes in a model's configuration of which each of ``share`` GPUs has its part.

    Raises:
        ValueError: a size cannot be divided by ``share``.
    """
    sizes = {}
    for name in ("num_attention_heads", "o_groups", "moe_intermediate_size"):
        sizes[name], rest = divmod(MODELS[model][name], share)
        if rest:
            raise ValueError(f"{name} {MODELS[model][name]} of {model} has no {share} equal parts")
    return sizes


class LayerSetup:
    """Weights of one layer of a model, and batches for it."""

    def __init__(
        self,
        model: str,
        ratio: int,
        device: torch.device,
        *,
        experts: int = 32,
        copies: int = 2,
        backend: str | None = None,
        changes: dict[str, Any] | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Make the weights.

        Args:
            model: "flash" or "pro".
            ratio: compression ratio of the layer; 0 for a window alone.
            device: device that holds the weights.
            experts: number of routed experts.
            copies: layers of the same sizes, so that one finds nothing of itself in the caches.
            backend: name of every operation's backend; None for the best.
            changes: other fields of the configuration, to make it small.
            ranks: the processes that share the layer.
        """
        values = MODELS[model] | {
            "num_hidden_layers": 1,
            "num_nextn_predict_layers": 0,
            "compress_ratios": [ratio],
            "num_hash_layers": 0,
            "n_routed_experts": experts,
        }
        self.config = ModelConfig.from_dict(values | (changes or {}))
        self.device = device
        self.backend = backend
        (self.spec,) = layer_specs(self.config)
        weights = RandomWeights(self.config, device)
        builder = Builder(
            self.config,
            weights.tensor,
            weights.linear,
            dtype=torch.bfloat16,
            device=device,
            backend=backend,
            ranks=ranks,
        )
        self.layers = [builder.decoder("layers.0.", self.spec) for _ in range(copies)]

    def batch(
        self,
        batch: int,
        context: int,
        side: SideStream = INLINE,
        *,
        queries: int = 1,
        reads: Reads = Reads.SLOTS,
    ) -> DecodeBatch:
        """Make requests of ``context`` tokens each, of which the newest ``queries`` are run."""
        store = self._store(context)
        groups = store.groups
        device = self.device
        tables = {
            group.name: torch.randint(
                1,
                store.pools[group.name].num_pages,
                (batch, -(-context // group.tokens_per_page)),
                dtype=torch.int32,
                device=device,
            )
            for group in groups
        }
        tokens = batch * queries
        ids = torch.arange(tokens, dtype=torch.int32, device=device)
        step = device_step(
            Batch(
                ids,
                torch.arange(0, tokens + 1, queries, dtype=torch.int32, device=device),
                torch.full((batch,), queries, dtype=torch.int32, device=device),
                torch.full((batch,), context - queries, dtype=torch.int32, device=device),
                tables,
            ),
            groups,
            BatchSizes((queries,) * batch, batch, context),
            backend=self.backend,
            reads=lambda _: reads,
        )
        fill_randomly(store)
        streams = torch.randn(tokens, self.config.hc_mult, self.config.hidden_size, device=device)
        n = self.config.hc_mult
        mix = Mix(torch.rand(tokens, n, device=device), torch.rand(tokens, n, n, device=device) / n)
        h = streams.bfloat16()
        step = dataclasses.replace(step, side=side)
        return DecodeBatch(step, store.layers[0], Streams(h, h[:, 0].contiguous(), mix))

    def visited(self, batch: DecodeBatch) -> int:
        """Count the experts of the first layer that have a token of the batch."""
        chosen: dict[str, Tensor] = {}

        def record(kind: str, _: int, value: Tensor) -> None:
            chosen[kind] = value

        step = dataclasses.replace(batch.step, recorder=record)
        dataclasses.replace(batch, step=step).run(self.layers[0])
        return len(chosen["experts"].unique())

    def _store(self, context: int) -> CacheStore:
        specs: tuple[LayerSpec, ...] = (self.spec,)
        groups = cache_groups(specs)
        pages = {group.name: min(_MOST_PAGES, max(8, 4 * group.pages(context))) for group in groups}
        return CacheStore(
            groups,
            specs,
            CACHE_FORMATS["fp8"],
            pages,
            max_requests=1,
            max_seq_len=1,
            device=self.device,
        )


@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """A step, the caches it reads and writes, and the streams that enter the layer."""

    step: Step
    cache: LayerCache
    streams: Streams

    def run(self, layer: DecoderLayer) -> Streams:
        """Run the whole layer."""
        out: Streams = layer(self.streams, self.step, self.cache)
        return out
