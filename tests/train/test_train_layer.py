"""The attention layer: gradients against transformers, outputs against the engine."""

from pathlib import Path

import pytest
import torch
from served_layers import scored, weights_of

from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.rope_table import RopeTable
from anymla.layers.spec import LayerSpec
from anymla.model.load import load_model
from anymla.train import Attention, Plan
from anymla.train.layer import Sizes

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"

SIZES = Sizes(
    hidden_size=64, num_attention_heads=4, head_dim=512, q_lora_rank=32, o_groups=2,
    o_lora_rank=16, index_n_heads=32, index_head_dim=128, rms_norm_eps=1e-6,
)  # fmt: skip
NAMES = {
    "wq_a.weight": "q_a_proj.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "kv_norm.weight": "kv_norm.weight",
    "attn_sink": "sinks",
}
POOLED = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "ape": "position_bias",
    "norm.weight": "kv_norm.weight",
}
INDEXER = {"wq_b.weight": "q_b_proj.weight", "weights_proj.weight": "scorer.weights_proj.weight"}


@pytest.fixture(autouse=True)
def gradients(inference_rules):
    with torch.enable_grad():
        yield


def spec_of(ratio, width=512, window=128):
    return LayerSpec(
        index=0, role="backbone", ratio=ratio, overlap=ratio == 4, selects=ratio == 4,
        window=window, selection_width=width if ratio == 4 else 0,
    )  # fmt: skip


def layer_of(spec, **options):
    rope = RopeTable(64, 160000.0 if spec.ratio else 10000.0, None, torch.device("cpu"))
    layer = Attention(spec, SIZES, rope, CACHE_FORMATS["fp32"], **options)
    with torch.no_grad():
        for name, value in layer.named_parameters():
            torch.nn.init.normal_(value, std=1.0 if value.ndim == 1 else value.shape[-1] ** -0.5)
            if name.endswith("norm.weight"):
                value.mul_(0.2).add_(1.0)
    return layer


def names_of(layer):
    names = dict(NAMES)
    if layer.compressor is not None:
        names |= {f"compressor.{a}": f"compressor.{b}" for a, b in POOLED.items()}
    return names


