"""Layers of DeepSeek-V4.1: gradients against the float64 oracle's, outputs against the engine's."""

import copy

import pytest
import torch
from served_layers import scored, weights_of

from anymla.layers.caches import CACHE_FORMATS
from anymla.model.load import load_model
from anymla.testing.oracle.attention import AttentionOracle, IndexQueries, membership, spans
from anymla.testing.oracle.config import OracleConfig
from anymla.testing.oracle.model import KV_ROUNDING
from anymla.testing.oracle.selection import best
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing
from anymla.train import Attention, Plan, Shared
from anymla.train.layer import Sizes

# A source of ratio 2 and one of 1, a layer behind each that reuses, and two that select anew within
# 3 blocks of 4 entries.
RATIOS = (0, 2, 2, 1, 1, 1, 1)
OPTIONS = TinyOptions.shared(
    weights="bf16", hidden=96, heads=4, o_groups=2, o_lora=32, q_lora=64, index_heads=8,
    index_topk=6, experts=4, experts_per_token=2, moe_size=32, window=16, vocab=258,
    ratios=RATIOS,
    sharing=TinySharing.of(
        RATIOS, kv_sources=(1, 3), index_sources=(1, 3, 5, 6), candidate_source=3,
        candidate_blocks=3, candidate_block_size=4, engram_layers=(),
    ),
)  # fmt: skip
TOKENS = 70


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("shared_layers")
    write_tiny_checkpoint(directory, OPTIONS)
    return directory


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, dtype=torch.float32, progress=False)


def layers_of(model, kv_cache, **options):
    """Layers that train, of the weights of a model that serves."""
    layers = []
    for served in model.modules():
        if type(served).__name__ == "AttentionLayer":
            rope = copy.copy(served.rope)
            with torch.inference_mode(False):  # an engine's tables are inference tensors
                rope._table = rope._table.clone()
            sizes = Sizes.of(model.config)
            layer = Attention(served.spec, sizes, rope, CACHE_FORMATS[kv_cache], **options)
            layer.load_state_dict({k: v.clone() for k, v in weights_of(served).items()})
            layers.append(layer)
    return layers[: len(RATIOS)]


@pytest.mark.parametrize("kv_cache", ["nvfp4", "fp8", "bf16", "fp32"])
def test_outputs_are_those_of_an_engine_that_scores_the_sequence(model, kv_cache, monkeypatch):
    """Bit for bit in every layer, from entries and selections that earlier layers left."""
    length, shared = 130, Shared()
    seen = scored(model, kv_cache, length, monkeypatch)
    layers = layers_of(model, kv_cache)
    assert [served.spec for served, _, _ in seen] == [layer.spec for layer in layers]
    for layer, (_, x, out) in zip(layers, seen, strict=True):
        with torch.no_grad():
            plan = Plan([0, length], layer.spec.ratio, layer.spec.window)
            got = layer(x, plan, shared=shared).out
        assert torch.equal(got, out), layer.spec
    assert set(shared.entries) == {1, 3}
    assert set(shared.lists) == {1, 3, 5, 6}
    assert set(shared.blocks) == {3}


class Given:
    """Weights of layers that train, as the oracle reads a checkpoint's."""

    def __init__(self, layers):
        self.tensors = {
            f"layers.{layer.spec.index}.attn.{name}": value.detach().double().requires_grad_()
            for layer in layers
            for name, value in layer.named_parameters()
        }

    def __contains__(self, name):
        return name in self.tensors

    def __getitem__(self, name):
        return self.tensors[name]

    def linear(self, module):
        return self.tensors[f"{module}.weight"]

    def apply(self, x, module):
        return x @ self.linear(module).T


def straight_through(rows, rounded):
    return rows + (rounded - rows).detach()


def oracle(x, config, weights, rounding, lists):
    """Outputs of layers, each of which adds to the input of the next, and their own selections."""
    rows, outs, own, kept = {}, [], {}, None
    chained = rounding.main == "rows_fp32_512"
    at = torch.arange(len(x))
    for index, ratio in enumerate(RATIOS):
        layer = AttentionOracle(config, weights, index, f"layers.{index}.attn")
        q, queries = layer.queries(x, at)
        exact = layer.rows(x, at)
        read = exact.rounded(rounding, rotates=False)
        read.window = straight_through(exact.window, read.window)
        chosen = None
        if ratio:
            source = config.sharing.source(config.sharing.kv, index)
            if source == index:
                read.compressed = straight_through(exact.compressed, read.compressed)
                rows[index] = read
            read.compressed, read.index = rows[source].compressed, rows[source].index
            chosen = lists[config.sharing.source(config.sharing.index, index)]
        if queries is not None:
            with torch.no_grad():
                source, blocks, size = config.sharing.candidates
                queries = IndexQueries(queries.q.detach(), queries.weights.detach())
                if index == source:
                    scores = layer.block_scores(queries, read.index, size)
                    members = membership(best(scores, scores > -torch.inf, blocks), scores.shape[1])
                    kept = members.repeat_interleave(size, 1)
                layer.kept = kept if index > source else None
                parts = [layer.select(queries, read.index, part) for part in spans(len(x))]
                own[index] = torch.cat(parts)
                layer.kept = None
        outs.append(layer.output(layer.attend(q, read, chosen), at))
        x = x + outs[-1] if chained else x
    return outs, own


