"""Log-probabilities of a whole model that trains are those of an engine that scores."""

from pathlib import Path

import pytest
import torch
from served_layers import frozen, score, weights_of

from anymla import train
from anymla.layers.caches import CACHE_FORMATS
from anymla.model.load import load_model
from anymla.ops.linear import linear_float32
from anymla.runtime.scoring import next_token_logprobs
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing
from anymla.train.layer import Sizes

TRAINED = Path(__file__).parents[2] / "examples" / "tiny" / "checkpoint"
RATIOS = (0, 2, 2, 1, 1)
SHARED = TinyOptions.shared(
    weights="fp8", hidden=128, heads=4, o_groups=2, o_lora=64, q_lora=64, index_heads=8,
    index_topk=6, experts=8, experts_per_token=2, moe_size=64, window=16, ratios=RATIOS,
    sharing=TinySharing.of(
        RATIOS, candidate_blocks=3, candidate_block_size=4, engram_layers=(),
    ),
)  # fmt: skip
TOKENS = 290


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    shared = tmp_path_factory.mktemp("shared")
    write_tiny_checkpoint(shared, SHARED)
    return {"V4, trained": TRAINED, "V4.1": shared}


def blocks(model, step, kv_cache):
    """Backbone and head by the blocks of ``anymla.train``; experts and tables are the engine's."""
    spec = model.layers[0].attention_site.options
    site = {"norm_eps": spec.norm_eps, "hc_eps": spec.eps, "iters": spec.iterations}
    sizes, shared = Sizes.of(model.config), train.Shared()
    h = model.embed(step.token_ids).unsqueeze(1).repeat(1, model.config.hc_mult, 1)
    pre = torch.zeros(h.shape[:2])
    pre[:, 0] = 1
    plans = {}

    def sublayer(h, pre, at, run):
        gates = at.fn, at.base, at.scale
        if not spec.delayed:
            x, post, comb = train.hyper_pre(h, *gates, norm_weight=at.norm, **site)
            return train.hyper_post(run(x), h, post, comb), pre
        later, post, comb = train.hyper_gates(h, *gates, **site)
        x = train.hyper_collapse(h, pre, at.norm, norm_eps=spec.norm_eps)
        return train.hyper_post(run(x), h, post, comb), later

    for layer in model.layers:
        served = layer.attention
        own = served.spec
        attention = train.Attention(
            own, sizes, served.rope, CACHE_FORMATS[kv_cache], dtype=model.dtype
        )
        attention.load_state_dict(weights_of(served))
        frozen(attention, served)
        plan = plans.setdefault(own.ratio, train.Plan([0, len(h)], own.ratio, own.window))

        def attend(x, attention=attention, plan=plan):
            return attention(x, plan, shared=shared).out

        h, pre = sublayer(h, pre, layer.attention_site, attend)
        h, pre = sublayer(h, pre, layer.ffn_site, lambda x, ffn=layer.ffn: ffn(x, step))
    head = model.head
    if spec.delayed:
        return train.hyper_collapse(h, pre, head.norm, norm_eps=spec.norm_eps)
    y = train.hyper_head(h, head.fn, head.base, head.scale, norm_eps=spec.norm_eps, hc_eps=spec.eps)
    return train.rms_norm(y, head.norm, spec.norm_eps)


@pytest.mark.parametrize("kv_cache", ["fp8", "nvfp4", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["V4, trained", "V4.1"])
def test_a_whole_model_has_the_engines_log_probabilities(
    directories, name, dtype, kv_cache, monkeypatch
):
    """Bit for bit: selections, hyper-connections and the head included.

    In bfloat16, FP8 weights have inputs that are quantised.
    """
    with torch.inference_mode():
        model = load_model(directories[name], dtype=dtype, progress=False)
        _, step, served = score(model, kv_cache, TOKENS, monkeypatch)
        hidden = blocks(model, step, kv_cache)
        following = step.token_ids[1:TOKENS].tolist()
        vocabulary = model.config.vocab_size
        logprobs = next_token_logprobs(
            lambda x: linear_float32(x, model.lm_head), hidden[: TOKENS - 1], following, vocabulary
        )
    assert torch.equal(torch.tensor(logprobs, dtype=torch.float64), served)
