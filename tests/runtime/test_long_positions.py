"""Far from the beginning: caches hold rows that are turned by where they are.

A single layer's rows follow from tokens alone, so that those of the same token, or of the same few
tokens, differ by the rotation of their positions and by nothing else. What lies before the place
that is looked at is not computed: a request is moved there, and what it attends to is no matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anymla.layers.attention import AttentionLayer
from anymla.model.load import load_model
from anymla.model.transformer import Transformer
from anymla.ops.norm_rope.rope_tables import YarnScaling, inv_freq
from anymla.runtime.cache_groups import CacheKind
from anymla.runtime.cache_view import read_rows
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request, RequestState
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

ROPE, VOCABULARY, PERIOD = 64, 264, 256
SMALL: dict[str, Any] = {
    "weights": "bf16", "hidden": 32, "heads": 1, "o_groups": 1, "q_lora": 16, "o_lora": 16,
    "index_heads": 1, "index_topk": 4, "experts": 2, "experts_per_token": 1, "moe_size": 16,
    "mtp": 0, "hash_layers": 0, "window": 16, "vocab": VOCABULARY,
}  # fmt: skip


def v4(*ratios: int, **changes: Any) -> TinyOptions:
    return TinyOptions(**(SMALL | {"ratios": ratios} | changes))


def v41(*ratios: int) -> TinyOptions:
    sharing = TinySharing.of(ratios, engram_layers=())
    return TinyOptions.shared(**(SMALL | {"ratios": ratios, "sharing": sharing}))


def built(options: TinyOptions, directory: Path) -> Transformer:
    write_tiny_checkpoint(directory, options)
    return load_model(directory, dtype=torch.float32, progress=False)


# Every kind of layer that writes rows of its own, and what it writes.
KINDS: dict[str, tuple[TinyOptions, tuple[CacheKind, ...]]] = {
    "V4, window": (v4(0), ("window",)),
    "V4, ratio 4": (v4(4), ("window", "compressed", "index")),
    "V4, ratio 128": (v4(128), ("window", "compressed")),
    "V4.1, window": (v41(0), ("window",)),
    "V4.1, ratio 2": (v41(2), ("window", "compressed", "index")),
    "V4.1, ratio 1": (v41(1), ("window", "compressed", "index")),
}
# A growth of the tables while they are used, and far beyond it. Scores of all entries take their
# time: layers that select are looked at somewhat nearer. Whole halves of the text's periods.
PLACES = {"2,048": 2048 - PERIOD // 2, "70,000": 69_888}
NEARER = 9216


class Far:
    """A request of a text of so many equal periods, read where it is."""

    def __init__(self, model: Transformer, stop: int) -> None:
        options = EngineOptions(
            kv_cache="fp32", max_requests=1, max_seq_len=stop + PERIOD + 1, chunk_size=16
        )
        self.engine = Engine(model, options)
        tokens = tuple(position % PERIOD + 3 for position in range(stop + PERIOD))
        self.engine.submit(Request("far", tokens, 1))
        self.state: RequestState = self.engine.state("far")
        self.stop = stop

    def rows(self, kinds: tuple[CacheKind, ...]) -> dict[CacheKind, dict[int, Tensor]]:
        """Rows by number as they are written on the way to ``stop``, turned back to position 0."""
        found: dict[CacheKind, dict[int, Tensor]] = {kind: {} for kind in kinds}
        first, model = self.state.computed, self.engine.model
        layer_ratio = model.layer_specs[0].ratio
        base = compressed(model) if layer_ratio else plain(model)
        while self.state.computed < self.stop:
            self.engine.step()
            for kind in kinds:
                ratio = 1 if kind == "window" else layer_ratio
                held = read_rows(self.engine.store, self.state, 0, kind)
                skipped = max(0, -(-first // ratio) - held.first)
                numbers = torch.arange(held.first + skipped, held.first + len(held.rows))
                back = turned_back(held.rows[skipped:], numbers * ratio, base)
                found[kind] |= dict(zip(numbers.tolist(), back, strict=True))
        return found


def move(engine: Engine, state: RequestState, start: int) -> None:
    """Have a request that is running go on at ``start``, as if all before it were computed."""
    engine.step()
    state.computed = start
    engine.store.slide(state)


def plain(model: Transformer) -> Tensor:
    return inv_freq(ROPE, model.config.rope_theta)


def compressed(model: Transformer) -> Tensor:
    return inv_freq(ROPE, model.config.compress_rope_theta, model.config.yarn)


def turned_back(rows: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rows [n, C] before their last 64 channels were rotated by their positions, in float64."""
    angles = (positions.float()[:, None] * frequencies).double()
    even, odd = rows[:, -ROPE:].double().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos(), angles.sin()
    back = torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)
    return torch.cat((rows[:, :-ROPE].double(), back), -1)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    return built(KINDS[kind][0], tmp_path_factory.mktemp("kind"))


