"""The decode layer that is measured, made small, and what is counted of it."""

import contextlib
import dataclasses

import pytest
import torch
from small_shapes import CONFIG

from anymla.bench.layer_setup import MODELS, LayerCase, LayerSetup, shared_sizes
from anymla.bench.runner import run
from anymla.compat import flash_mla
from anymla.formats.page_layout import INDEX_FP8
from anymla.layers.caches import CACHE_FORMATS
from anymla.layers.side_stream import INLINE
from anymla.ops.attention import sparse_attention
from anymla.ops.indexer import paged_mqa_logits
from anymla.runtime.device_step import Reads
from anymla.testing.tolerance import relative_l2
from lab import layer
from lab.kernel_files import family_of
from lab.layer import cases, compile_ahead, layer_case, layer_cases
from lab.layer_rival import rival_kernels
from lab.layer_work import layer_work
from lab.model_steps import decode_steps, engine_at, padding_step, random_model
from lab.peers.deep_gemm import DeepGemm
from lab.peers.flash_mla import FlashMla

BATCH, CONTEXT = 3, 300


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_a_small_one_runs_and_is_counted(ratio):
    setup = LayerSetup("flash", ratio, torch.device("cpu"), experts=8, copies=1, changes=CONFIG)
    batch = setup.batch(BATCH, CONTEXT)
    out = batch.run(setup.layers[0]).flush()
    assert out.shape == (BATCH, 4, 256)
    assert out.isfinite().all()
    assert 0.1 < out.float().std() < 10  # nothing explodes or dies, so that times mean something
    visited = setup.visited(batch)
    assert 1 <= visited <= 8
    work = layer_work(setup.layers[0], setup.config, batch, visited)
    # Window rows, and 16 chosen of 75 scored, or both complete entries of 128 tokens.
    rows = 128 + {0: 0, 4: 16, 128: 2}[ratio]
    keys = {0: 0, 4: 75, 128: 0}[ratio]
    assert work.cache_bytes == BATCH * (rows * 584 + keys * 132)
    # Entries may have a record of their own.
    cache = dataclasses.replace(batch.cache, format=CACHE_FORMATS["nvfp4"])
    others = dataclasses.replace(batch, cache=cache)
    counted = layer_work(setup.layers[0], setup.config, others, visited)
    assert counted.cache_bytes == BATCH * (128 * 528 + (rows - 128) * 288 + keys * 68)
    assert counted.flops == work.flops
    expert = 3 * 256 * 128
    fewer = layer_work(setup.layers[0], setup.config, batch, visited - 1)
    assert work.weight_bytes - fewer.weight_bytes == expert // 2 + expert // 32
    assert work.expert_bytes == visited * (expert // 2 + expert // 32)
    attention = 256 * (128 + 512) + 4 * 512 * 128 + 256 * 2 * 512 + 256 * 256
    assert work.flops > 2 * BATCH * (attention + 7 * expert)
    assert work.roofline_us(1e9, 1e18) == pytest.approx(
        (work.weight_bytes + work.cache_bytes) / 1e3
    )


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_several_queries_of_a_request_see_the_same_however_rows_are_read(ratio):
    setup = LayerSetup("flash", ratio, torch.device("cpu"), experts=8, copies=1, changes=CONFIG)
    results = []
    for reads in Reads:
        torch.manual_seed(1)
        batch = setup.batch(BATCH, CONTEXT, queries=5, reads=reads)
        assert ("window" in batch.step.chunks) is (reads == Reads.DECODED)
        results.append(batch.run(setup.layers[0]).flush().float())
    by_slots, decoded = results
    assert by_slots.shape[0] == 5 * BATCH
    assert (decoded - by_slots).norm() < 5e-3 * by_slots.norm()


def test_a_case_of_several_queries_says_so(scripted):
    setup = LayerSetup("flash", 0, torch.device("cpu"), experts=8, copies=1, changes=CONFIG)
    (case,) = layer.cases(["flash"], [0], [BATCH], [CONTEXT], 3, [Reads.DECODED])
    batch = setup.batch(BATCH, CONTEXT, queries=3, reads=Reads.DECODED)
    (result,) = run([layer_case(setup, case, batch)], scripted(20))
    assert result.values["queries"] == 3
    assert result.values["reads"] == "decoded"
    assert "3 queries" in result.case


def test_what_is_only_compiled_is_not_kept(monkeypatch):
    monkeypatch.setattr(layer, "compiled_together", lambda: contextlib.nullcontext(True))
    setup = LayerSetup("flash", 0, torch.device("cpu"), experts=8, copies=1, changes=CONFIG)
    batch = setup.batch(BATCH, CONTEXT)
    compile_ahead(setup, [batch])
    assert not batch.step.plans._made
    batch.run(setup.layers[0])
    assert batch.step.plans._made


def test_every_combination_is_a_case():
    found = list(cases())
    # A layer with nothing but a window is measured at one context.
    assert len(found) == 2 * 4 * (1 + 3 + 3)
    assert len(set(found)) == len(found)


def test_kernels_are_known_by_their_family():
    pytest.importorskip("triton")
    assert family_of("decode_kernel") == "attention"
    assert family_of("mix_kernel") == "hyper_connection"
    assert family_of("nvjet_tst_128x64") == "torch"


class _StandIn:
    """This package's own FlashMLA, which reads the same arguments, outside of the patches."""

    def __init__(self):
        self.attention = [*sparse_attention.backends.values()]
        self.calls = 0

    def get_mla_metadata(self):
        return flash_mla.get_mla_metadata()

    def flash_mla_with_kvcache(self, *args, **kwargs):
        self.calls += 1
        with sparse_attention.with_backends(self.attention):
            return flash_mla.flash_mla_with_kvcache(*args, **kwargs)


class _Scores:
    """This package's index scores, which read the same arguments as DeepGEMM's."""

    def __init__(self):
        self.early = []
        self.set_pdl = self.early.append

    def get_num_sms(self):
        return 1

    def get_paged_mqa_logits_metadata(self, lengths, page, sms):
        return lengths

    def fp8_paged_mqa_logits(self, q, cache, weights, lengths, table, plan, most, clean):
        assert plan.data_ptr() == lengths.data_ptr()
        return paged_mqa_logits(
            q, cache, weights, lengths, table, max_context=most, layout=INDEX_FP8
        )


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_others_kernels_compute_the_same_layer(ratio):
    setup = LayerSetup("flash", ratio, torch.device("cpu"), experts=8, copies=1, changes=CONFIG)
    batch = setup.batch(BATCH, CONTEXT)
    want = batch.run(setup.layers[0]).flush()
    module, scores = _StandIn(), _Scores()
    with rival_kernels(FlashMla(lambda _: module), DeepGemm(lambda _: scores)):
        got = batch.run(setup.layers[0]).flush()
    assert module.calls == 1
    assert scores.early == [True, False]
    # The same bytes and roundings; sums of padded lists may be taken in another order.
    assert relative_l2(got, want) < 0.02


@pytest.mark.parametrize("others", [False, True])
def test_a_row_says_what_it_always_said(others, scripted, recorded_fields):
    setup = LayerSetup("flash", 4, torch.device("cpu"), experts=8, copies=2, changes=CONFIG)
    module, scores = _StandIn(), _Scores()
    peers = FlashMla(lambda _: module), DeepGemm(lambda _: scores)
    case = LayerCase("flash", 4, BATCH, CONTEXT)
    clock = scripted(20, 50)
    batch = setup.batch(BATCH, CONTEXT)
    (result,) = run([layer_case(setup, case, batch, peers if others else None)], clock)
    fields = recorded_fields("layer", layer.PART, "batch 1,")
    named = {"times_others", *(name for name in fields if name.startswith("others_"))}
    fields |= {"experts_mb"}  # rows before 30 November 2026 lack it
    assert set(result.values) == (fields if others else fields - named)
    assert result.case == f"flash, ratio 4, batch {BATCH}, context {CONTEXT}"
    assert result.values["us"] == 20.0
    if others:
        assert result.values["times_others"] == 2.5
        assert result.values["others_launches"] == 3
    assert result.values["parts_us"] == {"attention": 3.0, "torch": 2.5}
    assert result.values["kernels_us"] == {"decode_kernel": [1, 3.0], "nvjet": [2, 2.5]}
    roofline = result.values["roofline_us"]
    assert result.values["share_of_roofline"] == pytest.approx(roofline / 20, abs=3e-3)
    assert result.target == "<= 2.5 x roofline + 3.0 us a launch"
    assert result.met is (2.5 * roofline + 9 >= 20)
    # Both copies of the layer follow each other three times.
    assert clock.seen[0] == (6, 20)


def test_one_gpus_part_of_a_layer_has_parts_of_its_heads_and_channels():
    (case,) = cases(["flash"], [0], [1], [CONTEXT], experts=8, share=4)
    assert (case.experts, case.share) == (8, 4)
    changes = shared_sizes("flash", case.share)
    part = LayerSetup("flash", 0, torch.device("meta"), experts=8, copies=1, changes=changes)
    (layer,) = part.layers
    assert len(layer.attention.heads.sink) * 4 == MODELS["flash"]["num_attention_heads"]
    with pytest.raises(ValueError, match="64 of flash has no 5 equal parts"):
        shared_sizes("flash", 5)


def test_the_cases_of_a_layer_share_its_weights(monkeypatch, clock):
    made = []

    def setup(model, ratio, device, *, experts, changes):
        made.append((model, ratio))
        return LayerSetup(model, ratio, device, experts=8, copies=1, changes=CONFIG)

    monkeypatch.setattr(layer, "LayerSetup", setup)
    monkeypatch.setattr(layer, "SideStream", lambda _: INLINE)
    chosen = cases(["flash"], [0, 128], [2, 16], [CONTEXT])
    results = list(run(layer_cases(chosen, clock), clock))
    assert made == [("flash", 0), ("flash", 128)]
    assert [result.case.split(", ", 1)[1] for result in results] == [
        f"ratio {ratio}, batch {batch}, context {CONTEXT}"
        for ratio in (0, 128)
        for batch in (2, 16)
    ]
    # Many requests are not asked to be near the roofline.
    assert [result.met is None for result in results] == [False, True] * 2


@pytest.mark.parametrize(
    ("name", "ratios", "kv_cache", "ngrams"),
    [
        ("flash", [0, 0, 4, 128], "fp8", False),
        ("flash-41", [0, 0, 2, 2], "nvfp4", False),
        ("flash-41", [0, 0, 2, 2], "nvfp4", True),
    ],
)
def test_a_whole_small_model_takes_steps(name, ratios, kv_cache, ngrams):
    changes = (
        CONFIG | {"vocab_size": 300} | ({"engram_compressed_vocab_size": 200} if ngrams else {})
    )
    model = random_model(
        name, torch.device("cpu"), layers=4, experts=8, changes=changes, ngrams=ngrams
    )
    assert [spec.ratio for spec in model.layer_specs] == ratios
    assert [layer.engram is not None for layer in model.layers] == [False, ngrams, False, False]
    given = {"context": 40, "steps": 2, "kv_cache": kv_cache}
    results = list(decode_steps(model, "small", (2,), ("fixed", "plain"), **given))
    assert [result.case for result in results] == [
        "small, batch 2, context 40, fixed",
        "small, batch 2, context 40, plain",
    ]
    assert all(result.values["us"] > 0 for result in results)
    # What a GPU compiles ahead, of tokens that are nobody's.
    store = engine_at(model, 2, 40, 4, "plain", kv_cache=kv_cache).store
    step = padding_step(model, store, 3, 64)
    assert model.forward(step, store.layers, only=model.kinds_of_layers()).shape[0] == 3
