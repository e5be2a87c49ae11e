"""Cases C10, C11, I15, I16, M5, M6 and Q10: what V4.1's layers share, and what they do not do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anymla.formats.page_layout import INDEX_MXFP4
from anymla.layers.engram import Engram, EngramTable
from anymla.layers.linear import Linear, PackedWeight
from anymla.layers.step import Step
from anymla.model.build import ngram_hash
from anymla.model.config import ModelConfig
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.conformance.expected import EngramGate, index_scale, index_scores, table
from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import case, expect
from anymla.testing.conformance.tiny_model import tiny_model
from anymla.testing.generate import guarded_cache, scattered_pages, slots_of
from anymla.testing.oracle.blocks import rms_norm
from anymla.testing.oracle.check import check_run
from anymla.testing.oracle.recording import RecordedModel, Recorder
from anymla.testing.oracle.rounding import decode_e4m3
from anymla.testing.oracle.row_formats import ROW_FORMATS
from anymla.testing.published import FLASH_41
from anymla.testing.tiny_checkpoint import TinyOptions
from anymla.testing.tiny_options import TinySharing
from anymla.testing.tolerance import accumulation, assert_close, assert_identical

_EPS = 1e-20


def _latents(ops: Ops, kv: Tensor, score: Tensor, norm: Tensor, splits: Sequence[int]) -> Tensor:
    """Run ``compress_norm`` for entries of two tokens in steps of the given sizes: [T, D]."""
    tokens, dim = kv.shape
    table_, pages = scattered_pages([tokens], 4)
    state = torch.full((pages, 4, 2 * dim), torch.nan)
    out, start = [], 0
    for count in splits:
        here = slice(start, start + count)
        positions = torch.arange(start, start + count)
        slots = slots_of(table_, 0, positions, 4)
        ops.save_partial_states(
            kv[here], score[here], torch.zeros(2, dim), positions, state, slots, compress_ratio=2
        )
        owner = torch.zeros(count, dtype=torch.int32)
        out.append(
            ops.compress_norm(
                state, table_, slots, owner, positions, norm, _EPS, compress_ratio=2, overlap=False
            )
        )
        start += count
    return torch.cat(out)


@case(
    "C10",
    "V4.1 pools two tokens by their scores alone, and hands the entry on before it is rotated",
    "save_partial_states",
    "compress_norm",
)
def pairs_of_tokens(ops: Ops) -> None:
    dim, slack = 64, accumulation(4, torch.float32)
    for tokens, splits in ((1, [1]), (2, [2]), (11, [11]), (11, [1] * 11), (11, [3, 5, 1, 2])):
        kv, score = torch.randn(tokens, 2 * dim).split(dim, 1)
        norm = 1 + 0.1 * torch.randn(dim)
        for size, what in ((1.0, ""), (1e-4, ", tiny, which V4's epsilon would shrink")):
            got = _latents(ops, size * kv, score, norm, splits)
            name = f"{tokens} tokens in steps of {splits}{what}"
            whole = tokens // 2 * 2
            share = score[:whole].double().unflatten(0, (-1, 2)).softmax(1)
            pooled = (share * size * kv[:whole].double().unflatten(0, (-1, 2))).sum(1)
            want = rms_norm(pooled, norm.double(), _EPS)
            # The norm divides the rounding errors of two rows by the size of their mean.
            scale = 4 * size / pooled.square().mean(1, keepdim=True).sqrt()
            assert_close(got[1::2], want, atol=slack, scale=scale, name=name)
            expect(not bool(got[::2].any()), f"{name}: tokens that close nothing give zero")


@case(
    "I15",
    "candidate blocks are those of the best scores, the newest always; no other entry is selected",
    "select_candidate_blocks",
    "mask_candidates",
)
def candidate_blocks(ops: Ops) -> None:
    width, size, count = 45, 4, 3
    lens = torch.tensor([0, 1, 4, 5, 12, 13, 33, 44, 45], dtype=torch.int32)
    logits = torch.randint(-9, 9, (len(lens), width)).float()
    logits[-1, -1] = -50.0  # the newest block, and the worst
    logits[-2, 40:44] = -50.0
    logits[-3, 8:12] = -torch.inf
    for row, seen in enumerate(lens.tolist()):
        logits[row, seen:] = torch.nan if row % 2 else 1000.0
    blocks = ops.select_candidate_blocks(logits.clone(), lens, count, block_size=size)
    for row, seen in enumerate(lens.tolist()):
        parts = logits[row, :seen].split(size) if seen else ()
        best = {number: float(part.max()) for number, part in enumerate(parts)}
        if best:
            best[max(best)] = float("inf")
        order = sorted((n for n in best if best[n] > -torch.inf), key=lambda n: (-best[n], n))
        want = sorted(order[:count])
        expect(
            blocks[row].tolist() == want + [-1] * (count - len(want)),
            f"{seen} entries: blocks {blocks[row].tolist()}, expected {want}",
        )
    scores = torch.randn(len(lens), width)
    masked = scores.clone()
    ops.mask_candidates(masked, blocks.flip(1).contiguous(), block_size=size)
    for row in range(len(lens)):
        kept = set(blocks[row].tolist()) - {-1}
        inside = torch.tensor([column // size in kept for column in range(width)])
        want_row = torch.where(inside, scores[row], -torch.inf)
        assert_identical(masked[row], want_row, name=f"scores of {int(lens[row])} entries")


@case(
    "I16",
    "V4.1's MXFP4 index keys and queries are not rotated by the Hadamard matrix",
    "quantize_and_insert_k_cache",
    "indexer_q_rope_quant",
    "paged_mqa_logits",
)
def plain_mxfp4_keys(ops: Ops) -> None:
    entries, heads = 70, 32
    table_, pages = scattered_pages([entries], 64)
    guarded = guarded_cache(INDEX_MXFP4, pages, 64)
    keys = torch.randn(entries, 128).bfloat16()
    slots = slots_of(table_, 0, torch.arange(entries), 64)
    ops.quantize_and_insert_k_cache(keys, guarded.cache, slots, layout=INDEX_MXFP4)
    q, weights = torch.randn(3, heads, 128).bfloat16(), torch.randn(3, heads)
    # At position 0 the rotation is the identity, so the codes are known exactly.
    codes, scales, scaled = ops.indexer_q_rope_quant(
        q,
        weights,
        torch.zeros(3, dtype=torch.int64),
        table(8, compressed=True),
        softmax_scale=128**-0.5,
        head_scale=heads**-0.5,
        quant="mxfp4",
        hadamard=False,
    )
    lens = torch.tensor([[70], [64], [1]], dtype=torch.int32)
    got = ops.paged_mqa_logits(
        codes.unsqueeze(1), guarded.cache, scaled, lens, table_.repeat(3, 1),
        max_context=entries, layout=INDEX_MXFP4, q_scales=scales.unsqueeze(1),
    )  # fmt: skip
    mxfp4 = ROW_FORMATS[INDEX_MXFP4]
    rounded = mxfp4.round(q.double().flatten(0, 1)).view(q.shape)
    rows = mxfp4.round(keys.double())
    exact = weights.double() * 128**-0.5 * heads**-0.5
    want = index_scores(rounded, rows, exact)
    want = torch.where(torch.arange(entries) < lens, want, -torch.inf)
    size = index_scale(rounded, rows, exact)
    assert_close(got, want, atol=2 * ops.dot_error, scale=size, name="scores")


@case("M5", "V4.1's n-grams: which rows they are hashed to, and how much of them is added")
def ngrams(ops: Ops) -> None:
    del ops
    config = ModelConfig.from_dict(FLASH_41).engram
    assert config is not None
    primes = config.primes()
    expect(primes[14][:1] == (16000477,), "layers have primes of their own")
    sums = tuple(map(sum, primes.values()))
    expect(sums == config.rows, f"tables of {sums} rows, expected {config.rows}")
    # Golden numbers of DeepSeek's own code, with an identity token map.
    every = torch.arange(129280) % config.tokens
    hashes = ngram_hash(config, 1, every, torch.device("cpu"))
    at = torch.tensor([8])
    rows = hashes(at, torch.tensor([[7, 6, 5]]))[0, [0, 1, 2, 8, 16, 23]].tolist()
    golden = [11754974, 24210124, 42797160, 143641730, 259287126, 371888815]
    expect(rows == golden, f"rows {rows}, expected {golden}")
    for previous, same in (([-1, -1, -1], [2, 2, 2]), ([7, -1, 5], [7, 2, 2])):
        first, second = (hashes(at, torch.tensor([each])) for each in (previous, same))
        expect(torch.equal(first, second), f"behind the gap of {previous} stands padding")

    tokens, streams, hidden = 5, 4, 24
    columns, width = config.columns, 4
    engram = Engram(
        layer=0,
        ngrams=hashes,
        table=EngramTable(torch.randn(7, width), None),
        wkv=Linear(PackedWeight("plain", torch.randn((streams + 1) * hidden, columns * width))),
        weight=1 + 0.1 * torch.randn(streams, hidden),
        eps=_EPS,
    )
    read = engram.table.rows(torch.randint(0, 7, (tokens, columns)))
    h = torch.randn(tokens, streams, hidden)
    h[0] = 0  # no agreement: the root of the least size
    got = engram(h, _only_ngrams(read))
    parts = (read.weight.flatten(1).double() @ engram.wkv.packed.weight.double().T).unflatten(
        1, (streams + 1, hidden)
    )
    keys, value = rms_norm(parts[:, :-1], None, _EPS), parts[:, -1:]
    dot = (rms_norm(h.double(), None, _EPS) * keys * engram.weight).sum(-1) * hidden**-0.5
    gate = torch.sigmoid(dot.sign() * dot.abs().clamp(min=1e-6).sqrt())
    gate[0] = torch.sigmoid(torch.tensor(1e-3, dtype=torch.float64))
    want = h.double() + gate.unsqueeze(-1) * value
    # Products of 96 terms reach 30; the slope of a root at 0.01, near which a dot may be, is 5.
    assert_close(
        got, want, atol=8 * accumulation(96, torch.float32), scale=30.0, name="streams with n-grams"
    )


@case(
    "M6",
    "V4.1's n-grams are added to each stream by how far it agrees with its own key",
    "engram_gate",
    quick=True,
)
def gates_of_ngrams(ops: Ops) -> None:
    streams, width = 4, 48
    weight = 1 + 0.2 * torch.randn(streams, width)
    for tokens, size, name in ((1, 1.0, "a token"), (19, 1.0, "19"), (19, 1e-4, "19 tiny ones")):
        h = size * torch.randn(tokens, streams, width)
        projected = torch.randn(tokens, (streams + 1) * width)
        got = ops.engram_gate(h, projected, weight, eps=_EPS)
        EngramGate.of(h, projected, weight, _EPS).check(got, f"{name}: streams")
        # No agreement, and almost no disagreement: roots of the least size.
        h[:, 0], h[:, 1] = 0, torch.tensor([1.0, 0.0]).repeat(width // 2)
        projected[:, width : 2 * width] = torch.tensor([-1e-7, 1.0]).repeat(width // 2)
        got = ops.engram_gate(h, projected, weight.abs(), eps=_EPS)
        EngramGate.of(h, projected, weight.abs(), _EPS).check(got, f"{name}: small dots")


@case(
    "Q10",
    "rows of V4.1's tables have a scale for every 32 channels, and lie side by side",
    "engram_rows",
    quick=True,
)
def rows_of_tables(ops: Ops) -> None:
    tokens, columns, width, blocks = 5, 3, 64, 2
    codes = torch.randint(0, 256, (tokens, columns, width)).to(torch.uint8)
    codes[codes & 0x7F == 0x7F] = 1  # a subnormal instead of NaN
    scales = torch.randint(100, 150, (tokens, columns, blocks)).to(torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((tokens, columns * width), torch.nan, dtype=dtype)
        ops.engram_rows(out, codes, scales)
        size = torch.exp2(scales.double() - 127).repeat_interleave(width // blocks, 2)
        want = (decode_e4m3(codes).double() * size).flatten(1).to(dtype)
        assert_identical(out, want, name=f"rows in {dtype}")


def _only_ngrams(read: object) -> Step:
    step: Step = object.__new__(Step)
    object.__setattr__(step, "ngrams", {0: read})
    return step


_RATIOS = (0, 2, 1, 1)
OPTIONS = TinyOptions.shared(
    weights="bf16", ratios=_RATIOS, hidden=64, heads=2, o_groups=1, o_lora=32, q_lora=32,
    index_heads=4, index_topk=5, experts=4, experts_per_token=2, moe_size=32, window=16,
    sharing=TinySharing.of(
        _RATIOS, candidate_blocks=2, candidate_block_size=4, engram_layers=(1, 2),
        index_sources=(1, 2, 3),
    ),
)  # fmt: skip


# Operations that a step of a whole model calls.
STEP_OPERATIONS = (
    "rope",
    "rms_norm",
    "quantize_and_insert_k_cache",
    "save_partial_states",
    "compress_norm",
    "indexer_q_rope_quant",
    "paged_mqa_logits",
    "select_candidate_blocks",
    "mask_candidates",
    "topk_per_row",
    "sparse_attention",
    "grouped_output_projection",
    "linear",
    "experts",
    "hc_gates",
    "hc_post",
    "hc_collapse_norm",
    "engram_gate",
)


@case(
    "C11",
    "a whole V4.1 in chunks: heads are not normed, n-grams reach back over chunks, layers attend "
    "to what others wrote and selected",
    *STEP_OPERATIONS,
    quick=True,
)
def whole_shared_model(ops: Ops) -> None:
    with tiny_model(ops, OPTIONS) as (model, directory):
        prompt = tuple(torch.randint(2, model.config.vocab_size, (37,)).tolist())
        request = Request("one", prompt, max_new_tokens=3)
        # On a CPU, steps of few tokens are built on the host and all others on the device's path.
        for options in (
            EngineOptions(kv_cache="fp32", chunk_size=13, decode="plain"),
            EngineOptions(kv_cache="fp32", chunk_size=37, decode="fixed"),
        ):
            recorder = Recorder()
            recorded = RecordedModel(model, recorder)
            engine = Engine.for_requests(recorded, options, [request])  # type: ignore[arg-type]
            (done,) = engine.run([request])
            (recording,) = recorder.recordings
            tokens = [*prompt, *done.token_ids]
            report = check_run(directory, recording, tokens, recorded.logprobs(recording, tokens))
            expect(report.ok, "\n".join([f"chunks of {options.chunk_size}:", *report.lines()]))
