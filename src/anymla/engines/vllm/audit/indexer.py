"""Audited methods of a layer's indexer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anymla.audit.caches import planes_at, slots_of
from anymla.audit.packet import Held
from anymla.engines.vllm.audit.method import Layer, Look, Method, Watched
from anymla.engines.vllm.audit.sample import Sample
from anymla.formats.page_layout import INDEX_FP8


class IndexQuery(Method):
    """RoPE of the index query's heads and their quantisation, whose scale enters the weights."""

    call = "forward"
    needs = ("index_q", "index_weights", "index_codes", "index_weights_out")
    judged_by = ("index_query",)

    @staticmethod
    def modules(layer: Layer) -> list[Any]:
        indexer = layer.attention.indexer
        return [] if indexer is None else [indexer]

    def watched(self) -> Iterable[Watched]:
        return [(self.module, "_wq_b_proj", self.project), *super().watched()]

    def project(self, *args: Any, **kwargs: Any) -> Look:
        q = yield
        self.note(index_q=q)

    def look(
        self, hidden: Tensor, qr: Tensor, kv_score: Tensor, weights: Tensor, *args: Any, **rest: Any
    ) -> Look:
        self.note(index_weights=weights)
        q, scale, out = yield
        if q is not None and scale is None:
            self.note(index_codes=q, index_weights_out=out)

    def plan(self, sample: Sample, q: Held, weights: Held, codes: Held, out: Held) -> None:
        indexer = self.module
        if indexer.use_fp4_kv:
            return
        shape = indexer.n_head, indexer.head_dim
        first, count = sample.heads(f"heads {indexer.prefix}", indexer.n_head)
        tensors = {
            "q": q.rows(*shape).narrow(1, first, count),
            "weights": weights.narrow(1, first, count),
            "codes": codes.rows(*shape).seen_as(torch.uint8).narrow(1, first, count),
            "weights_out": out.narrow(1, first, count),
            **sample.rotary(self.attention),
        }
        numbers = {"softmax_scale": indexer.softmax_scale, "head_scale": shape[0] ** -0.5}
        numbers["fnuz"] = int(codes.dtype == torch.float8_e4m3fnuz)
        sample.plan("index_query", indexer.prefix, tensors, **numbers)


class Selection(Method):
    """Scores of all visible index keys, and the selection of the best."""

    call = "forward"
    needs = ("searched_by", "searched_weights", "selected")
    judged_by = ("selection",)

    @staticmethod
    def modules(layer: Layer) -> list[Any]:
        indexer = layer.attention.indexer
        return [] if indexer is None or indexer.use_fp4_kv else [indexer.indexer_op]

    def look(self, hidden: Tensor, q_quant: Any, k: Any, weights: Tensor) -> Look:
        if isinstance(q_quant, Tensor):
            self.note(searched_by=q_quant, searched_weights=weights)
            yield
            self.note(selected=self.attention.topk_indices_buffer)

    def gather(self, sample: Sample, metadata: dict[str, Any]) -> list[dict[str, Held]]:
        """Gather all index keys that each chosen token can see."""
        cache = self.attention.indexer.k_cache.kv_cache
        ratio = self.attention.compress_ratio
        counts = [(sample.position(token) + 1) // ratio for token in sample.chosen]
        entries = torch.arange(max(counts), device=self.watch.device).expand(len(counts), -1)
        slots = slots_of(metadata[self.section].block_table[sample.of], entries, cache.shape[1])
        rows = sample.hold(**planes_at(cache, slots, INDEX_FP8))
        return [
            {name: each.select(0, place).narrow(0, 0, count) for name, each in rows.items()}
            for place, count in enumerate(counts)
        ]

    def plan(self, sample: Sample, *given: Held) -> None:
        numbers = {"k": self.attention.topk_indices_buffer.shape[1], "layout": INDEX_FP8}
        for place, token in enumerate(sample.chosen):
            q, weights, chosen = (each.select(0, place) for each in given)
            tensors = {"q": q, "weights": weights, "chosen": chosen, **sample.gathered[self][place]}
            sample.plan("selection", self.attention.indexer.prefix, tensors, [token], **numbers)
