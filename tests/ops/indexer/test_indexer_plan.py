"""What a selection runs and how much of it at a time, by sizes alone."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anymla.ops.device import TARGETS
from anymla.ops.indexer import config as configs
from anymla.ops.indexer.config import choose_select_config, sm90_context_splits

LEAST = 1 << 24
HOPPER = TARGETS["sm_90"]


@given(
    rows=st.integers(1, 20_000),
    entries=st.integers(0, 1 << 20),
    k=st.integers(1, 2048),
    sm_count=st.integers(1, 200),
    scratch=st.integers(LEAST, 1 << 34),
    histograms=st.booleans(),
)
def test_configs_stay_within_their_scratch(rows, entries, k, sm_count, scratch, histograms):
    config = choose_select_config(
        rows,
        entries,
        k,
        target=dataclasses.replace(HOPPER, sm_count=sm_count),
        scratch_bytes=scratch,
        histograms=histograms,
    )
    assert 1 <= config.chunk <= rows
    assert config.chunk * config.row_bytes(entries) <= scratch
    assert config.padded_k >= k
    if config.algorithm == "all":
        assert entries <= k
    elif config.algorithm == "row":
        assert entries <= config.elements <= 16_384
    elif config.algorithm == "groups":
        # What a program of the group selector keeps in registers.
        assert config.groups * 16 >= entries
        assert config.groups <= 16_384
        assert config.padded_k <= 1024
    else:
        assert config.capacity > k
    if config.chunk < rows and config.chunk >= 2 * sm_count:
        assert config.chunk % (2 * sm_count) == 0


@pytest.mark.parametrize(
    ("rows", "entries", "k", "algorithm", "splits", "by_histograms"),
    [
        (128, 512, 512, "all", 1, "all"),
        (128, 8192, 512, "row", 1, "row"),
        (2048, 4096, 512, "row", 1, "row"),
        (128, 32_768, 512, "groups", 1, "groups"),
        (1, 32_768, 1024, "groups", 1, "groups"),
        (1, 262_144, 512, "samples", 32, "groups"),
        (8, 262_144, 512, "groups", 1, "groups"),
        (2048, 8192, 512, "samples", 1, "row"),
        (2048, 65_536, 512, "groups", 1, "groups"),
        (128, 32_768, 2048, "samples", 1, "samples"),
        (64, 1_000_000, 512, "samples", 1, "samples"),
    ],
)
def test_shapes_take_what_was_measured(rows, entries, k, algorithm, splits, by_histograms):
    limits = {"target": HOPPER, "scratch_bytes": 1 << 30}
    config = choose_select_config(rows, entries, k, **limits)
    assert (config.algorithm, config.splits) == (algorithm, splits)
    assert (
        choose_select_config(rows, entries, k, histograms=True, **limits).algorithm == by_histograms
    )


@pytest.mark.parametrize(
    ("rows", "columns", "kept", "splits", "block", "merge_block"),
    [
        (1, 262_144, 2048, 4, 4096, 4096),
        (128, 8192, 512, 2, 4096, 1024),
        (8192, 8192, 512, 1, 4096, 1024),
        (1, 300, 10, 1, 1024, 1024),
    ],
)
def test_few_long_rows_are_split(rows, columns, kept, splits, block, merge_block):
    config = configs.choose_topk_config(rows, columns, kept)
    assert (config.splits, config.block, config.merge_block) == (splits, block, merge_block)
    assert config.resident == (columns <= splits * block)
    assert config.merge_resident == (splits * kept <= merge_block)


@pytest.mark.parametrize(
    ("items", "tiles", "pairs", "config"),
    [
        (32, 32, False, configs.SM90_FEW_SINGLE),
        (128, 32, False, configs.SM90_SINGLE),
        (32, 128, True, configs.SM90_FEW_PAIRS),
        (128, 128, True, configs.SM90_OVERLAP),
        (1024, 128, True, configs.SM90_OVERLAP),
    ],
)
def test_scores_take_the_config_that_was_measured(items, tiles, pairs, config):
    assert configs.choose_sm90_score_config(items, tiles, pairs, 132) == config


def test_groups_on_intels_gpus_are_those_whose_addresses_fit_shared_memory():
    limits = {"scratch_bytes": 1 << 30}
    for name, k, algorithm in (
        ("sm_90", 1024, "groups"), ("xpu_bmg", 512, "groups"), ("xpu_bmg", 1024, "samples"),
        ("xpu_dg2", 256, "groups"), ("xpu_dg2", 512, "samples"),
    ):  # fmt: skip
        config = choose_select_config(32, 65_536, k, target=TARGETS[name], **limits)
        assert config.algorithm == algorithm, (name, k)


def test_a_million_tokens_go_in_whole_waves():
    config = choose_select_config(16_384, 262_144, 512, target=HOPPER, scratch_bytes=512 << 20)
    assert config.chunk == 264
    with pytest.raises(ValueError, match="scratch_bytes must be >= "):
        choose_select_config(1, 1 << 24, 512, target=HOPPER, scratch_bytes=LEAST)


@pytest.mark.parametrize(
    ("pairs", "tiles", "waves"), [(132, 4096, 132), (120, 4096, 121), (1, 4096, 128), (1, 3, 3)]
)
def test_prefill_programs_fill_their_waves(pairs, tiles, waves):
    # Of 132 SMs at least so many have work at a time.
    splits = sm90_context_splits(pairs, tiles, 132)
    programs = pairs * splits
    assert programs / -(-programs // 132) >= min(waves, 132)
