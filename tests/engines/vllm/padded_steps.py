"""Padding tokens of a step in the plugin's layers and metadata, without vLLM:
``padded_steps.py ANSWER.json [DEVICE]``.

Five requests decode in a step that is padded to eight tokens, as vLLM pads one for a captured
graph: padding has slot -1, and position and request are what an earlier step left there. Nothing of
an earlier step may be listed for it, and nothing written. The answer says what did not hold, of the
plugin as it is and with each of some faults planted in it.

vLLM's modules are stand-ins here. Its block tables go on behind a request's own pages, as they do
where longer requests were before: an entry or row that padding lists is one that exists.
"""

from __future__ import annotations

import contextlib
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import stand_ins
import torch
from torch import Tensor

stand_ins.install()

from kept_layer import bare  # noqa: E402

from anymla.engines.vllm import (  # noqa: E402
    attention,
    compressor,
    cpu_kernels,
    indexer,
    metadata,
)
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout  # noqa: E402

TOKENS, REAL = 8, 5
POSITIONS = (3, 7, 127, 255, 130, 511, 127, 383)  # padding's would close entries of both ratios
REQUESTS = (0, 1, 2, 3, 4, 0, 4, 9)  # the last is past this step's block table
LONGEST, WINDOW, HEADS, CHOSEN = 512, 128, 4, 16
BLOCK = 256  # tokens of a block of the compressed caches
RATIOS = (4, 128)
STATE_BLOCK = {4: 4, 128: 8}  # tokens
FREE = 5  # a slot that no token writes in any cache


class Step:
    """A padded step's tensors, and caches with a page for every position that a request can have.

    Attributes:
        seen: tokens that the metadata tell of: all of them, as for a graph of whole steps, or the
            real ones alone, as outside of graphs and between the pieces of one. Slots are always
            those of all tokens.
    """

    def __init__(self, device: torch.device, seen: int) -> None:
        self.device, self.seen = device, seen
        self.positions = torch.tensor(POSITIONS, device=device)
        self.requests = torch.tensor(REQUESTS, dtype=torch.int32, device=device)
        self.valid = torch.arange(TOKENS, device=device) < REAL
        self.starts = torch.arange(REAL + 1, dtype=torch.int32, device=device)
        self.seq_lens = (self.positions[:REAL] + 1).int()
        self.rotary = types.SimpleNamespace(cos_sin_cache=self._rotary_table())

    def _rotary_table(self) -> Tensor:
        angles = torch.rand(LONGEST, 32, device=self.device)
        return torch.cat((angles.cos(), angles.sin()), dim=1)

    def table(self, page: int) -> Tensor:
        """Pages of each request, of ``page`` tokens: all different."""
        columns = LONGEST // page
        pages = torch.arange(REAL * columns, dtype=torch.int32, device=self.device)
        return pages.view(REAL, columns)

    def slots(self, page: int, ratio: int = 1) -> Tensor:
        """Where each token writes: its row, or the entry that it closes."""
        made = torch.full((TOKENS,), -1, device=self.device)
        for token in range(REAL):
            position = POSITIONS[token]
            if (position + 1) % ratio == 0:
                made[token] = (token * LONGEST + position) // ratio
        assert page % ratio == 0  # pages follow each other, so a slot does not depend on them
        return made

    def common(self, page: int) -> Any:
        """What vLLM hands to a builder of metadata."""
        return types.SimpleNamespace(
            num_actual_tokens=self.seen,
            positions=self.positions,
            slot_mapping=self.slots(page),
            block_table_tensor=self.table(page),
            max_seq_len=LONGEST,
        )

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)


