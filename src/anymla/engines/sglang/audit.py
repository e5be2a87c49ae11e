"""Audit of SGLang's DeepSeek-V4: attention and selection of a live server, whoever computes them.

Nothing is replaced. Hooks record what attention and the indexer take and give for the sampled
tokens of audited steps, by launches that captured graphs repeat (``anymla.audit.rows``). The rows
that a token must attend to are found by SGLang's own tables of requests, not by the lists that it
made of them, so that a wrong list is noticed too. A process of its own judges the cases.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from torch import Tensor

from anymla.audit.auditor import Auditor, Judge
from anymla.audit.caches import planes_at
from anymla.audit.packet import Held, Packet
from anymla.audit.process import JudgeProcess
from anymla.audit.rows import RowRecorder
from anymla.audit.settings import Settings
from anymla.audit.watcher import Watcher
from anymla.engines import server_metrics
from anymla.engines.sglang.pinned import BACKEND, INDEXER, RUNNER, installed_version
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8

LOG = logging.getLogger("sglang.plugins.anymla.audit")
WINDOW = 128
_MAIN_BYTES, _INDEX_BYTES = 584, 132
_HEADS = 16  # heads of attention that are judged: it bounds a case's size

_watches: dict[int, Watch] = {}


def register() -> None:
    """Register the hooks."""
    add = HookRegistry.register
    add(f"{BACKEND}.__init__", backend_built, HookType.AFTER)
    add(f"{BACKEND}._forward_attention", forward_attention, HookType.AROUND)
    for name in ("_forward_prepare_normal", "_forward_prepare_multi_stream"):
        add(f"{INDEXER}.{name}", query_prepared, HookType.AFTER)
    add(f"{INDEXER}.forward_c4_indexer", forward_c4_indexer, HookType.AROUND)
    add(f"{RUNNER}.forward", forward, HookType.AROUND)


def backend_built(result: None, backend: Any, model_runner: Any, *args: Any, **rest: Any) -> None:
    """Watch a backend of DeepSeek-V4's rows, unless it serves drafts; the log says why not."""
    if getattr(model_runner, "is_draft_worker", False):
        return
    try:
        refused = _refusal(backend)
        if refused is None:
            _watches[id(backend)] = _watch(backend)
    except Exception:
        LOG.exception("audit: nothing is audited")
        return
    if refused is not None:
        LOG.warning("audit: nothing is audited, %s", refused)


def _refusal(backend: Any) -> str | None:
    """Return the reason why a backend cannot be audited; None if it can."""
    pool = backend.token_to_kv_pool
    if backend.trtllm_attn or backend.mega_attn or pool.request_window is not None:
        return "its window or its attention takes another path"
    if pool.get_swa_key_bytes_per_token() != _MAIN_BYTES:
        return "its rows are not DeepSeek-V4's"
    return None


def _watch(backend: Any) -> Watch:
    """Start an audit of a backend."""
    settings = Settings.of(os.environ.get("ANYMLA_AUDIT", ""))
    made_by = {"sglang": installed_version() or "", "torch": torch.__version__}
    judges: list[Judge] = [JudgeProcess() for _ in range(settings.judges)]
    auditor = Auditor(settings, LOG, made_by, judges)
    server_metrics.count_audit(auditor)
    watch = Watch(backend, auditor)
    LOG.info("audit: %s", settings)
    return watch


def forward(original: Callable[..., Any], runner: Any, batch: Any, *args: Any, **rest: Any) -> Any:
    """Run a step of a model runner; choose its tokens before, hand over its cases behind."""
    watch = _watches.get(id(getattr(runner, "attn_backend", None)))
    if watch is None:
        return original(runner, batch, *args, **rest)
    with watch.guarded("a step"):
        watch.begin(batch)
    try:
        return original(runner, batch, *args, **rest)
    finally:
        with watch.guarded("a step"):
            watch.end()


