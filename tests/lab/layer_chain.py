"""Layers of real size, one behind the other in a graph, against the same launched one by one.

A kernel that starts before its predecessor has ended, or beside a kernel of another stream, must
not read data that are not there yet, nor overwrite data that are still read. A host that launches
layers one by one is so slow that every kernel finds the device idle and nothing overlaps. A graph's
replay must compute the same bits from the same inputs.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from anymla.bench.layer_setup import LayerSetup
from anymla.bench.random_caches import fill_randomly
from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.hyper_connection import Mix, Streams
from anymla.layers.side_stream import INLINE, SideStream
from anymla.ops.compile_ahead import compiled_together
from anymla.runtime.cache_groups import CacheGroup, cache_groups
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.device_step import Batch, BatchSizes, device_step
from anymla.runtime.graphs import Graph

# Range of a batch's positions, counted back from its context: two windows that are compressed.
_POSITIONS = 256
_READ_ONLY_PAGES = 64


class LayerChain:
    """Step of decoding requests through ``length`` layers, including the making of metadata.

    Every request writes to pages of its own, and reads those and common pages that nobody writes.
    """

    def __init__(self, setup: LayerSetup, batch: int, context: int, *, length: int = 6) -> None:
        """Make caches, block tables and buffers.

        Args:
            setup: layers that are used in turn.
            batch: number of requests, of one token each.
            context: largest number of tokens in a request, more than 256.
            length: number of layers in the chain.
        """
        self._setup = setup
        self._length = length
        self._context = context
        device, config = setup.device, setup.config
        self._groups = cache_groups((setup.spec,))
        first = context - _POSITIONS
        own = {group.name: _columns(group, first, context) for group in self._groups}
        pages = {name: _READ_ONLY_PAGES + batch * len(mine) for name, mine in own.items()}
        self._store = CacheStore(
            self._groups, (setup.spec,), CACHE_FORMATS["fp8"], pages,
            max_requests=1, max_seq_len=1, device=device,
        )  # fmt: skip
        fill_randomly(self._store)
        self._tables = {}
        for group in self._groups:
            width = -(-context // group.tokens_per_page)
            table = torch.randint(1, _READ_ONLY_PAGES, (batch, width), dtype=torch.int32)
            mine = own[group.name]
            free = 1 + _READ_ONLY_PAGES + torch.randperm(batch * len(mine), dtype=torch.int32)
            table[:, mine.start : mine.stop] = free.view(batch, -1)
            self._tables[group.name] = table.to(device)
        self._starts = torch.zeros(batch, dtype=torch.int32, device=device)
        self._counts = torch.ones(batch, dtype=torch.int32, device=device)
        self._rows = torch.arange(batch + 1, dtype=torch.int32, device=device)
        n, width = config.hc_mult, config.hidden_size
        self._h = torch.zeros(batch, n, width, dtype=torch.bfloat16, device=device)
        self._u = torch.zeros(batch, width, dtype=torch.bfloat16, device=device)
        self._mix = Mix(
            torch.zeros(batch, n, device=device), torch.zeros(batch, n, n, device=device)
        )

    def shuffle(self) -> None:
        """Draw other inputs at other positions."""
        self._starts.random_(self._context - _POSITIONS, self._context)
        self._counts.random_(0, 8).clamp_(max=1)  # a few are padding
        for tensor in (self._h, self._u):
            tensor.normal_()
        for tensor in (self._mix.post, self._mix.comb):
            tensor.uniform_(0, 1 / self._setup.config.hc_mult)

    def compile_ahead(self) -> None:
        """Compile the layers' kernels in parallel, where there are any to compile."""
        with compiled_together() as only_compiled:
            if only_compiled:
                # Rows and slots index tensors, so they must be right.
                self._run(INLINE, "torch")

    def run(self) -> tuple[Tensor, ...]:
        """Launch everything once; return the streams [T, N, hidden] of the requests that exist."""
        return self._run(INLINE, self._setup.backend)

    def _run(self, side: SideStream, selection: str | None) -> tuple[Tensor, ...]:
        batch = len(self._starts)
        step = device_step(
            Batch(self._rows[:-1], self._rows, self._counts, self._starts, self._tables),
            self._groups,
            BatchSizes((1,) * batch, batch, self._context),
            backend=selection,
        )
        step = dataclasses.replace(step, side=side)
        streams = Streams(self._h, self._u, self._mix)
        for i in range(self._length):
            layer = self._setup.layers[i % len(self._setup.layers)]
            streams = layer(streams, step, self._store.layers[0])
        return (streams.flush().where(step.is_valid[:, None, None], 0),)

    def graph(self, side: SideStream = INLINE) -> Graph:
        """Record ``run`` as a graph."""
        backend = self._setup.backend
        return Graph(lambda: self._run(side, backend), self._setup.device, record=True)

    def written(self) -> list[Tensor]:
        """Return copies of all caches as bytes."""
        return [
            cache.contiguous().view(torch.uint8).clone()
            for group in self._groups
            for cache in self._store.tensors(group)
        ]


def _columns(group: CacheGroup, first: int, stop: int) -> range:
    """Return the columns of a block table that tokens first .. stop - 1 write to."""
    per_page = group.tokens_per_page
    return range(first // per_page, (stop - 1) // per_page + 1)
