"""Memory grows with the length of a sequence, not with its square."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

# Peak of a layer's forward pass, or of its training step, over the loaded model, in MiB.
PROGRAM = """
import resource, sys, torch
import anymla.engines.transformers
from transformers import AutoModelForCausalLM, DeepseekV4Config
torch.set_num_threads(1)
name, kind = sys.argv[1:3]
heads, tokens, train = map(int, sys.argv[3:])
config = DeepseekV4Config(
    vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=heads, o_groups=1,
    o_lora_rank=16, q_lora_rank=32, layer_types=[kind], mlp_layer_types=["moe"], hc_mult=1,
    moe_intermediate_size=16, n_routed_experts=2, num_experts_per_tok=1, index_n_heads=4,
    index_topk=64, sliding_window=128, max_position_embeddings=65536,
)
model = AutoModelForCausalLM.from_config(
    config, attn_implementation=name, experts_implementation="eager"
)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def run(length):
    ids = torch.arange(length)[None] % 64
    with torch.set_grad_enabled(bool(train)):
        out = model(ids, use_cache=False, logits_to_keep=1).logits.sum()
        if train:
            out.backward()
run(300)
before = peak()
run(tokens)
print(peak() - before)
"""
KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]


def peak(name: str, kind: str, heads: int, tokens: int, train: bool = False) -> float:
    words = [name, kind, str(heads), str(tokens), str(int(train))]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


def test_a_sparse_layer_needs_less_than_one_matrix_of_scores() -> None:
    heads, tokens = 4, 4096
    scores = 4 * heads * tokens * (tokens + tokens // 4) / 2**20
    assert peak("anymla", "compressed_sparse_attention", heads, tokens) < 0.75 * scores


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True], ids=["forward", "training"])
@pytest.mark.parametrize("kind", KINDS)
def test_twice_the_tokens_need_at_most_twice_the_memory(kind: str, train: bool) -> None:
    lengths = (4096, 8192) if train else (4096, 8192, 16384)
    found = [peak("anymla", kind, 2, tokens, train) for tokens in lengths]
    for less, more in itertools.pairwise(found):
        assert more < 2.2 * less, found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_eight_heads_need_a_sixth_of_eagers_memory(kind: str) -> None:
    assert peak("anymla", kind, 8, 8192) < peak("eager", kind, 8, 8192) / 6


@pytest.mark.slow
def test_a_training_step_needs_less_than_eagers() -> None:
    kind = "compressed_sparse_attention"
    assert peak("anymla", kind, 8, 4096, True) < 0.4 * peak("eager", kind, 8, 4096, True)