@pytest.mark.parametrize("kv_cache", ["fp32", "nvfp4", "fp8"])
def test_gradients_of_every_parameter_are_the_oracles(checkpoint, model, kv_cache):
    """Entries have the gradients of all layers that read them, and rounded rows their gradient.

    Where rows are rounded, a row near the middle of two codes may take the other in float64: layers
    then have one input in common, and the bound is that of a few such codes. Gradients at rows that
    are not rounded are 3e-2 and more away.
    """
    exactly = kv_cache == "fp32"
    bound = 2e-5 if exactly else 2e-3
    layers = layers_of(model, kv_cache)
    config = OracleConfig.from_dir(checkpoint)
    x = torch.randn(TOKENS, OPTIONS.hidden, requires_grad=True)
    h, outs, shared = x, [], Shared()
    for layer in layers:
        plan = Plan([0, TOKENS], layer.spec.ratio, layer.spec.window)
        outs.append(layer(h, plan, shared=shared).out)
        h = h + outs[-1] if exactly else x
    weights = Given(layers)
    exact = x.detach().double().requires_grad_()
    theirs, own = oracle(exact, config, weights, KV_ROUNDING[kv_cache], shared.lists)
    assert set(own) == set(shared.lists)
    for index, chosen in own.items() if exactly else ():
        assert torch.equal(chosen.sort().values, shared.lists[index].sort().values.long()), index
    pulls = [torch.randn_like(out) for out in outs]
    names = {"x": (x, exact)}
    for layer in layers:
        for name, value in layer.named_parameters():
            path = f"layers.{layer.spec.index}.attn.{name}"
            names[path] = value, weights[path]
    got = torch.autograd.grad(outs, [a for a, _ in names.values()], pulls, allow_unused=True)
    want = torch.autograd.grad(
        theirs, [b for _, b in names.values()], [p.double() for p in pulls], allow_unused=True
    )
    for name, a, b in zip(names, got, want, strict=True):
        if ".indexer." in name:
            assert a is None
            assert b is None
            continue
        assert (a - b).norm() < bound * b.norm(), name
    for a, b in zip(outs, theirs, strict=True):
        assert (a - b).norm() < bound * b.norm()


@pytest.mark.parametrize("stage", ["sparse", "dense"])
def test_indexers_learn_from_the_losses_of_all_layers_that_read_their_keys(model, stage):
    layers = layers_of(model, "nvfp4", index_stage=stage)
    x, shared, losses = torch.randn(TOKENS, OPTIONS.hidden, requires_grad=True), Shared(), {}
    h = x
    for layer in layers:
        plan = Plan([0, 30, TOKENS], layer.spec.ratio, layer.spec.window)
        out, loss, lists = layer(h, plan, shared=shared)
        h = h + out
        assert (loss is None) == (not layer.spec.selects)
        assert stage == "sparse" or lists is None
        if loss is not None:
            losses[layer.spec.index] = loss
    keys = list(layers[3].indexer.wk.parameters())
    for index in (3, 5, 6):
        (grad,) = torch.autograd.grad(losses[index], keys, retain_graph=True)
        assert grad.any()
    (none,) = torch.autograd.grad(losses[1], keys, allow_unused=True, retain_graph=True)
    assert none is None
    total = sum(losses.values())
    model_parameters = [
        p for layer in layers for n, p in layer.named_parameters() if not n.startswith("indexer")
    ]
    got = torch.autograd.grad(total, [x, *model_parameters], allow_unused=True, retain_graph=True)
    assert set(got) == {None}
    own = [p for layer in layers for n, p in layer.named_parameters() if n.startswith("indexer")]
    assert set(torch.autograd.grad(h.sum(), own, allow_unused=True, retain_graph=True)) == {None}
    for grad in torch.autograd.grad(total, own):
        assert grad.isfinite().all()
        assert grad.any()


def test_packed_sequences_are_each_alone(model):
    """With lengths on the host and without them, blocks of entries included."""
    lengths = [50, 0, 1, 70]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    layers, x = layers_of(model, "nvfp4"), torch.randn(sum(lengths), OPTIONS.hidden)

    def run(x, plan_of):
        shared, outs = Shared(), []
        for layer in layers:
            outs.append(layer(x, plan_of(layer.spec), shared=shared).out)
        return outs

    packed = run(x, lambda spec: Plan(starts, spec.ratio, spec.window))

    def unknown(spec):
        plan = Plan(starts, spec.ratio, spec.window)
        plan.lengths = None
        return plan

    for a, b in zip(packed, run(x, unknown), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for begin, length in zip(starts.tolist(), lengths, strict=False):
        part = slice(begin, begin + length)
        alone = run(x[part], lambda spec, n=length: Plan([0, n], spec.ratio, spec.window))
        for a, b in zip(packed, alone, strict=True):
            torch.testing.assert_close(b, a[part], rtol=1e-5, atol=1e-5)


def test_entries_of_a_layer_that_has_not_run_are_missed(model):
    layer = layers_of(model, "nvfp4")[2]
    with pytest.raises(KeyError, match="1"):
        layer(torch.randn(9, OPTIONS.hidden), Plan([0, 9], 2, 16))
