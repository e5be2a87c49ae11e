"""Audit of vLLM's DeepSeek-V4: takes cases from the layers of a live model, vLLM's own or ours.

Nothing is replaced. A method's inputs are copied before it runs and its results after, for the
sampled tokens of audited steps; ``anymla.audit`` judges them in a thread of its own. Audited steps
run without a CUDA graph, in which no Python runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from anymla import __version__
from anymla.audit import Case
from anymla.audit.auditor import Auditor
from anymla.audit.process import JudgeProcess
from anymla.audit.settings import Settings
from anymla.engines.vllm.pinned import CUDA_MODELS, installed_version
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

_LOG = init_logger("vllm.plugins.anymla.audit")
VARIABLE = "ANYMLA_AUDIT"
_ROWS_AT_REST = 16  # of a kind in a layer
_Hook = Generator[None, Any, None]


@dataclasses.dataclass
class _Sample:
    """The tokens of a step that are looked at.

    Attributes:
        tokens: all of the step, padding left out.
        positions: of all, on the CPU.
        owners: index of the request of each token, on the CPU.
        names: of the requests.
        layers: those that are looked at, by their prefix.
        chosen: indices of tokens that are looked at by every method but the compressors.
        rows: the same on the device.
    """

    tokens: int
    positions: list[int]
    owners: list[int]
    names: list[str]
    layers: set[str]
    chosen: list[int]
    rows: Tensor

    def name(self, token: int) -> str:
        """The request of a token."""
        owner = self.owners[token]
        return self.names[owner] if owner < len(self.names) else f"row {owner}"


@dataclasses.dataclass
class _Kept:
    """Cache rows of one kind in one layer that have been seen.

    Attributes:
        requests: whose row each is.
        entries: its number in the request's compressed cache.
        since: the step in which it was seen.
        slots: where it lay, on the device.
        rows: its bytes, values before scales, on the device.
    """

    requests: list[str]
    entries: list[int]
    since: list[int]
    slots: Tensor
    rows: Tensor

    def only(self, places: list[int]) -> _Kept:
        """These rows of them."""
        index = torch.tensor(places, dtype=torch.int64, device=self.slots.device)
        return _Kept(
            [self.requests[i] for i in places],
            [self.entries[i] for i in places],
            [self.since[i] for i in places],
            self.slots[index],
            self.rows[index],
        )


class Hooks:
    """Puts itself around the methods of one model.

    Attributes:
        auditor: who gets the cases.
        request_ids: of the batch that runs, in its order.
    """

    def __init__(self, model: nn.Module, auditor: Auditor) -> None:
        """Find the layers and put the hooks in."""
        self.auditor = auditor
        self.request_ids: list[str] = []
        self._sample: _Sample | None = None
        self._layers: dict[int, list[str]] = {}
        self._streams: dict[int, str] = {}
        self._windows: dict[str, Any] = {}
        self._window = 128
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._gone: set[str] = set()
        self._pending: list[
            tuple[Case, Callable[[dict[str, Tensor]], dict[str, Tensor]] | None]
        ] = []
        self._side: torch.cuda.Stream | None = None
        for name, module in model.named_modules():
            if hasattr(module, "swa_cache_layer"):
                self._attention(module)
            for each, parameter in module.named_parameters(recurse=False):
                if each.startswith("hc_") and each.endswith("_fn"):
                    self._streams[id(parameter)] = f"{name}.{each}"
            if _is_stream_layer(module):
                self._stream_layer(module)
        inner: Any = model.model
        inner.forward = self._forward(inner.forward)

    # The step.

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not self.auditor.active:
                return forward(input_ids, positions, *args, **kwargs)
            with self._guarded("a step"):
                self._sample = self._choose(positions)
            try:
                return forward(input_ids, positions, *args, **kwargs)
            finally:
                self._sample = None
                with self._guarded("a step"):
                    self._hand_over(positions.device)

        return wrapped

    def _choose(self, positions: Tensor) -> _Sample | None:
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not self._windows:
            return None
        window = metadata[next(iter(self._windows.values())).swa_cache_layer.prefix]
        tokens = len(window.slot_mapping)
        if window.is_valid_token is not None:
            tokens = min(tokens, len(window.is_valid_token))
        tokens = min(tokens, len(positions))
        valid = (window.slot_mapping[:tokens] >= 0).cpu().tolist()
        owners = window.token_to_req_indices[:tokens].cpu().tolist()
        known = positions[:tokens].cpu().tolist()
        by_owner: dict[int, list[int]] = {}
        for token in range(tokens):
            if valid[token]:
                by_owner.setdefault(owners[token], []).append(token)
        if not by_owner:
            return None
        layers = {name for kind in self._layers.values() for name in self.auditor.turn(kind)}
        chosen = self._pick("tokens", list(by_owner.values()))
        rows = torch.tensor(chosen, dtype=torch.int64, device=positions.device)
        sample = _Sample(tokens, known, owners, list(self.request_ids), layers, chosen, rows)
        self._sample = sample
        self._visit(metadata)
        return sample

    # Rows at rest.

    def forget(self, requests: set[str]) -> None:
        """Rows of requests that have ended, or that will be computed again."""
        if self._kept:
            self._gone |= requests

    def _visit(self, metadata: dict[str, Any]) -> None:
        """Look at kept rows again, and keep some of the chosen tokens' requests."""
        sample = self._sample
        assert sample is not None
        owner_of = {name: owner for owner, name in enumerate(sample.names)}
        token_of = {owner: token for token, owner in reversed(list(enumerate(sample.owners)))}
        gone, self._gone = self._gone, set()
        for (layer, kind), kept in list(self._kept.items()):
            if gone:
                held = [i for i, name in enumerate(kept.requests) if name not in gone]
                kept = self._kept[layer, kind] = kept.only(held)
            here = [i for i, name in enumerate(kept.requests) if owner_of.get(name, -1) in token_of]
            if here:
                seen = kept.only(here)
                owners = [owner_of[name] for name in seen.requests]
                slots, rows = self._rows(metadata, layer, kind, owners, seen.entries)
                tensors = {
                    "before": seen.rows,
                    "after": rows,
                    "moved": slots != seen.slots,
                    "entries": torch.tensor(seen.entries),
                    "since": torch.tensor(seen.since),
                }
                self._submit(
                    "at_rest",
                    layer,
                    [token_of[owner] for owner in owners],
                    tensors,
                    _still_there,
                    what=kind,
                    codes=448 if kind == "main" else 128,
                )
        self._keep(metadata, token_of)

    def _keep(self, metadata: dict[str, Any], token_of: dict[int, int]) -> None:
        """Remember a row of each chosen token's request, of an entry that earlier steps closed."""
        sample = self._sample
        assert sample is not None
        numbers = self.auditor.random("rows at rest")
        for layer in sorted(sample.layers):
            module = self._windows[layer]
            owners, entries = [], []
            for token in sample.chosen if module.compress_ratio > 1 else ():
                owner = sample.owners[token]
                closed = sample.positions[token_of[owner]] // module.compress_ratio
                if closed and owner < len(sample.names):
                    owners.append(owner)
                    entries.append(numbers.randrange(closed))
            for kind in ("main", "index") if module.indexer is not None else ("main",):
                if owners:
                    slots, rows = self._rows(metadata, layer, kind, owners, entries)
                    names = [sample.names[owner] for owner in owners]
                    since = [self.auditor.step] * len(owners)
                    self._add((layer, kind), _Kept(names, entries, since, slots, rows))

    def _add(self, key: tuple[str, str], new: _Kept) -> None:
        old = self._kept.get(key)
        if old is not None:
            new = _Kept(
                old.requests + new.requests,
                old.entries + new.entries,
                old.since + new.since,
                torch.cat((old.slots, new.slots)),
                torch.cat((old.rows, new.rows)),
            )
        count = len(new.requests)
        self._kept[key] = new.only(list(range(max(0, count - _ROWS_AT_REST), count)))

    def _rows(
        self, metadata: dict[str, Any], layer: str, kind: str, owners: list[int], entries: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Slots and bytes of entries of requests."""
        module = self._windows[layer]
        cache = module.kv_cache if kind == "main" else module.indexer.k_cache.kv_cache
        table, page = metadata[layer].block_table, cache.shape[1]
        at = torch.tensor([owners, entries], device=table.device)
        pages = table[at[0], (at[1] // page).clamp(max=table.shape[1] - 1)].long()
        slots = pages * page + at[1] % page
        data, scales = _bytes(cache, slots, MAIN_FP8 if kind == "main" else INDEX_FP8)
        return slots, torch.cat((data, scales), -1)

    def _pick(self, what: str, groups: list[list[int]]) -> list[int]:
        """One token of as many groups as are asked for; once all groups have one, further ones."""
        numbers = self.auditor.random(what)
        groups = [numbers.sample(group, len(group)) for group in groups]
        numbers.shuffle(groups)
        picked: list[int] = []
        while len(picked) < self.auditor.settings.requests and any(groups):
            for group in groups:
                if group and len(picked) < self.auditor.settings.requests:
                    picked.append(group.pop())
        return sorted(picked)

    def _looks(self, layer: str) -> _Sample | None:
        """The sample, if this layer is looked at in this step."""
        sample = self._sample
        return sample if sample is not None and layer in sample.layers else None

    def _submit(
        self,
        method: str,
        layer: str,
        tokens: list[int],
        tensors: dict[str, Any],
        finish: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
        **numbers: float | int | str,
    ) -> None:
        """Copy what a case needs, on the device; ``finish`` is done with it on the CPU."""
        sample = self._sample
        assert sample is not None
        held = {
            name: each.detach() if isinstance(each, nn.Parameter) else each.detach().clone()
            for name, each in tensors.items()
            if each is not None
        }
        names = [sample.name(token) for token in tokens]
        places = [sample.positions[token] for token in tokens]
        self._pending.append((Case(method, layer, names, places, held, numbers), finish))

    def _hand_over(self, device: torch.device) -> None:
        """Have the step's cases judged; the engine waits for nothing."""
        pending, self._pending = self._pending, []
        if device.type != "cuda":
            for case, finish in pending:
                self.auditor.submit_later(functools.partial(_finished, case, finish))
            return
        if self._side is None:
            self._side = torch.cuda.Stream(device)
        copied = torch.cuda.Event()
        copied.record()

        def fetched(case: Case, finish: Any) -> Case:
            with torch.cuda.stream(self._side):
                copied.wait()
                return _finished(case.to("cpu"), finish)

        for case, finish in pending:
            self.auditor.submit_later(functools.partial(fetched, case, finish))

    def _around(self, module: Any, name: str, hook: Callable[..., _Hook], **fixed: Any) -> None:
        """Have a hook look at a method: before, and with its result after it yields.

        Whatever goes wrong in a hook, the method runs once and its result is returned.
        """
        method = getattr(module, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if self._sample is None:
                return method(*args, **kwargs)
            looking = hook(module, *args, **fixed, **kwargs)
            with self._guarded(name):
                next(looking, None)
            result = method(*args, **kwargs)
            with self._guarded(name), contextlib.suppress(StopIteration):
                looking.send(result)
            return result

        vars(module)[name] = wrapped

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Count and tell a fault of the audit itself; the engine goes on."""
        try:
            yield
        except Exception:
            self.auditor.skipped += 1
            _LOG.exception("audit: %s could not be looked at", what)

    # Attention.

    def _attention(self, layer: Any) -> None:
        self._layers.setdefault(layer.compress_ratio, []).append(layer.prefix)
        self._windows[layer.prefix] = layer
        self._window = layer.window_size
        self._around(layer, "_split_qkv_and_norm", self._qkv_norm)
        self._around(layer, "_fused_qnorm_rope_kv_insert", self._insert)
        self._around(layer, "forward_mqa", self._mqa)
        self._around(layer, "_o_proj", self._projection)
        for compressor in (layer.compressor, layer.indexer and layer.indexer.compressor):
            if compressor is not None:
                self._around(compressor, "forward", self._compressor, owner=layer.prefix)
        if layer.indexer is not None:
            self._around(layer.indexer, "_wq_b_proj", self._index_projection, owner=layer)
            self._around(layer.indexer, "forward", self._index_query, owner=layer)
            self._around(layer.indexer.indexer_op, "forward", self._selection, owner=layer)

    def _qkv_norm(self, layer: Any, qr_kv: Tensor) -> _Hook:
        sample = self._looks(layer.prefix)
        if sample is None:
            return
        rows = qr_kv[sample.rows]
        qr, scale, kv = yield
        if scale is None:
            given = rows.split([layer.q_lora_rank, layer.head_dim], dim=-1)
            tensors = {
                "qr": given[0],
                "kv": given[1],
                "qr_weight": layer.q_norm.weight,
                "kv_weight": layer.kv_norm.weight,
                "qr_out": qr[sample.rows],
                "kv_out": kv[sample.rows],
            }
            self._submit("qkv_norm", layer.prefix, sample.chosen, tensors, eps=layer.eps)

    def _insert(
        self,
        layer: Any,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        metadata: Any,
    ) -> _Hook:
        sample = self._looks(layer.prefix)
        if sample is None:
            return
        chosen = sample.rows
        given, rows = q[chosen], kv[chosen]
        result = yield
        window = metadata[layer.swa_cache_layer.prefix]
        table = layer.rotary_emb.cos_sin_cache[positions[chosen]].float()
        heads = given.shape[1]
        self._submit(
            "query",
            layer.prefix,
            sample.chosen,
            {"q": given, "cos_sin": table, "out": result[chosen][:, :heads]},
            eps=layer.eps,
        )
        cache = layer.swa_cache_layer.kv_cache
        data, scales = _bytes(cache, window.slot_mapping[chosen], MAIN_FP8)
        self._submit(
            "window_row",
            layer.prefix,
            sample.chosen,
            {"kv": rows, "cos_sin": table, "data": data, "scales": scales},
            layout=MAIN_FP8,
        )
        for token in sample.chosen:
            self._slots(
                layer.prefix,
                token,
                "the token's own row",
                window.block_table,
                cache.shape[1],
                torch.tensor([sample.positions[token]]),
                window.slot_mapping[token],
            )

    def _slots(
        self,
        layer: str,
        token: int,
        what: str,
        block_table: Tensor,
        page_size: int,
        wanted: Tensor,
        listed: Tensor,
        length: Tensor | None = None,
    ) -> None:
        """Compare listed slots, the first ``length`` of them, with those of wanted places."""
        assert self._sample is not None
        table = block_table[self._sample.owners[token]]
        last = int(wanted.max()) // page_size + 1 if len(wanted) else 1
        tensors = {"table": table[:last], "wanted": wanted, "listed": listed, "length": length}
        self._submit("slots", layer, [token], tensors, _listed_only, page_size=page_size, what=what)

    def _mqa(
        self,
        layer: Any,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        output: Tensor,
    ) -> _Hook:
        yield
        sample = self._looks(layer.prefix)
        if sample is None or not isinstance(output, Tensor):
            return
        metadata = get_forward_context().attn_metadata
        window = metadata[layer.swa_cache_layer.prefix]
        heads = layer.n_local_heads
        for token in sample.chosen:
            position = sample.positions[token]
            places = torch.arange(max(0, position + 1 - self._window), position + 1)
            tensors = {"q": q[token, :heads], "out": output[token, :heads]}
            tensors["sink"] = layer.attn_sink[:heads]
            cache = layer.swa_cache_layer.kv_cache
            slots = _slots_of(window.block_table[sample.owners[token]], places, cache.shape[1])
            tensors["window_data"], tensors["window_scales"] = _bytes(cache, slots, MAIN_FP8)
            listed = _listed(window, token)
            if listed is not None:
                self._slots(
                    layer.prefix,
                    token,
                    "rows of the window",
                    window.block_table,
                    cache.shape[1],
                    places,
                    *listed,
                )
            if layer.compress_ratio > 1:
                count = (position + 1) // layer.compress_ratio
                entries = torch.arange(count)
                if layer.indexer is not None:
                    entries = tensors["chosen"] = layer.topk_indices_buffer[token]
                table = metadata[layer.prefix].block_table[sample.owners[token]]
                slots = _slots_of(table, entries, layer.kv_cache.shape[1])
                held = _bytes(layer.kv_cache, slots, MAIN_FP8)
                tensors["entries_data"], tensors["entries_scales"] = held
            finish = _chosen_only
            self._submit("attention", layer.prefix, [token], tensors, finish, scale=layer.scale)

    def _projection(self, layer: Any, o: Tensor, positions: Tensor) -> _Hook:
        sample = self._looks(layer.prefix)
        if sample is None or not isinstance(o, Tensor):
            return
        chosen = sample.rows
        given = o[chosen]
        inputs: list[Tensor] = []
        wo_b = layer._modules["wo_b"]

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            inputs.append(args[0][chosen])

        handle = wo_b.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()
        # One group is enough: all of them would take longer to judge than everything else.
        group = self.auditor.random(f"group {layer.prefix}").randrange(layer.n_local_groups)
        weight = _group_weight(layer, group)
        if inputs and weight is not None:
            heads, rank = layer.n_local_heads // layer.n_local_groups, layer.o_lora_rank
            tensors = {
                "o": given[:, group * heads : (group + 1) * heads],
                "cos_sin": layer.rotary_emb.cos_sin_cache[positions[chosen]].float(),
                "out": inputs[0].flatten(1)[:, group * rank : (group + 1) * rank],
                **weight,
            }
            self._submit("projection", layer.prefix, sample.chosen, tensors, group=group)

    # Compressors and the indexer.

    def _compressor(
        self,
        compressor: Any,
        kv_score: Tensor,
        positions: Tensor,
        rotary_emb: Any,
        *,
        owner: str,
    ) -> _Hook:
        sample = self._looks(owner)
        if sample is None:
            return
        given = kv_score[sample.rows]
        yield
        metadata = get_forward_context().attn_metadata
        states, cache = metadata[compressor.state_cache.prefix], compressor.state_cache.kv_cache
        ratio, page = compressor.compress_ratio, cache.shape[1]
        name = compressor.prefix
        rows = cache[_places(states.slot_mapping[sample.rows], cache)]
        tensors = {"kv_score": given, "ape": compressor.ape, "state": rows}
        self._submit("compressor_state", name, sample.chosen, tensors, ratio=ratio)
        layout = MAIN_FP8 if compressor.head_dim == 512 else INDEX_FP8
        if compressor.use_fp4_cache:
            return
        groups: dict[int, list[int]] = {}
        for token in range(sample.tokens):
            if (sample.positions[token] + 1) % ratio == 0:
                groups.setdefault(sample.owners[token], []).append(token)
        keys = compressor._static_forward_context[compressor.k_cache_prefix].kv_cache
        key_slots = metadata[compressor.k_cache_prefix].slot_mapping
        for token in self._pick(f"entries of {ratio}", list(groups.values())):
            position = sample.positions[token]
            first = position + 1 - ratio * (2 if compressor.overlap else 1)
            places = torch.arange(first, position + 1)
            present = places >= 0
            table = states.block_table[sample.owners[token]]
            slots = _slots_of(table, places, page)
            data, scales = _bytes(keys, key_slots[token : token + 1], layout)
            tensors = {
                "state": cache[_places(slots, cache)].unsqueeze(0),
                "present": present.unsqueeze(0),
                "norm_weight": compressor.norm.weight,
                "cos_sin": rotary_emb.cos_sin_cache[position + 1 - ratio].float().unsqueeze(0),
                "data": data,
                "scales": scales,
            }
            self._submit(
                "compressed_row",
                name,
                [token],
                tensors,
                ratio=ratio,
                overlap=int(compressor.overlap),
                eps=compressor.rms_norm_eps,
                layout=layout,
            )

    def _index_projection(self, indexer: Any, *args: Any, owner: Any) -> _Hook:
        q = yield
        sample = self._looks(owner.prefix)
        if sample is not None:
            indexer._anymla_audited_q = q[sample.rows]

    def _index_query(
        self,
        indexer: Any,
        hidden: Tensor,
        qr: Tensor,
        kv_score: Tensor,
        weights: Tensor,
        positions: Tensor,
        rotary_emb: Any,
        *args: Any,
        owner: Any,
        **kwargs: Any,
    ) -> _Hook:
        sample = self._looks(owner.prefix)
        if sample is None:
            return
        given = weights[sample.rows]
        q, scale, out = yield
        projected = vars(indexer).pop("_anymla_audited_q", None)
        if q is not None and scale is None and projected is not None:
            shape = len(sample.chosen), indexer.n_head, indexer.head_dim
            tensors = {
                "q": projected.view(shape),
                "weights": given,
                "codes": q[sample.rows].view(torch.uint8).view(shape),
                "weights_out": out[sample.rows],
                "cos_sin": rotary_emb.cos_sin_cache[positions[sample.rows]].float(),
            }
            self._submit(
                "index_query",
                indexer.prefix,
                sample.chosen,
                tensors,
                softmax_scale=indexer.softmax_scale,
                head_scale=indexer.n_head**-0.5,
            )

    def _selection(
        self,
        op: Any,
        hidden: Tensor,
        q_quant: Any,
        k: Any,
        weights: Tensor,
        *,
        owner: Any,
    ) -> _Hook:
        yield
        sample = self._looks(owner.prefix)
        if sample is None or not isinstance(q_quant, Tensor):
            return
        metadata = get_forward_context().attn_metadata
        main, cache = metadata[owner.prefix], owner.indexer.k_cache.kv_cache
        for token in sample.chosen:
            entries = torch.arange((sample.positions[token] + 1) // owner.compress_ratio)
            table = main.block_table[sample.owners[token]]
            data, scales = _bytes(cache, _slots_of(table, entries, cache.shape[1]), INDEX_FP8)
            tensors = {
                "q": q_quant[token].float(),
                "weights": weights[token],
                "data": data,
                "scales": scales,
                "chosen": owner.topk_indices_buffer[token],
            }
            numbers = {"k": owner.topk_indices_buffer.shape[1], "layout": INDEX_FP8}
            self._submit("selection", owner.indexer.prefix, [token], tensors, **numbers)

    # Hyper-connections.

    def _stream_layer(self, module: Any) -> None:
        kind = next(each.__name__ for each in type(module).__mro__ if each.__name__ in _STREAMS)
        wrapped = self.streams(_STREAMS[kind], module.forward)
        module.forward = wrapped

    def streams(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of vLLM's hyper-connections with its cases taken."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if self._sample is not None:
                with self._guarded(name):
                    given = dict(zip(_PARAMETERS[name], args, strict=False)) | kwargs
                    getattr(self, f"_{name}")(given, result)
            return result

        return wrapped

    def _owner(self, fn: Tensor) -> str | None:
        """The layer whose weight this is, if it is looked at."""
        assert self._sample is not None
        name = self._streams.get(id(fn), "")
        layer = name.rpartition(".")[0]
        looked = any(each.startswith(f"{layer}.") for each in self._sample.layers)
        return name if layer and looked else None

    def _mhc_pre(self, given: dict[str, Any], result: Any) -> None:
        self._gates(given, given["residual"], result)

    def _mhc_pre_broadcast(self, given: dict[str, Any], result: Any) -> None:
        self._gates(given, result[0], result[1:])

    def _mhc_post_pre(self, given: dict[str, Any], result: Any) -> None:
        owner = self._owner(given["fn"])
        if owner is not None:
            self._sums(owner, given, result[0])
            self._gates(given, result[0], result[1:], fused=1)

    def _mhc_post(self, given: dict[str, Any], result: Any) -> None:
        self._sums("streams after a sublayer", given, result)

    def _mhc_head(self, given: dict[str, Any], result: Any) -> None:
        sample = self._sample
        assert sample is not None
        tensors = {
            "h": given["hidden_states"].flatten(0, -3)[sample.rows],
            "fn": given["hc_fn"],
            "base": given["hc_base"],
            "scale": given["hc_scale"],
            "y": result.flatten(0, -2)[sample.rows],
        }
        numbers = {"norm_eps": given["rms_norm_eps"], "hc_eps": given["hc_eps"]}
        self._submit("hc_head", "head", sample.chosen, tensors, **numbers)

    def _sums(self, owner: str, given: dict[str, Any], streams: Tensor) -> None:
        sample = self._sample
        assert sample is not None
        residual = given["residual"]
        n, width = residual.shape[-2:]
        rows = sample.rows
        tensors = {
            "u": given["x"].reshape(-1, width)[rows],
            "h": residual.reshape(-1, n, width)[rows],
            "post": given["post_layer_mix"].reshape(-1, n)[rows],
            "comb": given["comb_res_mix"].reshape(-1, n, n)[rows],
            "streams": streams.reshape(-1, n, width)[rows],
        }
        self._submit("hc_post", owner, sample.chosen, tensors)

    def _gates(
        self, given: dict[str, Any], residual: Tensor, result: Any, *, fused: int = 0
    ) -> None:
        sample, owner = self._sample, self._owner(given["fn"])
        if owner is None:
            return
        assert sample is not None
        n, width = residual.shape[-2:]
        post, comb, y = result
        rows = sample.rows
        tensors = {
            "h": residual.reshape(-1, n, width)[rows],
            "fn": given["fn"],
            "base": given["hc_base"],
            "scale": given["hc_scale"],
            "norm_weight": given.get("norm_weight"),
            "post": post.reshape(-1, n)[rows],
            "comb": comb.reshape(-1, n, n)[rows],
            "y": y.reshape(-1, width)[rows],
        }
        numbers = {
            "norm_eps": given["rms_eps"],
            "hc_eps": given["hc_pre_eps"],
            "iters": given["sinkhorn_repeat"],
            "fused": fused,
        }
        self._submit("hc_pre", owner, sample.chosen, tensors, **numbers)


_GATES = (
    "fn",
    "hc_scale",
    "hc_base",
    "rms_eps",
    "hc_pre_eps",
    "hc_sinkhorn_eps",
    "hc_post_mult_value",
    "sinkhorn_repeat",
    "n_splits",
)
_SUMS = ("x", "residual", "post_layer_mix", "comb_res_mix")
# Parameters of vLLM's hyper-connections that may be given by place.
_PARAMETERS = {
    "mhc_pre": ("residual", *_GATES, "norm_weight", "norm_eps"),
    "mhc_pre_broadcast": ("residual", *_GATES, "norm_weight", "norm_eps"),
    "mhc_post": _SUMS,
    "mhc_post_pre": (*_SUMS, *_GATES, "tile_n", "norm_weight", "norm_eps"),
    "mhc_head": ("hidden_states", "hc_fn", "hc_scale", "hc_base", "rms_norm_eps", "hc_eps"),
}
# What vLLM's hyper-connection layers and functions compute.
_STREAMS = {
    "MHCPreOp": "mhc_pre",
    "MHCPostOp": "mhc_post",
    "MHCFusedPostPreOp": "mhc_post_pre",
    "HCHeadOp": "mhc_head",
}
_FUNCTIONS = {
    "mhc_pre_tilelang": "mhc_pre",
    "mhc_pre_broadcast_tilelang": "mhc_pre_broadcast",
    "mhc_post_tilelang": "mhc_post",
    "mhc_fused_post_pre_tilelang": "mhc_post_pre",
    "hc_head_fused_kernel_tilelang": "mhc_head",
}


def _is_stream_layer(module: nn.Module) -> bool:
    return any(each.__name__ in _STREAMS for each in type(module).__mro__)


# Whatever a faulty engine holds, nothing outside its tensors may be read: on a GPU that would end
# the process. What is read instead is judged as wrong.


def _slots_of(table: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Slots of places in a request, by its row of a block table."""
    places = places.to(table.device).long().clamp(min=0)
    pages = table[(places // page_size).clamp(max=len(table) - 1)]
    return pages.long() * page_size + places % page_size


def _places(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Page and offset of each slot."""
    slots = slots.to(cache.device).long().clamp(0, cache.shape[0] * cache.shape[1] - 1)
    return slots // cache.shape[1], slots % cache.shape[1]


def _bytes(cache: Tensor, slots: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    data, scales = get_layout(layout).planes(cache)
    assert scales is not None
    page, offset = _places(slots, cache)
    return data[page, offset], scales[page, offset]


def _listed(window: Any, token: int) -> tuple[Tensor, Tensor] | None:
    """The slots that a step's metadata list as a token's window, and how many; None for no list."""
    decodes = window.num_decode_tokens
    if token < decodes:
        indices, lengths, row = window.decode_swa_indices, window.decode_swa_lens, token
    else:
        indices, lengths, row = window.prefill_swa_indices, window.prefill_swa_lens, token - decodes
    if indices is None or lengths is None:
        return None
    return indices[row].flatten(), lengths[row]


# What is done with copies that have reached the CPU: on the device it would need their values.


def _finished(case: Case, finish: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None) -> Case:
    return case if finish is None else dataclasses.replace(case, tensors=finish(case.tensors))


def _listed_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    listed = tensors["listed"].flatten()
    length = tensors.pop("length", None)
    listed = listed if length is None else listed[: int(length)]
    return tensors | {"listed": listed[listed >= 0]}


def _chosen_only(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    chosen = tensors.pop("chosen", None)
    if chosen is None:
        return tensors
    names = ("entries_data", "entries_scales")
    return tensors | {name: tensors[name][chosen >= 0] for name in names}


def _still_there(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Nothing is asked of a row that lies elsewhere now."""
    moved = tensors.pop("moved").unsqueeze(1)
    return tensors | {"before": torch.where(moved, tensors["after"], tensors["before"])}


def _group_weight(layer: Any, group: int) -> dict[str, Tensor] | None:
    """``wo_a`` of one group as [1, R, J]: ours in bf16, or as vLLM's layer holds it."""
    groups, rank = layer.n_local_groups, layer.o_lora_rank
    if getattr(layer, "wo_a_groups", None) is not None:
        return {"wo_a": layer.wo_a_groups[group : group + 1]}
    weight = layer.wo_a.weight
    if not weight.numel():
        return None
    weight = weight.view(groups, rank, -1)[group : group + 1]
    if weight.dtype == torch.bfloat16:
        return {"wo_a": weight}
    scale = getattr(layer.wo_a, "weight_scale_inv", None)
    if weight.dtype != torch.float8_e4m3fn or scale is None or scale.dtype == torch.int32:
        return None
    scale = scale.view(groups, -(-rank // 128), -1)[group : group + 1]
    return {"wo_a": weight.view(torch.uint8), "wo_a_scale": scale}


def start(model: nn.Module, runner_of_steps: bool = True) -> Hooks:
    """Audit a model that has been built, with the settings in the environment."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    versions = {
        "anymla": __version__,
        "vllm": installed_version() or "?",
        "torch": torch.__version__,
        "device": name,
    }
    auditor = Auditor(Settings.of(os.environ.get(VARIABLE, "")), _LOG, versions, JudgeProcess())
    hooks = Hooks(model, auditor)
    _wrap_functions(hooks)
    if runner_of_steps:
        _wrap_runners(hooks)
    _LOG.info("audit: %s", auditor.settings)
    return hooks


def _wrap_functions(hooks: Hooks) -> None:
    """Take cases where vLLM's CUDA models call hyper-connections as functions."""
    for module in CUDA_MODELS:
        held = vars(sys.modules[module]) if module in sys.modules else {}
        for name, kind in _FUNCTIONS.items():
            if name in held:
                held[name] = hooks.streams(kind, held[name])


def _wrap_runners(hooks: Hooks) -> None:
    """Count the steps of both of vLLM's model runners, and keep audited ones out of graphs."""
    import vllm.v1.worker.gpu_model_runner as first

    runner = first.GPUModelRunner
    auditor = hooks.auditor

    @contextlib.contextmanager
    def step(scheduled: Any) -> Iterator[None]:
        gone = set(scheduled.finished_req_ids) | set(scheduled.preempted_req_ids or ())
        hooks.forget(gone)
        tokens = scheduled.total_num_scheduled_tokens
        if not tokens:
            yield
            return
        auditor.begin()
        try:
            yield
        finally:
            auditor.end(tokens)

    execute = runner.execute_model
    batch = runner._determine_batch_execution_and_padding

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        with step(scheduler_output):
            return execute(self, scheduler_output, *args, **kwargs)

    @functools.wraps(batch)
    def determine(self: Any, *args: Any, **kwargs: Any) -> Any:
        if auditor.active:
            kwargs["force_eager"] = True
            hooks.request_ids = list(self.input_batch.req_ids)
        return batch(self, *args, **kwargs)

    runner.execute_model = execute_model
    runner._determine_batch_execution_and_padding = determine
    if not torch.cuda.is_available():
        return

    import vllm.v1.worker.gpu.model_runner as second

    runner2 = second.GPUModelRunner
    execute2, prepare, dispatch = (
        runner2.execute_model,
        runner2.prepare_inputs,
        second.dispatch_cg_and_sync_dp,
    )

    @functools.wraps(execute2)
    def execute_model2(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or len(args) > 1:
            return execute2(self, scheduler_output, *args, **kwargs)
        with step(scheduler_output):
            return execute2(self, scheduler_output, *args, **kwargs)

    @functools.wraps(prepare)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(self, *args, **kwargs)
        if auditor.active:
            hooks.request_ids = list(made.req_ids)
        return made

    @functools.wraps(dispatch)
    def dispatch_cg_and_sync_dp(*args: Any, **kwargs: Any) -> Any:
        if auditor.active:
            kwargs["need_eager"] = True
        return dispatch(*args, **kwargs)

    runner2.execute_model = execute_model2
    runner2.prepare_inputs = prepare_inputs
    second.dispatch_cg_and_sync_dp = dispatch_cg_and_sync_dp
