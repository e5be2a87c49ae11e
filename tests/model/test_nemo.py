"""anymla against nemo-automodel's DeepSeek-V4.1, an independent implementation, in float32.

Both load the same random checkpoint. What each layer puts out must agree to 1e-5 of its largest
value and the logits to 1e-4, however the prompt is cut, and every token must choose the same
entries and the same experts. ``record_nemo.py`` keeps some of its results for where it is not.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip(
    "nemo_automodel", reason="the comparison needs nemo-automodel 0.7.0, which is no dependency"
)

from nemo_reference import Nemo
from test_transformers import (
    assert_agrees,
    prompt_of,
    run_alone,
    settled,
)
from traces import Scores, Trace

from anymla.model.load import load_model
from anymla.model.transformer import Transformer
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing

SMALL: dict[str, Any] = {
    "weights": "bf16", "hidden": 96, "heads": 4, "o_groups": 2, "o_lora": 32, "q_lora": 64,
    "index_heads": 8, "index_topk": 6, "experts": 16, "experts_per_token": 4, "moe_size": 64,
    "window": 16,
}  # fmt: skip
_FLASH = (0, 0, 2, 2, 1, 1, 1, 1)


def shared(ratios: tuple[int, ...] = _FLASH, **changes: Any) -> TinyOptions:
    """A small model; fields of ``TinySharing`` and of ``TinyOptions``."""
    fields = {field.name for field in dataclasses.fields(TinySharing)}
    blocks = {"candidate_blocks": 3, "candidate_block_size": 4}
    sharing = {name: value for name, value in changes.items() if name in fields}
    rest = {name: value for name, value in changes.items() if name not in fields}
    given = TinySharing.of(ratios, **(blocks | sharing))
    return TinyOptions.shared(**(SMALL | {"ratios": ratios, "sharing": given} | rest))


CASES = {
    "flash": shared(),
    "no candidates": shared(candidate_source=-1, seed=1),
    "no engram": shared(engram_layers=(), seed=2, index_topk=9),
    # Several sources of one ratio, a source behind a layer that reuses, ratio 1 first.
    "sources": shared(
        (1, 1, 2, 2, 2, 0, 1, 1, 1),
        kv_sources=(0, 2, 3, 6),
        index_sources=(0, 2, 3, 4, 6, 7),
        candidate_source=6,
        engram_layers=(0, 3, 8),
        engram_heads=3,
        heads=6,
        o_groups=3,
        seed=3,
    ),
    "ratio 3": shared((0, 3, 3, 1), candidate_source=-1, window=5, seed=4),
    "fp8": shared(weights="fp8", hidden=128, seed=5),
    "fp4": shared(weights="fp4", hidden=128, seed=6),
}
TOKENS = 97


@dataclasses.dataclass
class Pair:
    """One checkpoint in both implementations, and the reference run of one prompt."""

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
        return cls(options, model, nemo, prompt, trace, scores)


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
