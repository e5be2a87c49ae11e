"""Runs of anymla's engine with everything its layers computed, request by request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from traces import Trace

from anymla.layers.hyper_connection import Streams
from anymla.layers.step import Step
from anymla.model.transformer import Transformer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.span import Span


class TracedEngine:
    """An engine whose layers are watched; a token that runs twice counts as it ran last."""

    def __init__(self, model: Transformer, options: EngineOptions) -> None:
        self.model = model
        self.engine = Engine(model, options)
        self._rows: dict[tuple[str, str, int], dict[int, Tensor]] = {}
        self._owners: list[tuple[str, int]] = []
        self._watch_steps()

    def run(self, requests: Sequence[Request]) -> dict[str, tuple[list[int], Trace]]:
        """Run requests together; by id, the tokens that went through the layers and their trace."""
        handles = []
        for index, layer in enumerate(self.model.layers):
            for name, module in (
                ("attention", layer.attention),
                ("ffn", layer.ffn),
                ("streams", layer),
            ):
                handles.append(module.register_forward_hook(self._keeper(name, index)))
        try:
            completions = self.engine.run(requests)
        finally:
            for handle in handles:
                handle.remove()
        out = {}
        for completion in completions:
            request = completion.request
            seen = [*request.token_ids, *completion.token_ids]
            # The last token that was chosen has not gone through the layers.
            seen = seen[: len(request.token_ids) + max(0, len(completion.token_ids) - 1)]
            out[request.request_id] = (seen, self._trace(request.request_id, len(seen)))
        return out

    def _watch_steps(self) -> None:
        build = self.engine._planner.build

        def watched(spans: Sequence[Span], **kwargs: Any) -> Step:
            step = build(spans, **kwargs)
            self._owners = [
                (span.state.request.request_id, position)
                for span in spans
                for position in range(span.start, span.stop)
            ]
            return dataclasses.replace(step, recorder=self._keep)

        self.engine._planner.build = watched  # type: ignore[method-assign]

    def _keep(self, name: str, layer: int, value: Tensor) -> None:
        for (request, position), row in zip(self._owners, value, strict=True):
            self._rows.setdefault((request, name, layer), {})[position] = row.clone()

    def _keeper(self, name: str, layer: int) -> Any:
        def hook(module: Any, inputs: Any, output: Tensor | Streams) -> None:
            settled = output.flush() if isinstance(output, Streams) else output
            self._keep(name, layer, settled)
            if isinstance(output, Streams) and output.pre is not None:
                self._keep("gates", layer, output.pre)

        return hook

    def _trace(self, request: str, tokens: int) -> Trace:
        layers = range(len(self.model.layers))

        def stacked(name: str, layer: int) -> Tensor:
            rows = self._rows[request, name, layer]
            assert rows.keys() >= set(range(tokens)), f"{name} of layer {layer}: {sorted(rows)}"
            return torch.stack([rows[position] for position in range(tokens)])

        def chosen(name: str) -> dict[int, list[set[int]]]:
            return {
                layer: [set(row) - {-1} for row in stacked(name, layer).tolist()]
                for layer in layers
                if (request, name, layer) in self._rows
            }

        streams = [stacked("streams", layer) for layer in layers]
        gated = (request, "gates", layers[-1]) in self._rows
        last = Streams(streams[-1], pre=stacked("gates", layers[-1]) if gated else None)
        return Trace(
            attention=[stacked("attention", layer) for layer in layers],
            ffn=[stacked("ffn", layer) for layer in layers],
            streams=streams,
            logits=self.model.logits(self.model.head.leave(last)),
            entries=chosen("topk"),
            experts=chosen("experts"),
        )
