import dataclasses
import itertools

import pytest

from anymla.ops.attention.decode_config import (
    MODES,
    Tile,
    choose_mode,
    choose_splits,
    choose_tile,
    combine_warps,
    invariant_splits,
)
from anymla.ops.device import CPU, TARGETS

STEP = Tile(16, 32, 4)


@pytest.mark.parametrize("target", [*TARGETS.values(), CPU], ids=lambda target: target.name)
@pytest.mark.parametrize("mode", MODES)
def test_tiles_suit_matrix_instructions(target, mode):
    for heads, tokens in itertools.product((1, 8, 16, 20, 32, 64, 128), (None, 1, 8, 4096)):
        chosen = choose_tile(heads, 640, tokens, mode, target)
        for size in (chosen.heads, chosen.keys, chosen.warps):
            assert size & (size - 1) == 0
        # No instruction multiplies on Arc A, and its compiler wants 8 terms.
        assert chosen.heads >= 16
        assert chosen.keys >= (8 if target.arc_a else 16)
        assert chosen.heads < 2 * max(heads, 16)


def test_wide_rows_take_smaller_tiles_where_memory_is_short():
    for name, heads in (("sm_86", 16), ("sm_89", 16), ("sm_120", 16), ("sm_80", 32)):
        chosen = choose_tile(128, 2048, 4096, "bfloat16", TARGETS[name], channels=576)
        assert chosen.heads == heads
        assert choose_tile(128, 640, 4096, "bfloat16", TARGETS[name]).heads == 32


def test_coded_rows_are_loaded_ahead_where_that_was_seen_to_be_faster():
    for target in TARGETS.values():
        chosen = choose_tile(64, 640, 8, "float16", target)
        assert chosen.ahead == (target.backend == "cuda" and target.name != "sm_90")
        assert not choose_tile(64, 640, 8, "bfloat16", target).ahead
        few = choose_tile(16, 640, 8, "float16", target)
        # Four warps spill, and were seen to be faster all the same as sm_80 alone.
        assert not few.ahead or (few.warps == 4) == (target.name == "sm_80")


def test_packed_rows_take_tiles_that_fit():
    """64 rows of NVFP4 beside 16 heads are 144 KiB."""
    assert choose_tile(16, 640, 8, "float16", TARGETS["sm_89"]).keys == 64
    assert choose_tile(16, 640, 8, "float16", TARGETS["sm_89"], packed=True).keys == 32