def cache_of(layout: str, page: int, ratio: int, device: torch.device) -> Tensor:
    """A page for every position of every request, full of what nobody may read."""
    pages = REAL * LONGEST // page
    return get_layout(layout).allocate(pages, page // ratio, device).fill_(0xFF)


def rows_written(cache: Tensor, before: Tensor, layout: str | None) -> set[int]:
    """Slots whose bytes have changed."""
    if layout is None:  # states
        changed = (cache != before).any(-1).flatten()
    else:
        slots = torch.arange(cache.shape[0] * cache.shape[1], device=cache.device)
        rows = [get_layout(layout).read(each, slots, torch.float32) for each in (cache, before)]
        changed = (rows[0].nan_to_num(1e6) != rows[1].nan_to_num(1e6)).any(-1)
    return set(changed.nonzero().flatten().tolist())


def told(what: str, found: Any, wanted: Any) -> list[str]:
    """Nothing, or one line."""
    return [] if found == wanted else [f"{what}: {found} instead of {wanted}"]


def real(slots: Tensor) -> set[int]:
    return {slot for slot in slots.tolist() if slot >= 0}


def visible_to(token: int, ratio: int) -> int:
    return (POSITIONS[token] + 1) // ratio if token < REAL else 0


def window_row_written(step: Step) -> list[str]:
    layer = a_layer(step, 0)
    cache = layer.swa_cache_layer.kv_cache
    before, slots = cache.clone(), step.slots(64)
    described = {"window": types.SimpleNamespace(slot_mapping=slots)}
    q, kv = step.normal(TOKENS, HEADS, 512), step.normal(TOKENS, 512)
    layer._fused_qnorm_rope_kv_insert(q, kv, step.positions, described)
    return told("window slots", rows_written(cache, before, MAIN_FP8), real(slots))


def entries_listed(step: Step, ratio: int) -> list[str]:
    """Slots of compressed entries that attention is given."""
    described = metadata_of(step)
    found = a_layer(step, ratio)._entries(described, slice(0, step.seen))
    table, page, lines = step.table(BLOCK), BLOCK // ratio, []
    for token in range(step.seen):
        entries = range(visible_to(token, ratio))
        if ratio == 4:
            entries = entries[:CHOSEN]
        wanted = [int(table[token, e // page]) * page + e % page for e in entries]
        listed = [slot for slot in found.indices[token].flatten().tolist() if slot >= 0]
        lines += told(f"entries of token {token}", listed, wanted)
        lines += told(f"number of token {token}", int(found.lengths[token]), len(wanted))
    return lines


def attended(step: Step, ratio: int) -> list[str]:
    """Padding attends to nothing: its output is the sink's, which has no value."""
    layer, q = a_layer(step, ratio), step.normal(TOKENS, HEADS, 512)
    for cache in (layer.swa_cache_layer.kv_cache, layer.kv_cache):
        rows = torch.arange(cache.shape[0] * cache.shape[1], device=step.device)
        get_layout(MAIN_FP8).write(cache, rows, step.normal(len(rows), 512).float())
    stand_ins.context.attn_metadata = metadata_of(step)
    out = torch.full_like(q, torch.nan)
    layer.forward_mqa(q, None, step.positions, out)
    attending = [bool(row.isnan().any() or row.any()) for row in out.flatten(1)]
    return told("tokens that attend", attending, step.valid.tolist())


def selected(step: Step, max_seq_len: int) -> list[str]:
    """Entries that the index chooses, where all of them fit the selection and where not."""
    described, buffer = described_index(step, max_seq_len), chosen_before(step)
    keys = types.SimpleNamespace(
        prefix="index", kv_cache=cache_of(INDEX_FP8, BLOCK, 4, step.device)
    )
    slots = torch.arange(keys.kv_cache.shape[0] * keys.kv_cache.shape[1], device=step.device)
    get_layout(INDEX_FP8).write(keys.kv_cache, slots, step.normal(len(slots), 128).float())
    common = {"k_cache": keys, "compress_ratio": 4, "topk_indices_buffer": buffer}
    layer = bare(
        indexer.AnymlaIndexer,
        **common,
        **{"topk_tokens": CHOSEN, "n_head": 8, "head_dim": 128, "softmax_scale": 128**-0.5},
        use_fp4_kv=False,
        _wq_b_proj=lambda qr, scale: qr,
    )
    scores = bare(indexer.AnymlaSparseAttnIndexer, **common, layout=INDEX_FP8)
    stand_ins.context.attn_metadata = {"index": described}
    raw, weights = step.normal(TOKENS, 8 * 128), step.normal(TOKENS, 8)
    q, _, scaled = layer(
        None, raw, None, weights, step.positions, step.rotary, skip_compressor=True
    )
    assert (q is None) == (max_seq_len // 4 <= CHOSEN)
    if q is not None:
        scores(None, q, None, scaled)
    counts = [int((row >= 0).sum()) for row in buffer[: step.seen]]
    most = max_seq_len // 4
    wanted = [min(visible_to(token, 4), CHOSEN, most) for token in range(step.seen)]
    return told(f"entries chosen of {most}", counts, wanted)


def compressed(step: Step, ratio: int, channels: int) -> list[str]:
    """States that are saved, and entries that are made of them."""
    width, page = channels * (2 if ratio == 4 else 1), STATE_BLOCK[ratio]
    layout = MAIN_FP8 if channels == 512 else INDEX_FP8
    states = step.normal(REAL * LONGEST // page, page, 2 * width, dtype=torch.float32)
    entries = cache_of(layout, BLOCK, ratio, step.device)
    before = states.clone(), entries.clone()
    layer = bare(
        compressor.AnymlaCompressor,
        compress_ratio=ratio,
        overlap=ratio == 4,
        head_dim=channels,
        use_fp4_cache=False,
        rms_norm_eps=1e-6,
        ape=step.normal(ratio, width, dtype=torch.float32),
        norm=types.SimpleNamespace(weight=step.normal(channels)),
        state_cache=types.SimpleNamespace(prefix="states", kv_cache=states),
        k_cache_prefix="entries",
        _static_forward_context={"entries": types.SimpleNamespace(kv_cache=entries)},
    )
    described = types.SimpleNamespace(
        slot_mapping=step.slots(page),
        block_table=step.table(page),
        token_to_req_indices=step.requests[: step.seen],
    )
    closed = step.slots(BLOCK, ratio)
    stand_ins.context.attn_metadata = {
        "states": described,
        "entries": types.SimpleNamespace(slot_mapping=closed[: step.seen]),
    }
    layer(step.normal(TOKENS, 2 * width, dtype=torch.float32), step.positions, step.rotary)
    saved = rows_written(states, before[0], None)
    lines = told("state slots", saved, real(described.slot_mapping))
    return lines + told("entry slots", rows_written(entries, before[1], layout), real(closed))


def stand_in_kernels(step: Step) -> list[str]:
    """What the plugin computes on a CPU in place of vLLM's Triton kernels."""
    ints = {"dtype": torch.int32, "device": step.device}
    rows, lens = torch.full((TOKENS, 1, WINDOW), 7, **ints), torch.full((TOKENS,), 7, **ints)
    requests = torch.full((TOKENS,), 7, **ints)
    cpu_kernels.token_request_mapping(step.starts, requests, REAL, REAL, TOKENS)
    lines = told("requests", requests.tolist(), [0, 1, 2, 3, 4, 0, 0, 0])
    lists = (rows, WINDOW, lens, WINDOW, WINDOW, lens, lens)
    batch = (step.starts, step.seq_lens, requests, step.valid, step.table(64), 0, 64)
    cpu_kernels.window_indices(*lists, *batch, None, 0, False, 1024)
    wanted = [min(p + 1, WINDOW) for p in POSITIONS[:REAL]] + [0] * (TOKENS - REAL)
    lines += told("window lengths", lens.tolist(), wanted)
    lines += told("window rows", (rows[:, 0] >= 0).sum(-1).tolist(), wanted)
    for ratio in RATIOS:
        closed, slots = torch.full((TOKENS,), 7, device=step.device), step.slots(BLOCK)
        slots[3] = -1  # within a request: its row is cached already, and so is its entry
        places = (closed, slots, step.starts, step.seq_lens, step.table(BLOCK), 0)
        cpu_kernels.compressed_slots(*places, BLOCK // ratio, 1, 1, ratio, -1, 1024)
        wanted = torch.where(slots < 0, -1, step.slots(BLOCK, ratio)).tolist()
        lines += told(f"closed slots of {ratio}", closed.tolist(), wanted)
    return lines


def a_layer(step: Step, ratio: int) -> Any:
    """An attention layer with caches of its own."""
    window = cache_of(MAIN_FP8, 64, 1, step.device)
    return bare(
        attention.AnymlaAttention,
        prefix=f"main{ratio}",
        compress_ratio=ratio,
        eps=1e-6,
        scale=512**-0.5,
        PREFILL_CHUNK_SIZE=4,
        attn_sink=torch.zeros(HEADS, device=step.device),
        rotary_emb=step.rotary,
        swa_cache_layer=types.SimpleNamespace(prefix="window", kv_cache=window),
        kv_cache=cache_of(MAIN_FP8, BLOCK, ratio or 1, step.device),
        indexer="some" if ratio == 4 else None,
        topk_indices_buffer=chosen_before(step, real_tokens=True),
    )


def chosen_before(step: Step, *, real_tokens: bool = False) -> Tensor:
    """The selection's buffer: what an earlier step chose, or for real tokens what this one did."""
    entries = torch.arange(CHOSEN, dtype=torch.int32, device=step.device)
    buffer = entries.repeat(TOKENS, 1)
    if real_tokens:
        for token in range(REAL):
            buffer[token, visible_to(token, 4) :] = -1
    return buffer


def metadata_of(step: Step) -> dict[str, Any]:
    """A step's metadata as the builders make them; window rows as vLLM's own does."""
    builder = types.SimpleNamespace(
        compress_ratio=128,
        reorder_batch_threshold=1,
        kv_cache_spec=types.SimpleNamespace(block_size=BLOCK),
        c128a_global_decode_buffer=torch.full(
            (TOKENS, 8), 7, dtype=torch.int32, device=step.device
        ),
        c128a_decode_lens_buffer=torch.full((TOKENS,), 7, dtype=torch.int32, device=step.device),
    )
    build, ids = metadata.CompressedBuilder._build_c128a_metadata, step.requests[: step.seen]
    shared = {"req_id_per_token": ids, "block_table": step.table(BLOCK), "block_size": BLOCK}
    rows = torch.full((step.seen, 1, WINDOW), -1, dtype=torch.int32, device=step.device)
    rows[:REAL, 0, 0] = step.slots(64)[:REAL].int()
    window = types.SimpleNamespace(
        num_decode_tokens=step.seen,
        num_prefill_tokens=0,
        decode_swa_indices=rows,
        decode_swa_lens=step.valid[: step.seen].int(),
        prefill_swa_indices=None,
        prefill_swa_lens=None,
        is_valid_token=step.valid,
        **{f"tile_sched_{k}": v for k, v in a_plan().items()},
    )
    listed = build(builder, step.common(BLOCK), ids)
    return {
        "window": window,
        "main4": types.SimpleNamespace(**shared),
        "main128": types.SimpleNamespace(**shared, **listed),
    }


def a_plan() -> dict[str, Any]:
    return metadata.WindowBuilder.build_tile_scheduler(None, REAL)


def described_index(step: Step, max_seq_len: int) -> Any:
    """Metadata of index keys, of the plugin's builder over what vLLM's returns."""
    common = step.common(BLOCK)
    builder = bare(
        metadata.IndexBuilder,
        compress_ratio=4,
        reorder_batch_threshold=1,
        visible_buffer=torch.full((TOKENS,), 7, dtype=torch.int32, device=step.device),
    )
    theirs = types.SimpleNamespace(
        num_actual_tokens=step.seen,
        max_seq_len=max_seq_len,
        block_table=common.block_table_tensor,
        req_id_per_token=step.requests[: step.seen],
    )
    base = metadata.DeepseekV4SparseMLAMetadataBuilder
    with mock.patch.object(base, "build", return_value=theirs, create=True):
        return builder.build(0, common)


# By name: a part, and what it is given after the step.
PARTS: dict[str, tuple[Any, ...]] = {
    "window": (window_row_written,),
    "list of ratio 4": (entries_listed, 4),
    "list of ratio 128": (entries_listed, 128),
    "attention of ratio 4": (attended, 4),
    "attention of ratio 128": (attended, 128),
    "selection of some": (selected, LONGEST),
    "selection of all": (selected, 4 * CHOSEN),
    "compressor of ratio 4": (compressed, 4, 512),
    "compressor of ratio 128": (compressed, 128, 512),
    "compressor of index keys": (compressed, 4, 128),
    "kernels for a CPU": (stand_in_kernels,),
}


def everything(device: torch.device) -> list[str]:
    """What does not hold, of all parts."""
    lines = []
    for kind, seen in (("whole", TOKENS), ("pieces", REAL)):
        for name, (part, *given) in PARTS.items():
            if part is not stand_in_kernels or device.type == "cpu":
                wrong = part(Step(device, seen), *given)
                lines += [f"{name} ({kind}): {line}" for line in wrong]
    return lines


def forgetting(function: Callable[..., Any], **forgotten: Any) -> Callable[..., Any]:
    """The function, which is given something else in the arguments of these names."""

    def call(*args: Any, **named: Any) -> Any:
        return function(*args, **named | forgotten)

    return call


def writing_padding(function: Callable[..., Any], *places: int) -> Callable[..., Any]:
    """The function, whose slots at these places of its arguments are FREE where there are none."""

    def call(*args: Any, **named: Any) -> Any:
        given = list(args)
        for place in places:
            given[place] = torch.where(given[place] < 0, FREE, given[place])
        return function(*given, **named)

    return call


def all_valid(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        *rest, valid = args
        return function(*rest, torch.ones_like(valid), **named)

    return call


# Where a fault is planted: the module that calls the function, its name there, what is called
# instead; and the part that must notice.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "entries of ratio 128": (
        metadata,
        "compressed_rows",
        forgetting(metadata.compressed_rows, is_valid_token=None),
        "ratio 128",
    ),
    "entries of ratio 4": (
        attention,
        "compute_global_topk_indices_and_lens",
        all_valid(attention.compute_global_topk_indices_and_lens),
        "ratio 4",
    ),
    "visible entries": (
        metadata,
        "_visible",
        lambda positions, slots, ratio: (positions + 1) // ratio,
        "selection",
    ),
    "window row": (
        attention,
        "qnorm_rope_kv_insert",
        writing_padding(attention.qnorm_rope_kv_insert, 3),
        "window",
    ),
    "state": (
        compressor,
        "save_partial_states",
        writing_padding(compressor.save_partial_states, 5),
        "compressor",
    ),
    "entry": (
        compressor,
        "compress_norm_rope_insert",
        writing_padding(compressor.compress_norm_rope_insert, 2, 9),
        "compressor",
    ),
    "window list": (
        cpu_kernels,
        "window_rows",
        forgetting(cpu_kernels.window_rows, is_valid_token=None),
        "kernels",
    ),
    "closed slot": (
        cpu_kernels,
        "slot_mapping",
        lambda positions, *_, **__: torch.arange(len(positions)),
        "kernels",
    ),
}


@contextlib.contextmanager
def planted(fault: str) -> Iterator[str]:
    """Yields the part that must notice."""
    module, name, instead, part = FAULTS[fault]
    with mock.patch.object(module, name, instead):
        yield part


def noticed(fault: str, device: torch.device) -> list[str]:
    """Lines of the part that must notice the fault."""
    torch.manual_seed(0)
    with planted(fault) as part:
        return [line for line in everything(device) if part in line.partition(":")[0]]


if __name__ == "__main__":
    place = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        answer: dict[str, Any] = {"wrong": everything(place)}
        if place.type == "cpu":
            answer["noticed"] = {fault: noticed(fault, place) for fault in FAULTS}
    Path(sys.argv[1]).write_text(json.dumps(answer))
