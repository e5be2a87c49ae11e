"""anymla against nemo-automodel's DeepSeek-V4.1, an independent implementation, in float32.

Both load the same random checkpoint. What each layer puts out must agree to 1e-5 of its largest
value and the logits to 1e-4, however the prompt is cut, and every token must choose the same
entries and the same experts. The same holds for the float64 oracle, and where nemo-automodel is not
installed, ``test_nemo_recorded.py`` compares with what it gave once.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "nemo_automodel", reason="the comparison needs nemo-automodel 0.7.0, which is no dependency"
)

from nemo_reference import Nemo
from test_transformers import (
    LAYER_BOUND,
    LOGITS_BOUND,
    assert_agrees,
    prompt_of,
    run_alone,
    settled,
)
from traces import Scores, Trace
from v41_cases import CASES, TOKENS, shared

from anymla.model.load import load_model
from anymla.model.transformer import Transformer
from anymla.testing.oracle.model import OracleModel
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tolerance import relative_error


@dataclasses.dataclass
class Pair:
    """One checkpoint in both implementations, and the reference run of one prompt."""

    directory: Path
    options: TinyOptions
    model: Transformer
    nemo: Nemo
    prompt: tuple[int, ...]
    trace: Trace
    scores: Scores

    @classmethod
    def of(cls, directory: Path, options: TinyOptions) -> Pair:
        write_tiny_checkpoint(directory, options)
        model = load_model(directory, dtype=torch.float32, progress=False)
        nemo = Nemo(directory)

        def once(seed: int) -> tuple[tuple[int, ...], list[tuple[Trace, Scores]]]:
            prompt = prompt_of(options, TOKENS, seed)
            return prompt, [nemo.run(list(prompt))]

        prompt, [(trace, scores)] = settled(once)
        return cls(directory, options, model, nemo, prompt, trace, scores)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.of(tmp_path_factory.mktemp("checkpoint"), CASES[request.param])


def test_one_prefill(pair: Pair) -> None:
    _, got = run_alone(pair.model, pair.prompt)
    assert_agrees(got, pair.trace, pair.scores)


@pytest.mark.parametrize("chunk_size", [40, 13, 1])
def test_chunks(pair: Pair, chunk_size: int) -> None:
    _, got = run_alone(pair.model, pair.prompt, chunk_size=chunk_size)
    assert_agrees(got, pair.trace, pair.scores)


def test_the_oracle(pair: Pair) -> None:
    result = OracleModel(pair.directory).run(pair.prompt, keep_layers=True)
    for got, want in zip(result.layers, pair.trace.streams, strict=True):
        assert relative_error(got, want.double()) <= LAYER_BOUND
    assert relative_error(result.logits, pair.trace.logits.double()) <= LOGITS_BOUND


def test_rows_in_the_released_formats(tmp_path: Path) -> None:
    # All entries are attended to, so that rounded queries decide nothing. A value that float32
    # computes a little otherwise may take the next code, which later layers see.
    pair = Pair.of(tmp_path, shared(index_topk=TOKENS, candidate_source=-1, seed=7))
    rounded, _ = pair.nemo.run(list(pair.prompt), rounds=True)
    _, got = run_alone(pair.model, pair.prompt, kv_cache="nvfp4")
    for layer, runs in enumerate(
        zip(got.attention, rounded.attention, pair.trace.attention, strict=True)
    ):
        ours, theirs, exact = (run.double() for run in runs)
        moved, apart = (exact - theirs).norm(), (ours - theirs).norm()
        print(f"layer {layer}: {float(apart / moved):.2g} of what rounding moves")
        assert apart < moved / (1000 if layer == 0 else 10)


def test_token_by_token_with_the_reference_backend(tmp_path: Path) -> None:
    pair = Pair.of(tmp_path, shared(seed=8))
    for module in pair.model.modules():
        if hasattr(module, "backend"):
            module.backend = "reference"
    _, got = run_alone(pair.model, pair.prompt[:30], chunk_size=7)
    assert_agrees(got, *pair.nemo.run(list(pair.prompt[:30])))
