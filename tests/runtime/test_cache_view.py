import pytest
import torch
from fake_model import SPECS, FakeModel

from anymla.formats.cache_dump import load_cache
from anymla.formats.page_layout import get_layout
from anymla.runtime.cache_view import dump_pages, read_rows
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request

PROMPT = tuple((7 * n) % 61 for n in range(300))


@pytest.fixture(scope="module")
def running():
    """Two requests in the middle of generation."""
    options = EngineOptions(kv_cache="fp32", max_requests=2, max_seq_len=400, draft_tokens=2)
    engine = Engine(FakeModel(), options)
    for name in ("a", "b"):
        engine.submit(Request(name, PROMPT, 40))
    for _ in range(6):
        engine.step()
    return engine


def _values(tokens, layer):
    return [(token + 1) * (1 + p % 7) + layer for p, token in enumerate(tokens)]


@pytest.mark.parametrize("kind", ["window", "state", "index_state"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_rows_by_position(running, kind, name):
    state = running.state(name)
    held = read_rows(running.store, state, 1, kind)
    retention = 128 if kind == "window" else 8
    assert 0 < held.first <= state.computed - retention + 1
    values = _values(state.tokens, 1)
    assert held.rows[:, 0].tolist() == values[held.first : state.computed]


@pytest.mark.parametrize(("layer", "kind"), [(1, "compressed"), (2, "compressed"), (3, "index")])
def test_rows_by_entry(running, layer, kind):
    state, spec = running.state("b"), SPECS[layer]
    held = read_rows(running.store, state, layer, kind)
    values = _values(state.tokens, layer)
    ends = range(spec.ratio, state.computed + 1, spec.ratio)
    assert held.first == 0
    assert held.rows[:, -1].tolist() == [
        sum(values[max(0, end - spec.pooled_tokens) : end]) for end in ends
    ]


@pytest.mark.parametrize("kind", ["window", "compressed", "index"])
def test_a_dump_holds_the_same_rows(running, kind, tmp_path):
    state = running.state("b")
    dump_pages(running.store, state, 3, kind, tmp_path / "dump")
    cache, layout_id, meta = load_cache(tmp_path / "dump")
    held = read_rows(running.store, state, 3, kind)
    rows = get_layout(layout_id).read(cache, torch.arange(meta["rows"]), torch.float32)
    assert torch.equal(rows, held.rows)
    assert meta == {
        "request": "b",
        "layer": 3,
        "kind": kind,
        "first": held.first,
        "rows": len(held.rows),
    }


def test_caches_that_a_layer_lacks(running, tmp_path):
    state = running.state("a")
    with pytest.raises(ValueError, match="layer 0 keeps no compressed cache"):
        read_rows(running.store, state, 0, "compressed")
    with pytest.raises(ValueError, match="layer 2 keeps no index cache"):
        dump_pages(running.store, state, 2, "index", tmp_path / "dump")
    with pytest.raises(ValueError, match=r"window, compressed, index caches .*, not 'state'"):
        dump_pages(running.store, state, 2, "state", tmp_path / "dump")


def test_pages_can_be_read_when_a_request_ends():
    seen = []
    engine = Engine(
        FakeModel(),
        EngineOptions(kv_cache="fp32", max_seq_len=400),
        on_finish=lambda engine, state: seen.append(read_rows(engine.store, state, 0, "window")),
    )
    engine.run([Request("a", PROMPT, 2)])
    assert seen[0].first + len(seen[0].rows) == 301
