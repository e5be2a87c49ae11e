"""anymla against what nemo-automodel's DeepSeek-V4.1 gave once, and deliberate faults against it.

``record_nemo.py`` made the numbers; ``test_nemo.py`` compares everything, where it is installed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from record_nemo import RECORDED, sample, sample_logits
from test_transformers import LAYER_BOUND, LOGITS_BOUND, run_alone
from torch import Tensor
from traces import Trace
from v41_cases import CASES

from anymla.layers.compressor import LatentCompressor
from anymla.layers.hyper_connection import HyperConnection
from anymla.layers.indexer import Indexer
from anymla.layers.rope_table import RopeTable
from anymla.model.load import load_model
from anymla.model.transformer import Transformer
from anymla.testing.tiny_checkpoint import write_tiny_checkpoint

GIVEN: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))


def load(name: str, directory: Path) -> Transformer:
    write_tiny_checkpoint(directory, CASES[name])
    return load_model(directory, dtype=torch.float32, progress=False)


def errors(name: str, got: Trace) -> tuple[float, float]:
    """Largest difference of a layer's streams, and of the logits, both relative."""
    given = GIVEN[name]
    layers = [
        float((sample(ours) - torch.tensor(theirs)).abs().max()) / largest
        for ours, theirs, largest in zip(
            got.streams, given["streams"], given["largest"], strict=True
        )
    ]
    logits = (sample_logits(got.logits) - torch.tensor(given["logits"])).abs().max()
    return max(layers), float(logits) / given["largest_logit"]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk_size", [512, 13])
def test_recorded_runs(name: str, chunk_size: int, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    _, got = run_alone(model, tuple(GIVEN[name]["prompt"]), chunk_size=chunk_size)
    layer, logits = errors(name, got)
    assert layer <= LAYER_BOUND
    assert logits <= LOGITS_BOUND


def _respecify(model: Transformer, **changes: Any) -> None:
    for layer in model.layers:
        attention = layer.attention
        attention.spec = dataclasses.replace(attention.spec, **changes)
        if attention.indexer is not None:
            attention.indexer.spec = attention.spec


def heads_normed(model: Transformer) -> None:
    _respecify(model, norms_heads=True)


def no_candidates(model: Transformer) -> None:
    _respecify(model, candidates=None)


def newest_block_not_pinned(model: Transformer) -> None:
    from anymla.layers import selection

    original = selection.select_candidate_blocks

    def unpinned(logits: Tensor, lengths: Tensor, count: int, **named: Any) -> Tensor:
        # Its scores are hidden, which a block that is always kept would not notice.
        size = named["block_size"]
        last = (lengths.long() - 1).div(size, rounding_mode="floor").clamp(min=0)
        kept = original(logits, (last * size).int().clamp(min=1), count, **named)
        return kept

    _patch(selection, "select_candidate_blocks", unpinned)


def visible_one_late(model: Transformer) -> None:
    original = Indexer._select

    def late(self: Indexer, queries: Any, step: Any, *rest: Any) -> Tensor:
        lens = {name: (each - 1).clamp(min=0) for name, each in step.index_lens.items()}
        return original(self, queries, dataclasses.replace(step, index_lens=lens), *rest)

    _patch(Indexer, "_select", late)


def rotated_at_the_end(model: Transformer) -> None:
    original = LatentCompressor.insert

    def ended(self: LatentCompressor, rows: Tensor, step: Any, *rest: Any) -> None:
        moved = step.positions + (self.ape.shape[0] - 1)
        original(self, rows, dataclasses.replace(step, positions=moved), *rest)

    _patch(LatentCompressor, "insert", ended)


def keys_from_rotated_entries(model: Transformer) -> None:
    from anymla.ops.norm_rope import rope

    original = Indexer.write_latent_keys

    def rotated(self: Indexer, latent: Tensor, compressor: Any, step: Any, *rest: Any) -> None:
        cos_sin = compressor.rope.table_for(step.max_seq_len)
        first = step.positions + 1 - compressor.ape.shape[0]
        turned = rope(latent.unsqueeze(1), first, cos_sin).squeeze(1)
        original(self, turned, compressor, step, *rest)

    _patch(Indexer, "write_latent_keys", rotated)


def own_selection_of_the_source(model: Transformer) -> None:
    """Layers behind one that selects again attend to what the first one selected."""
    for layer in model.layers:
        spec = layer.attention.spec
        if spec.index_source is not None and spec.kv_source is not None:
            layer.attention.spec = dataclasses.replace(spec, index_source=spec.kv_source)


def plain_rope_where_entries_are_reused(model: Transformer) -> None:
    config = model.config
    table = RopeTable(config.qk_rope_head_dim, config.rope_theta, None, model.device)
    for layer in model.layers:
        if layer.attention.spec.ratio and layer.attention.compressor is None:
            layer.attention.rope = table


def another_eps(model: Transformer) -> None:
    for layer in model.layers:
        layer.attention.eps = 1e-2


def sites_not_delayed(model: Transformer) -> None:
    for module in model.modules():
        if isinstance(module, HyperConnection):
            module.options = dataclasses.replace(module.options, delayed=False)


def no_engram(model: Transformer) -> None:
    for layer in model.layers:
        layer.engram = None


def bigrams_of_the_chunk_alone(model: Transformer) -> None:
    from anymla.runtime.ngrams import NgramReader

    original = NgramReader.found

    def forgetful(self: NgramReader, spans: Any) -> Any:
        return original(self, [dataclasses.replace(s, state=_Nothing()) for s in spans])

    _patch(NgramReader, "found", forgetful)


class _Nothing:
    tokens: list[int] = []  # noqa: RUF012


FAULTS: list[Callable[[Transformer], None]] = [
    heads_normed,
    no_candidates,
    newest_block_not_pinned,
    visible_one_late,
    rotated_at_the_end,
    keys_from_rotated_entries,
    own_selection_of_the_source,
    plain_rope_where_entries_are_reused,
    another_eps,
    sites_not_delayed,
    no_engram,
    bigrams_of_the_chunk_alone,
]
_PATCHES = pytest.MonkeyPatch()


def _patch(owner: Any, name: str, value: Any) -> None:
    _PATCHES.setattr(owner, name, value)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault: Callable[[Transformer], None], tmp_path: Path) -> None:
    model = load("flash", tmp_path)
    try:
        fault(model)
        _, got = run_alone(model, tuple(GIVEN["flash"]["prompt"]), chunk_size=40)
    finally:
        _PATCHES.undo()
    layer, logits = errors("flash", got)
    print(f"{fault.__name__}: streams {layer:.2g}, logits {logits:.2g}")
    assert layer > 100 * LAYER_BOUND
    assert logits > 10 * LOGITS_BOUND
