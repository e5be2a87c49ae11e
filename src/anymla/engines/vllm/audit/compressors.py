"""The audited method of a compressor, of a layer's entries or of its index keys."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from anymla.audit.caches import before, planes_at, rows_at, slots_of
from anymla.audit.packet import Held
from anymla.engines.vllm.audit.method import Layer, Look, Method, Watch
from anymla.engines.vllm.audit.sample import Sample, on_device
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8


class Compressor(Method):
    """States of each token, and the row of each entry that a token closes."""

    call = "forward"
    judged_by = ("compressor_state", "compressed_row")

    def __init__(self, watch: Watch, layer: Layer, module: Any) -> None:
        """Tell the compressor of entries from that of index keys."""
        super().__init__(watch, layer, module)
        kind = next(kind for kind, each in layer.compressors.items() if each is module)
        self.needs = (f"{kind}_kv_score",)

    @staticmethod
    def modules(layer: Layer) -> list[Any]:
        return list(layer.compressors.values())

    def look(self, kv_score: Tensor, positions: Tensor, rotary_emb: Any) -> Look:
        self.note(**{self.needs[0]: kv_score})
        yield

    def gather(self, sample: Sample, metadata: dict[str, Any]) -> dict[str, Held]:
        """Gather the state rows of chosen tokens; plan a case of entries that this step closes."""
        module = self.module
        states, cache = metadata[module.state_cache.prefix], module.state_cache.kv_cache
        state = sample.hold(state=cache[rows_at(states.slot_mapping[sample.rows], cache)])
        ratio = module.compress_ratio
        if module.use_fp4_cache:
            return state
        closing = (sample.positions + 1) % ratio == 0
        owners = np.unique(sample.owners[closing])
        groups = [np.flatnonzero(closing & (sample.owners == each)) for each in owners]
        picked = sample.pick(f"entries of {ratio}", groups)
        if not picked:
            return state
        layout = MAIN_FP8 if module.head_dim == 512 else INDEX_FP8
        keys = module._static_forward_context[module.k_cache_prefix].kv_cache
        where = [picked, sample.positions[picked].tolist(), sample.owners[picked].tolist()]
        rows, at, of = on_device(self.watch.device, where)
        places = before(at, ratio * (2 if module.overlap else 1))
        slots = slots_of(states.block_table[of], places, cache.shape[1])
        tensors = sample.hold(
            state=cache[rows_at(slots, cache)],
            present=places >= 0,
            norm_weight=module.norm.weight,
            cos_sin=self.attention.rotary_emb.cos_sin_cache[at + 1 - ratio].float(),
            **planes_at(keys, metadata[module.k_cache_prefix].slot_mapping[rows], layout),
        )
        sample.plan(
            "compressed_row",
            module.prefix,
            tensors,
            picked,
            ratio=ratio,
            overlap=int(module.overlap),
            eps=module.rms_norm_eps,
            layout=layout,
        )
        return state

    def plan(self, sample: Sample, kv_score: Held) -> None:
        tensors = {"kv_score": kv_score, **sample.hold(ape=self.module.ape)}
        tensors |= sample.gathered[self]
        ratio = self.module.compress_ratio
        sample.plan("compressor_state", self.module.prefix, tensors, ratio=ratio)
