"""Layers of an engine that scores a sequence: inputs, outputs and dense weights."""

import random

import torch

from anymla.layers.attention import AttentionLayer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.train import FrozenLinear


def scored(model, kv_cache, length, monkeypatch):
    """Return layers, inputs and outputs while an engine scores tokens."""
    return score(model, kv_cache, length, monkeypatch)[0]


def score(model, kv_cache, length, monkeypatch):
    """Let an engine score tokens in one step, from a workspace as on GPUs.

    By slots, as a CPU attends to prompts, sums are in another order.

    Returns:
        Layers, inputs and outputs; the step; log-probabilities of the tokens after the first.
    """
    seen, steps = [], []
    forward = AttentionLayer.forward

    def kept(layer, x, step, *rest):
        x = x.clone()
        steps.append(step)
        seen.append((layer, x, forward(layer, x, step, *rest)))
        return seen[-1][2]

    monkeypatch.setattr(AttentionLayer, "forward", kept)
    tokens = tuple(random.Random(0).choices(range(3, 200), k=length))
    engine = Engine(model, EngineOptions(kv_cache=kv_cache, max_requests=1, max_seq_len=length + 1))
    engine._planner.chunks = True
    with torch.no_grad():
        (done,) = engine.run([Request("a", tokens, 0, prompt_logprobs=True)])
    monkeypatch.undo()
    assert all(step is steps[0] for step in steps)
    return seen, steps[0], torch.tensor(done.prompt_logprobs[1:], dtype=torch.float64)


def weights_of(layer):
    """Dense float32 weights of an engine's layer, under their names in a checkpoint."""
    spec = layer.spec

    def dense(packed):
        return packed.dense(torch.float32)

    def pooled(prefix, compressor):
        parts = compressor.kv_gate.float().chunk(2 if spec.keeps_states else 1)
        names = "wkv", "wgate"
        out = {f"{prefix}{n}.weight": w for n, w in zip(names, parts, strict=False)}
        if spec.position_bias:
            out[f"{prefix}ape"] = compressor.ape
        return out | {f"{prefix}norm.weight": compressor.norm}

    out = {
        "wq_a.weight": dense(layer.wq_a_wkv.first.packed),
        "wkv.weight": dense(layer.wq_a_wkv.second.packed),
        "wq_b.weight": dense(layer.wq_b.packed),
        "wo_a.weight": dense(layer.output.wo_a),
        "wo_b.weight": dense(layer.output.wo_b.packed),
        "q_norm.weight": layer.q_norm,
        "kv_norm.weight": layer.kv_norm,
        "attn_sink": layer.heads.sink,
    }
    if layer.compressor is not None:
        out |= pooled("compressor.", layer.compressor)
    indexer = layer.indexer
    if indexer is None:
        return out
    if indexer.compressor is not None:
        out |= pooled("indexer.compressor.", indexer.compressor)
    if indexer.keys is not None:
        out["indexer.wk.weight"] = dense(indexer.keys.wk.packed)
        out["indexer.k_norm.weight"] = indexer.keys.norm
    out["indexer.wq_b.weight"] = dense(indexer.wq_b.packed)
    out["indexer.weights_proj.weight"] = dense(indexer.weights_proj.packed)
    return out


def frozen(layer, served):
    """Let a layer that trains multiply by an engine's layer's weights as they are stored."""
    layer.wq_a = as_stored(served.wq_a_wkv.first)
    layer.wkv = as_stored(served.wq_a_wkv.second)
    layer.wq_b, layer.wo_b = as_stored(served.wq_b), as_stored(served.output.wo_b)
    if layer.indexer is not None:
        layer.indexer.wq_b = as_stored(served.indexer.wq_b)
    return layer


def as_stored(linear):
    return FrozenLinear(linear.packed, quantize_activations=linear.quantize_activations)
