"""Padding on either side and packed sequences: each sequence as if it were alone."""

from __future__ import annotations

import pytest
import torch
from hf_pair import Pair, gradient_error, gradients, relative
from torch import Tensor
from transformers import DynamicCache

LENGTHS = (200, 133, 3, 57)
BOUND = 5e-6


def prompts_of(pair: Pair) -> list[Tensor]:
    rows = (0, 1, 1, 0)
    return [pair.ids[row, :length] for row, length in zip(rows, LENGTHS, strict=True)]


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """A batch of prompts and its mask; padding is token 7, which must not matter."""
    width = max(map(len, prompts))
    ids, mask = torch.full((len(prompts), width), 7), torch.zeros(len(prompts), width).long()
    for i, prompt in enumerate(prompts):
        place = slice(width - len(prompt), None) if side == "left" else slice(len(prompt))
        ids[i, place], mask[i, place] = prompt, 1
    return ids, mask


@pytest.fixture(scope="module")
def alone(flash: Pair) -> list[Tensor]:
    """transformers' own logits of each prompt in a batch of one."""
    return [flash.eager(prompt[None]).logits[0] for prompt in prompts_of(flash)]


@pytest.mark.parametrize("positions", [False, True], ids=["ids count padding", "ids do not"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(
    flash: Pair, alone: list[Tensor], side: str, positions: bool
) -> None:
    ids, mask = padded(prompts_of(flash), side)
    given = (mask.cumsum(1) - 1).clamp(min=0) if positions else None
    got = flash.ours(ids, attention_mask=mask, position_ids=given).logits
    for i, want in enumerate(alone):
        assert relative(got[i][mask[i].bool()], want) < BOUND


def test_transformers_is_wrong_about_left_padding(flash: Pair, alone: list[Tensor]) -> None:
    # When it no longer is, docs/transformers.md is to say so.
    ids, mask = padded(prompts_of(flash), "left")
    got = flash.eager(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert relative(got.logits[1, -1], alone[1][-1]) > 0.01


def test_packed_sequences_do_not_see_each_other(flash: Pair, alone: list[Tensor]) -> None:
    prompts = prompts_of(flash)
    ids = torch.cat(prompts)[None]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    got = flash.ours(ids, position_ids=positions).logits[0]
    for part, want in zip(got.split(LENGTHS), alone, strict=True):
        assert relative(part, want) < BOUND


def test_packed_rows_of_a_padded_batch(flash: Pair, alone: list[Tensor]) -> None:
    prompts = prompts_of(flash)
    ids, mask = padded([torch.cat(prompts[1:]), prompts[0]], "left")
    positions = torch.zeros_like(ids)
    positions[0, -193:] = torch.cat([torch.arange(n) for n in LENGTHS[1:]])
    positions[1] = torch.arange(200)
    got = flash.ours(ids, attention_mask=mask, position_ids=positions).logits
    parts = [got[1], *got[0, -193:].split(LENGTHS[1:])]
    for part, want in zip(parts, alone, strict=True):
        assert relative(part, want) < BOUND


def test_generation_of_a_padded_batch_is_that_of_each_prompt(flash: Pair) -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    prompts = prompts_of(flash)
    ids, mask = padded(prompts, "left")
    got = flash.ours.generate(ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, prompt in zip(got, prompts, strict=True):
        one = prompt[None]
        want = flash.eager.generate(one, attention_mask=torch.ones_like(one), **options)
        assert torch.equal(row, want[0, len(prompt) :])


def test_rows_of_a_cache_are_chosen_and_repeated(flash: Pair) -> None:
    prompts = prompts_of(flash)
    ids, mask = padded(prompts, "left")
    cache = DynamicCache(config=flash.ours.config)
    flash.ours(ids, mask, None, cache, use_cache=True)
    for layer in cache.layers:
        layer.batch_repeat_interleave(2)
        layer.reorder_cache(torch.tensor([2, 7, 2, 0]))
    rows = [1, 3, 1, 0]
    more = torch.tensor([[5, 6, 9, 8]]).expand(4, -1)
    whole = torch.cat((mask[rows], torch.ones_like(more)), 1)
    got = flash.ours(more, whole, None, cache, use_cache=True).logits
    for row, logits in zip(rows, got, strict=True):
        want = flash.ours(torch.cat((prompts[row], more[0]))[None]).logits[0, -4:]
        assert relative(logits, want) < BOUND


def test_gradients_of_padded_and_of_packed_sequences_are_the_sums(flash: Pair) -> None:
    prompts = prompts_of(flash)
    total: dict[str, Tensor] = {}
    for prompt in prompts:
        inputs = {"input_ids": prompt[None], "labels": prompt[None]}
        _, found = gradients(flash.eager, **inputs, num_items_in_batch=100)
        total |= {n: g + total.get(n, 0) for n, g in found.items()}
    ids, mask = padded(prompts, "left")
    labels = torch.where(mask.bool(), ids, -100)
    labels[torch.arange(4), mask.argmax(1)] = -100  # nothing predicts a first token
    _, got = gradients(
        flash.ours, input_ids=ids, attention_mask=mask, labels=labels, num_items_in_batch=100
    )
    assert gradient_error(got, total) < (2e-5,)  # of sums, in another order
    packed = torch.cat(prompts)[None]
    positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts])[None]
    labels = torch.where(positions == 0, -100, packed)
    _, got = gradients(
        flash.ours, input_ids=packed, position_ids=positions, labels=labels, num_items_in_batch=100
    )
    assert gradient_error(got, total) < (2e-5,)
