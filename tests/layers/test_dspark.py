"""The DSpark drafter's layers against the float64 oracle, which shares no code with them."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch

from anymla.formats.page_layout import get_layout
from anymla.layers.caches import CACHE_FORMATS, LayerCache
from anymla.layers.dspark import Taps
from anymla.layers.rows import Rows
from anymla.layers.spec import CONTEXT_ROWS, WINDOW_GROUP
from anymla.model.load import load_model
from anymla.runtime.block_step import block_step
from anymla.runtime.cache_groups import cache_groups
from anymla.runtime.cache_store import CacheStore
from anymla.runtime.ngrams import NgramReader
from anymla.runtime.request import Request, RequestState
from anymla.runtime.sampler import best_tokens
from anymla.runtime.span import Span
from anymla.runtime.step_plan import StepPlanner
from anymla.testing.oracle import DSparkOracle, OracleModel
from anymla.testing.oracle.row_formats import ROW_FORMATS, read_entries
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing
from anymla.testing.tolerance import relative_error

TINY = TinyOptions(
    weights="fp4",
    ratios=(0, 4, 128, 4),
    hidden=128,
    heads=4,
    o_groups=2,
    q_lora=64,
    o_lora=64,
    index_heads=4,
    index_topk=16,
    experts=8,
    experts_per_token=3,
    moe_size=64,
    drafter="dspark",
    markov_rank=24,
)
_RATIOS = (0, 0, 2, 1, 1)
MODELS = {
    "v4": TINY,
    # Its stages have other experts, its taps lie where layers begin: the first behind n-grams.
    "v4.1": TinyOptions.shared(
        weights="fp4",
        ratios=_RATIOS,
        sharing=TinySharing.of(_RATIOS, engram_layers=(1, 2)),
        hidden=128,
        heads=4,
        o_groups=2,
        q_lora=64,
        o_lora=64,
        index_heads=4,
        index_topk=16,
        experts=8,
        experts_per_token=3,
        moe_size=64,
        drafter="dspark",
        markov_rank=24,
        draft_experts=6,
        draft_experts_per_token=2,
    ),
}
# Rows that each is meant to keep.
ROWS = {"v4": "fp8", "v4.1": "nvfp4"}
# Three float32 layers; transformers agrees with the oracle as closely.
FLOAT32 = 1e-5
MAX_SEQ_LEN = 420
LENGTHS = [1, 2, 5, 127, 128, 129, 300]


@pytest.fixture(scope="module", params=MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def directory(name, tmp_path_factory):
    directory = tmp_path_factory.mktemp("dspark")
    write_tiny_checkpoint(directory, MODELS[name])
    return directory


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def oracle(directory):
    return DSparkOracle(directory)


class Run:
    """Requests of one model in paged caches full of NaN, driven step by step."""

    def __init__(self, model, kv_cache="fp32", block=5, requests=4):
        self.model, self.block = model, block
        specs, groups = model.layer_specs, cache_groups(model.layer_specs)
        self.window = specs[0].window
        pages = {g.name: requests * g.worst_case_pages(MAX_SEQ_LEN, MAX_SEQ_LEN) for g in groups}
        self.store = CacheStore(
            groups,
            specs,
            CACHE_FORMATS[kv_cache],
            pages,
            max_requests=requests,
            max_seq_len=MAX_SEQ_LEN,
            device=torch.device("cpu"),
        )
        for group in groups:
            for cache in self.store.tensors(group):
                cache.fill_(255 if cache.dtype == torch.uint8 else torch.nan)
        self.pages = pages
        self.planner = StepPlanner(self.store, ngrams=NgramReader(model.engrams, model.device))
        count = model.config.num_hidden_layers
        self.backbone, self.stages = self.store.layers[:count], self.store.layers[count:]
        rows = dataclasses.replace(CACHE_FORMATS[kv_cache], compressed=None)
        layout = get_layout(rows.main)
        own = layout.allocate(requests, block, torch.device("cpu"))
        own.fill_(255 if own.dtype == torch.uint8 else torch.nan)
        self.blocks = [
            LayerCache(format=rows, window=own, compressed=cache.window) for cache in self.stages
        ]

    def admit(self, token_ids):
        state = RequestState(Request("r", tuple(token_ids), 100))
        needs = {name: pages // 4 for name, pages in self.pages.items()}
        assert self.store.admit(state, needs)
        return state

    def backbone_taps(self, state, start, stop):
        """Run the backbone over tokens; the streams, and the taps behind the target layers."""
        step = self.planner.build([Span(state, start, state.tokens[start:stop], False)])
        layers = self.model.dspark.tapped
        taps = torch.empty(stop - start, len(layers), self.model.config.hidden_size)
        h = self.model.forward(step, self.backbone, taps=Taps(layers, taps))
        return h, taps

    def commit(self, state, start, taps):
        span = Span(state, start, [0] * len(taps), False)
        step = self.planner.build([span], window_only=True)
        self.model.write_context(taps, step, self.stages)

    def guess(self, anchors, last, states, present=None):
        """The blocks' guesses, and the logits of which each was the best."""
        longest = max(last) + 1
        rows = torch.tensor([state.row for state in states])
        table = self.store.tables[WINDOW_GROUP].rows(rows, longest)
        context = self.planner.build(
            [Span(state, 0, [0], False) for state in states[:1]], window_only=True
        ).groups[WINDOW_GROUP]
        step = block_step(
            dataclasses.replace(context, block_table=table),
            torch.tensor(anchors),
            torch.tensor(last),
            size=self.block,
            noise_token_id=self.model.dspark.noise_token_id,
            window=self.window,
            max_seq_len=longest,
            present=present,
        )
        logits = []

        def choose(row, i):
            logits.append(row)
            return best_tokens(row)

        h = self.model.block_forward(step, self.blocks).unflatten(0, (len(anchors), -1))
        return self.model.guess_block(h, torch.tensor(anchors), choose), torch.stack(logits, 1)

    def rows(self, stage, state, first, stop):
        """Context rows of a stage, as they lie in its cache: values and scales."""
        cache = self.stages[stage].window
        pages = self.store.tables[WINDOW_GROUP].held(state.row)
        slots = torch.tensor([pages[p // 64] * 64 + p % 64 for p in range(first, stop)])
        return read_entries(cache, slots, self.stages[stage].format.main)


def _tokens(length, seed=0):
    return random.Random(seed).choices(range(2, 250), k=length)


def _taps(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, 3, TINY.hidden, generator=generator)


def test_taps_are_the_means_at_the_layers(directory, model, oracle):
    """The run does not notice. V4: behind the layers, the last one's streams, which the head
    collapses, included. V4.1: where the layers begin, behind what their n-grams add."""
    tokens = _tokens(150)
    run = Run(model)
    h, taps = run.backbone_taps(run.admit(tokens), 0, 150)
    want = oracle.taps(OracleModel(directory).run(tokens, keep_layers=True))
    for place, layer in enumerate(model.dspark.tapped):
        error = relative_error(taps[:, place], want[:, place])
        print(f"where layer {layer} begins: {error:.2e}")
        assert error <= FLOAT32
    other = Run(model)
    step = other.planner.build([Span(other.admit(tokens), 0, tokens, False)])
    assert torch.equal(model.forward(step, other.backbone), h)


def test_taps_of_some_rows(model):
    tokens = _tokens(20)
    run = Run(model)
    layers = model.dspark.tapped
    _, every = run.backbone_taps(run.admit(tokens), 0, 20)
    step = run.planner.build([Span(run.admit(tokens), 0, tokens, False)])
    some = torch.empty(3, 3, TINY.hidden)
    rows = torch.tensor([2, 17, 19], dtype=torch.int32)
    model.forward(step, run.backbone, taps=Taps(layers, some, rows))
    assert torch.equal(some, every[rows.long()])


@pytest.mark.parametrize("kv_cache", ["fp32", "bf16", "fp8", "nvfp4"])
def test_context_rows_are_the_oracles(model, oracle, kv_cache):
    taps = _taps(70, 1)
    run = Run(model, kv_cache)
    state = run.admit(_tokens(70))
    run.commit(state, 0, taps)
    for stage, want in enumerate(oracle.context(taps.double())):
        layout_id = CACHE_FORMATS[kv_cache].main
        row_format = ROW_FORMATS[layout_id]
        slack = FLOAT32 * want.abs().amax()
        bytes_of = run.rows(stage, state, 0, 70)
        assert bool(row_format.explains(*bytes_of, want - slack, want + slack).all())
        same = row_format.decode(*bytes_of) == row_format.round(want)
        assert kv_cache == "fp32" or float(same.double().mean()) > 0.999


def test_rows_can_be_written_in_any_batch(model):
    taps = _taps(30, 2)
    run = Run(model)
    one, other = run.admit(_tokens(30)), run.admit(_tokens(30))
    run.commit(one, 0, taps)
    start = 0
    for count in (9, 1, 3, 3, 8, 6):
        run.commit(other, start, taps[start : start + count])
        start += count
    assert start == 30
    layout = ROW_FORMATS[CACHE_FORMATS["fp32"].main]
    for stage in range(3):
        rows = [layout.decode(*run.rows(stage, state, 0, 30)) for state in (one, other)]
        assert relative_error(rows[0], rows[1]) < 1e-6


def _check(guess, logits, row, block, name):
    """One row of a run's guess against the oracle that follows its tokens."""
    error = relative_error(logits[row], block.logits)
    survival = block.confidence.sigmoid().cumprod(0)
    sure = float((guess.survival[row].double() - survival).abs().max())
    print(f"{name}: logits {error:.2e}, survival {sure:.2e}")
    assert error <= FLOAT32
    assert sure <= FLOAT32
    assert guess.tokens[row].tolist() == block.logits.argmax(1).tolist()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("size", [1, 5, 7])
def test_a_block_is_the_oracles(model, oracle, length, size):
    """Only the last W rows of the context were ever written; what precedes them is NaN."""
    taps = _taps(length, length)
    run = Run(model, block=size)
    state = run.admit(_tokens(length))
    first = max(0, length - run.window)
    run.commit(state, first, taps[first:])
    context = oracle.context(taps.double())
    for anchor in (3, 250):
        guess, logits = run.guess([anchor], [length - 1], [state])
        block = oracle.block(context, anchor, size=size, tokens=guess.tokens[0].tolist())
        _check(guess, logits, 0, block, f"{length} positions, anchor {anchor}")


def _context(step, indices, lengths):
    return dataclasses.replace(step, dense={CONTEXT_ROWS: Rows(indices, lengths)})


def _positions_from_last(step):
    return dataclasses.replace(step, positions=step.positions - 1)


def _causal(step):
    lengths = torch.arange(1, len(step.positions) + 1, dtype=torch.int32)
    return dataclasses.replace(step, window=Rows(step.window.indices, lengths))


def _window_hangs_on_the_row(step):
    seen = step.dense[CONTEXT_ROWS]
    indices = torch.stack([row.roll(-i) for i, row in enumerate(seen.indices)])
    return _context(step, indices, seen.lengths - torch.arange(len(indices)).int())


def _oldest_row_dropped(step):
    seen = step.dense[CONTEXT_ROWS]
    return _context(step, seen.indices[:, 1:].contiguous(), seen.lengths - 1)


def _noise_is_the_anchor(step):
    return dataclasses.replace(step, token_ids=step.token_ids[:1].expand_as(step.token_ids))


@pytest.mark.parametrize(
    "fault",
    [
        _positions_from_last,
        _causal,
        _window_hangs_on_the_row,
        _oldest_row_dropped,
        _noise_is_the_anchor,
    ],
)
def test_a_wrong_step_is_noticed(model, oracle, monkeypatch, fault):
    taps = _taps(300, 5)
    run = Run(model)
    state = run.admit(_tokens(300))
    run.commit(state, 0, taps)
    right = model.block_forward
    monkeypatch.setattr(model, "block_forward", lambda step, caches: right(fault(step), caches))
    guess, logits = run.guess([3], [299], [state])
    block = oracle.block(oracle.context(taps.double()), 3, tokens=guess.tokens[0].tolist())
    errors = (logits[0].double() - block.logits).abs().amax(1) / block.logits.abs().max()
    print(errors.tolist())
    # All rows see each other, so that all of them are wrong.
    assert float(errors.min()) > 10 * FLOAT32


def test_blocks_of_several_requests_and_padding(model, oracle):
    run = Run(model)
    states, contexts = [], []
    for number, length in enumerate((40, 7, 200)):
        taps = _taps(length, number)
        states.append(run.admit(_tokens(length)))
        run.commit(states[-1], 0, taps)
        contexts.append(oracle.context(taps.double()))
    absent = RequestState(Request("absent", (1,), 1))
    absent.row = run.store.absent_row
    order = [states[0], absent, states[1], states[2]]
    present = torch.tensor([True, False, True, True])
    guess, logits = run.guess([5, -1, 6, 7], [39, 0, 6, 199], order, present)
    for row, anchor, context in ((0, 5, contexts[0]), (2, 6, contexts[1]), (3, 7, contexts[2])):
        block = oracle.block(context, anchor, tokens=guess.tokens[row].tolist())
        _check(guess, logits, row, block, f"row {row}")
    # Padding writes no row: its page of the blocks' cache is as it was.
    assert bool(run.blocks[0].window[1].isnan().all())
    assert not bool(run.blocks[0].window[[0, 2, 3]].isnan().any())


def test_bfloat16_and_fp8_rows_come_near(name, directory, oracle):
    """As the checkpoint is meant to run: FP8 and FP4 products, quantised activations, FP8 rows."""
    model = load_model(directory, dtype=torch.bfloat16, progress=False)
    kv_cache = ROWS[name]
    run = Run(model, kv_cache)
    taps = _taps(90, 3).bfloat16()
    state = run.admit(_tokens(90))
    run.commit(state, 0, taps)
    guess, logits = run.guess([5], [89], [state])
    block = oracle.block(
        oracle.context(taps.double(), kv=kv_cache), 5, kv=kv_cache, tokens=guess.tokens[0].tolist()
    )
    difference = (logits[0].double() - block.logits).square().mean().sqrt()
    print(f"rms difference {float(difference):.3f}, of {float(block.logits.std()):.3f}")
    # Inputs of every product keep 4 significant bits; another text's logits are 1.4 away.
    assert float(difference) < 0.25 * float(block.logits.std())


def test_without_a_confidence_head(model):
    run = Run(model)
    state = run.admit(_tokens(9))
    run.commit(state, 0, _taps(9, 4))
    with_head, _ = run.guess([5], [8], [state])
    markov = model.dspark.markov
    confidence, markov.confidence = markov.confidence, None
    try:
        without, _ = run.guess([5], [8], [state])
    finally:
        markov.confidence = confidence
    assert torch.equal(with_head.tokens, without.tokens)
    assert without.survival.tolist() == [[1.0] * 5]
    falling = with_head.survival[0].tolist()
    assert all(1 > a > b > 0 for a, b in itertools.pairwise(falling))


def test_a_guess_that_is_no_token_ends_nothing(model):
    """Logits without a best give id V; what follows is computed from the last row of the table."""
    run = Run(model)
    state = run.admit(_tokens(9))
    run.commit(state, 0, _taps(9, 4))
    vocab = model.config.vocab_size
    h = torch.zeros(1, 3, TINY.hidden)
    guess = model.guess_block(
        h, torch.tensor([5]), lambda logits, i: torch.tensor([vocab if i == 0 else i])
    )
    assert guess.tokens.tolist() == [[vocab, 1, 2]]
