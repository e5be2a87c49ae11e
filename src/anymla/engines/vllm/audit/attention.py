"""Audited methods of an attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from anymla.audit.caches import before, planes_at, slots_of
from anymla.audit.packet import Held
from anymla.engines.vllm import report
from anymla.engines.vllm.attention import AttentionAdapter
from anymla.engines.vllm.audit.method import Look, Method
from anymla.engines.vllm.audit.sample import Sample
from anymla.engines.vllm.audit.weights import block_of_outputs, group_weight
from anymla.formats.page_layout import MAIN_FP8

# To look the machine up searches folders for packages, which would happen twice a layer.
_FNUZ = report.this_machine().fnuz


def _holds_fnuz(layer: Any) -> bool:
    """Return True if the rows of a layer's windows hold e4m3fnuz codes.

    vLLM's own kernel writes the platform's codes there. Rows of entries are OCP's everywhere.
    """
    return _FNUZ and not isinstance(layer, AttentionAdapter)


def _rotates_back(layer: Any) -> bool:
    """Return True if attention gives heads that are rotated back, as vLLM's own for ROCm does.

    It leaves that to the projection where ``wo_a`` stays FP8.
    """
    return getattr(layer, "_wo_a_fp8_weight", layer) is None


class QkvNorm(Method):
    """RMS norms of the query's latent and of the row."""

    call = "_split_qkv_and_norm"
    needs = ("qr_kv", "qr_out", "kv_out")
    judged_by = ("qkv_norm",)

    def look(self, qr_kv: Tensor) -> Look:
        self.note(qr_kv=qr_kv)
        qr, scale, kv = yield
        if scale is None:
            self.note(qr_out=qr, kv_out=kv)

    def plan(self, sample: Sample, given: Held, qr: Held, kv: Held) -> None:
        layer = self.attention
        tensors = {
            "qr": given.narrow(1, 0, layer.q_lora_rank),
            "kv": given.narrow(1, layer.q_lora_rank, layer.head_dim),
            "qr_out": qr,
            "kv_out": kv,
            **sample.hold(qr_weight=layer.q_norm.weight, kv_weight=layer.kv_norm.weight),
        }
        sample.plan("qkv_norm", self.section, tensors, eps=layer.eps)


