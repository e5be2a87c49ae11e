"""Two compressors, and two kinds of queries, whose projections are one product."""

import pytest
import torch

from anymla.layers.compressor import Compressor, SharedProjection
from anymla.layers.linear import Linear, LinearPair, PackedWeight
from anymla.layers.rope_table import RopeTable
from anymla.model.load import load_model
from anymla.ops.linear import linear_float32
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint


def _compressor(width, dtype=torch.float32):
    return Compressor(
        kv_gate=torch.randn(2 * width, 96).to(dtype),
        ape=torch.randn(4, width),
        norm=torch.ones(width // 2),
        eps=1e-6,
        rope=RopeTable(64, 10000.0, None, torch.device("cpu")),
        overlap=True,
    )


def test_each_gets_its_own_projection():
    main, index = _compressor(1024), _compressor(256)
    gates = main.kv_gate.clone(), index.kv_gate.clone()
    heads = Linear(PackedWeight("plain", torch.randn(4, 96)))
    weight = heads.packed.weight.clone()
    shared = SharedProjection.of(main, index, heads)
    x = torch.randn(5, 96)
    for values, gate in zip(shared(x), (*gates, weight), strict=True):
        torch.testing.assert_close(values, linear_float32(x, gate), rtol=1e-5, atol=1e-4)
    # The weights are there once, and the compressors still know theirs.
    assert torch.equal(main.kv_gate, gates[0])
    assert torch.equal(index.kv_gate, gates[1])
    assert torch.equal(heads.packed.weight, weight)
    storage = main.kv_gate.untyped_storage()
    assert storage.data_ptr() == index.kv_gate.untyped_storage().data_ptr()


def test_not_everything_goes_together():
    assert SharedProjection.of(_compressor(256), None) is None
    other = Linear(PackedWeight("plain", torch.randn(4, 96).bfloat16()))
    apart = SharedProjection.of(_compressor(256), _compressor(256), other)
    assert apart(torch.randn(2, 96))[2] is None
    assert SharedProjection.of(_compressor(256), _compressor(256, torch.bfloat16)) is None
    # A CPU converts them where they are used, one after the other.
    both = [_compressor(256, torch.bfloat16) for _ in range(2)]
    assert SharedProjection.of(*both) is None


@pytest.mark.parametrize("chunk_size", [7, 64])
def test_a_model_generates_the_same(tmp_path, chunk_size):
    write_tiny_checkpoint(
        tmp_path,
        TinyOptions(
            weights="bf16",
            ratios=(4, 4),
            hidden=96,
            heads=2,
            o_groups=1,
            q_lora=64,
            o_lora=64,
            index_heads=4,
            index_topk=8,
            experts=4,
            experts_per_token=2,
            moe_size=64,
        ),
    )
    request = Request("a", tuple(range(3, 100)), 12)
    options = EngineOptions(kv_cache="fp32", chunk_size=chunk_size, max_requests=1, max_seq_len=120)
    tokens = []
    for shares in (False, True):
        model = load_model(tmp_path, dtype=torch.float32, progress=False)
        for layer in model.layers:
            attention = layer.attention
            assert attention.projections is None
            if shares:
                for each in (attention.compressor, attention.indexer.compressor):
                    each.kv_gate = each.kv_gate.float()
                attention.projections = SharedProjection.of(
                    attention.compressor,
                    attention.indexer.compressor,
                    attention.indexer.weights_proj,
                )
                assert attention.projections is not None
                assert attention.queries is None
                attention.queries = LinearPair(attention.wq_b, attention.indexer.wq_b)
                assert attention.queries.merged is not None
        tokens.append(Engine(model, options).run([request])[0].token_ids)
    assert tokens[0] == tokens[1]
