"""The sweep over tiles of portable kernels of older targets."""

from __future__ import annotations

import dataclasses
import itertools
from unittest import mock

import pytest
import torch

from anymla.bench.cpu_clock import CpuClock
from anymla.ops.attention.decode_config import choose_tile
from anymla.ops.device import TARGETS, has_triton
from anymla.ops.hyper_connection.config import choose_mix_config
from anymla.ops.indexer.config import choose_score_config
from anymla.ops.linear.config import choose_triton_config
from anymla.ops.linear.shapes import ProductShape
from anymla.ops.moe.config import choose_config

if not has_triton():
    pytest.skip("triton is not installed", allow_module_level=True)

from anymla.testing.tolerance import relative_l2
from lab import mma_tiles, portable_tiles
from lab.cases import many_tokens


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89"])
def test_what_is_chosen_is_among_what_is_timed(name: str) -> None:
    target = TARGETS[name]
    for heads in (8, 16, 64):
        tile = choose_tile(heads, 640, 1024, "bfloat16", target)
        assert str((tile.heads, tile.keys, tile.warps)) in portable_tiles.prefill_tiles(heads)
    for tokens, d in portable_tiles.STREAMS:
        chosen = choose_mix_config(tokens, d, torch.bfloat16, target)
        known = portable_tiles.stream_tiles(tokens, d, target)
        assert str(dataclasses.astuple(chosen)) in known
    math = "e4m3" if target.dot_e4m3 else "fp16"
    for shape in portable_tiles.SELECTIONS:
        keys = shape.rows * shape.keys
        tile = choose_score_config(1, 64, 128, math, target, paged_keys=keys)
        sizes = tile.keys, tile.warps, tile.stages
        assert str(sizes) in portable_tiles.score_tiles(target)


def test_tiles_give_the_same_streams_and_the_fastest_is_named() -> None:
    torch.manual_seed(0)
    made = portable_tiles.stream_calls(3, 64, torch.device("cpu"))[:1]
    tiles = portable_tiles.stream_tiles(3, 64, TARGETS["sm_80"])
    some = {name: tiles[name] for name in ("(16, 16, 2, 4, False)", "(16, 32, 1, 4, False)")}
    with mock.patch.object(portable_tiles, "_REPETITIONS", 1):
        row = portable_tiles.searched(made, some, CpuClock())
    assert set(row["us_by_tile"]) == set(some)
    assert row["us_best"] == min(row["us_by_tile"].values()) == row["us_by_tile"][row["tile"]]
    assert row["difference"] < 1e-3


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_89"])
def test_chosen_products_and_experts_are_among_what_is_timed(name: str) -> None:
    target = TARGETS[name]
    for product, tokens in itertools.product(many_tokens.products(), many_tokens.TOKENS):
        shape = many_tokens.gemm_shape(product, tokens)
        chosen = choose_triton_config(shape, "fp8", target, x_dtype=torch.bfloat16, quantized=True)
        known = many_tokens.product_configs(shape, target)
        assert chosen in known.values(), (product, tokens)
        assert len(known) <= 16
    for sizes, tokens in itertools.product(many_tokens.EXPERTS.values(), many_tokens.EXPERT_TOKENS):
        each = dataclasses.replace(sizes, tokens=tokens)
        configs = many_tokens.expert_configs(each)
        assert choose_config(each, mma_tiles._FORMATS, target) in configs.values(), each
        assert len(configs) <= 16


@pytest.mark.parametrize("groups", [0, 2])
def test_products_are_the_same_in_all_tiles(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(portable_tiles, "_REPETITIONS", 1)
    product = ProductShape("small", 128, 512, groups)
    tiles = portable_tiles.product_tiles(product, 35, TARGETS["sm_80"])
    made = many_tokens.product_calls(product, 35, torch.device("cpu"), 1)
    want = made[0]()
    assert bool(want.isfinite().all())
    assert bool(want.any())
    assert len(tiles) >= 7
    for name in sorted(tiles)[::3]:
        with tiles[name]():
            assert relative_l2(made[0](), want) < 1e-3, name
    some = {name: tiles[name] for name in sorted(tiles)[:2]}
    assert portable_tiles.searched(made, some, CpuClock())["difference"] < 1e-3


def test_rows_of_products_and_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable_tiles, "_REPETITIONS", 1)
    for module in (many_tokens, mma_tiles):
        monkeypatch.setattr(module, "copies_for", lambda _: 1)
    every = many_tokens.product_configs
    monkeypatch.setattr(
        many_tokens, "product_configs", lambda *given: dict([*every(*given).items()][:2])
    )
    monkeypatch.setattr(many_tokens, "products", lambda: [ProductShape("small", 64, 512)])
    tiny = dataclasses.replace(mma_tiles.EXPERTS["flash"], experts=8, inner=128, d=256)
    monkeypatch.setattr(many_tokens, "EXPERTS", {"tiny": tiny})
    clock, target = CpuClock(), TARGETS["sm_80"]
    rows = [*portable_tiles.measured({"products": {33}, "experts": {3}}, target, clock)]
    assert [row["part"] for row in rows] == ["product tile", "experts tile"]
    for row, tokens in zip(rows, (33, 3), strict=True):
        assert row["tokens"] == tokens
        assert row["difference"] < 1e-3
        assert row["us_best"] == row["us_by_tile"][row["tile"]]
        assert row["share"] > 0
    product = rows[0]
    moved = 64 * 512 + 33 * (512 + 2 * 64)
    assert product["tb_per_s"] == pytest.approx(moved / product["us_best"] / 1e6)
    assert product["tflop_per_s"] == pytest.approx(2 * 33 * 64 * 512 / product["us_best"] / 1e6)


def test_families_and_their_numbers_of_tokens() -> None:
    assert portable_tiles.parsed(["streams:2048,8192", "prefill"]) == {
        "streams": {2048, 8192}, "prefill": set()
    }  # fmt: skip
    assert [*portable_tiles.parsed(portable_tiles.FAMILIES)] == [*portable_tiles.FAMILIES]
    with pytest.raises(SystemExit, match="no family stream"):
        portable_tiles.parsed(["stream"])
