"""The name is known after the import, and nothing else has changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hf_pair import Pair, gradient_error, gradients, load, relative
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Attention

from anymla.engines.transformers import AnymlaDeepseekV4Attention, install, uninstall

# Runs in a process of its own, since an import cannot be undone.
EAGER = """
import sys, torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
).eval()
ids = torch.load(sys.argv[2])
assert not any(name.startswith("anymla") for name in sys.modules)
out = model(ids, labels=ids)
out.loss.backward()
grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
torch.save((type(model.model.layers[0].self_attn).__name__, out.logits, grads), sys.argv[3])
"""


def test_eager_is_the_same_to_the_bit(flash: Pair, tmp_path: Path) -> None:
    ids = flash.ids[:, :150]
    torch.save(ids, tmp_path / "ids")
    paths = [str(path) for path in (flash.directory, tmp_path / "ids", tmp_path / "found")]
    subprocess.run([sys.executable, "-W", "ignore", "-c", EAGER, *paths], check=True)
    kind, want, grads = torch.load(tmp_path / "found")
    assert kind == "DeepseekV4Attention"
    assert isinstance(flash.eager.model.layers[0].self_attn, AnymlaDeepseekV4Attention)
    logits, found = gradients(flash.eager, input_ids=ids, labels=ids)
    assert torch.equal(logits, want)
    assert found.keys() == grads.keys()
    assert all(torch.equal(found[name], grad) for name, grad in grads.items())


def test_the_name_may_be_set_and_taken_back(flash: Pair) -> None:
    ids = flash.ids[:, :150]
    want, ours = flash.eager(ids).logits, flash.ours(ids).logits
    assert not torch.equal(want, ours)
    try:
        flash.ours.set_attn_implementation("eager")
        assert torch.equal(flash.ours(ids).logits, want)
    finally:
        flash.ours.set_attn_implementation("anymla")
    assert torch.equal(flash.ours(ids).logits, ours)


def test_a_model_that_is_there_is_changed_and_changed_back(flash: Pair) -> None:
    model = load(flash.directory, "eager")
    ids = flash.ids[:, :150]
    want, ours = model(ids).logits, flash.ours(ids).logits
    for layer in model.model.layers:  # as one that was built before the import
        layer.self_attn.__class__ = DeepseekV4Attention
    model.set_attn_implementation("anymla")
    with pytest.raises(ValueError, match=r"transformers\.install\(model\)"):
        model(ids)
    install(model)
    assert torch.equal(model(ids).logits, ours)
    uninstall(model)
    assert {type(layer.self_attn) for layer in model.model.layers} == {DeepseekV4Attention}
    assert torch.equal(model(ids).logits, want)


def test_gradient_checkpointing(flash: Pair) -> None:
    ids = flash.ids[:1, :150]
    model = load(flash.directory, "anymla").train()
    _, want = gradients(model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable()
    calls = []
    model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    with torch.enable_grad():
        _, got = gradients(model, input_ids=ids, labels=ids, use_cache=False)
    assert len(calls) == 2  # forward, and again in the backward pass
    assert gradient_error(got, want) < (1e-6,)


def test_lora_of_peft(flash: Pair) -> None:
    peft = pytest.importorskip("peft", reason="the comparison needs the dev dependency peft")
    ids = flash.ids[:1, :150]
    config = peft.LoraConfig(r=4, target_modules=["q_a_proj", "kv_proj", "o_b_proj"])
    found = []
    for name in ("eager", "anymla"):
        torch.manual_seed(0)
        model = peft.get_peft_model(load(flash.directory, "eager"), config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.02)
        if name == "anymla":
            install(model)
            assert isinstance(
                model.base_model.model.model.layers[0].self_attn, AnymlaDeepseekV4Attention
            )
        found.append(gradients(model, input_ids=ids, labels=ids))
    (logits, want), (ours, got) = found
    assert relative(ours, logits) < 1e-5
    assert any(".compressor.kv_proj.lora_A" in name for name in got)
    # A layer of an indexer gets no gradient in either: top-k has none.
    assert gradient_error(got, want) < (2e-5,)
