"""Audit of vLLM's DeepSeek-V4: takes cases from the layers of a live model, vLLM's own or ours.

Nothing is replaced. Hooks around a method record what goes in and what comes out, for the sampled
tokens of audited steps; captured graphs record it again in each replay (``anymla.audit.rows``).
What lies in the engine's caches is gathered on the device when the method, or the graph, has run.
All of a step's bytes leave the device together, and a process of its own judges them: the engine
neither waits nor looks at a value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger

from anymla import __version__
from anymla.audit.auditor import Auditor
from anymla.audit.packet import Held, Packed, Packet
from anymla.audit.process import JudgeProcess
from anymla.audit.rows import RowRecorder
from anymla.audit.settings import Settings
from anymla.engines.vllm.pinned import CUDA_MODELS, installed_version
from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

_LOG = init_logger("vllm.plugins.anymla.audit")
VARIABLE = "ANYMLA_AUDIT"
_ROWS_AT_REST = 16  # of a kind in a layer
_KINDS_AT_REST = 8  # kinds of layers whose rows are kept; the oldest give way
# Sizes to which a case is cut down, so that a step's cases are judged in a fraction of a second.
_LINEARS = 2  # of a layer
_OUTPUTS = 32  # of a product
_EXPERTS_EVERY = 8  # how seldom a layer's experts are judged
_HEADS = 16  # of attention, and of an index query
_HEAD = "head"  # what follows the last layer
_Hook = Generator[None, Any, None]
_Taken = dict[str, Held]


@dataclasses.dataclass
class _Sample:
    """The tokens of a step that are looked at.

    Attributes:
        positions: position of every token in its request, padding left out.
        owners: index of the request of each token.
        names: names of the requests.
        layers: those that are looked at, by their prefix.
        chosen: indices of tokens that are looked at by every method but the compressors.
        rows: the same, on the device.
        at: their positions, on the device.
        of: their requests, on the device.
        packet: tensors that leave the device together.
        recorded: tensors recorded in this step, by layer and then by name.
        taken: rows gathered from caches, by method and module.
    """

    positions: np.ndarray
    owners: np.ndarray
    names: list[str]
    layers: set[str]
    chosen: list[int]
    rows: Tensor
    at: Tensor
    of: Tensor
    packet: Packet = dataclasses.field(default_factory=Packet)
    recorded: dict[str, dict[str, Held]] = dataclasses.field(default_factory=dict)
    taken: dict[tuple[str, str], Any] = dataclasses.field(default_factory=dict)

    def name(self, token: int) -> str:
        """Return the name of a token's request."""
        owner = int(self.owners[token])
        return self.names[owner] if owner < len(self.names) else f"row {owner}"

    def position(self, token: int) -> int:
        """Return the position of a token in its request."""
        return int(self.positions[token])

    def owner(self, token: int) -> int:
        """Return the index of a token's request."""
        return int(self.owners[token])