@pytest.mark.parametrize("place", PLACES)
def test_rows_far_away_are_those_of_the_beginning_turned(
    model: Transformer, kind: str, place: str
) -> None:
    """Of prompts in chunks: rows of the window, entries, and index keys of every kind of layer."""
    selects = "index" in KINDS[kind][1]
    start, length = NEARER if selects and place == "70,000" else PLACES[place], 200
    near = Far(model, 2 * PERIOD).rows(KINDS[kind][1])
    request = Far(model, start + length)
    move(request.engine, request.state, start)
    for cache, rows in request.rows(KINDS[kind][1]).items():
        ratio = 1 if cache == "window" else model.layer_specs[0].ratio
        period = PERIOD // ratio
        # An entry of ratio 4 also pools the tokens before its own, which the first had none of.
        overlap = ratio == 4
        whole = [number for number in rows if number * ratio >= start + ratio * overlap]
        assert len(whole) >= length // ratio - 2
        for number in whole:
            expected = near[cache][number % period + period * overlap]
            torch.testing.assert_close(rows[number], expected, atol=2e-5, rtol=1e-4)


# How the rows of generated tokens come to be written.
SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as many as there are": ({"decode": "plain"}, {}),
    "of fixed size": ({"decode": "fixed"}, {}),
    "with MTP drafts": ({"decode": "plain", "draft_tokens": 2}, {"mtp": 1}),
    "of fixed size with MTP drafts": ({"decode": "fixed", "draft_tokens": 2}, {"mtp": 1}),
    "with a DSpark drafter": (
        {"decode": "plain", "draft_tokens": 3}, {"drafter": "dspark", "block": 3, "stages": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_generated_tokens_far_away_are_turned_by_their_positions(
    schedule: str, place: str, tmp_path: Path
) -> None:
    """Of decode steps of every kind, that cross 2,048 or are far beyond: a row by its token."""
    options, changes = SCHEDULES[schedule]
    model = built(v4(0, **changes), tmp_path)
    known = rows_of_tokens(model)
    start = PLACES[place]
    prompt = start + PERIOD // 2 - 12  # up to twelve tokens before 2,048
    engine = Engine(
        model, EngineOptions(kv_cache="fp32", max_requests=1, max_seq_len=prompt + 50, **options)
    )
    tokens = tuple(position % PERIOD + 3 for position in range(prompt))
    engine.submit(Request("far", tokens, 40))
    state = engine.state("far")
    move(engine, state, start)
    seen = set()
    while engine.busy:
        engine.step()
        if state.finish_reason is not None:
            break
        held = read_rows(engine.store, state, 0, "window")
        numbers = torch.arange(held.first, held.first + len(held.rows))
        back = turned_back(held.rows, numbers, plain(model))
        for number, row in zip(numbers.tolist(), back, strict=True):
            if number >= prompt:
                torch.testing.assert_close(row, known[state.tokens[number]], atol=2e-5, rtol=1e-4)
                seen.add(number)
    assert len(seen) > 24


def rows_of_tokens(model: Transformer) -> dict[int, Tensor]:
    """The window row of every token, turned back to position 0."""
    tokens = (*range(model.config.vocab_size), *range(3, 40))
    engine = Engine(
        model, EngineOptions(kv_cache="fp32", max_requests=1, max_seq_len=400, chunk_size=16)
    )
    engine.submit(Request("near", tokens, 1))
    state, known = engine.state("near"), dict[int, Tensor]()
    while len(known) < model.config.vocab_size:
        engine.step()
        held = read_rows(engine.store, state, 0, "window")
        numbers = torch.arange(held.first, held.first + len(held.rows))
        back = turned_back(held.rows, numbers, plain(model))
        known |= {tokens[n]: row for n, row in zip(numbers.tolist(), back, strict=True)}
    return known


# Models of one kind of layer, and which base turns everything in it. Of V4.1's, the first layer
# writes, the second attends to the same selection, and the third selects among it again.
BASES: dict[str, tuple[TinyOptions, str]] = {
    "V4, window": (v4(0, 0), "rope_theta"),
    "V4, ratio 4": (v4(4, 4), "compress_rope_theta"),
    "V4, ratio 128": (v4(128, 128), "compress_rope_theta"),
    "V4.1, window": (v41(0, 0), "rope_theta"),
    "V4.1, ratio 2": (v41(2, 2, 2), "compress_rope_theta"),
    "V4.1, ratio 1": (v41(1, 1, 1), "compress_rope_theta"),
}


@pytest.mark.parametrize("of", BASES)
def test_a_layer_is_turned_by_the_base_of_its_kind_alone(of: str, tmp_path: Path) -> None:
    """Window, entries, queries and index: with the other base they are what they were."""
    options, base = BASES[of]
    before = logprobs(options, tmp_path / "before")
    other = ({"rope_theta", "compress_rope_theta"} - {base}).pop()
    assert logprobs(options, tmp_path / "other", **{other: 777.0}) == before
    assert logprobs(options, tmp_path / "own", **{base: 777.0}) != before


def logprobs(options: TinyOptions, directory: Path, **changes: float) -> tuple[float | None, ...]:
    """Of a prompt's tokens, by a checkpoint whose configuration says something else."""
    write_tiny_checkpoint(directory, options)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.get("text_config", config).update(changes)
    path.write_text(json.dumps(config))
    model = load_model(directory, dtype=torch.float32, backend="reference", progress=False)
    tokens = tuple(position * 7 % 250 + 3 for position in range(150))
    request = Request("only", tokens, 0, prompt_logprobs=True)
    (done,) = Engine.for_requests(model, EngineOptions(kv_cache="fp32"), [request]).run([request])
    assert done.prompt_logprobs is not None
    return done.prompt_logprobs


@pytest.mark.parametrize("of", [*BASES, "V4, all", "V4.1, all"])
def test_every_part_of_a_layer_has_the_table_of_its_kind(of: str, tmp_path: Path) -> None:
    mixed = {"V4, all": v4(0, 4, 128, 4), "V4.1, all": v41(0, 0, 2, 2, 1, 1, 1, 1)}
    options = mixed.get(of) or BASES[of][0]
    model = built(options, tmp_path)
    yarn = YarnScaling(16.0, 65536)
    for spec, layer in zip(model.layer_specs, model.layers, strict=True):
        attention = layer.attention
        assert isinstance(attention, AttentionLayer)
        expected = inv_freq(ROPE, 160_000.0, yarn) if spec.ratio else inv_freq(ROPE, 10_000.0)
        assert torch.equal(attention.rope.inv_freq, expected)
        parts = [attention.compressor, attention.indexer]
        if attention.indexer is not None:
            parts.append(attention.indexer.compressor)
        assert all(part.rope is attention.rope for part in parts if part is not None)