def transformers_layer(layer, length):
    """Attention of the same weights, its rotary angles and its causal mask of the window."""
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    kinds = {0: "sliding", 4: "compressed_sparse", 128: "heavily_compressed"}
    spec = layer.spec
    sizes = vars(SIZES)
    config = DeepseekV4Config(
        num_hidden_layers=1, layer_types=[f"{kinds[spec.ratio]}_attention"],
        sliding_window=spec.window, index_topk=spec.selection_width or 1, qk_rope_head_dim=64,
        num_hash_layers=0, attn_implementation="eager", **sizes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    attention = theirs.DeepseekV4Attention(config, 0)
    pairs = dict(names_of(layer))
    if layer.indexer is not None:
        pairs |= {f"indexer.{a}": f"compressor.indexer.{b}" for a, b in INDEXER.items()}
        pairs |= {f"indexer.compressor.{a}": f"compressor.indexer.{b}" for a, b in POOLED.items()}
    own, weights = dict(layer.named_parameters()), dict(attention.named_parameters())
    assert set(pairs) == set(own)
    assert set(pairs.values()) == set(weights)
    with torch.no_grad():
        for ours, name in pairs.items():
            weights[name].copy_(own[ours])
    rotary = theirs.DeepseekV4RotaryEmbedding(config)
    at = torch.arange(length)[None]
    angles = {
        kind: rotary(torch.zeros(1), position_ids=at, layer_type=kind)
        for kind in ("main", "compress")
    }
    ages = torch.arange(length)[:, None] - torch.arange(length)
    seen = (ages >= 0) & (ages < spec.window)
    mask = torch.where(seen, 0.0, -torch.inf)[None, None]
    return attention, lambda x: attention(x[None], angles, at, mask)[0][0]


CASES = [(0, 300, 0), (0, 5, 0), (4, 150, 512), (4, 301, 16), (4, 3, 16), (128, 300, 0),
         (128, 100, 0)]  # fmt: skip


@pytest.mark.parametrize(("ratio", "length", "width"), CASES)
def test_gradients_of_every_parameter_are_those_of_transformers(ratio, length, width):
    layer = layer_of(spec_of(ratio, width, 32))
    attention, theirs = transformers_layer(layer, length)
    x = torch.randn(length, SIZES.hidden_size, requires_grad=True)
    pull = torch.randn(length, SIZES.hidden_size)
    ours = layer(x, Plan([0, length], ratio, 32)).out
    wanted = theirs(x)
    assert (ours - wanted).norm() < 1e-5 * wanted.norm()
    names = names_of(layer)
    own, weights = dict(layer.named_parameters()), dict(attention.named_parameters())
    got = torch.autograd.grad(ours, [x, *(own[n] for n in names)], pull, allow_unused=True)
    want = torch.autograd.grad(
        wanted, [x, *(weights[n] for n in names.values())], pull, allow_unused=True
    )
    for name, a, b in zip(("x", *names), got, want, strict=True):
        if a is None or b is None or not b.any():
            assert a is None or not a.any(), name
            assert b is None or not b.any(), name
            continue
        assert (a - b).norm() < 1e-5 * b.norm(), name


def test_packed_sequences_are_each_alone():
    """Sequences of other lengths beside it change nothing, where the direct use of a mask would."""
    lengths = [150, 0, 3, 77]
    for ratio in (0, 4, 128):
        layer = layer_of(spec_of(ratio, 16))
        starts = torch.tensor([0, *lengths]).cumsum(0)
        x = torch.randn(sum(lengths), SIZES.hidden_size, requires_grad=True)
        out = layer(x, Plan(starts, ratio)).out
        (grads,) = torch.autograd.grad(out.square().sum(), x)
        for begin, length in zip(starts.tolist(), lengths, strict=False):
            own = x.detach()[begin : begin + length].requires_grad_()
            alone = layer(own, Plan([0, length], ratio)).out
            torch.testing.assert_close(alone, out[begin : begin + length], rtol=1e-5, atol=1e-5)
            (grad,) = torch.autograd.grad(alone.square().sum(), own)
            torch.testing.assert_close(grad, grads[begin : begin + length], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stage", ["frozen", "sparse", "dense"])
def test_indexer_and_model_learn_from_their_own_losses_only(stage):
    layer = layer_of(spec_of(4, 16), index_stage=stage)
    x = torch.randn(150, SIZES.hidden_size, requires_grad=True)
    out, loss, lists = layer(x, Plan([0, 90, 150], 4))
    assert (lists is None) == (stage == "dense")
    assert (loss is None) == (stage == "frozen")
    own = dict(layer.indexer.named_parameters())
    others = {k: v for k, v in layer.named_parameters() if not k.startswith("indexer")}
    grads = torch.autograd.grad(out.sum(), list(own.values()), allow_unused=True, retain_graph=True)
    assert set(grads) == {None}
    if loss is None:
        return
    assert loss > 0
    got = torch.autograd.grad(loss, [x, *others.values()], allow_unused=True, retain_graph=True)
    assert set(got) == {None}
    for name, grad in zip(own, torch.autograd.grad(loss, list(own.values())), strict=True):
        assert grad.isfinite().all(), name
        assert grad.any(), name


def test_what_is_not_the_plans_is_refused():
    layer = layer_of(spec_of(4))
    with pytest.raises(ValueError, match="plan must have ratio 4, window 128, got ratio 128"):
        layer(torch.randn(8, SIZES.hidden_size), Plan([0, 8], 128))


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT, dtype=torch.float32, progress=False)


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4", "fp8-mxfp4-index", "bf16", "fp32"])
def test_outputs_are_those_of_an_engine_that_scores_the_sequence(model, kv_cache, monkeypatch):
    """Bit for bit in every layer, the indexer's choice of 64 of 75 entries included.

    Prompts attend from a workspace here, as on GPUs; by slots, sums are in another order.
    """
    seen = scored(model, kv_cache, 300, monkeypatch)
    assert [layer.spec.ratio for layer, _, _ in seen] == [0, 4, 128, 4]
    for served, x, out in seen:
        spec = served.spec
        layer = Attention(spec, Sizes.of(model.config), served.rope, CACHE_FORMATS[kv_cache])
        layer.load_state_dict(weights_of(served))
        with torch.no_grad():  # an engine's tables are inference tensors
            got = layer(x, Plan([0, 300], spec.ratio, spec.window)).out
        assert torch.equal(got, out), spec.index
