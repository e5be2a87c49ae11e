"""The trained tiny checkpoint padded to larger sizes says the same."""

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from anymla import LLM
from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ModelConfig
from anymla.model.loading import load_weights
from anymla.runtime.request import Request
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.widen import SIZES, widen

TINY = pathlib.Path(__file__).parents[2] / "examples" / "tiny"
CHECKPOINT = TINY / "checkpoint"
EXPERTS = {"n_routed_experts": 64, "num_experts_per_tok": 8}
ALL = EXPERTS | {
    "num_attention_heads": 8,
    "o_lora_rank": 128,
    "moe_intermediate_size": 256,
    "index_n_heads": 64,
}
assert set(ALL) == set(SIZES) - {"index_topk"}


def loaded(directory) -> LLM:
    """In float32 without FP8 rows, whose codes now and then round otherwise."""
    return LLM(directory, dtype="fp32", kv_cache="fp32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def given() -> LLM:
    return loaded(CHECKPOINT)


def said(llm: LLM):
    """400 tokens of text, of which the indexer chooses 64 of 100 entries; then 16 tokens."""
    text = (TINY / "persuasion.txt").read_text("utf-8")
    prompt = tuple(llm.tokenizer.encode(text)[:400])
    request = Request("text", prompt, max_new_tokens=16, prompt_logprobs=True)
    return llm.engine([request]).run([request])[0]


@pytest.fixture(scope="module")
def expected(given):
    return said(given)


@pytest.mark.parametrize(
    ("sizes", "plain"),
    [({"n_routed_experts": 64}, False), (EXPERTS, True), (ALL, False)],
    ids=["unused experts", "experts", "all"],
)
def test_a_padded_checkpoint_is_the_same_model(expected, tmp_path, sizes, plain) -> None:
    """But for the order in which sums of float32 are taken."""
    widen(CHECKPOINT, tmp_path, sizes, plain=plain)
    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: config[name] for name in sizes} == sizes
    assert ("quantization_config" in config) is not plain
    found = said(loaded(tmp_path))
    assert found.token_ids == expected.token_ids
    ours, theirs = (
        torch.tensor([*run.prompt_logprobs[1:], *run.logprobs]) for run in (found, expected)
    )
    difference = (ours - theirs).abs()
    print(difference.median(), difference.max())
    assert difference.max() < 1e-4


def test_experts_that_were_added_are_kept_out_until_their_bias_is_lifted(
    expected, tmp_path
) -> None:
    """The text is then another: what was added has no effect because it is never chosen."""
    widen(CHECKPOINT, tmp_path, {"n_routed_experts": 64})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        if name.endswith("ffn.gate.bias"):
            tensors[name][16:] = 0
    save_file(tensors, file, {"format": "pt"})
    assert said(loaded(tmp_path)).token_ids != expected.token_ids


def test_linear_layers_keep_their_kind_and_their_values(tmp_path) -> None:
    random = tmp_path / "random"
    options = TinyOptions(ratios=(0, 4), hidden=128, heads=2, o_groups=2, experts=8, moe_size=64)
    write_tiny_checkpoint(random, options)
    widen(random, tmp_path / "wide", {"num_attention_heads": 6, "n_routed_experts": 9})
    names = ("layers.1.attn.wo_a", "layers.1.attn.wq_b", "layers.1.ffn.experts.7.w2")
    values = []
    for directory in (random, tmp_path / "wide"):
        config = ModelConfig.from_dir(directory)
        with load_weights(Checkpoint.open(directory), config, progress=False) as weights:
            each = {name: weights.linear(name) for name in names}
        assert [weight.kind for weight in each.values()] == ["fp8", "fp8", "mxfp4"]
        values.append({name: weight.dense(torch.float32) for name, weight in each.items()})
    before, after = values
    wo_a, wq_b, expert = names
    assert torch.equal(after[expert], before[expert])
    # One head of each of two groups has become three; those that were added give nothing.
    heads = after[wq_b].view(2, 3, 512, -1)
    assert torch.equal(heads[:, 0], before[wq_b].view(2, 512, -1))
    assert not heads[:, 1:].any()
    assert torch.equal(after[wo_a][:, :512], before[wo_a])
    assert not after[wo_a][:, 512:].any()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"hidden_size": 512}, "cannot pad hidden_size, only n_routed_experts"),
        ({"n_routed_experts": 8}, "n_routed_experts is 16 and cannot become 8"),
        ({"num_experts_per_tok": 6}, "is 4 and can become a multiple of it, not 6"),
        ({"num_experts_per_tok": 8}, "16 experts, each 2 times, do not go into 16"),
    ],
)
def test_what_cannot_be_padded_is_refused(tmp_path, sizes, message) -> None:
    with pytest.raises(ValueError, match=message):
        widen(CHECKPOINT, tmp_path / "out", sizes)
    assert not (tmp_path / "out").exists()
