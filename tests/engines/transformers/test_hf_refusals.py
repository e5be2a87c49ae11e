"""What attn_implementation="anymla" does not compute is refused, each with one message."""

from __future__ import annotations

import pytest
import torch
from hf_pair import Pair
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from anymla.engines.transformers import install


def test_attention_weights(flash: Pair) -> None:
    with pytest.raises(ValueError, match="no attention weights"):
        flash.ours(flash.ids[:, :9], output_attentions=True)


def test_dropout_in_training(flash: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = flash.ours.model.layers[0].self_attn
    monkeypatch.setattr(layer, "attention_dropout", 0.1)
    flash.ours(flash.ids[:, :9])
    monkeypatch.setattr(layer, "training", True)
    with pytest.raises(ValueError, match=r"no dropout: attention_dropout must be 0, got 0\.1"):
        flash.ours(flash.ids[:, :9])


def test_a_model_that_sees_later_tokens(flash: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash.ours.config, "is_causal", False, raising=False)
    with pytest.raises(ValueError, match="earlier tokens only"):
        flash.ours(flash.ids[:, :9])


@pytest.mark.parametrize("kind", ["plain", "offloaded", "eager's"])
def test_other_caches(flash: Pair, kind: str) -> None:
    ids = flash.ids[:, :9]
    cache = DynamicCache(config=None if kind == "plain" else flash.ours.config)
    if kind == "offloaded":
        cache.offloading = True
    elif kind == "eager's":
        flash.eager(ids, None, None, cache, use_cache=True)
    message = "filled by another" if kind == "eager's" else "takes DynamicCache"
    with pytest.raises(ValueError, match=message):
        flash.ours(ids, None, None, cache, use_cache=True)


def test_a_cache_of_ours_elsewhere(flash: Pair) -> None:
    cache = DynamicCache(config=flash.ours.config)
    flash.ours(flash.ids[:, :9], None, None, cache, use_cache=True)
    with pytest.raises(ValueError, match='filled with attn_implementation="anymla"'):
        flash.eager(flash.ids[:, :9], None, None, cache, use_cache=True)
    with pytest.raises(ValueError, match="cannot forget"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="the cache holds 2 sequences, the batch 1"):
        flash.ours(flash.ids[:1, :9], None, None, cache, use_cache=True)
    with pytest.raises(ValueError, match="no gradients through"), torch.enable_grad():
        flash.ours(flash.ids[:, :9], None, None, cache, use_cache=True)
    cache.reset()
    assert cache.get_seq_length() == 0
    flash.ours(flash.ids[:1, :9], None, None, cache, use_cache=True)


def test_position_ids_that_leave_some_out(flash: Pair) -> None:
    ids, mask = flash.ids[:, :9], torch.ones(2, 9)
    mask[1, 3:5] = 0
    with pytest.raises(ValueError, match="position_ids of row 1 go on at 5"):
        flash.ours(ids, attention_mask=mask)
    flash.ours(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0).long())
    cache = DynamicCache(config=flash.ours.config)
    flash.ours(ids, None, None, cache, use_cache=True)
    for start in (8, 10):
        with pytest.raises(ValueError, match=f"position_ids of row 0 go on at {start}"):
            flash.ours(ids, None, torch.arange(start, start + 9)[None], cache, use_cache=True)


def test_masks_of_pairs_of_tokens(flash: Pair) -> None:
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\]"):
        flash.ours(flash.ids[:, :9], attention_mask=torch.zeros(2, 1, 9, 9))
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\]"):
        flash.ours(flash.ids[:, :9], attention_mask=torch.ones(2, 5))


def test_other_models() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    config = LlamaConfig(num_attention_heads=1, **sizes)
    model = LlamaForCausalLM._from_config(config, attn_implementation="anymla")
    with pytest.raises(ValueError, match="for DeepSeek-V4 alone, and this LlamaAttention"):
        model(torch.ones(1, 2).long())
    with pytest.raises(ValueError, match="no DeepSeek-V4 of transformers in this LlamaForCausalLM"):
        install(model)
