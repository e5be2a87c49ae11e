import re
import time
import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from fake_block_model import FakeBlockModel
from fake_model import FakeModel

from anymla.layers.spec import LayerSpec
from anymla.ops.memory import NotEnoughMemory
from anymla.ops.streams import Workspace
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.engine import Engine
from anymla.runtime.ngrams import NgramReader
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request

WINDOW_ONLY = (LayerSpec(0, "backbone", 0, False, False, 128, 0),)


@pytest.fixture
def has(monkeypatch):
    """Pretend that the machine has so many bytes."""

    def pretend(nbytes):
        monkeypatch.setattr("anymla.ops.memory.host_bytes", lambda: nbytes)

    return pretend


def refused(make, pattern):
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(NotEnoughMemory, match=pattern) as caught:
            make()
        took, (_, peak) = time.perf_counter() - began, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert took < 1
    assert peak < 10e6
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        ({"max_requests": 10**8}, "caches"),
        ({"max_seq_len": 10**8}, "caches"),
        ({"max_requests": 10**12, "max_seq_len": 1}, "caches"),
        ({"draft_tokens": 10**8, "max_seq_len": 10**8}, "row lists of a step"),
        ({"max_seq_len": 10**18}, "caches"),
    ],
)
def test_sizes_that_no_machine_has(has, sizes, largest):
    has(64e9)
    message = refused(lambda: Engine(FakeModel(), EngineOptions(**sizes)), r"an engine for \d+ req")
    assert re.search(rf"needs [\d.e+]+ \wB of memory \({largest}: .*\), has 64\.0 GB$", message)


def test_blocks_of_a_drafter(has):
    has(64e9)
    model = FakeBlockModel()
    options = {"max_seq_len": 100, "chunk_size": 1, "pages": {"window": 4}}
    refused(
        lambda: Engine(model, EngineOptions(draft_tokens=10**8, **options)),
        r"\(blocks of drafts: 467\.2 GB",
    )
    model.config.hidden_size, model.dspark.target_layer_ids = 2**24, (1,) * 64
    refused(
        lambda: Engine(model, EngineOptions(draft_tokens=1, **options)),
        r"\(taps of a step: 68\.7 GB",
    )


def test_wide_steps_are_reckoned_too(has):
    has(2e9)
    model = FakeModel(WINDOW_ONLY)
    long = {"max_seq_len": 10**7, "max_requests": 1, "pages": {"window": 4}}
    Engine(model, EngineOptions(**long))
    refused(
        lambda: Engine(model, EngineOptions(chunk_size=10**7, **long)),
        r"10000001 in a step, needs .*\(row lists of a step: 10\.2 GB\)",
    )
    model.config.qk_rope_head_dim = 64
    refused(lambda: Engine(model, EngineOptions(**long)), r"\(rotary table: 2\.6 GB\)")
    model.config.qk_rope_head_dim = 0
    model.config.hidden_size = 2**29
    refused(lambda: Engine(model, EngineOptions(**long)), r"\(streams of a step: ")
    model.config.hidden_size, model.config.vocab_size = 2, 2**30
    refused(lambda: Engine(model, EngineOptions(**long)), r"\(logits of a step: 4\.3 GB\)")


@pytest.mark.parametrize(("scaled", "token"), [(True, 2 * 16 * 33), (False, 2 * 16 * 64)])
def test_rows_of_ngrams(has, monkeypatch, scaled, token):
    """Two layers that read sixteen rows of 32 values each, in FP8 with a scale or plain."""
    has(64e9)
    weight = torch.empty(1, 32, dtype=torch.uint8 if scaled else torch.bfloat16)
    table = SimpleNamespace(weight=weight, scale=weight[:, :1] if scaled else None)
    ngrams = SimpleNamespace(moduli=torch.ones(4, 4))
    model = FakeModel(WINDOW_ONLY)
    model.engrams = [SimpleNamespace(layer=at, table=table, ngrams=ngrams) for at in range(2)]
    assert NgramReader(model.engrams, model.device).token_bytes == token
    many = {"max_seq_len": 10**9, "max_requests": 1, "pages": {"window": 4}}
    refused(
        lambda: Engine(model, EngineOptions(chunk_size=10**9 - 1, **many)),
        rf"needs .*\(n-gram rows of a step: {token / 1e3:.1f} TB\)",
    )
    asked = []
    monkeypatch.setattr(
        "anymla.runtime.engine_memory.require_memory", lambda what, parts, *_: asked.append(parts)
    )
    few = {"max_requests": 3, "draft_tokens": 1, "max_seq_len": 100, "chunk_size": 1}
    drafting = FakeBlockModel()
    drafting.engrams = model.engrams
    for mode, rows in (("plain", 0), ("fixed", 6)):
        Engine(drafting, EngineOptions(decode=mode, **few))
        assert asked.pop().get("n-gram buffers", 0) == rows * token


def test_a_wide_window(has):
    has(64e9)
    specs = (LayerSpec(0, "backbone", 0, False, False, 10**9, 0),)
    request = Request("a", tuple(range(60)), max_new_tokens=4)
    refused(
        lambda: Engine.for_requests(FakeModel(specs), EngineOptions(), [request]),
        r"needs 512\.0 GB of memory \(row lists of a step: 512\.0 GB\)",
    )


def test_many_pages_are_lists_on_the_host(has, monkeypatch):
    class OnDevice(FakeModel):
        device = torch.device("cuda")

    has(64e9)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10**18, 10**18))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 0)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 0)
    options = EngineOptions(max_requests=10**8, max_seq_len=64)

    def make():
        Engine(OnDevice(), options, workspace=Workspace("cpu"))

    refused(
        lambda: Engine(OnDevice(), options, workspace=Workspace("cpu")),
        r"of memory \(page and request lists: ",
    )
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10**9, 10**18))
    refused(
        lambda: Engine(OnDevice(), options, workspace=Workspace("cpu")),
        r"of memory on cuda \(caches: .* has 1\.0 GB$",
    )


def test_no_more_is_asked_for_than_is_taken(has):
    """The reckoning is a lower bound: what it counts as caches and tables is what is allocated."""
    options = EngineOptions(max_requests=3, max_seq_len=5000, chunk_size=8)
    engine = Engine(FakeModel(), options)
    tables = sum(
        4 * engine.options.max_requests * (-(-5000 // group.tokens_per_page))
        for group in cache_groups(engine.model.layer_specs[:4])
    )
    taken = engine.store.nbytes + tables
    has(taken - 1)
    with pytest.raises(NotEnoughMemory):
        Engine(FakeModel(), options)
    has(taken * 1.1 + 200_000)
    Engine(FakeModel(), options)


@pytest.mark.parametrize("sizes", [{"chunk_size": 10**8}, {"draft_tokens": 10**8}])
def test_a_warm_up_of_steps_that_no_requests_could_fill(has, sizes):
    has(64e9)
    engine = Engine(FakeModel(), EngineOptions(max_requests=1, max_seq_len=200, **sizes))
    refused(engine.warm_up, r"100000\d\d\d in a step, needs .*\(row lists of a step: ")
