"""anymla against transformers' DeepSeek-V4, an independent implementation, in float32.

Both load the same random checkpoint. What each layer puts out must agree to 1e-5 of its largest
value and the logits to 1e-4, however the prompt is cut, and every token must choose the same
compressed entries and the same experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

pytest.importorskip(
    "transformers", minversion="5.23", reason="the comparison needs the dev dependency transformers"
)

from engine_trace import TracedEngine
from hf_checkpoints import CASES, SMALL, write_pair
from hf_reference import HuggingFace
from traces import Scores, Trace, differing_choices, layer_errors, narrowest_choice

from anymla.layers.rope_table import RopeTable
from anymla.model.load import load_model
from anymla.model.transformer import Transformer
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tolerance import relative_error

LAYER_BOUND = 1e-5
LOGITS_BOUND = 1e-4
# Two float32 computations of one score differ by less than this, relative to the largest of its
# row. Prompts where a choice is decided by less than twice that are passed over: which way it goes
# there is chance, and everything after it differs. The reference's scores alone decide that.
SCORE_NOISE = 1e-5

TOKENS = 300  # past two windows, two entries of ratio 128, 75 of ratio 4


@dataclasses.dataclass
class Pair:
    """One checkpoint in both implementations, and the reference run of one prompt."""

    options: TinyOptions
    model: Transformer
    hugging_face: HuggingFace
    prompt: tuple[int, ...]
    trace: Trace
    scores: Scores

    @classmethod
    def of(cls, directory: Path, options: TinyOptions, tokens: int, **changes: Any) -> Pair:
        """Write the checkpoint, load it on both sides and run transformers on a prompt."""
        twin = write_pair(directory, options, changes)
        model = load_model(directory / "own", dtype=torch.float32, progress=False)
        hugging_face = HuggingFace(twin)

        def once(seed: int) -> tuple[tuple[int, ...], list[Reference]]:
            prompt = prompt_of(options, tokens, seed)
            return prompt, [hugging_face.run(list(prompt))]

        prompt, [(trace, scores)] = settled(once)
        return cls(options, model, hugging_face, prompt, trace, scores)


Reference = tuple[Trace, Scores]
Run = TypeVar("Run")


def settled(run: Callable[[int], tuple[Run, list[Reference]]]) -> tuple[Run, list[Reference]]:
    """The first of several runs, by seed, in whose references no choice is a near-tie."""
    for seed in range(8):
        result = run(seed)
        if min(narrowest_choice(*reference) for reference in result[1]) > 2 * SCORE_NOISE:
            return result
    raise AssertionError("near-ties in the runs of eight seeds")


def prompt_of(options: TinyOptions, tokens: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * options.seed + seed)
    return tuple(torch.randint(2, options.vocab, (tokens,), generator=generator).tolist())


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    options, changes = CASES[request.param]
    return Pair.of(tmp_path_factory.mktemp("checkpoint"), options, TOKENS, **changes)


def engine_options(**changes: Any) -> EngineOptions:
    return EngineOptions(
        **{"kv_cache": "fp32", "chunk_size": 512, "max_requests": 1, "max_seq_len": 512, **changes}
    )


def run_alone(
    model: Transformer, prompt: tuple[int, ...], new_tokens: int = 1, **options: Any
) -> tuple[list[int], Trace]:
    request = Request("only", prompt, max_new_tokens=new_tokens)
    return TracedEngine(model, engine_options(**options)).run([request])["only"]


def assert_agrees(got: Trace, want: Trace, scores: Scores) -> None:
    """The whole comparison; prints the largest errors."""
    different = differing_choices(got, want, scores, SCORE_NOISE)
    assert not different, "\n".join(different[:10])
    errors = layer_errors(got, want)
    worst = max(errors, key=lambda name: errors[name])
    logits = relative_error(got.logits, want.logits)
    print(f"largest layer error {errors[worst]:.2g} ({worst}), logits {logits:.2g}")
    assert errors[worst] <= LAYER_BOUND, errors
    assert logits <= LOGITS_BOUND


def test_one_prefill(pair: Pair) -> None:
    _, got = run_alone(pair.model, pair.prompt)
    assert_agrees(got, pair.trace, pair.scores)


def test_selection_matters(pair: Pair) -> None:
    # Otherwise the comparison would say nothing about top-k.
    layers = [i for i, ratio in enumerate(pair.options.ratios) if ratio == 4]
    assert sorted(pair.trace.entries) == layers
    for chosen in pair.trace.entries.values():
        last = chosen[-1]
        assert len(last) == pair.options.index_topk < TOKENS // 4
        newest = set(range(TOKENS // 4 - len(last), TOKENS // 4))
        assert len(last & newest) < len(last)
        assert len({frozenset(row) for row in chosen[-20:]}) > 10


@pytest.mark.parametrize("chunk_size", [130, 37])
def test_chunked_prefill(pair: Pair, chunk_size: int) -> None:
    _, got = run_alone(pair.model, pair.prompt, chunk_size=chunk_size)
    assert_agrees(got, pair.trace, pair.scores)


def test_decode(pair: Pair) -> None:
    # 117 tokens of prompt, then greedy tokens across the ends of a window and of both ratios.
    def once(seed: int) -> tuple[tuple[list[int], Trace], list[Reference]]:
        run = run_alone(pair.model, prompt_of(pair.options, 117, seed), new_tokens=17)
        return run, [pair.hugging_face.run(run[0])]

    (tokens, got), [(want, scores)] = settled(once)
    assert len(got) == 117 + 16
    assert_agrees(got, want, scores)
    logits = want.logits[116:-1]
    chosen = logits.gather(1, torch.tensor(tokens[117:]).unsqueeze(1)).squeeze(1)
    best = logits.amax(1)
    assert bool((chosen >= best - LOGITS_BOUND * best.abs().max()).all())


def test_two_requests_at_once(pair: Pair) -> None:
    # The second is longer, and is cut in pieces while the first decodes.
    def once(seed: int) -> tuple[list[Trace], list[Reference]]:
        engine = TracedEngine(pair.model, engine_options(chunk_size=64, max_requests=2))
        first, second = (prompt_of(pair.options, n, seed) for n in (70, 160))
        runs = engine.run(
            [Request("first", first, max_new_tokens=8), Request("second", second, max_new_tokens=4)]
        )
        references = [pair.hugging_face.run(tokens) for tokens, _ in runs.values()]
        return [trace for _, trace in runs.values()], references

    traces, references = settled(once)
    assert [len(trace) for trace in traces] == [70 + 7, 160 + 3]
    for got, reference in zip(traces, references, strict=True):
        assert_agrees(got, *reference)


@pytest.fixture(scope="module")
def flash(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """One more checkpoint, for the tests that need only one."""
    return Pair.of(tmp_path_factory.mktemp("flash"), dataclasses.replace(SMALL, seed=11), 270)


def test_token_by_token(flash: Pair) -> None:
    _, got = run_alone(flash.model, flash.prompt, chunk_size=1)
    assert_agrees(got, flash.trace, flash.scores)


def test_transformers_agrees_with_itself(flash: Pair) -> None:
    # The reference's own chunked and decode paths: what they differ by is the noise of float32.
    got, scores = flash.hugging_face.run(list(flash.prompt), [101, 99, 60] + [1] * 10)
    assert_agrees(got, flash.trace, flash.scores)
    assert_agrees(flash.trace, got, scores)


def test_reference_backend(flash: Pair) -> None:
    patched = [m for m in flash.model.modules() if hasattr(m, "backend")]
    for module in patched:
        module.backend = "reference"
    try:
        _, got = run_alone(flash.model, flash.prompt[:40])
    finally:
        for module in patched:
            module.backend = None
    assert_agrees(got, *flash.hugging_face.run(list(flash.prompt[:40])))


def no_sink(model: Transformer) -> None:
    for layer in model.layers:
        layer.attention.heads.sink.fill_(-torch.inf)


def transposed_mix(model: Transformer) -> None:
    for layer in model.layers:
        site = layer.ffn_site
        n = model.config.hc_mult
        for weight in (site.fn, site.base):
            comb = weight[2 * n :].unflatten(0, (n, n))
            comb.copy_(comb.transpose(0, 1).clone())


def one_entry_less(model: Transformer) -> None:
    for layer in model.layers:
        if layer.attention.indexer is not None:
            layer.attention.indexer.width -= 1


def plain_rope(model: Transformer) -> None:
    config = model.config
    table = RopeTable(config.qk_rope_head_dim, config.compress_rope_theta, None, model.device)
    for layer in model.layers:
        attention = layer.attention
        if attention.compressor is not None:
            attention.rope = attention.compressor.rope = table


def no_ape(model: Transformer) -> None:
    for layer in model.layers:
        if layer.attention.compressor is not None:
            layer.attention.compressor.ape.zero_()


def no_clamp(model: Transformer) -> None:
    for layer in model.layers:
        layer.ffn.limit = 1e9


def no_bias(model: Transformer) -> None:
    for layer in model.layers:
        if layer.ffn.router.bias is not None:
            layer.ffn.router.bias.zero_()


def swapped_gate_and_up(model: Transformer) -> None:
    for layer in model.layers:
        layer.ffn.w1, layer.ffn.w3 = layer.ffn.w3, layer.ffn.w1


@pytest.mark.parametrize(
    "mistake",
    [
        no_sink,
        transposed_mix,
        one_entry_less,
        plain_rope,
        no_ape,
        no_clamp,
        no_bias,
        swapped_gate_and_up,
    ],
)
def test_mistakes_are_found(
    flash: Pair, tmp_path: Path, mistake: Callable[[Transformer], None]
) -> None:
    write_tiny_checkpoint(tmp_path / "own", flash.options)
    model = load_model(tmp_path / "own", dtype=torch.float32, progress=False)
    mistake(model)
    _, got = run_alone(model, flash.prompt)
    found = differing_choices(got, flash.trace, flash.scores, SCORE_NOISE)
    errors = layer_errors(got, flash.trace)
    print(f"{len(found)} different choices, largest layer error {max(errors.values()):.2g}")
    assert max(errors.values()) > 100 * LAYER_BOUND
    assert relative_error(got.logits, flash.trace.logits) > 10 * LOGITS_BOUND
