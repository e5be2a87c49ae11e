"""Entries that are neither rotated nor stored, against those that are."""

import pytest
import torch

from anymla.formats.page_layout import ROWS_FP32_512, get_layout
from anymla.ops.compressor import compress_norm, compress_norm_rope_insert

CHANNELS = 512


def _state(ratio, overlap, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    width = CHANNELS * (2 if overlap else 1)
    pages = -(-tokens // 4)
    return {
        "state_cache": torch.randn(pages, 4, 2 * width, generator=generator),
        "state_block_table": torch.arange(pages, dtype=torch.int32).unsqueeze(0),
        "state_slot_mapping": torch.arange(tokens),
        "token_to_req": torch.zeros(tokens, dtype=torch.int32),
        "positions": torch.arange(tokens),
        "norm_weight": torch.rand(CHANNELS, generator=generator),
        "eps": 1e-20,
        "compress_ratio": ratio,
        "overlap": overlap,
    }


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(("ratio", "overlap"), [(1, False), (2, False), (4, True), (5, False)])
def test_entries_are_those_that_are_stored(backend, ratio, overlap):
    given = _state(ratio, overlap, 23, seed=ratio)
    entries = compress_norm(**given, backend=backend)
    layout = get_layout(ROWS_FP32_512)
    cache = layout.allocate(8, 4)
    closing = (given["positions"] + 1) % ratio == 0
    slots = torch.where(closing, given["positions"] // ratio, -1)
    names = ("state_cache", "state_block_table", "state_slot_mapping", "token_to_req", "positions")
    unrotated = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)
    compress_norm_rope_insert(
        *(given[name] for name in names), given["norm_weight"], given["eps"], unrotated, cache,
        slots, compress_ratio=ratio, overlap=overlap, layout=ROWS_FP32_512, backend="reference",
    )  # fmt: skip
    stored = layout.read(cache, slots[closing], torch.float32)
    assert (entries[closing] - stored).abs().max() < 2e-6
    assert not entries[~closing].any()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_padding_and_states_that_are_not_there_give_zero(backend):
    given = _state(2, False, 8, seed=0)
    given["state_cache"].fill_(torch.nan)
    given["state_slot_mapping"][:4] = -1
    given["token_to_req"][4:6] = -1
    given["state_block_table"][0, 1] = -1
    entries = compress_norm(**given, backend=backend)
    assert not entries.any()


def test_a_row_of_zeros_stays_zero():
    given = _state(2, False, 4, seed=0)
    given["state_cache"].zero_()
    assert torch.equal(compress_norm(**given), torch.zeros(4, CHANNELS))
