"""A layer of the plugin's on a device, made of what ``record.py`` kept of a real worker's.

Import ``stand_ins`` first where there is no vLLM.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import measures
import stand_ins
import torch
from torch import Tensor, nn

from anymla.engines.vllm.attention import AnymlaAttention
from anymla.engines.vllm.compressor import AnymlaCompressor
from anymla.engines.vllm.indexer import AnymlaIndexer, AnymlaSparseAttnIndexer
from anymla.engines.vllm.metadata import CompressedBuilder, WindowBuilder
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

Measures = dict[str, dict[str, float]]  # of each part

# Of each part of a step, what goes in; the rest of the record is what comes out.
INPUTS = {
    "query": ("q", "kv", "positions"),
    "index rows": ("kv_score",),
    "index query": ("raw", "raw_weights"),
    "selection": ("q", "weights"),
    "compressed rows": ("kv_score",),
    "attention": ("chosen",),
    "projection": ("o", "positions"),
    "metadata": ("fields",),
}
LONGEST = 4096  # tokens of a request that a captured step has to serve


def unpacked(value: Any, device: torch.device) -> Any:
    """What ``record.pack`` packed; memory between the elements is as it was."""
    if isinstance(value, list):
        return [unpacked(each, device) for each in value]
    if not isinstance(value, dict):
        return value
    if "flat" not in value:
        return {name: unpacked(each, device) for name, each in value.items()}
    return value["flat"].to(device).as_strided(value["size"], value["stride"])


def bare(kind: type, **attributes: Any) -> Any:
    """An object of a class of the plugin's, without vLLM's constructor."""
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def cache_of(size: Sequence[int], stride: Sequence[int], dtype: str, device: Any) -> Tensor:
    """A cache as it lies in vLLM's memory, full of what nobody may read."""
    kind = getattr(torch, dtype)
    reach = size[0] * stride[0] * kind.itemsize
    memory = torch.full((reach,), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(kind).as_strided(tuple(size), tuple(stride))


def one_chunk(window: Any, ratio: int) -> list[tuple[int, int, int, int]]:
    """All prefills of a step's metadata in one chunk, as vLLM plans it."""
    lengths = window.prefill_seq_lens_cpu
    entries = int(lengths.max()) // ratio if ratio > 1 else 0
    return [(0, window.num_prefills, entries, entries + int(lengths.max()))]


class Layer:
    """One layer of the plugin's, with caches of its own."""

    def __init__(self, kept: dict[str, Any], device: torch.device) -> None:
        held = unpacked(kept["constants"], device)
        self.device, self.ratio = device, held["compress_ratio"]
        self.steps = [unpacked(step, device) for step in kept["steps"]]
        shapes = self.steps[0]["metadata"]["shapes"]
        most = {
            name: max(step["metadata"]["shapes"][name]["size"][0] for step in self.steps)
            for name in shapes
        }
        self.caches = {
            name: cache_of((most[name], *each["size"][1:]), each["stride"], each["dtype"], device)
            for name, each in shapes.items()
        }
        self.rotary = types.SimpleNamespace(cos_sin_cache=held["cos_sin"])
        tokens = len(self.steps[0]["query"]["q"])
        entries = held["indexer"]["topk_tokens"] if "indexer" in held else 1
        self.buffer = torch.full((tokens, entries), -1, dtype=torch.int32, device=device)
        self.compressors = [self._compressor(each) for each in held["compressors"]]
        self.indexer = self.scores = None
        if "indexer" in held:
            self._make_indexer(held["indexer"])
        window = held["window_prefix"]
        main = self.caches.get(held["prefix"])
        self.attention = bare(
            AnymlaAttention,
            **{name: held[name] for name in ("q_lora_rank", "head_dim", "eps", "scale", "prefix")},
            compress_ratio=self.ratio,
            rotary_emb=self.rotary,
            attn_sink=held["attn_sink"],
            wo_a_groups=held["wo_a_groups"],
            wo_b=nn.Identity(),
            swa_cache_layer=types.SimpleNamespace(prefix=window, kv_cache=self.caches[window]),
            kv_cache=main,
            indexer=self.indexer,
            topk_indices_buffer=self.buffer,
            PREFILL_CHUNK_SIZE=4,
        )

    def _compressor(self, held: dict[str, Any]) -> Any:
        state, keys = held["state_prefix"], held["k_cache_prefix"]
        names = ("compress_ratio", "overlap", "use_fp4_cache", "rms_norm_eps", "head_dim")
        return bare(
            AnymlaCompressor,
            **{name: held[name] for name in names},
            ape=held["ape"],
            norm=types.SimpleNamespace(weight=held["norm"]),
            state_cache=types.SimpleNamespace(prefix=state, kv_cache=self.caches[state]),
            k_cache_prefix=keys,
            _static_forward_context={keys: types.SimpleNamespace(kv_cache=self.caches[keys])},
        )

    def _make_indexer(self, held: dict[str, Any]) -> None:
        keys = types.SimpleNamespace(
            prefix=held["k_prefix"], kv_cache=self.caches[held["k_prefix"]]
        )
        common = {"k_cache": keys, "compress_ratio": self.ratio, "topk_indices_buffer": self.buffer}
        names = ("topk_tokens", "n_head", "head_dim", "softmax_scale", "use_fp4_kv")
        facts = {name: held[name] for name in names}
        self.indexer = bare(AnymlaIndexer, **facts, **common, compressor=self.compressors[-1])
        self.scores = bare(AnymlaSparseAttnIndexer, **common, layout=INDEX_FP8)

    def run(self, step: dict[str, Any]) -> dict[str, Tensor]:
        """One step in the order of vLLM's layer; the results of its parts by name."""
        fields = step["metadata"]["fields"]
        metadata = {name: types.SimpleNamespace(**each) for name, each in fields.items()}
        for each in metadata.values():
            if "req_id_per_token" in vars(each):
                every = slice(0, each.num_actual_tokens)
                each.selections = [(every, each.max_seq_len // max(self.ratio, 1))]
        held = WindowBuilder.build_tile_scheduler(None, 0)
        window = metadata[self.attention.swa_cache_layer.prefix]
        vars(window).update((f"tile_sched_{name}", plan) for name, plan in held.items())
        window.get_prefill_chunk_plan = lambda compress_ratio, prefill_chunk_size: one_chunk(
            window, compress_ratio
        )
        stand_ins.context.attn_metadata = metadata
        query, attention = step["query"], self.attention
        positions, found = query["positions"], {}
        found["q"] = attention._fused_qnorm_rope_kv_insert(
            query["q"].clone(), query["kv"], positions, metadata
        )
        if self.indexer is not None:
            keys, raw = step["index rows"], step["index query"]
            self.indexer._wq_b_proj = lambda qr, scale: raw["raw"].flatten(1)
            index_q, _, weights = self.indexer(
                None, None, keys["kv_score"], raw["raw_weights"], positions, self.rotary
            )
            found |= {"index_q": index_q, "index_weights": weights}
            given = step["selection"]
            chosen = self.scores(None, given["q"], None, given["weights"])
            found["chosen"] = chosen[: len(positions)].clone()
            # The same entries as vLLM's attention had: scores that are nearly equal may swap.
            self.buffer[: len(positions)] = step["attention"]["chosen"]
        if "compressed rows" in step:
            self.compressors[0](step["compressed rows"]["kv_score"], positions, self.rotary)
        found["out"] = torch.empty_like(found["q"])
        attention.forward_mqa(found["q"], query["kv"], positions, found["out"])
        given = step["projection"]
        found["projected"] = attention._o_proj(given["o"], given["positions"])
        return found

    def compare(
        self, step: dict[str, Any], found: dict[str, Tensor]
    ) -> dict[str, dict[str, float]]:
        """Each part beside vLLM's own kernel."""
        prefixes = self.attention.swa_cache_layer.prefix, self.attention.prefix
        fields, some = step["metadata"]["fields"], step["query"]["some"]
        slots = fields[prefixes[0]]["slot_mapping"]
        rows = get_layout(MAIN_FP8).read(self.caches[prefixes[0]], slots, torch.float32)
        told = {
            "query": {"ulps": measures.ulps(found["q"][some], step["query"]["theirs"])},
            "window rows": measures.changed(rows, step["query"]["their_rows"].float()),
            "attention": {"ulps": measures.ulps(found["out"][some], step["attention"]["theirs"])},
            "output projection": {
                "ulps": measures.ulps(found["projected"], step["projection"]["theirs"])
            },
        }
        for compressor in self.compressors:
            part = "compressed rows" if compressor.head_dim == 512 else "index rows"
            layout = get_layout(MAIN_FP8 if compressor.head_dim == 512 else INDEX_FP8)
            cache = self.caches[compressor.k_cache_prefix]
            rows = layout.read(cache, step[part]["slots"], torch.float32)
            told[part] = measures.changed(rows, step[part]["theirs"].float())
        if self.ratio == 128:
            told["slots of ratio 128"] = {"bytes_that_differ": self._rebuilt(step)}
        if self.indexer is not None:
            raw, positions = step["index query"], step["query"]["positions"]
            told["index query"] = measures.changed(found["index_q"].float(), raw["theirs"].float())
            told["index weights"] = measures.changed(found["index_weights"], raw["their_weights"])
            visible = (positions + 1) // self.ratio
            scores = step["selection"]["scores"]
            told["selection"] = {"missed": measures.missed(scores, found["chosen"], visible)}
        return told

    def _rebuilt(self, step: dict[str, Any]) -> int:
        """How many bytes of a step's metadata differ when the plugin builds them here."""
        fields = step["metadata"]["fields"]
        kept = fields[self.attention.prefix]
        tokens, most = kept["num_actual_tokens"], LONGEST // self.ratio
        options = {"dtype": torch.int32, "device": self.device}
        builder = types.SimpleNamespace(
            compress_ratio=self.ratio,
            kv_cache_spec=types.SimpleNamespace(block_size=kept["block_size"]),
            c128a_global_decode_buffer=torch.empty(tokens, most, **options),
            c128a_decode_lens_buffer=torch.empty(tokens, **options),
        )
        common = types.SimpleNamespace(
            num_actual_tokens=tokens,
            max_seq_len=kept["max_seq_len"],
            positions=step["query"]["positions"],
            block_table_tensor=kept["block_table"],
            slot_mapping=fields[self.attention.swa_cache_layer.prefix]["slot_mapping"],
        )
        build = CompressedBuilder._build_c128a_metadata
        built = build(builder, common, kept["req_id_per_token"])
        return sum(int((_bytes(made) != _bytes(kept[name])).sum()) for name, made in built.items())

    def captured(self) -> int:
        """How many bytes differ when a captured step is replayed for the one after it."""
        first, second = self.steps[-2:]
        for fields in first["metadata"]["fields"].values():
            if "max_seq_len" in fields:
                fields["max_seq_len"] = LONGEST
        before = {name: cache.clone() for name, cache in self.caches.items()}
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run(first)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                found = self.run(first)
            for part, names in INPUTS.items():
                for name in names if part in first else ():
                    _copy(first[part], {name: second[part][name]})
            self._put(before)
            graph.replay()
        stream.synchronize()
        after = {name: cache.clone() for name, cache in self.caches.items()}
        self._put(before)
        direct = self.run(second)
        pairs = [(found[name], direct[name]) for name in direct]
        pairs += [(after[name], self.caches[name]) for name in after]
        return sum(int((_bytes(a) != _bytes(b)).sum()) for a, b in pairs)

    def _put(self, contents: dict[str, Tensor]) -> None:
        for name, cache in self.caches.items():
            cache.copy_(contents[name])


def _copy(target: Any, source: Any) -> None:
    """The values of every tensor of a dictionary into those of another."""
    for name, value in source.items():
        if isinstance(value, dict):
            _copy(target[name], value)
        elif isinstance(value, Tensor):
            target[name].copy_(value)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