@dataclasses.dataclass
class _Kept:
    """Cache rows of one kind in one layer that have been seen.

    Attributes:
        requests: whose row each is.
        entries: its number in the request's compressed cache.
        since: the step in which it was seen.
        slots: slot of each row in the cache, on the device.
        rows: its bytes, values before scales, on the device.
    """

    requests: list[str]
    entries: list[int]
    since: list[int]
    slots: Tensor
    rows: Tensor

    def only(self, places: list[int]) -> _Kept:
        """Select the rows at these places."""
        if places == list(range(len(self.requests))):
            return self
        index = _on(self.slots.device, places)
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
        auditor: auditor that gets the cases.
        request_ids: ids of the running batch's requests in its order, where the runner does not
            choose.
    """

    def __init__(self, model: nn.Module, auditor: Auditor) -> None:
        """Find the layers and put the hooks in."""
        self.auditor = auditor
        self.request_ids: list[str] = []
        self._runner_chooses = False
        self._sample: _Sample | None = None
        self._layers: dict[int, list[str]] = {}
        self._streams: dict[int, str] = {}
        self._windows: dict[str, Any] = {}
        self._experts: dict[str, Any] = {}
        self._window = 128
        self._angles: dict[int, Any] = {}  # RoPE of each compressor
        # Arguments of hyper-connections that are no tensors of a step, by owner.
        self._gates_of: dict[str, tuple[dict[str, Tensor], dict[str, float | int | str]]] = {}
        self._posts = 0
        self._linears: dict[str, list[tuple[str, Any, str, str]]] = {}
        self._kept: dict[tuple[str, str], _Kept] = {}
        self._gone: set[str] = set()
        self._side: torch.cuda.Stream | None = None
        self._device = next(model.parameters()).device
        names = {id(module): name for name, module in model.named_modules()}
        for name, module in model.named_modules():
            if hasattr(module, "swa_cache_layer"):
                self._attention(module, names)
            for each, parameter in module.named_parameters(recurse=False):
                if each.startswith("hc_") and each.endswith("_fn"):
                    self._streams[id(parameter)] = f"{name}.{each}"
            if _is_stream_layer(module):
                self._stream_layer(module)
            if hasattr(module, "attn") and hasattr(module, "ffn"):
                self._mixture(module.ffn, module.attn.prefix, names)
        self._maybe_recorder: RowRecorder | None = None
        inner: Any = model.model
        inner.forward = self._forward(inner.forward)

    # The step.

    def _forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(input_ids: Any, positions: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._maybe_recorder is None:
                self._maybe_recorder = self._make_recorder()
            self._posts, self._recorder.tokens = 0, len(positions)
            chooses = self.auditor.active and not self._runner_chooses
            if chooses:
                with self.guarded("a step"):
                    self._choose(positions)
            try:
                return forward(input_ids, positions, *args, **kwargs)
            finally:
                with self.guarded("a step"):
                    self._recorder.flush()
                if chooses:
                    self.end(get_forward_context().attn_metadata)

        return wrapped

    def _make_recorder(self) -> RowRecorder:
        """Make the recorder at the first step.

        Memory that is reserved while a model is built may be put to sleep with its weights.
        """
        sections = [*self._windows, _HEAD]
        size = max((_row_bytes(each) for each in self._windows.values()), default=0)
        count = self.auditor.settings.requests
        return RowRecorder(self._device, count, sections, count * size)

    @property
    def _recorder(self) -> RowRecorder:
        assert self._maybe_recorder is not None
        return self._maybe_recorder

    @property
    def _looks(self) -> bool:
        """True if this forward pass is recorded, at once or in a graph's replays."""
        if self._sample is not None:
            return True
        return self._maybe_recorder is not None and self._maybe_recorder.captured

    def _choose(self, positions: Tensor) -> None:
        """Choose from what the step's metadata say, which may lie on a device."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or not self._windows:
            return
        window = metadata[next(iter(self._windows.values())).swa_cache_layer.prefix]
        tokens = len(window.slot_mapping)
        if window.is_valid_token is not None:
            tokens = min(tokens, len(window.is_valid_token))
        tokens = min(tokens, len(positions))
        valid = (window.slot_mapping[:tokens] >= 0).cpu().numpy()
        owners = window.token_to_req_indices[:tokens].cpu().numpy()
        self.begin(positions[:tokens].cpu().numpy(), owners, self.request_ids, valid)

    def begin_batch(self, batch: Any, *, exact: bool) -> None:
        """Choose from a batch of vLLM's second runner, for the most part without the device.

        Args:
            batch: vLLM's ``InputBatch`` of the step.
            exact: True if the runner knows on the CPU how far requests are, which it does not while
                it drafts.
        """
        self._runner_chooses = True
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        owners = np.repeat(np.arange(batch.num_reqs), np.diff(starts))[: batch.num_tokens]
        if exact:
            ahead = np.arange(len(owners)) - starts[owners]
            positions = batch.num_computed_tokens_np[owners] + ahead
        else:
            positions = batch.positions[: len(owners)].cpu().numpy()
        self.begin(positions, owners, list(batch.req_ids), np.ones(len(owners), dtype=bool))

    def begin(
        self, positions: np.ndarray, owners: np.ndarray, names: list[str], valid: np.ndarray
    ) -> None:
        """Choose what is looked at in the step that comes; of each token, on the CPU."""
        if self._maybe_recorder is None:
            return
        if self.auditor.full:
            self.auditor.skip()
            return
        groups = [np.flatnonzero(valid & (owners == each)) for each in np.unique(owners[valid])]
        if not groups:
            return
        layers = {name for kind in self._layers.values() for name in self.auditor.turn(kind)}
        chosen = self._pick("tokens", groups)
        where = [chosen, positions[chosen].tolist(), owners[chosen].tolist()]
        rows, at, of = _on(self._device, where)
        sample = _Sample(positions, owners, list(names), layers, chosen, rows, at, of)
        self._recorder.tokens = len(positions)
        self._recorder.choose(self.auditor.step, chosen, [*layers, _HEAD])
        for section in (*sorted(layers), _HEAD):
            sample.recorded[section] = {}
        self._sample = sample

    def end(self, metadata: Any) -> None:
        """Gather what the step's cases still lack, after it has run, and have them judged."""
        sample = self._sample
        if sample is None:
            return
        try:
            if isinstance(metadata, dict):
                for prefix in sorted(sample.layers):
                    self._plan_layer(prefix, metadata)
                with self.guarded("what follows the last layer"):
                    self._plan_head()
                with self.guarded("rows at rest"):
                    self._visit(metadata)
                with self.guarded("a step"):
                    self._hand_over(sample.packet)
        finally:
            self._sample = None
            self._recorder.release()

    def _plan_layer(self, prefix: str, metadata: dict[str, Any]) -> None:
        sample, layer = self._sample, self._windows[prefix]
        assert sample is not None
        with self.guarded(prefix):
            self._take("insert", layer, metadata)
            self._take("attention", layer, metadata)
            for compressor in _compressors(layer):
                self._take("compressor", compressor, metadata)
            if layer.indexer is not None:
                self._take("selection", layer, metadata)
        sample.recorded[prefix] = self._recorder.hold(sample.packet, prefix)
        plans = (
            self._plan_insert,
            self._plan_attention,
            self._plan_projection,
            self._plan_compressors,
            self._plan_indexer,
            self._plan_streams,
            self._plan_linears,
            self._plan_router,
            self._plan_experts,
        )
        for plan in plans:
            with self.guarded(f"{plan.__name__} of {prefix}"):
                plan(layer)

    def _take(self, what: str, module: Any, metadata: dict[str, Any]) -> None:
        """Gather from caches what a method has read or written, once a step."""
        sample = self._sample
        assert sample is not None
        key = what, module.prefix
        if key not in sample.taken:
            sample.taken[key] = getattr(self, f"_take_{what}")(module, metadata)

    def _take_now(self, what: str, module: Any) -> None:
        """Gather it where the method has just run, which is in no captured graph."""
        metadata = get_forward_context().attn_metadata
        if self._sample is not None and not self._recorder.captured and isinstance(metadata, dict):
            self._take(what, module, metadata)

    # Rows at rest.

    def forget(self, requests: set[str]) -> None:
        """Drop the rows of requests that have ended, or that will be computed again."""
        if self._kept:
            self._gone |= requests

    def _visit(self, metadata: dict[str, Any]) -> None:
        """Look at kept rows again, and keep some of the chosen tokens' requests."""
        sample = self._sample
        assert sample is not None
        owner_of = {name: owner for owner, name in enumerate(sample.names)}
        owners, first = np.unique(sample.owners, return_index=True)
        token_of = dict(zip(owners.tolist(), first.tolist(), strict=True))
        gone, self._gone = self._gone, set()
        for (layer, kind), kept in list(self._kept.items()):
            if gone & set(kept.requests):
                held = [i for i, name in enumerate(kept.requests) if name not in gone]
                kept = self._kept[layer, kind] = kept.only(held)
            here = [i for i, name in enumerate(kept.requests) if owner_of.get(name, -1) in token_of]
            if here:
                seen = kept.only(here)
                of = [owner_of[name] for name in seen.requests]
                slots, rows = self._rows(metadata, layer, kind, of, seen.entries)
                numbers = _on(slots.device, [seen.entries, seen.since])
                tensors = {
                    "before": seen.rows,
                    "after": rows,
                    "slots_before": seen.slots,
                    "slots": slots,
                    "entries": numbers[0],
                    "since": numbers[1],
                }
                held_in = {name: sample.packet.hold(each) for name, each in tensors.items()}
                tokens, codes = [token_of[owner] for owner in of], 448 if kind == "main" else 128
                self._plan("at_rest", layer, tokens, held_in, what=kind, codes=codes)
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
                owner = sample.owner(token)
                closed = sample.position(token_of[owner]) // module.compress_ratio
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
        old = self._kept.pop(key, None)
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
        while len(self._kept) > _KINDS_AT_REST:
            del self._kept[next(iter(self._kept))]

    def _rows(
        self, metadata: dict[str, Any], layer: str, kind: str, owners: list[int], entries: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Slots and bytes of entries of requests."""
        module = self._windows[layer]
        cache = module.kv_cache if kind == "main" else module.indexer.k_cache.kv_cache
        table, page = metadata[layer].block_table, cache.shape[1]
        at = _on(table.device, [owners, entries])
        pages = table[at[0], (at[1] // page).clamp(max=table.shape[1] - 1)].long()
        slots = pages * page + at[1] % page
        data, scales = _bytes(cache, slots, MAIN_FP8 if kind == "main" else INDEX_FP8)
        return slots, torch.cat((data, scales), -1)

    # Cases.

    def _pick(self, what: str, groups: Sequence[np.ndarray]) -> list[int]:
        """Pick one token of as many groups as wanted; once all groups have one, further tokens."""
        numbers = self.auditor.random(what)
        count = min(self.auditor.settings.requests, self._recorder.rows)
        groups = list(groups)
        numbers.shuffle(groups)
        picked: list[int] = []
        while len(picked) < count and any(len(group) for group in groups):
            for place, group in enumerate(groups):
                if len(group) and len(picked) < count:
                    at = numbers.randrange(len(group))
                    picked.append(int(group[at]))
                    groups[place] = np.delete(group, at)
        return sorted(picked)

    def _plan(
        self,
        method: str,
        layer: str,
        tokens: list[int],
        tensors: _Taken,
        **numbers: float | int | str,
    ) -> None:
        """Plan a case of these tokens."""
        sample = self._sample
        assert sample is not None
        names = [sample.name(token) for token in tokens]
        places = [sample.position(token) for token in tokens]
        sample.packet.plan(method, layer, names, places, tensors, **numbers)

    def _recorded(self, layer: str, *names: str) -> list[Held] | None:
        """Return recorded tensors by name, a row for each chosen token; None if any is missing."""
        sample = self._sample
        assert sample is not None
        of, count = sample.recorded[layer], len(sample.chosen)
        if any(name not in of for name in names):
            return None
        return [of[name].narrow(0, 0, count) for name in names]

    def _weights(self, **tensors: Any) -> _Taken:
        """Take along what no step changes."""
        sample = self._sample
        assert sample is not None
        return {n: sample.packet.hold(each) for n, each in tensors.items() if each is not None}

    def _note(self, section: str, **tensors: Any) -> None:
        """Record a method's tensors; a graph has its launches together, for they cost time."""
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor):
                self._recorder.note(section, name, tensor)
        if not self._recorder.captured:
            self._recorder.flush()

    def _hand_over(self, packet: Packet) -> None:
        """Have the step's cases judged; the engine waits for nothing."""
        planned, marks = packet.planned, self._recorder.hold_marks(packet)
        block = packet.block(self._device)
        if self._device.type != "cuda":
            self.auditor.submit_step(lambda: Packed(planned, block, marks=marks))
            return
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        arrived = torch.cuda.Event()
        with torch.cuda.stream(self._side):
            host = torch.empty(block.shape, dtype=block.dtype, pin_memory=True)
            host.copy_(block, non_blocking=True)
            arrived.record()
        block.record_stream(self._side)  # no step that waits for its judge keeps it

        def fetched() -> Packed:
            arrived.synchronize()
            return Packed(planned, host, marks=marks)

        self.auditor.submit_step(fetched)

    def _around(self, module: Any, name: str, hook: Callable[..., _Hook], **fixed: Any) -> None:
        """Have a hook look at a method: before, and with its result after it yields.

        Whatever goes wrong in a hook, the method runs once and its result is returned.
        """
        method = getattr(module, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if not self._looks:
                return method(*args, **kwargs)
            looking: _Hook | None = None
            with self.guarded(name):
                looking = hook(module, *args, **fixed, **kwargs)
                next(looking, None)
            result = method(*args, **kwargs)
            if looking is not None:
                with self.guarded(name), contextlib.suppress(StopIteration):
                    looking.send(result)
            return result

        vars(module)[name] = wrapped

    @contextlib.contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Count and tell a fault of the audit itself; the engine goes on."""
        try:
            yield
        except Exception:
            self.auditor.skipped += 1
            _LOG.exception("audit: %s could not be looked at", what)

    # Attention.

    def _attention(self, layer: Any, names: dict[int, str]) -> None:
        self._layers.setdefault(layer.compress_ratio, []).append(layer.prefix)
        self._windows[layer.prefix] = layer
        self._window = layer.window_size
        self._around(layer, "_run_parallel_input_projections", self._inputs)
        self._around(layer, "_split_qkv_and_norm", self._qkv_norm)
        self._around(layer, "_fused_qnorm_rope_kv_insert", self._insert)
        self._around(layer, "forward_mqa", self._mqa)
        self._around(layer, "_o_proj", self._projection)
        linears = [
            (layer.fused_wqa_wkv, "hidden", "qr_kv"),
            (layer.wq_b, "qr_out", "q"),
            (layer.wo_b, "z", "projected"),
        ]
        for kind, compressor in zip(("main", "index"), _compressors(layer), strict=False):
            self._around(compressor, "forward", self._compressor, owner=layer.prefix, kind=kind)
            self._angles[id(compressor)] = layer.rotary_emb
            linears.append((compressor.fused_wkv_wgate, "hidden", f"{kind}_kv_score"))
        if layer.indexer is not None:
            self._around(layer.indexer, "_wq_b_proj", self._index_projection, owner=layer)
            self._around(layer.indexer, "forward", self._index_query, owner=layer)
            self._around(layer.indexer.indexer_op, "forward", self._selection, owner=layer)
            linears.append((layer.indexer.wq_b, "qr_out", "index_q"))
            linears.append((layer.indexer.weights_proj, "hidden", "index_weights"))
        self._add_linears(layer.prefix, linears, names)

    def _inputs(self, layer: Any, hidden: Tensor) -> _Hook:
        if self._recorder.wants(layer.prefix):
            self._note(layer.prefix, hidden=hidden)
        yield

    def _qkv_norm(self, layer: Any, qr_kv: Tensor) -> _Hook:
        if not self._recorder.wants(layer.prefix):
            return
        self._note(layer.prefix, qr_kv=qr_kv)
        qr, scale, kv = yield
        if scale is None:
            self._note(layer.prefix, qr_out=qr, kv_out=kv)

    def _insert(
        self,
        layer: Any,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        metadata: Any,
    ) -> _Hook:
        if not self._recorder.wants(layer.prefix):
            return
        self._note(layer.prefix, q=q, kv=kv)
        result = yield
        self._note(layer.prefix, q_out=result)
        self._take_now("insert", layer)

    def _take_insert(self, layer: Any, metadata: dict[str, Any]) -> _Taken:
        sample = self._sample
        assert sample is not None
        window, cache = metadata[layer.swa_cache_layer.prefix], layer.swa_cache_layer.kv_cache
        slots = window.slot_mapping[sample.rows]
        listed = sample.packet.hold(slots)
        for place, token in enumerate(sample.chosen):
            own = {"listed": listed.select(0, place)}
            first = sample.position(token)
            self._slots(layer, place, "the token's own row", metadata, first, own)
        data, scales = _bytes(cache, slots, MAIN_FP8)
        return {"data": sample.packet.hold(data), "scales": sample.packet.hold(scales)}

    def _slots(
        self,
        layer: Any,
        place: int,
        what: str,
        metadata: dict[str, Any],
        first: int,
        listed: _Taken,
    ) -> None:
        """Compare listed slots with those of a chosen token's rows, from one to its own."""
        sample, window = self._sample, metadata[layer.swa_cache_layer.prefix]
        assert sample is not None
        key = "table", layer.prefix
        if key not in sample.taken:
            sample.taken[key] = sample.packet.hold(window.block_table[sample.of])
        token, page = sample.chosen[place], layer.swa_cache_layer.kv_cache.shape[1]
        last = sample.position(token) + 1
        table = sample.taken[key].select(0, place)
        held = {"table": table.narrow(0, 0, (last - 1) // page + 1), **listed}
        numbers = {"page_size": page, "what": what, "first": first, "last": last}
        self._plan("slots", layer.prefix, [token], held, **numbers)

    def _plan_insert(self, layer: Any) -> None:
        sample, found = self._sample, self._recorded(layer.prefix, "qr_kv", "qr_out", "kv_out")
        assert sample is not None
        prefix, tokens = layer.prefix, sample.chosen
        if found is not None:
            given, qr, kv = found
            tensors = {
                "qr": given.narrow(1, 0, layer.q_lora_rank),
                "kv": given.narrow(1, layer.q_lora_rank, layer.head_dim),
                "qr_out": qr,
                "kv_out": kv,
                **self._weights(qr_weight=layer.q_norm.weight, kv_weight=layer.kv_norm.weight),
            }
            self._plan("qkv_norm", prefix, tokens, tensors, eps=layer.eps)
        found = self._recorded(prefix, "q", "kv", "q_out")
        if found is not None:
            q, kv, out = found
            table = self._weights(cos_sin=layer.rotary_emb.cos_sin_cache[sample.at].float())
            tensors = {"q": q, "out": out.narrow(1, 0, q.shape[1]), **table}
            self._plan("query", prefix, tokens, tensors, eps=layer.eps)
            stored = sample.taken["insert", prefix]
            self._plan("window_row", prefix, tokens, {"kv": kv, **table, **stored}, layout=MAIN_FP8)

    def _mqa(
        self,
        layer: Any,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        output: Tensor,
    ) -> _Hook:
        if not self._recorder.wants(layer.prefix):
            return
        # Record the choice now, because later layers write theirs to the same buffer.
        chosen = layer.topk_indices_buffer if layer.indexer is not None else None
        self._note(layer.prefix, attended_by=q, chosen=chosen)
        yield
        self._note(layer.prefix, attended=output)
        self._take_now("attention", layer)

    def _take_attention(self, layer: Any, metadata: dict[str, Any]) -> list[_Taken]:
        """Gather the rows in both caches that each chosen token attends to."""
        sample = self._sample
        assert sample is not None
        window, cache = metadata[layer.swa_cache_layer.prefix], layer.swa_cache_layer.kv_cache
        seen = sample.at.unsqueeze(1) + torch.arange(1 - self._window, 1, device=self._device)
        slots = _slots_of(window.block_table[sample.of], seen, cache.shape[1])
        rows = self._weights(**_named("window", _bytes(cache, slots, MAIN_FP8)))
        counts = [sample.position(token) + 1 for token in sample.chosen]
        found = []
        for place, count in enumerate(counts):
            count = min(count, self._window)
            part = {n: each.select(0, place) for n, each in rows.items()}
            found.append(
                {n: each.narrow(0, self._window - count, count) for n, each in part.items()}
            )
            listed = _listed(window, sample.chosen[place])
            if listed is not None:
                held, what = self._weights(**listed), "rows of the window"
                self._slots(layer, place, what, metadata, counts[place] - count, held)
        if layer.compress_ratio == 1:
            return found
        table = metadata[layer.prefix].block_table[sample.of]
        if layer.indexer is None:
            counts = [count // layer.compress_ratio for count in counts]
            entries = torch.arange(max(counts), device=self._device).expand(len(counts), -1)
        else:
            last = self._recorder.last(layer.prefix, "chosen")
            if last is None:
                return found
            entries = last[: len(counts)]
            counts = [entries.shape[1]] * len(counts)
        slots = _slots_of(table, entries, layer.kv_cache.shape[1])
        rows = self._weights(**_named("entries", _bytes(layer.kv_cache, slots, MAIN_FP8)))
        for place, count in enumerate(counts):
            part = {n: each.select(0, place).narrow(0, 0, count) for n, each in rows.items()}
            found[place] |= part
        return found

    def _plan_attention(self, layer: Any) -> None:
        sample, found = self._sample, self._recorded(layer.prefix, "attended_by", "attended")
        assert sample is not None
        if found is None:
            return
        first, count = self._heads(f"heads {layer.prefix}", layer.n_local_heads)
        q, out = (each.narrow(1, first, count) for each in found)
        sink = self._weights(sink=layer.attn_sink[first : first + count])
        rows = sample.taken["attention", layer.prefix]
        for place, (token, held) in enumerate(zip(sample.chosen, rows, strict=True)):
            tensors = {"q": q.select(0, place), "out": out.select(0, place), **sink, **held}
            if layer.indexer is not None:
                tensors["chosen"] = sample.recorded[layer.prefix]["chosen"].select(0, place)
            numbers = {"scale": layer.scale, "first_head": first}
            self._plan("attention", layer.prefix, [token], tensors, **numbers)

    def _heads(self, what: str, heads: int) -> tuple[int, int]:
        """Return the first head, and the number, of adjacent heads to judge."""
        count = min(heads, _HEADS)
        return self.auditor.random(what).randrange(heads - count + 1), count

    def _projection(self, layer: Any, o: Tensor, positions: Tensor) -> _Hook:
        if not self._recorder.wants(layer.prefix):
            return
        self._note(layer.prefix, o=o)

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            with self.guarded("_o_proj"):
                self._note(layer.prefix, z=args[0].flatten(1))

        handle = layer._modules["wo_b"].register_forward_pre_hook(keep)
        try:
            result = yield
        finally:
            handle.remove()
        if layer.wo_b.tp_size == 1:  # else it is the sum of all ranks
            self._note(layer.prefix, projected=result)

    def _plan_projection(self, layer: Any) -> None:
        sample, found = self._sample, self._recorded(layer.prefix, "o", "z")
        assert sample is not None
        if found is None:
            return
        # Part of one group is enough: all groups would take longer than everything else.
        groups, rank = layer.n_local_groups, layer.o_lora_rank
        numbers = self.auditor.random(f"group {layer.prefix}")
        group, wide = numbers.randrange(groups), min(rank, _OUTPUTS)
        first = numbers.randrange(rank // wide) * wide
        weight = _group_weight(layer, group, slice(first, first + wide))
        if weight is not None:
            heads = layer.n_local_heads // groups
            tensors = {
                "o": found[0].narrow(1, group * heads, heads),
                "out": found[1].narrow(1, group * rank + first, wide),
                **self._weights(cos_sin=layer.rotary_emb.cos_sin_cache[sample.at].float()),
                **self._weights(**weight),
            }
            self._plan("projection", layer.prefix, sample.chosen, tensors, group=group)

    # Compressors and the indexer.

    def _compressor(
        self,
        compressor: Any,
        kv_score: Tensor,
        positions: Tensor,
        rotary_emb: Any,
        *,
        owner: str,
        kind: str,
    ) -> _Hook:
        if not self._recorder.wants(owner):
            return
        self._note(owner, **{f"{kind}_kv_score": kv_score})
        yield
        self._take_now("compressor", compressor)

    def _take_compressor(self, compressor: Any, metadata: dict[str, Any]) -> _Taken:
        """Take the state rows of chosen tokens, and cases of the entries that this step closes."""
        sample = self._sample
        assert sample is not None
        states, cache = metadata[compressor.state_cache.prefix], compressor.state_cache.kv_cache
        state = self._weights(state=cache[_places(states.slot_mapping[sample.rows], cache)])
        ratio, page = compressor.compress_ratio, cache.shape[1]
        if compressor.use_fp4_cache:
            return state
        layout = MAIN_FP8 if compressor.head_dim == 512 else INDEX_FP8
        closing = (sample.positions + 1) % ratio == 0
        owners = np.unique(sample.owners[closing])
        groups = [np.flatnonzero(closing & (sample.owners == each)) for each in owners]
        picked = self._pick(f"entries of {ratio}", groups)
        if not picked:
            return state
        keys = compressor._static_forward_context[compressor.k_cache_prefix].kv_cache
        angles = self._angles[id(compressor)].cos_sin_cache
        where = [picked, sample.positions[picked].tolist(), sample.owners[picked].tolist()]
        rows, at, of = _on(self._device, where)
        length = ratio * (2 if compressor.overlap else 1)
        places = at.unsqueeze(1) + torch.arange(1 - length, 1, device=self._device)
        slots = _slots_of(states.block_table[of], places, page)
        key_slots = metadata[compressor.k_cache_prefix].slot_mapping[rows]
        data, scales = _bytes(keys, key_slots, layout)
        tensors = self._weights(
            state=cache[_places(slots, cache)],
            present=places >= 0,
            norm_weight=compressor.norm.weight,
            cos_sin=angles[at + 1 - ratio].float(),
            data=data,
            scales=scales,
        )
        self._plan(
            "compressed_row",
            compressor.prefix,
            picked,
            tensors,
            ratio=ratio,
            overlap=int(compressor.overlap),
            eps=compressor.rms_norm_eps,
            layout=layout,
        )
        return state

    def _plan_compressors(self, layer: Any) -> None:
        sample = self._sample
        assert sample is not None
        for kind, compressor in zip(("main", "index"), _compressors(layer), strict=False):
            found = self._recorded(layer.prefix, f"{kind}_kv_score")
            if found is not None:
                tensors = {"kv_score": found[0], **self._weights(ape=compressor.ape)}
                tensors |= sample.taken["compressor", compressor.prefix]
                numbers = {"ratio": compressor.compress_ratio}
                self._plan("compressor_state", compressor.prefix, sample.chosen, tensors, **numbers)

    def _index_projection(self, indexer: Any, *args: Any, owner: Any, **kwargs: Any) -> _Hook:
        q = yield
        if self._recorder.wants(owner.prefix):
            self._note(owner.prefix, index_q=q)

    def _index_query(
        self,
        indexer: Any,
        hidden: Tensor,
        qr: Tensor,
        kv_score: Tensor,
        weights: Tensor,
        *args: Any,
        owner: Any,
        **kwargs: Any,
    ) -> _Hook:
        if not self._recorder.wants(owner.prefix):
            return
        self._note(owner.prefix, index_weights=weights)
        q, scale, out = yield
        if q is not None and scale is None:
            self._note(owner.prefix, index_codes=q, index_weights_out=out)

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
        if not self._recorder.wants(owner.prefix) or not isinstance(q_quant, Tensor):
            return
        self._note(owner.prefix, searched_by=q_quant, searched_weights=weights)
        yield
        self._note(owner.prefix, selected=owner.topk_indices_buffer)
        self._take_now("selection", owner)

    def _take_selection(self, layer: Any, metadata: dict[str, Any]) -> list[_Taken]:
        """Gather all index keys that each chosen token can see."""
        sample, cache = self._sample, layer.indexer.k_cache.kv_cache
        assert sample is not None
        counts = [(sample.position(t) + 1) // layer.compress_ratio for t in sample.chosen]
        entries = torch.arange(max(counts), device=self._device).expand(len(counts), -1)
        slots = _slots_of(metadata[layer.prefix].block_table[sample.of], entries, cache.shape[1])
        data, scales = (sample.packet.hold(each) for each in _bytes(cache, slots, INDEX_FP8))
        return [
            {
                "data": data.select(0, place).narrow(0, 0, count),
                "scales": scales.select(0, place).narrow(0, 0, count),
            }
            for place, count in enumerate(counts)
        ]

    def _plan_indexer(self, layer: Any) -> None:
        sample, indexer = self._sample, layer.indexer
        assert sample is not None
        if indexer is None or indexer.use_fp4_kv:
            return
        prefix, shape = layer.prefix, (indexer.n_head, indexer.head_dim)
        names = "index_q", "index_weights", "index_codes", "index_weights_out"
        found = self._recorded(prefix, *names)
        if found is not None:
            first, count = self._heads(f"heads {indexer.prefix}", indexer.n_head)
            q, weights, codes, out = found
            tensors = {
                "q": q.rows(*shape).narrow(1, first, count),
                "weights": weights.narrow(1, first, count),
                "codes": codes.rows(*shape).seen_as(torch.uint8).narrow(1, first, count),
                "weights_out": out.narrow(1, first, count),
                **self._weights(cos_sin=layer.rotary_emb.cos_sin_cache[sample.at].float()),
            }
            numbers = {"softmax_scale": indexer.softmax_scale, "head_scale": shape[0] ** -0.5}
            self._plan("index_query", indexer.prefix, sample.chosen, tensors, **numbers)
        found = self._recorded(prefix, "searched_by", "searched_weights", "selected")
        if found is not None:
            k, keys = layer.topk_indices_buffer.shape[1], sample.taken["selection", prefix]
            for place, (token, held) in enumerate(zip(sample.chosen, keys, strict=True)):
                q, weights, chosen = (each.select(0, place) for each in found)
                tensors = {"q": q, "weights": weights, "chosen": chosen, **held}
                self._plan("selection", indexer.prefix, [token], tensors, k=k, layout=INDEX_FP8)

    # Linear layers and experts.

    def _mixture(self, mixture: Any, section: str, names: dict[int, str]) -> None:
        self._experts[section] = mixture
        self._around(mixture, "forward", self._mixed, section=section)
        linears = [(mixture.gate, "mixed", "logits")]
        self._around(mixture.gate, "forward", self._multiplied, section=section, y="logits")
        shared = mixture.shared_experts
        if shared is not None:
            linears.append((shared.gate_up_proj, "mixed", "gate_up"))
            up, down = shared.gate_up_proj, shared.down_proj
            self._around(up, "forward", self._multiplied, section=section, y="gate_up")
            if down.tp_size == 1 or not down.reduce_results:
                linears.append((down, "inner", "shared"))
                of = {"given": "inner", "y": "shared"}
                self._around(down, "forward", self._multiplied, section=section, **of)
        routed = getattr(mixture.experts, "routed_experts", None)
        if routed is not None:
            self._around(routed, "forward_modular", self._routed, section=section)
            if hasattr(routed.quant_method, "run"):  # anymla's, which asks no router of vLLM's
                self._around(routed.quant_method, "run", self._routed_here, section=section)
        self._add_linears(section, linears, names)

    def _add_linears(
        self, section: str, linears: list[tuple[Any, str, str]], names: dict[int, str]
    ) -> None:
        found = [(names[id(module)], module, x, y) for module, x, y in linears]
        self._linears.setdefault(section, []).extend(found)

    def _mixed(
        self,
        mixture: Any,
        hidden: Tensor,
        input_ids: Any = None,
        *args: Any,
        section: str,
        **rest: Any,
    ) -> _Hook:
        wanted = self._recorder.wants(section)
        if wanted:
            token = input_ids.view(-1, 1) if isinstance(input_ids, Tensor) else None
            self._note(section, mixed=hidden, token=token)
            self._recorder.flush()  # a graph's launch for all of attention
        yield
        if wanted:
            self._recorder.flush()

    def _multiplied(
        self, module: Any, x: Tensor, *args: Any, section: str, y: str, given: str = ""
    ) -> _Hook:
        if not self._recorder.wants(section):
            return
        if given:
            self._note(section, **{given: x})
        result = yield
        self._note(section, **{y: result[0] if isinstance(result, tuple) else result})

    def _routed(
        self,
        experts: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        **rest: Any,
    ) -> _Hook:
        section = rest["section"]
        if self._recorder.wants(section):
            self._note(section, experts=topk_ids, expert_weights=topk_weights)
        yield

    def _routed_here(
        self,
        experts: Any,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        limit: float,
        shared: Tensor | None,
        *,
        section: str,
    ) -> _Hook:
        if self._recorder.wants(section):
            self._note(section, experts=ids, expert_weights=weights, beside=shared)
        result = yield
        if self._recorder.wants(section):
            self._note(section, summed=result)

    def _plan_router(self, layer: Any) -> None:
        sample, mixture = self._sample, self._experts.get(layer.prefix)
        found = self._recorded(layer.prefix, "experts", "expert_weights", "mixed")
        if mixture is None or found is None or not _is_plain_router(mixture):
            return
        assert sample is not None
        gate, of = mixture.gate, sample.recorded[layer.prefix]
        k = mixture.n_activated_experts
        tensors = {"ids": found[0].narrow(1, 0, k), "weights": found[1].narrow(1, 0, k)}
        if gate.tid2eid is not None:
            tokens = self._recorder.last(layer.prefix, "token")
            if tokens is None:
                return
            known = gate.tid2eid[tokens[: len(sample.chosen), 0].long()]
            held = self._weights(known=known)["known"]
            tensors["known"] = held._replace(mark=of["token"].mark)
        else:
            tensors |= self._weights(bias=gate.e_score_correction_bias)
        numbers = {"scale": mixture.routed_scaling_factor, "k": k}
        name = f"{mixture.prefix}.gate"
        logits = self._recorded(layer.prefix, "logits")
        if logits is not None:
            self._plan("router", name, sample.chosen, {"logits": logits[0], **tensors}, **numbers)
        if type(mixture).__name__ == "AnymlaMoE":  # it multiplies and chooses at once
            tensors |= {"x": found[2], **self._weights(weight=gate.weight)}
            self._plan("router", name, sample.chosen, tensors, **numbers)

    def _plan_experts(self, layer: Any) -> None:
        """Plan some outputs of one token's experts now and then, because all weights travel along.

        This happens only where weights lie as in a checkpoint, which no kernel of vLLM's leaves
        them.
        """
        sample, mixture = self._sample, self._experts.get(layer.prefix)
        found = self._recorded(layer.prefix, "mixed", "experts", "expert_weights", "summed")
        numbers = self.auditor.random(f"experts {layer.prefix}")
        if mixture is None or found is None or numbers.randrange(_EXPERTS_EVERY):
            return
        assert sample is not None
        routed, place = mixture.experts.routed_experts, numbers.randrange(len(sample.chosen))
        count = len(routed.w13_weight)
        chosen = self._recorder.last(layer.prefix, "experts")
        if chosen is None or count != mixture.n_routed_experts or mixture.tp_size > 1:
            return
        ids = chosen[place].long().clamp(0, count - 1)
        wide = min(_OUTPUTS, mixture.hidden_size)
        first = numbers.randrange(mixture.hidden_size // wide) * wide
        part = slice(first, first + wide)
        weights = self._weights(
            w13=routed.w13_weight.data[ids],
            w13_scale=routed.w13_weight_scale.data[ids],
            w2=routed.w2_weight.data[:, part][ids],
            w2_scale=routed.w2_weight_scale.data[:, part][ids],
        )
        x, _, factors, out = (each.narrow(0, place, 1) for each in found)
        mark = sample.recorded[layer.prefix]["experts"].mark
        tensors = {n: each._replace(mark=mark) for n, each in weights.items()}
        tensors |= {"x": x, "weights": factors, "out": out.narrow(1, first, wide)}
        beside = self._recorded(layer.prefix, "beside")
        if beside is not None:
            tensors["shared"] = beside[0].narrow(0, place, 1).narrow(1, first, wide)
        limit = float(mixture.swiglu_limit)
        name, token = f"{mixture.prefix}.experts", sample.chosen[place]
        self._plan("experts", name, [token], tensors, limit=limit, first=first)

    def _plan_linears(self, layer: Any) -> None:
        """Plan a block of outputs of some of a layer's products."""
        sample = self._sample
        assert sample is not None
        numbers = self.auditor.random(f"linears {layer.prefix}")
        every = []
        for name, module, x, y in self._linears[layer.prefix]:
            found = self._recorded(layer.prefix, x, y)
            if found is not None and _is_readable(module, found[0].shape[1]):
                every.append((name, module, y, found))
        for name, module, y, (given, result) in numbers.sample(every, min(_LINEARS, len(every))):
            outputs = len(module.weight)
            wide = min(outputs, _OUTPUTS)
            first = numbers.randrange(outputs // wide) * wide
            weight = _block_of_weight(module, slice(first, first + wide))
            part = result.rows(outputs).narrow(1, first, wide)
            tensors = {"x": given, "y": part, **self._weights(**weight)}
            # The router's product may be rounded to its operands' type before it is widened.
            unit = {"unit": torch.finfo(torch.bfloat16).eps} if y == "logits" else {}
            self._plan("linear", name, sample.chosen, tensors, first=first, **unit)

    # Hyper-connections.

    def _stream_layer(self, module: Any) -> None:
        kind = next(each.__name__ for each in type(module).__mro__ if each.__name__ in _STREAMS)
        wrapped = self.streams(_STREAMS[kind], module.forward)
        module.forward = wrapped

    def streams(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function of vLLM's hyper-connections so that its cases are taken."""

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            if self._looks:
                with self.guarded(name):
                    given = dict(zip(_PARAMETERS[name], args, strict=False)) | kwargs
                    getattr(self, f"_{name}")(given, result)
            return result

        return wrapped

    def _owner(self, fn: Tensor) -> tuple[str, str] | None:
        """Return the section of the layer that has this weight, and its name, if it is examined."""
        layer, _, name = self._streams.get(id(fn), "").rpartition(".")
        for section in self._windows if layer else ():
            if section.startswith(f"{layer}."):
                return (section, name) if self._recorder.wants(section) else None
        return None

    def _mhc_pre(self, given: dict[str, Any], result: Any) -> None:
        self._gates(given, given["residual"], result)

    def _mhc_pre_broadcast(self, given: dict[str, Any], result: Any) -> None:
        self._gates(given, result[0], result[1:])

    def _mhc_post_pre(self, given: dict[str, Any], result: Any) -> None:
        owner = self._owner(given["fn"])
        if owner is not None:
            self._sums(owner[0], owner[1], given, result[0])
            self._gates(given, result[0], result[1:], fused=1)

    def _mhc_post(self, given: dict[str, Any], result: Any) -> None:
        if self._recorder.wants(_HEAD):
            self._sums(_HEAD, f"post {self._posts}", given, result)
        self._posts += 1

    def _mhc_head(self, given: dict[str, Any], result: Any) -> None:
        if not self._recorder.wants(_HEAD):
            return
        weights = {"fn": given["hc_fn"], "base": given["hc_base"], "scale": given["hc_scale"]}
        numbers = {"norm_eps": given["rms_norm_eps"], "hc_eps": given["hc_eps"]}
        self._gates_of[_HEAD] = weights, numbers
        h, y = given["hidden_states"].flatten(0, -3), result.flatten(0, -2)
        self._note(_HEAD, h=h, y=y)

    def _sums(self, section: str, name: str, given: dict[str, Any], streams: Tensor) -> None:
        residual = given["residual"]
        n, width = residual.shape[-2:]
        tensors = {
            "u": given["x"].reshape(-1, width),
            "h": residual.reshape(-1, n, width),
            "post": given["post_layer_mix"].reshape(-1, n),
            "comb": given["comb_res_mix"].reshape(-1, n, n),
            "streams": streams.reshape(-1, n, width),
        }
        self._note(section, **{f"{name} sum {part}": each for part, each in tensors.items()})

    def _gates(
        self, given: dict[str, Any], residual: Tensor, result: Any, *, fused: int = 0
    ) -> None:
        owner = self._owner(given["fn"])
        if owner is None:
            return
        section, name = owner
        n, width = residual.shape[-2:]
        post, comb, y = result
        weights = {"fn": given["fn"], "base": given["hc_base"], "scale": given["hc_scale"]}
        if given.get("norm_weight") is not None:
            weights["norm_weight"] = given["norm_weight"]
        numbers = {
            "norm_eps": given["rms_eps"],
            "hc_eps": given["hc_pre_eps"],
            "iters": given["sinkhorn_repeat"],
            "fused": fused,
        }
        self._gates_of[f"{section} {name}"] = weights, numbers
        tensors = {
            "h": residual.reshape(-1, n, width),
            "post": post.reshape(-1, n),
            "comb": comb.reshape(-1, n, n),
            "y": y.reshape(-1, width),
        }
        self._note(section, **{f"{name} {part}": each for part, each in tensors.items()})

    def _plan_streams(self, layer: Any) -> None:
        section = layer.prefix
        for name in ("hc_attn_fn", "hc_ffn_fn"):
            where = f"{section.rpartition('.')[0]}.{name}"
            self._plan_sums(section, name, where)
            parts = "h", "post", "comb", "y"
            found = self._recorded(section, *(f"{name} {part}" for part in parts))
            if found is not None:
                weights, numbers = self._gates_of[f"{section} {name}"]
                tensors = {**dict(zip(parts, found, strict=True)), **self._weights(**weights)}
                assert self._sample is not None
                self._plan("hc_pre", where, self._sample.chosen, tensors, **numbers)

    def _plan_sums(self, section: str, name: str, where: str) -> None:
        parts = "u", "h", "post", "comb", "streams"
        found = self._recorded(section, *(f"{name} sum {part}" for part in parts))
        if found is not None:
            assert self._sample is not None
            self._plan("hc_post", where, self._sample.chosen, dict(zip(parts, found, strict=True)))

    def _plan_head(self) -> None:
        sample = self._sample
        assert sample is not None
        sample.recorded[_HEAD] = self._recorder.hold(sample.packet, _HEAD)
        for number in range(self._posts):
            self._plan_sums(_HEAD, f"post {number}", "streams after a sublayer")
        found = self._recorded(_HEAD, "h", "y")
        if found is not None:
            weights, numbers = self._gates_of[_HEAD]
            tensors = {"h": found[0], "y": found[1], **self._weights(**weights)}
            self._plan("hc_head", _HEAD, sample.chosen, tensors, **numbers)


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
# Results of vLLM's hyper-connection layers and functions.
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


def _slots_of(tables: Tensor, places: Tensor, page_size: int) -> Tensor:
    """Return slots of places [M, n] in requests, by their rows [M, pages] of a block table."""
    places = places.long().clamp(min=0)
    pages = (places // page_size).clamp(max=tables.shape[1] - 1)
    return tables.gather(1, pages).long() * page_size + places % page_size


def _named(name: str, planes: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {f"{name}_data": planes[0], f"{name}_scales": planes[1]}


def _places(slots: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return page and offset of each slot."""
    slots = slots.to(cache.device).long().clamp(0, cache.shape[0] * cache.shape[1] - 1)
    return slots // cache.shape[1], slots % cache.shape[1]


def _bytes(cache: Tensor, slots: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    data, scales = get_layout(layout).planes(cache)
    assert scales is not None
    page, offset = _places(slots, cache)
    return data[page, offset], scales[page, offset]


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


def _on(device: torch.device, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """Copy host values to a device as int64, without a wait."""
    pinned = device.type == "cuda"
    held = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return held.to(device, non_blocking=True) if pinned else held


def _compressors(layer: Any) -> list[Any]:
    """List an attention layer's compressors: the main cache's, then the index's."""
    found = layer.compressor, layer.indexer and layer.indexer.compressor
    return [each for each in found if each is not None]


def _row_bytes(layer: Any) -> int:
    """Return the bytes of the recorded tensors of one token in a layer, by the larger of them."""
    heads = max(layer.padded_heads, layer.n_local_heads) * layer.head_dim
    index = 0 if layer.indexer is None else layer.indexer.n_head * layer.indexer.head_dim
    streams = 4 * layer.hidden_size
    return 2 * (6 * heads + 4 * index + 10 * streams) + (1 << 16)


def _is_plain_router(mixture: Any) -> bool:
    """True if ``checks`` knows the mixture's way to choose experts."""
    gate, config = mixture.gate, getattr(mixture.experts, "moe_config", None)
    parallel = getattr(config, "moe_parallel_config", None)
    return (
        mixture.scoring_func == "sqrtsoftplus"
        and bool(mixture.renormalize)
        and getattr(gate, "bias_vl", None) is None
        and not getattr(parallel, "enable_eplb", False)
        and (gate.tid2eid is not None or gate.e_score_correction_bias is not None)
    )


def _group_weight(layer: Any, group: int, outputs: slice) -> dict[str, Tensor] | None:
    """Return ``wo_a`` of one group's outputs as [1, R, J]: ours in bf16, or as vLLM holds it."""
    groups, rank = layer.n_local_groups, layer.o_lora_rank
    if getattr(layer, "wo_a_groups", None) is not None:
        return {"wo_a": layer.wo_a_groups[group : group + 1, outputs]}
    weight = layer.wo_a.weight
    if not weight.numel():
        return None
    weight = weight.view(groups, rank, -1)[group : group + 1, outputs]
    if weight.dtype == torch.bfloat16:
        return {"wo_a": weight}
    scale = getattr(layer.wo_a, "weight_scale_inv", None)
    if weight.dtype != torch.float8_e4m3fn or scale is None or scale.dtype == torch.int32:
        return None
    scale = scale.view(groups, -(-rank // FP8_BLOCK), -1)[group : group + 1, _blocks(outputs)]
    return {"wo_a": weight.view(torch.uint8), "wo_a_scale": scale}


def _is_readable(module: Any, inputs: int) -> bool:
    """True if a linear layer's weight lies as in a checkpoint, not as some kernel wants it."""
    weight, scale = getattr(module, "weight", None), getattr(module, "weight_scale_inv", None)
    if weight is None or weight.ndim != 2 or weight.shape[1] != inputs:
        return False
    if weight.dtype in (torch.bfloat16, torch.float32):
        return True
    blocks = -(-len(weight) // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    known = scale is not None and scale.shape == blocks and scale.dtype != torch.int32
    return weight.dtype == torch.float8_e4m3fn and known and inputs % FP8_BLOCK == 0


def _block_of_weight(module: Any, outputs: slice) -> dict[str, Tensor]:
    """Return rows of a linear layer's weight."""
    weight = module.weight.data[outputs]
    if weight.dtype != torch.float8_e4m3fn:
        return {"weight": weight}
    scale = module.weight_scale_inv.data[_blocks(outputs)]
    return {"weight": weight.view(torch.uint8), "weight_scale": scale}


def _blocks(part: slice) -> slice:
    """Return the rows of scales of these rows, which begin with a block or lie within one."""
    return slice(part.start // FP8_BLOCK, -(-part.stop // FP8_BLOCK))


def start(model: nn.Module, runner_of_steps: bool = True) -> Hooks:
    """Audit a model that has been built, with the settings in the environment."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    versions = {
        "anymla": __version__,
        "vllm": installed_version() or "?",
        "torch": torch.__version__,
        "device": name,
    }
    settings = Settings.of(os.environ.get(VARIABLE, ""))
    judges = [JudgeProcess(2 if settings.judges == 1 else 1) for _ in range(settings.judges)]
    auditor = Auditor(settings, _LOG, versions, judges)
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
    """Let both of vLLM's model runners announce their steps.

    The second one knows enough on the CPU to choose tokens before a graph is replayed, and keeps
    the step's metadata. The first one's audited steps run without their graphs.
    """
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
    execute2, prepare2 = runner2.execute_model, runner2.prepare_attn

    @functools.wraps(execute2)
    def execute_model2(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dummy_run") or len(args) > 1:
            return execute2(self, scheduler_output, *args, **kwargs)
        with step(scheduler_output):
            result = execute2(self, scheduler_output, *args, **kwargs)
            if auditor.active:
                state = self.execute_model_state
                hooks.end(None if state is None else state.attn_metadata)
            return result

    @functools.wraps(prepare2)
    def prepare_attn(self: Any, input_batch: Any) -> Any:
        made = prepare2(self, input_batch)
        if auditor.active:
            with hooks.guarded("a step"):
                exact = getattr(self, "speculator", None) is None
                hooks.begin_batch(input_batch, exact=exact)
        return made

    runner2.execute_model = execute_model2
    runner2.prepare_attn = prepare_attn
