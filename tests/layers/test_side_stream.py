"""The order of work that may run on a second queue."""

import contextlib
import dataclasses

import pytest
import torch

from anymla.layers import compressor, indexer, selection
from anymla.layers.side_stream import Inline
from anymla.model.load import load_model
from anymla.ops.streams import deferred_stream_wait, flush_stream_wait
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.runtime.step_plan import StepPlanner
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

OPTIONS = TinyOptions(
    weights="bf16", ratios=(0, 4, 128), hidden=128, heads=2, o_groups=1, q_lora=64, o_lora=64,
    index_heads=4, index_topk=8, experts=4, experts_per_token=2, moe_size=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("side")
    write_tiny_checkpoint(directory, OPTIONS)
    return directory


class _Watched(Inline):
    """Notes forks and joins, and what is launched in between."""

    def __init__(self):
        super().__init__()
        self.events = []

    @contextlib.contextmanager
    def beside(self, *, first=False, after=None):
        self.events.append("first" if first else "fork")
        yield
        self.events.append("forked")

    def join(self):
        self.events.append("join")


def test_everything_written_beside_is_waited_for(checkpoint, monkeypatch):
    """Compressors and the indexer are launched beside, attention after the join."""
    model = load_model(checkpoint, dtype=torch.float32, progress=False)
    side = _Watched()
    for module, name in (
        (compressor, "compress_norm_rope_insert"),
        (indexer, "indexer_q_rope_quant"),
        (selection, "select_topk"),
    ):
        original = getattr(module, name)

        def noted(*args, name=name, original=original, **kwargs):
            side.events.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, noted)
    build = StepPlanner.build
    monkeypatch.setattr(
        StepPlanner, "build", lambda *args, **kw: dataclasses.replace(build(*args, **kw), side=side)
    )
    engine = Engine(model, EngineOptions(kv_cache="fp32", max_requests=1, max_seq_len=200))
    engine.submit(Request("a", tuple(range(3, 150)), 1))
    engine.step()
    writes, shared = "compress_norm_rope_insert", ("fork", "forked", "join")
    assert side.events == [
        "join", *shared,  # a window only
        "first", writes, "forked", "fork", writes, "forked",  # keys, and entries
        "first", "indexer_q_rope_quant", "select_topk", "forked", "join", *shared,
        "fork", writes, "forked", "join", *shared,
    ]  # fmt: skip


@pytest.mark.gpu
def test_further_queues_change_no_bit(checkpoint):
    model = load_model(checkpoint, dtype=torch.bfloat16, device="cuda", progress=False)
    requests = [Request(str(n), tuple(range(3, 90 + 40 * n)), 20) for n in range(3)]
    results = []
    for decode, side in (("graph", True), ("graph", False), ("fixed", False)):
        options = EngineOptions(max_requests=3, max_seq_len=260, side_stream=side, decode=decode)
        done = Engine(model, options).run(requests)
        results.append([(each.token_ids, each.logprobs) for each in done])
    assert results[0] == results[1] == results[2]


def test_an_operation_that_does_not_wait_is_found_out():
    waited = []
    with deferred_stream_wait(lambda: waited.append(1)):
        flush_stream_wait()
        flush_stream_wait()
    assert waited == [1]
    with pytest.raises(AssertionError, match="has not waited"), deferred_stream_wait(print):
        pass
    flush_stream_wait()  # for nothing


def test_an_engine_uses_two_queues_for_few_rows():
    assert EngineOptions().runs_beside(8)
    assert not EngineOptions().runs_beside(1024)
    assert EngineOptions(side_stream=True).runs_beside(1024)
    assert not EngineOptions(side_stream=False).runs_beside(1)
