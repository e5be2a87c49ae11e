"""The indexer's cases: shapes, and what a row says with the peers that a machine has."""

from __future__ import annotations

import functools

import pytest
import torch

from anymla.bench.runner import run
from anymla.formats.page_layout import INDEX_FP8
from anymla.ops.indexer import paged_mqa_logits, select_topk
from anymla.ops.indexer.shapes import DECODES, PREFILLS, SelectShape
from lab.cases import indexer as family
from lab.cases.indexer import PAGE, TOPK, WIDTH, pages_needed
from lab.peers.deep_gemm import DeepGemm


def test_shapes_cover_decoding_and_prefill():
    assert len(set(DECODES)) == 32
    assert {(s.queries, s.keys) for s in PREFILLS} == {
        (m, n) for m in (2048, 8192) for n in (8192, 65_536, 262_144)
    }
    assert SelectShape(8, 2, 2048).rows == 16
    assert SelectShape(8, 2, 2048).label == "decode 8 x 2 x 2048"
    assert SelectShape(1, 2048, 8192, prefill=True).label == "prefill 2048 x 8192"


def test_the_pool_holds_the_largest_shape():
    assert pages_needed([SelectShape(128, 1, 262_144)]) == 128 * 262_144 // 64
    # Small shapes still rotate through more than any cache holds.
    assert pages_needed([SelectShape(1, 1, 2048)]) * 64 * 132 > 256 << 20


class Scores:
    """DeepGEMM's functions by this package's operations and by torch."""

    __version__ = "2.1"

    def get_num_sms(self):
        return 1

    def get_paged_mqa_logits_metadata(self, lengths, page, sms):
        assert (page, sms) == (PAGE, 1)
        return lengths

    def fp8_paged_mqa_logits(self, q, cache, weights, lengths, table, plan, most, clean):
        assert plan is lengths
        logits = paged_mqa_logits(
            q, cache, weights, lengths, table, max_context=most, layout=INDEX_FP8, backend="torch"
        )
        return logits.flatten(0, -2)

    def fp8_mqa_logits(self, q, kv, weights, starts, ends, clean):
        keys = kv[0].float() * kv[1][:, None]
        scores = torch.einsum("thd,kd->thk", q.float(), keys).relu()
        logits = (scores * weights[:, :, None]).sum(1)
        place = torch.arange(len(keys))
        seen = (place >= starts[:, None]) & (place < ends[:, None])
        return logits.masked_fill(~seen, -torch.inf) if clean else logits


class Selectors:
    """vLLM's kernels, of which one does not take this shape."""

    def selectors(self, shape, k, device):
        assert k == TOPK

        def refuses(logits, lengths):
            raise RuntimeError("persistent_topk: too many")

        return {
            "top_k_per_row_prefill": lambda logits, lengths: logits.topk(k),
            "persistent_topk": refuses,
        }


PEER = DeepGemm(lambda _: Scores())


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(family, "_POOL_BYTES", 1)
    monkeypatch.setattr(family, "_MOST_SETS", 2)
    monkeypatch.setattr(family, "copies_for", lambda _: 2)


@pytest.fixture
def only_scores(monkeypatch):
    """The first half of a selection needs a kernel."""
    seen = []
    monkeypatch.setattr(family, "score_only", lambda backend, given, shape: seen.append(backend))
    return seen


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "shape", [SelectShape(2, 2, 1024), SelectShape(1, 3, 1024, prefill=True)], ids=str
)
def test_a_row_says_what_it_always_said(shape, only_scores, scripted, recorded_fields):
    clock = scripted(10, 20, 30, 5, 12.346)
    (result,) = run(family.cases([shape], ["torch"], PEER, Selectors()), clock)
    values = result.values
    assert only_scores == ["torch"] * 2
    assert {
        "deep_gemm_us": 10, "topk_us": 20, "topk_mb": 3.0, "torch_scores_us": 5,
        "torch_us": 12.35, "torch_mb": 3.0, "vllm_us": 30, "vllm_kernel": "top_k_per_row_prefill",
        "over_topk": 1.62, "over_vllm": 2.43,
    }.items() <= values.items()  # fmt: skip
    names = {name.replace("torch_", "gluon_sm90_") for name in values}
    assert names == recorded_fields("indexer_h200", "indexer", shape.label.split()[0])
    assert clock.seen == [(2, 8)] * 5 + ["release"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "shape", [SelectShape(2, 2, 1024), SelectShape(1, 3, 1024, prefill=True)], ids=str
)
def test_both_sides_select_the_same(shape):
    (given, _) = family.Pool(pages_needed([shape]), torch.device("cpu")).inputs(shape, 2)
    ours = given.select("torch", shape)
    theirs = PEER.scores(shape, given)(True).topk(TOPK).indices
    for mine, other in zip(ours, theirs, strict=True):
        assert len(set(mine.tolist()) & set(other.tolist())) >= 0.99 * TOPK


@pytest.mark.usefixtures("small")
def test_without_peers_only_ours_is_timed(only_scores, clock):
    (result,) = run(family.cases([SelectShape(1, 1, 640)], ["torch"], None, None), clock)
    assert set(result.values) == {"seed", "torch_scores_us", "torch_us", "torch_mb"}


@pytest.mark.usefixtures("small")
def test_without_anything_that_runs_here_there_is_no_row(clock):
    none = family.cases([SelectShape(1, 1, 640)], ["gluon_sm90"], None, None)
    assert list(run(none, clock)) == []


@pytest.mark.usefixtures("small")
def test_large_shapes_are_timed_less_often(only_scores, clock, monkeypatch):
    monkeypatch.setattr(select_topk, "supports", lambda *_, **__: True)
    monkeypatch.setattr(family.Inputs, "select", lambda *_: None)
    pool = functools.cache(lambda device: family.Pool(1, device))
    given = family.Inputs(*[torch.zeros(1)] * 5)
    monkeypatch.setattr(family.Pool, "inputs", lambda *_: [given] * 2)
    for requests, keys, want in (
        (1, WIDTH, (2, 8)),
        (1 << 17, 256, (2, 4)),
        (1 << 17, 4096, (1, 4)),
    ):
        shape = SelectShape(requests, 1, keys)
        subjects = family._subjects(shape, pool, ["triton"], None, None, clock)
        assert {(len(each.calls), each.repetitions) for each in subjects} == {want}


@pytest.mark.usefixtures("small")
def test_the_scores_that_are_timed_alone_are_those_of_the_selection(monkeypatch):
    """By a kernel's interpreter: what is selected are the entries of the best scores."""
    triton_scores = pytest.importorskip("anymla.ops.indexer.triton_scores")
    shape = SelectShape(1, 2, 640)
    (given, _) = family.Pool(pages_needed([shape]), torch.device("cpu")).inputs(shape, 2)
    seen = []
    write = triton_scores.write_scores

    def written(inputs, scores, maxima, target):
        write(inputs, scores, maxima, target)
        seen.append(scores[: len(inputs.q), : shape.keys].topk(TOPK).indices)

    monkeypatch.setattr(triton_scores, "write_scores", written)
    family.score_only("triton", given, shape)
    selected = given.select("torch", shape)
    for mine, other in zip(torch.cat(seen).tolist(), selected.tolist(), strict=True):
        assert len(set(mine) & set(other)) >= 0.99 * TOPK
