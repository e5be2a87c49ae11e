"""V4's shapes are the published ones, and ``TOKENS`` take every config that any step does."""

from __future__ import annotations

import itertools

import pytest
import torch

from anymla.ops.device import TARGETS
from anymla.ops.linear.config import (
    MAX_TOKENS,
    GemmShape,
    Sm90Config,
    choose_sm90_bf16_config,
    choose_sm90_config,
    choose_triton_config,
)
from anymla.ops.linear.shapes import MODELS, RANKS, TOKENS, ProductShape
from anymla.testing.published import FLASH, PRO

PRODUCTS = [
    product
    for sizes, ranks in itertools.product(MODELS.values(), RANKS)
    for product in (*sizes.products(ranks), sizes.index_query, sizes.draft)
]
# Every step that may lie beside a threshold, and a few of the longest.
STEPS = [*range(1, 700), *range(701, 33_000, 997), 32_768]


@pytest.mark.parametrize(("model", "published"), [("flash", FLASH), ("pro", PRO)])
def test_sizes_are_the_published_ones(model: str, published: dict[str, int]) -> None:
    names = {
        "hidden_size": "hidden", "q_lora_rank": "q_rank", "num_attention_heads": "heads",
        "o_groups": "groups", "moe_intermediate_size": "inner", "head_dim": "head_dim",
        "o_lora_rank": "o_rank", "index_n_heads": "index_heads", "index_head_dim": "index_dim",
    }  # fmt: skip
    for name, own in names.items():
        assert getattr(MODELS[model], own) == published[name]
    assert published["n_shared_experts"] == 1


def test_several_gpus_have_what_one_has() -> None:
    for sizes, ranks in itertools.product(MODELS.values(), RANKS):
        for whole, part in zip(sizes.products(), sizes.products(ranks), strict=True):
            shared = 1 if whole.name == "wq_a, wkv" else ranks
            assert part.name == whole.name
            assert part.elements * shared == whole.elements


def test_steps_take_every_config_on_hopper() -> None:
    def configs(product: ProductShape, steps: list[int]) -> set[Sm90Config]:
        shape = product.n, product.k, max(1, product.groups)
        few = (each for each in steps if each <= MAX_TOKENS)
        return {choose_sm90_config(GemmShape(each, *shape), TARGETS["sm_90"]) for each in few}

    for product in PRODUCTS:
        assert configs(product, STEPS) == configs(product, list(TOKENS))
    taken = {choose_sm90_bf16_config(tokens) for tokens in TOKENS if tokens <= 32}
    assert taken == {choose_sm90_bf16_config(tokens) for tokens in range(1, 33)}


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "gfx942", "gfx1151"])
def test_steps_take_every_config_of_triton(target: str) -> None:
    def configs(product: ProductShape, steps: list[int]) -> set[object]:
        found: set[object] = set()
        for tokens in steps:
            shape = GemmShape(tokens, product.n, product.k, max(1, product.groups))
            config = choose_triton_config(
                shape, "fp8", TARGETS[target], x_dtype=torch.bfloat16, quantized=True
            )
            found.add((config.swap_ab, config.tile, config.splits(product.k) > 1))
        return found

    for product in {(each.n, each.k, each.groups): each for each in PRODUCTS}.values():
        assert configs(product, STEPS) == configs(product, list(TOKENS)), product