def forward_attention(
    original: Callable[..., Any],
    backend: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,
    forward_batch: Any,
    compress_ratio: int,
    *args: Any,
    **rest: Any,
) -> Any:
    """Compute attention as the original, and record the chosen tokens' queries and results."""
    result = original(backend, q, k, v, layer, forward_batch, compress_ratio, *args, **rest)
    watch = _watches.get(id(backend))
    if watch is not None and isinstance(result, Tensor):
        with watch.guarded("attention"):
            sink = rest["attn_sink"] if "attn_sink" in rest else args[1]
            watch.note_attention(layer, compress_ratio, q, result, sink)
    return result


def query_prepared(result: Any, backend: Any, *args: Any, **rest: Any) -> None:
    """Keep the indexer's query of the layer whose selection is running."""
    watch = _watches.get(id(backend))
    if watch is not None:
        watch.query = result


def forward_c4_indexer(
    original: Callable[..., None],
    backend: Any,
    x: Tensor,
    q_lora: Tensor,
    c4_indexer: Any,
    *args: Any,
    **rest: Any,
) -> None:
    """Select as the original, and record the chosen tokens' queries and selections."""
    original(backend, x, q_lora, c4_indexer, *args, **rest)
    watch = _watches.get(id(backend))
    if watch is not None and not c4_indexer.use_fp4_indexer:
        with watch.guarded("selection"):
            watch.note_selection(c4_indexer)


