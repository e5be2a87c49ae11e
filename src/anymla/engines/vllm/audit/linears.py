"""The audited linear layers: some outputs of some of a layer's products."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from anymla.engines.vllm.audit.method import Look, Method, Watched
from anymla.engines.vllm.audit.sample import Sample
from anymla.engines.vllm.audit.weights import block_of_outputs, block_of_weight, is_readable

_LINEARS = 2  # products of a layer that are judged in a step


class Linears(Method):
    """Products of the linear layers of attention, compressors, indexer and experts."""

    call = "_run_parallel_input_projections"
    judged_by = ("linear",)

    def watched(self) -> Iterable[Watched]:
        """Return what no other method records: the layer's input, the router, shared experts."""
        yield from super().watched()
        for module, x, y in self._of_experts():
            given = "" if x == "mixed" else x
            yield module, "forward", functools.partial(self.multiply, y=y, given=given)

    def look(self, hidden: Tensor) -> Look:
        self.note(hidden=hidden)
        yield

    def multiply(self, x: Tensor, *args: Any, y: str, given: str) -> Look:
        """Record a product, and what it is made of if nothing else does."""
        if given:
            self.note(**{given: x})
        result = yield
        self.note(**{y: result[0] if isinstance(result, tuple) else result})

    def plan(self, sample: Sample) -> None:
        numbers = sample.auditor.random(f"linears {self.section}")
        every = []
        for module, x, y in self._products():
            found = sample.recorded(self.section, x, y)
            if found is not None and is_readable(module, found[0].shape[1]):
                every.append((module, y, found))
        for module, y, (given, result) in numbers.sample(every, min(_LINEARS, len(every))):
            outputs = len(module.weight)
            part = block_of_outputs(numbers, outputs)
            tensors = {
                "x": given,
                "y": result.rows(outputs).narrow(1, part.start, part.stop - part.start),
                **sample.hold(**block_of_weight(module, part)),
            }
            # The router's product may be rounded to its operands' type before it is widened.
            unit = {"unit": torch.finfo(torch.bfloat16).eps} if y == "logits" else {}
            name = self.layer.names[id(module)]
            sample.plan("linear", name, tensors, None, first=part.start, **unit)

    def _products(self) -> Iterator[tuple[Any, str, str]]:
        """Yield each linear layer with the names of its recorded input and output."""
        layer, indexer = self.attention, self.attention.indexer
        yield from self._of_experts()
        yield layer.fused_wqa_wkv, "hidden", "qr_kv"
        yield layer.wq_b, "qr_out", "q"
        yield layer.wo_b, "z", "projected"
        for kind, compressor in self.layer.compressors.items():
            yield compressor.fused_wkv_wgate, "hidden", f"{kind}_kv_score"
        if indexer is not None:
            yield indexer.wq_b, "qr_out", "index_q"
            yield indexer.weights_proj, "hidden", "index_weights"

    def _of_experts(self) -> Iterator[tuple[Any, str, str]]:
        if self.layer.block is not None:
            mixture = self.layer.block.ffn
            shared = mixture.shared_experts
            yield mixture.gate, "mixed", "logits"
            if shared is not None:
                yield shared.gate_up_proj, "mixed", "gate_up"
                down = shared.down_proj
                if down.tp_size == 1 or not getattr(down, "reduce_results", True):
                    yield down, "inner", "shared"