def test_v4s_rows_are_copied_by_every_nvidia_gpu_but_hopper():
    for target in TARGETS.values():
        if target.backend == "cuda":
            chosen = choose_tile(64, 640, 8, "float16", target, copied=True)
            assert chosen.copied == (target.name != "sm_90")
            assert not choose_tile(64, 640, 8, "bfloat16", target, copied=True).copied
            few = choose_tile(16, 640, 8, "float16", target, copied=True)
            # 59 KiB a CTA, and 1 KiB that the driver has.
            kib = target.shared_bytes // 1024 + 1
            assert not chosen.copied or few.per_sm == min(kib // 60, 2)
            # 115 KiB with two decoded blocks, 83 with one.
            many = choose_tile(64, 640, 256, "float16", target, copied=True)
            assert not many.copied or (many.heads, many.ahead) == (64, kib >= 116)


def test_tiles_of_copied_rows_are_those_that_were_fastest():
    """Of what was timed on an H200, as sm_80; a batch-invariant call has one tile for any batch."""
    target = dataclasses.replace(TARGETS["sm_80"], sm_count=132)
    timed = (
        (16, 64, 512, 16), (64, 1, 512, 16), (64, 8, 1024, 16), (128, 1, 512, 16),
        (32, 8, 512, 16), (64, 16, 128, 16), (32, 256, 1024, 32), (64, 128, 128, 64),
        (48, 64, 1024, 64), (64, 77, 1024, 64), (64, 256, 512, 64), (128, 24, 1024, 64),
    )  # fmt: skip
    for heads, tokens, slots, fastest in timed:
        chosen = choose_tile(heads, 128 + slots, tokens, "float16", target, copied=True)
        assert chosen.heads == fastest
        always = choose_tile(heads, 128 + slots, None, "float16", target, copied=True)
        assert always.heads == 16


WAVES = [
    Tile(32, 64, 8, ahead=True),
    Tile(16, 32, 4, ahead=True, per_sm=2),
    Tile(16, 32, 4, copied=True, per_sm=2),
    Tile(16, 32, 4, copied=True),
    Tile(64, 32, 8, copied=True),
    Tile(64, 32, 8, copied=True, ahead=True),
]


@pytest.mark.parametrize(
    "tile", WAVES, ids=["ahead", "two ahead", "two copied", "copied", "64 heads", "64 ahead"]
)
def test_waves_of_splits_end_no_later_than_whole_lists(tile):
    for ctas, keys in itertools.product((1, 8, 64, 154, 600), (1, 64, 640, 1152, 8192)):
        count = choose_splits(ctas, keys, tile, 108)
        steps = -(-keys // tile.keys)
        assert 1 <= count <= steps
        share = -(-steps // count)
        assert (count - 1) * share < steps
        # Steps of the SM that ends last.
        assert -(-ctas * count // (108 * tile.per_sm)) * share <= -(-ctas // 108) * steps


def test_waves_of_splits_are_those_that_were_fastest():
    """Of what was timed on an H200, as sm_80."""
    for ctas, keys, fastest in ((154, 1152, 3), (64, 640, 2), (96, 1152, 1), (120, 2176, 1)):
        assert choose_splits(ctas, keys, WAVES[0], 132) == fastest
    for ctas, keys, fastest in ((64, 1152, 4), (128, 640, 2), (90, 2176, 5)):
        assert choose_splits(ctas, keys, WAVES[1], 132) == fastest
    copied = (
        (64, 1152, 4), (128, 640, 2), (308, 1152, 3), (32, 1152, 8), (8, 1152, 12), (16, 1152, 8),
        (192, 1152, 2),
    )  # fmt: skip
    for ctas, keys, fastest in copied:
        assert choose_splits(ctas, keys, WAVES[2], 132) == fastest


def test_splits_fill_the_machine_without_overfilling_it():
    for programs, keys in itertools.product((1, 8, 40, 128, 200, 5000), (0, 1, 32, 33, 640, 8000)):
        count = choose_splits(programs, keys, STEP, 132)
        steps = max(1, -(-keys // STEP.keys))
        assert 1 <= count <= steps
        assert count == 1 or count * programs <= 132
        # No split is left without a step.
        share = -(-steps // count)
        assert (count - 1) * share < steps


def test_splits_of_one_token_are_one_step_each():
    assert choose_splits(1, 640, STEP, 132) == 20
    assert choose_splits(1, 100_000, STEP, 132) <= 132


def test_invariant_calls_choose_by_the_lists_alone():
    target = TARGETS["sm_90"]
    chosen = choose_tile(64, 640, None, "float16", target)
    assert chosen == choose_tile(64, 640, None, "float16", target, 8)
    assert [invariant_splits(keys, chosen) for keys in (1, 64, 128, 640)] == [1, 1, 2, 4]


def test_intels_gpus_multiply_coded_rows_in_bfloat16():
    """As one tile of rows, if they are no wider than the two kinds of coded rows."""
    arc, hopper = TARGETS["xpu_bmg"], TARGETS["sm_90"]
    assert (choose_mode(True, True, arc), choose_mode(True, True, hopper)) == (
        "bfloat16",
        "float16",
    )
    assert choose_mode(True, False, hopper) == choose_mode(True, False, arc) == "bfloat16"
    assert choose_mode(False, True, hopper) == choose_mode(False, False, arc) == "float32"
    assert choose_tile(64, 640, 8, "bfloat16", arc).row_parts
    assert choose_tile(64, 640, 8, "bfloat16", arc, channels=576).row_parts
    for mode, channels, values in (("float32", 512, 512), ("bfloat16", 640, 512)):
        assert not choose_tile(64, 640, 8, mode, arc, channels, values).row_parts
    assert not choose_tile(64, 640, 8, "bfloat16", arc, 576, 576).row_parts
    assert not choose_tile(64, 640, 8, "bfloat16", hopper).row_parts


@pytest.mark.parametrize("name", ["gfx1151", "gfx1201"])
def test_rdna_divides_rows_among_its_warps(name):
    target = TARGETS[name]
    assert choose_mode(True, True, target) == "bfloat16"
    for channels, values in ((512, 512), (576, 512)):
        assert choose_tile(16, 640, 8, "bfloat16", target, channels, values).row_parts
    for mode, channels, values in (("float32", 512, 512), ("bfloat16", 640, 512)):
        assert not choose_tile(16, 640, 8, mode, target, channels, values).row_parts
    assert choose_mode(True, True, TARGETS["gfx942"]) == "float16"


def test_arc_a_multiplies_in_float32():
    """Its products are additions, of as few terms as Triton's compiler takes."""
    arc = TARGETS["xpu_dg2"]
    assert {choose_mode(*of, arc) for of in ((True, True), (True, False), (False, False))} == {
        "float32"
    }
    tile = choose_tile(64, 640, 8, "float32", arc)
    assert (tile.keys, tile.warps, tile.row_parts) == (8, 32, 16)
    assert not choose_tile(64, 640, 8, "float32", arc, channels=640).row_parts


@pytest.mark.parametrize("name", ["gfx1151", "gfx1201"])
def test_a_thread_of_rdna_combines_no_more_than_half_its_registers(name):
    target = TARGETS[name]
    # Two lists have as many splits each as there are compute units, at most.
    for splits in (1, 8, 9, 64, 65, 2 * target.sm_count):
        values = (1 << (splits - 1).bit_length()) * 256
        assert values <= 128 * combine_warps(splits, target) * target.warp_size