class Watch(Watcher):
    """The audit of one backend.

    Attributes:
        backend: the ``DeepseekV4AttnBackend`` that is audited.
        query: index query and weights of the layer whose selection runs; None before the first.
    """

    def __init__(self, backend: Any, auditor: Auditor) -> None:
        """Reserve memory for a token's tensors in each layer."""
        super().__init__(auditor, torch.device(backend.device))
        self.backend, self.query = backend, None
        config = backend.model_runner.model_config
        layers = int(config.num_hidden_layers)
        sections = [str(layer) for layer in range(layers)]
        heads = max(64, int(config.num_attention_heads))
        # Query and result, an index query, and lists of slots.
        size = 2 * 2 * 512 * heads + 128 * 128 + 4 * 16384
        rows = auditor.settings.requests
        self.recorder = RowRecorder(self.device, rows, sections, rows * size)
        self._ratios: dict[str, int] = {}
        self._scales: dict[str, float] = {}
        self._sinks: dict[str, Tensor] = {}
        self._heads: dict[str, int] = {}
        self._chosen: list[int] = []
        self._layers: list[str] = []
        self._positions: list[int] = []
        self._requests: list[int] = []
        self._names: list[str] = []

    def begin(self, batch: Any) -> None:
        """Begin a step, and choose its tokens if it is audited."""
        self._chosen = []
        auditor = self.auditor
        auditor.begin()
        if not auditor.active:
            return
        if auditor.full or batch.forward_mode.is_idle() or not self._ratios:
            auditor.skip()
            return
        owners = _owners(batch)
        count = min(auditor.settings.requests, len(owners))
        numbers = auditor.random("tokens")
        self._chosen = sorted(numbers.sample(range(len(owners)), count))
        positions, requests = batch.positions.tolist(), batch.req_pool_indices.tolist()
        self._positions = [positions[token] for token in self._chosen]
        self._requests = [requests[owners[token]] for token in self._chosen]
        names = batch.rids or [f"request {slot}" for slot in requests]
        self._names = [str(names[owners[token]]) for token in self._chosen]
        kinds: dict[int, list[str]] = {}
        for section, ratio in self._ratios.items():
            kinds.setdefault(ratio, []).append(section)
        self._layers = [section for kind in kinds.values() for section in auditor.turn(kind)]
        self.recorder.tokens = len(owners)
        self.recorder.choose(auditor.step, self._chosen, self._layers)

    def note_attention(self, layer: Any, ratio: int, q: Tensor, out: Tensor, sink: Tensor) -> None:
        """Record a layer's queries, results and lists."""
        section = str(layer.layer_id)
        self._ratios[section] = ratio
        self._scales[section], self._sinks[section] = self.backend.softmax_scale, sink
        self._heads[section] = layer.tp_q_head_num  # further ones are padding
        if not self.recorder.wants(section):
            return
        note = self.recorder.note
        note(section, "q", q.squeeze(1) if q.ndim == 4 else q)
        note(section, "out", out)
        if ratio:
            core = self.backend.forward_metadata.core_attn_metadata
            note(section, "chosen", core.sparse_page_indices(ratio).flatten(1))
        self.recorder.flush()

    def note_selection(self, c4_indexer: Any) -> None:
        """Record a layer's index queries and selection."""
        section = str(c4_indexer.layer_id)
        if self.query is None or not self.recorder.wants(section):
            return
        q, weights = self.query
        metadata = self.backend.forward_metadata
        note = self.recorder.note
        note(section, "index_q", q)
        note(section, "index_weights", weights.flatten(1).float())
        note(section, "selected", metadata.core_metadata.c4_sparse_page_indices)
        note(section, "table", metadata.indexer_metadata.page_table)
        self.recorder.flush()

    def end(self) -> None:
        """Plan the cases of an audited step and have them judged."""
        auditor, tokens = self.auditor, self.recorder.tokens
        try:
            if auditor.active and self._chosen:
                packet = Packet()
                for section in self._layers:
                    with self.guarded(f"layer {section}"):
                        self._plan(packet, section)
                self.submit(packet, self.recorder)
        finally:
            auditor.end(tokens)
            self.recorder.release()

    def _plan(self, packet: Packet, section: str) -> None:
        """Plan the cases of a layer: attention of each chosen token, and its selection."""
        ratio = self._ratios[section]
        # Gather before the recorded rows are held: ``hold`` copies them as they are now.
        window = self._window(packet, int(section))
        last = {name: self.recorder.last(section, name) for name in _RECORDED}
        entries = self._entries(packet, int(section), last["chosen"]) if ratio else None
        slots, keys = None, None
        counts: list[int] = []
        if ratio == 4 and last["selected"] is not None:
            slots, keys, counts = self._keys(packet, int(section), last["selected"], last["table"])
        held = self.recorder.hold(packet, section)
        if "q" not in held or "out" not in held or (ratio and entries is None):
            return
        heads = self._heads[section]
        count = min(heads, _HEADS)
        first = self.auditor.random(f"heads {section}").randrange(heads - count + 1)
        sink = packet.hold(self._sinks[section][first : first + count])
        numbers = {"scale": self._scales[section], "first_head": first}
        for place in range(len(self._chosen)):
            name, position = [self._names[place]], [self._positions[place]]
            wide = min(self._positions[place] + 1, WINDOW)
            tensors = {
                "q": held["q"].select(0, place).narrow(0, first, count),
                "out": held["out"].select(0, place).narrow(0, first, count),
                "sink": sink,
                **{n: e.select(0, place).narrow(0, WINDOW - wide, wide) for n, e in window.items()},
            }
            if entries is not None:
                chosen, rows = entries
                tensors |= {n: each.select(0, place) for n, each in rows.items()}
                tensors["chosen"] = chosen.select(0, place)
            packet.plan("attention", f"layer {section}", name, position, tensors, **numbers)
            if keys is not None and slots is not None and "index_q" in held:
                seen = counts[place]
                found = {n: e.select(0, place).narrow(0, 0, seen) for n, e in keys.items()}
                found |= {
                    "q": held["index_q"].select(0, place),
                    "weights": held["index_weights"].select(0, place),
                    "chosen": slots.select(0, place),
                }
                packet.plan(
                    "selection",
                    f"layer {section}",
                    name,
                    position,
                    found,
                    k=slots.shape[1],
                    layout=INDEX_FP8,
                )

    def _window(self, packet: Packet, layer: int) -> dict[str, Held]:
        """Gather the rows of each chosen token's window by SGLang's tables of requests."""
        backend, pool = self.backend, self.backend.token_to_kv_pool
        at = torch.tensor(self._positions, device=self.device).unsqueeze(1)
        of = torch.tensor(self._requests, device=self.device).unsqueeze(1)
        places = (at + torch.arange(1 - WINDOW, 1, device=self.device)).clamp(min=0)
        slots = pool.translate_loc_from_full_to_swa(backend.req_to_token[of, places].long())
        cache = _pages(
            pool.get_swa_key_buffer_radix(layer), pool.get_swa_key_page_size(), _MAIN_BYTES
        )
        return _held(packet, cache, slots, MAIN_FP8, "window_")

    def _entries(
        self, packet: Packet, layer: int, chosen: Tensor | None
    ) -> tuple[Held, dict[str, Held]] | None:
        """Gather the entries that attention was given, and which of the list they are."""
        if chosen is None:
            return None
        pool = self.backend.token_to_kv_pool
        ratio = self._ratios[str(layer)]
        chosen = chosen[: len(self._chosen)].clone()
        if ratio == 128:  # what follows the last complete block is no entry, whatever is listed
            seen = torch.tensor(self._positions, device=self.device).add(1) // ratio
            column = torch.arange(chosen.shape[1], device=self.device)
            chosen[column >= seen.unsqueeze(1)] = -1
        cache = _pages(
            pool.get_extra_key_buffer(layer), pool.get_extra_key_page_size(layer), _MAIN_BYTES
        )
        return packet.hold(chosen), _held(packet, cache, chosen, MAIN_FP8, "entries_")

    def _keys(
        self, packet: Packet, layer: int, selected: Tensor, table: Tensor | None
    ) -> tuple[Held, dict[str, Held], list[int]]:
        """Gather all index keys that each token can see, and the selected slots as entries."""
        assert table is not None
        count = len(self._chosen)
        selected, table = selected[:count].long(), table[:count].long()
        cache = self.backend.token_to_kv_pool.get_index_k_with_scale_buffer(layer_id=layer)
        size = 64
        pages = _pages(cache, size, _INDEX_BYTES)
        seen = [(position + 1) // 4 for position in self._positions]
        most = max(1, *seen)
        entry = torch.arange(most, device=self.device).expand(count, -1)
        slots = table.gather(1, (entry // size).clamp(max=table.shape[1] - 1)) * size + entry % size
        # A selected slot that is no visible entry's becomes an entry beyond all of them: an alarm.
        same = selected.unsqueeze(2) == slots.unsqueeze(1)
        visible = entry.unsqueeze(1) < torch.tensor(seen, device=self.device).view(-1, 1, 1)
        same &= visible
        found = torch.where(same.any(2), same.int().argmax(2), most)
        found = torch.where(selected < 0, -1, found).int()
        return packet.hold(found), _held(packet, pages, slots, INDEX_FP8, ""), seen


_RECORDED = ("chosen", "selected", "table")


def _owners(batch: Any) -> list[int]:
    """Return the index of the request of each token of a batch."""
    tokens, requests = len(batch.positions), int(batch.batch_size)
    lengths = batch.extend_seq_lens_cpu
    if lengths is not None and sum(lengths) <= tokens:
        return [request for request, count in enumerate(lengths) for _ in range(count)]
    each = tokens // max(1, requests)
    return [token // max(1, each) for token in range(each * requests)]


def _pages(buffer: Tensor, entries: int, width: int) -> Tensor:
    """View a pool's buffer [P, bytes] as pages of entries [P, entries, width]."""
    return buffer.view(torch.uint8)[:, : entries * width].view(len(buffer), entries, width)


def _held(
    packet: Packet, cache: Tensor, slots: Tensor, layout: str, prefix: str
) -> dict[str, Held]:
    """Hold the bytes of rows at slots [M, n]."""
    return {n: packet.hold(each) for n, each in planes_at(cache, slots, layout, prefix).items()}
