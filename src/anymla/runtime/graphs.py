"""A computation over tensors that stay in place, recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Runs before recording: the first compiles kernels and fills caches, the second finds them there.
_REHEARSALS = 2


class Graph:
    """A function of no arguments that always reads and writes the same tensors.

    On a GPU it is recorded as a CUDA graph and replayed; the launches are those of the function
    called directly, in the same order, so the results have the same bits. Elsewhere, and with
    ``record=False``, the function is called, and its results are copied to where the first call
    left them: whoever uses them sees the same lifetimes as with a graph.

    Results are overwritten by the next call.
    """

    def __init__(
        self,
        function: Callable[[], tuple[Tensor, ...]],
        device: torch.device,
        *,
        record: bool,
        pool: Any = None,
    ) -> None:
        """Record nothing yet.

        Args:
            function: returns tensors; must not synchronise, and may be called any number of times
                before the first use without doing harm.
            device: of all of its tensors.
            record: replay a CUDA graph. Only on CUDA devices.
            pool: memory pool shared with other graphs, of which one runs at a time.
        """
        assert not record or device.type == "cuda"
        self._function = function
        self._device = device
        self._records = record
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: tuple[Tensor, ...] | None = None

    @property
    def prepared(self) -> bool:
        """Whether the first call has been prepared."""
        return self._results is not None

    def prepare(self) -> tuple[Tensor, ...]:
        """Rehearse and record, if it has not been done; where the results will be."""
        if self._results is not None:
            return self._results
        if not self._records:
            self._results = self._function()
            return self._results
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_REHEARSALS):
                self._function()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads (those that watch over NCCL, say) may go on with what they do.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            results = self._function()
        self._graph, self._results = graph, results
        return results

    def __call__(self) -> tuple[Tensor, ...]:
        """Run; prepares at the first call."""
        results = self.prepare()
        if self._graph is not None:
            self._graph.replay()
        else:
            for kept, result in zip(results, self._function(), strict=True):
                kept.copy_(result)
        return results