class _Windowed(Method):
    """A method that writes or reads rows of the window's cache."""

    def plan_slots(
        self,
        sample: Sample,
        metadata: dict[str, Any],
        place: int,
        what: str,
        first: int,
        listed: dict[str, Held],
    ) -> None:
        """Compare listed slots with those of a chosen token's rows, from ``first`` to its own."""
        window = self.attention.swa_cache_layer
        key = "table", self.section
        if key not in sample.gathered:
            tables = metadata[window.prefix].block_table[sample.of]
            sample.gathered[key] = sample.packet.hold(tables)
        token, page = sample.chosen[place], window.kv_cache.shape[1]
        last = sample.position(token) + 1
        table = sample.gathered[key].select(0, place)
        tensors = {"table": table.narrow(0, 0, (last - 1) // page + 1), **listed}
        numbers = {"page_size": page, "what": what, "first": first, "last": last}
        sample.plan("slots", self.section, tensors, [token], **numbers)


class Insert(_Windowed):
    """Norm and RoPE of the query's heads; RoPE of the row, which is quantised to its slot."""

    call = "_fused_qnorm_rope_kv_insert"
    needs = ("q", "kv", "q_out")
    judged_by = ("query", "window_row", "slots")

    def look(self, q: Tensor, kv: Tensor, positions: Tensor, metadata: Any) -> Look:
        self.note(q=q, kv=kv)
        result = yield
        self.note(q_out=result)

    def gather(self, sample: Sample, metadata: dict[str, Any]) -> dict[str, Held]:
        """Gather the row at each token's slot, and compare the slot with the block table's."""
        window = self.attention.swa_cache_layer
        slots = metadata[window.prefix].slot_mapping[sample.rows]
        listed = sample.packet.hold(slots)
        for place, token in enumerate(sample.chosen):
            own = {"listed": listed.select(0, place)}
            first = sample.position(token)
            self.plan_slots(sample, metadata, place, "the token's own row", first, own)
        fnuz = _holds_fnuz(self.attention)
        return sample.hold(**planes_at(window.kv_cache, slots, MAIN_FP8, fnuz=fnuz))

    def plan(self, sample: Sample, q: Held, kv: Held, out: Held) -> None:
        table = sample.rotary(self.attention)
        tensors = {"q": q, "out": out.narrow(1, 0, q.shape[1]), **table}
        sample.plan("query", self.section, tensors, eps=self.attention.eps)
        tensors = {"kv": kv, **table, **sample.gathered[self]}
        sample.plan("window_row", self.section, tensors, layout=MAIN_FP8)


class Attention(_Windowed):
    """Attention of each token to its window and to selected or all entries, with a sink."""

    call = "forward_mqa"
    needs = ("attended_by", "attended")
    judged_by = ("attention", "slots")

    def look(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> Look:
        layer = self.attention
        # Record the choice now, because later layers write theirs to the same buffer.
        chosen = layer.topk_indices_buffer if layer.indexer is not None else None
        self.note(attended_by=q, chosen=chosen)
        yield
        self.note(attended=output)

    def gather(self, sample: Sample, metadata: dict[str, Any]) -> list[dict[str, Held]]:
        """Gather the rows in both caches that each chosen token attends to."""
        layer, wide = self.attention, self.attention.window_size
        window, cache = metadata[layer.swa_cache_layer.prefix], layer.swa_cache_layer.kv_cache
        slots = slots_of(window.block_table[sample.of], before(sample.at, wide), cache.shape[1])
        fnuz = _holds_fnuz(layer)
        rows = sample.hold(**planes_at(cache, slots, MAIN_FP8, "window_", fnuz=fnuz))
        counts = [sample.position(token) + 1 for token in sample.chosen]
        found = []
        for place, count in enumerate(counts):
            count = min(count, wide)
            part = {n: each.select(0, place) for n, each in rows.items()}
            found.append({n: each.narrow(0, wide - count, count) for n, each in part.items()})
            listed = _listed(window, sample.chosen[place])
            if listed is not None:
                held, what = sample.hold(**listed), "rows of the window"
                self.plan_slots(sample, metadata, place, what, counts[place] - count, held)
        if layer.compress_ratio == 1:
            return found
        table = metadata[layer.prefix].block_table[sample.of]
        if layer.indexer is None:
            counts = [count // layer.compress_ratio for count in counts]
            entries = torch.arange(max(counts), device=self.watch.device).expand(len(counts), -1)
        else:
            last = sample.recorder.last(self.section, "chosen")
            if last is None:
                return found
            entries = last[: len(counts)]
            counts = [entries.shape[1]] * len(counts)
        slots = slots_of(table, entries, layer.kv_cache.shape[1])
        rows = sample.hold(**planes_at(layer.kv_cache, slots, MAIN_FP8, "entries_"))
        for place, count in enumerate(counts):
            found[place] |= {n: e.select(0, place).narrow(0, 0, count) for n, e in rows.items()}
        return found

    def plan(self, sample: Sample, *given: Held) -> None:
        layer = self.attention
        first, count = sample.heads(f"heads {self.section}", layer.n_local_heads)
        q, out = (each.narrow(1, first, count) for each in given)
        sink = sample.hold(sink=layer.attn_sink[first : first + count])
        numbers = {"scale": layer.scale, "first_head": first}
        table = sample.rotary(layer) if _rotates_back(layer) else {}
        for place, token in enumerate(sample.chosen):
            rows = sample.gathered[self][place]
            tensors = {"q": q.select(0, place), "out": out.select(0, place), **sink, **rows}
            tensors |= {name: each.narrow(0, place, 1) for name, each in table.items()}
            if layer.indexer is not None:
                tensors["chosen"] = sample.sections[self.section]["chosen"].select(0, place)
            sample.plan("attention", self.section, tensors, [token], **numbers)


class Projection(Method):
    """Inverse RoPE of the heads, and their product with ``wo_a`` by groups."""

    call = "_o_proj"
    needs = ("o", "z")
    judged_by = ("projection",)

    def look(self, o: Tensor, positions: Tensor) -> Look:
        """Record the heads, what ``wo_b`` is given, and what it gives."""
        self.note(o=o)

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            with self.watch.guarded(self.call):
                self.note(z=args[0].flatten(1))

        handle = self.attention._modules["wo_b"].register_forward_pre_hook(keep)
        try:
            result = yield
        finally:
            handle.remove()
        if self.attention.wo_b.tp_size == 1:  # else it is the sum of all ranks
            self.note(projected=result)

    def plan(self, sample: Sample, o: Held, z: Held) -> None:
        """Plan a case of part of one group: all would take longer than everything else."""
        layer, numbers = self.attention, sample.auditor.random(f"group {self.section}")
        groups, rank = layer.n_local_groups, layer.o_lora_rank
        group, part = numbers.randrange(groups), block_of_outputs(numbers, rank)
        weight = group_weight(layer, group, part)
        if weight is not None:
            heads = layer.n_local_heads // groups
            tensors = {
                "o": o.narrow(1, group * heads, heads),
                "out": z.narrow(1, group * rank + part.start, part.stop - part.start),
                **(self._no_rotation(sample) if _rotates_back(layer) else sample.rotary(layer)),
                **sample.hold(**weight),
            }
            sample.plan("projection", self.section, tensors, group=group)

    def _no_rotation(self, sample: Sample) -> dict[str, Held]:
        """Return a rotary table by which heads stay as they are."""
        width = self.attention.rotary_emb.cos_sin_cache.shape[1] // 2
        ones = torch.ones(len(sample.chosen), width, device=self.watch.device)
        return sample.hold(cos_sin=torch.cat((ones, torch.zeros_like(ones)), 1))


def _listed(window: Any, token: int) -> dict[str, Tensor] | None:
    """Return a token's window as a step's metadata list it, and its length; None without a list."""
    decodes = window.num_decode_tokens
    if token < decodes:
        indices, lengths, row = window.decode_swa_indices, window.decode_swa_lens, token
    else:
        indices, lengths, row = window.prefill_swa_indices, window.prefill_swa_lens, token - decodes
    if indices is None or lengths is None:
        return None
    return {"listed": indices[row].flatten(), "length": lengths[row]}
