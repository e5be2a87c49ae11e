"""Decode attention's cases, made small: what a row says, and that both sides do the same."""

from __future__ import annotations

import contextlib
import types

import pytest
import torch

from anymla.bench.runner import run
from anymla.compat import flash_mla
from anymla.formats.page_layout import MAIN_FP8
from anymla.ops.attention import CacheRows, sparse_attention
from lab.cases import sparse_attention as family
from lab.cases.sparse_attention import Decode
from lab.peers.flash_mla import FlashMla
from lab.peers.vllm import VllmXpu


def v32(batch, heads, width):
    return Decode(batch, 2, heads, 0, lengths=False, width=width, v32=True)


PEERS = [FlashMla(lambda _: flash_mla)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(family, "_WINDOW_SLOTS", 512)
    monkeypatch.setattr(family, "_EXTRA_SLOTS", 512)
    monkeypatch.setattr(family, "_MOST_LISTS", 2)


@pytest.mark.parametrize(
    "shape", [Decode(3, 1, 8, 64), Decode(2, 2, 64, 64, ragged=True), Decode(2, 2, 16, 0)]
)
def test_both_sides_are_right_and_a_row_says_what_it_always_said(shape, clock, recorded_fields):
    (result,) = run(family.decode_cases([shape], "torch", PEERS), clock)
    values = result.values
    assert values["error"] < 3e-3
    assert values["flash_mla_error"] < 3e-3
    assert (values["microseconds"], values["flash_mla_microseconds"]) == (10.0, 10.0)
    fields = recorded_fields("sparse_attention_h200", family.PART, "ragged" if shape.ragged else "")
    assert set(values) == fields - ({"mean_extra_length"} if not shape.ragged else set())
    assert result.case == shape.label
    assert values.items() >= shape.fields.items()
    if shape.ragged:
        torch.manual_seed(0)
        torch.randn(2, 2, 64, 512)
        assert values["mean_extra_length"] == torch.randint(0, 65, (2,)).double().mean()


@pytest.mark.parametrize("compiles", [True, False])
def test_random_shapes_are_compiled_before_they_are_timed(compiles, monkeypatch):
    """Each of them once, with what its timing draws; nothing runs where nothing is compiled."""
    seen = []

    def noted(q, rows, **keywords):
        seen.append((tuple(q.shape), rows[0].width, keywords["backend"]))
        return q, None

    monkeypatch.setattr(family, "sparse_attention", noted)
    monkeypatch.setattr(family, "compiled_together", lambda: contextlib.nullcontext(compiles))
    shapes = list(family.random_shapes(6, seed=3))
    family.compile_ahead(shapes, "torch", torch.device("cpu"))
    asked = [((s.batch * s.rows, s.heads, 512), s.width, "torch") for s in shapes]
    assert seen == (asked if compiles else [])


@pytest.mark.parametrize(
    ("heads", "ratio", "met"),
    [(64, 1.0, True), (64, 0.9, False), (16, 1.6, True), (16, 1.5, False)],
)
def test_a_shape_that_loses_is_said_to(heads, ratio, met, scripted):
    (result,) = run(
        family.decode_cases([Decode(1, 1, heads, 64)], "torch", PEERS), scripted(10, 10 * ratio)
    )
    assert result.values["ratio"] == pytest.approx(ratio)
    assert result.met is met
    assert "times FlashMLA's speed" in str(result.target)


def test_without_flash_mla_nothing_is_judged(clock):
    shapes = [Decode(1, 1, 8, 64)]
    cases = [*family.decode_cases(shapes, "torch", [], planned=True)]
    (planned, wide) = run([*cases, *family.decode_cases([v32(1, 2, 2048)], "torch", [])], clock)
    assert planned.values["planned"] is True
    for result in (planned, wide):
        assert (result.target, result.met) == (None, None)
        assert "ratio" not in result.values


def test_v32_rows(scripted, recorded_fields):
    shape = v32(2, 3, 64)
    (result,) = run(family.decode_cases([shape], "torch", PEERS), scripted(10, 8.9))
    assert result.values["error"] < 3e-3
    assert result.values["flash_mla_error"] < 3e-3
    assert set(result.values) == recorded_fields("sparse_attention_v32_h200", family.V32)
    assert result.values["teraflops"] == pytest.approx(2 * 2 * 2 * 3 * 64 * (576 + 512) / 1e7)
    assert result.met is False


@pytest.mark.parametrize(("times", "met"), [((9, 20, 20), True), ((9, 20, 20.1), False)])
def test_fp8_heads_have_the_same_bytes_in_no_more_time(times, met, scripted, recorded_fields):
    shape = Decode(2, 1, 64, 64)
    (result,) = run(family.fp8_heads_cases([shape], "torch", PEERS), scripted(*times, 30))
    assert result.values["same_bytes"] is True
    assert result.values["ratio"] == 30 / times[2]
    assert result.met is met
    assert set(result.values) == recorded_fields("decode_end_h200", family.FP8_HEADS, "h64")
    assert result.case == "h64 b2 s_q1 128+64, FP8 heads"
    # FlashMLA has no few heads to leave quantised.
    (few,) = run(family.fp8_heads_cases([Decode(2, 1, 16, 64)], "torch", PEERS), scripted())
    assert "flash_mla_microseconds" not in few.values


def test_other_bytes_are_said(monkeypatch, scripted):
    real = family.sparse_attention

    def other(*args, epilogue=None, **keywords):
        return (torch.zeros(1, 2), None) if epilogue else real(*args, **keywords)

    monkeypatch.setattr(family, "sparse_attention", other)
    (result,) = run(family.fp8_heads_cases([Decode(1, 1, 8, 64)], "torch", []), scripted())
    assert (result.values["same_bytes"], result.met) == (False, False)


def by_xpu(*, q, kv_cache, swa_kv_cache, topk_indices, swa_indices, topk_lens, swa_lens, **given):
    """vLLM's function over this package's operation."""
    assert given["swa_only"] is False
    assert given["head_dim"] == given["nope_head_dim"] + given["rope_head_dim"] == 512
    sparse_attention(
        q,
        [
            CacheRows(swa_kv_cache, MAIN_FP8, swa_indices[:, 0], swa_lens),
            CacheRows(kv_cache, MAIN_FP8, topk_indices[:, 0], topk_lens),
        ],
        sink=given["attn_sink"],
        out=given["out"],
        scale=given["softmax_scale"],
        backend="torch",
    )


def test_the_portable_one_beside_vllms_path(monkeypatch, scripted, recorded_fields):
    real = family.sparse_attention
    monkeypatch.setattr(
        family, "sparse_attention", lambda *a, backend, **k: real(*a, backend="torch", **k)
    )
    peer = VllmXpu(lambda _: types.SimpleNamespace(xpu_sparse_decode_fp8=by_xpu))
    shape = Decode(2, 1, 4, 64)
    (result,) = run(family.portable_cases([shape], peer), scripted(10, 21))
    assert result.values["error"] < 3e-3
    assert result.values["xpu_error"] < 3e-3
    assert (result.values["ratio"], result.met) == (2.1, True)
    assert set(result.values) == recorded_fields("portable_decode_h200", family.PORTABLE)


def test_the_shapes_are_those_of_the_tables():
    every = list(family.shapes())
    assert len(set(every)) == len(every) == 12 + 18 + 24 + 4
    assert set(family.portable_shapes()) <= set(every)
    assert set(family.fp8_heads_shapes()) <= set(every)
    assert next(shape.label for shape in family.v32_shapes()) == "V3.2 h128 b2 s_q2 2048"


def test_random_shapes_are_those_of_their_seed():
    some, more = [*family.random_shapes(20, 3)], [*family.random_shapes(200, 3)]
    assert more[:20] == some
    assert [each.number for each in more] == [*range(200)]
    assert {each.draw for each in more} == {3}
    assert {shape.label for shape in family.random_shapes(20, 4)} != {s.label for s in some}


@pytest.mark.parametrize("seed", range(3))
def test_random_shapes_are_of_every_kind(seed):
    shapes = [*family.random_shapes(200, seed)]
    assert {shape.heads for shape in shapes} == {*family.RANDOM_HEADS}
    assert {shape.page for shape in shapes} == {2, 64}
    assert {1, 2, 3} < {shape.rows for shape in shapes} <= {*range(1, 9)}
    assert min(shape.batch for shape in shapes) == 1
    assert 150 < max(shape.batch for shape in shapes) <= 300
    # Log-uniform: as many below the root of 300 as above.
    assert 75 <= sum(shape.batch <= 17 for shape in shapes) <= 125
    entries = [shape.extra for shape in shapes]
    assert 0 in entries
    assert 1536 < max(entries) <= 2048
    assert 60 < sum(count % 64 > 0 for count in entries) < 120
    assert 70 <= sum(shape.ragged for shape in shapes) <= 110
    assert 30 <= sum(not shape.lengths for shape in shapes) <= 70
    assert not any(shape.ragged and not (shape.lengths and shape.extra) for shape in shapes)


def test_a_random_shape_is_measured_beside_flash_mla(scripted):
    """One whose heads and lists FlashMLA does not take as they are; the row says all of it."""
    shape = family.Drawn(2, 3, 80, 70, 2, ragged=True, draw=7, number=5)
    (result,) = run(family.decode_cases([shape], "torch", PEERS), scripted(10, 9))
    values = result.values
    assert values["error"] < 3e-3
    assert values["flash_mla_error"] < 3e-3
    assert values.items() >= {"draw": 7, "number": 5, "seed": 7005, "width": 128}.items()
    assert values.items() >= shape.fields.items()
    assert (result.part, result.met) == (family.RANDOM, False)
