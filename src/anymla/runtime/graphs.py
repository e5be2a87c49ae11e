"""A computation over tensors that stay in place, recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Number of runs before recording: the first compiles kernels and fills caches, the second uses
# them.
_REHEARSALS = 2


class Graph:
    """A function of no arguments that always reads and writes the same tensors.

    On a GPU it is recorded as a CUDA graph and replayed. The launches are those of a direct call,
    in the same order, so the results have the same bits. Elsewhere, and with ``record=False``, the
    function is called and its results are copied to the tensors of the first call, so that
    lifetimes are the same as with a graph.

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
            function: function that returns tensors. It must not synchronise, and further calls
                before the first use must be harmless.
            device: device of all of its tensors.
            record: True to replay a CUDA graph, on CUDA devices only.
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
        """True if the first call has been prepared."""
        return self._results is not None

    def prepare(self) -> tuple[Tensor, ...]:
        """Rehearse and record unless that has been done; return the result tensors."""
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
        # Other threads, for example NCCL's watchdog, may call CUDA during capture.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"
        ):
            results = self._function()
        self._graph, self._results = graph, results
        return results

    def __call__(self) -> tuple[Tensor, ...]:
        """Run the computation; the first call prepares it."""
        results = self.prepare()
        if self._graph is not None:
            self._graph.replay()
        else:
            for kept, result in zip(results, self._function(), strict=True):
                kept.copy_(result)
        return results
