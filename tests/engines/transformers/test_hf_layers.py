"""transformers' V4 with attn_implementation="anymla" against its own eager attention."""

from __future__ import annotations

import pytest
import torch
from hf_checkpoints import CASES
from hf_pair import Pair, gradient_error, gradients, load, relative
from transformers import DynamicCache

from anymla.engines.transformers import AnymlaDeepseekV4Attention

BOUND = 1e-5
TOKENS = 200  # past a window, an entry of ratio 128, 50 of ratio 4
PIECES = [71, 62, 27, *[1] * 10, 30]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    options, changes = CASES[request.param]
    return Pair.of(tmp_path_factory.mktemp("checkpoint"), options, changes, TOKENS)


def test_a_batch_at_once_and_in_pieces(pair: Pair) -> None:
    want = pair.eager(pair.ids).logits
    assert all(
        isinstance(layer.self_attn, AnymlaDeepseekV4Attention) for layer in pair.ours.model.layers
    )
    assert relative(pair.ours(pair.ids).logits, want) < BOUND
    cache = DynamicCache(config=pair.ours.config)
    pieces = [
        pair.ours(piece, None, None, cache, use_cache=True).logits
        for piece in pair.ids.split(PIECES, dim=1)
    ]
    assert relative(torch.cat(pieces, 1), want) < BOUND
    assert cache.get_seq_length() == TOKENS


def test_the_gradient_of_every_parameter(pair: Pair) -> None:
    ids = pair.ids[:1]
    _, want = gradients(pair.eager, input_ids=ids, labels=ids)
    _, got = gradients(pair.ours, input_ids=ids, labels=ids)
    # Gradients of the streams' gates are sums over all channels that cancel, in which float32's
    # noise is larger; float64, below, tells about them.
    gates = {name for name in want if "_hc." in name or "hc_head." in name}
    error = gradient_error({n: got[n] for n in gates}, {n: want[n] for n in gates})
    assert error < (1e-4,)
    assert got.keys() == want.keys()
    nonzero = {n for n, gradient in want.items() if gradient.abs().max() > 0} - gates
    far = [n for n in nonzero if relative(got[n], want[n]) >= BOUND]
    if far:  # on some CPUs the eager float32 is itself farther than that from float64
        _, exact = gradients(load(pair.directory, "eager").double(), input_ids=ids, labels=ids)
        for name in far:
            assert relative(want[name], exact[name]) >= BOUND, name
            assert relative(got[name], exact[name]) < BOUND, name


def test_the_gradient_of_every_parameter_in_float64(flash: Pair) -> None:
    ids = flash.ids[:1]
    _, want = gradients(load(flash.directory, "eager").double(), input_ids=ids, labels=ids)
    _, got = gradients(load(flash.directory, "anymla").double(), input_ids=ids, labels=ids)
    assert gradient_error(got, want) < (1e-12,)


@pytest.mark.parametrize("tokens", [16, pytest.param(64, marks=pytest.mark.slow)])
def test_generation_chooses_the_same_tokens(flash: Pair, tokens: int) -> None:
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    prompts = flash.ids[:, :120]
    mask = torch.ones_like(prompts)
    want = flash.eager.generate(prompts, attention_mask=mask, **options)
    assert torch.equal(flash.ours.generate(prompts, attention_mask=mask, **options), want)


def test_beams_are_the_same(flash: Pair) -> None:
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    prompt = flash.ids[:1, :62]
    mask = torch.ones_like(prompt)
    want = flash.eager.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(flash.ours.generate(prompt, attention_mask=mask, **options), want)


def test_bfloat16_is_as_near_to_float32_as_eager(flash: Pair) -> None:
    ids = flash.ids[:1]
    logits, exact = gradients(flash.eager, input_ids=ids, labels=ids)

    def distances(name: str) -> tuple[float, float]:
        model = load(flash.directory, name, torch.bfloat16)
        rounded, got = gradients(model, input_ids=ids, labels=ids)
        errors = [float((got[n].float() - g).norm() / g.norm()) for n, g in exact.items()]
        return float((rounded - logits).abs().mean()), sum(errors) / len(errors)

    eager, ours = distances("eager"), distances("anymla")
    assert ours[0] < 1.25 * eager[0]
    assert ours[1] < 1.2 * eager[1]
