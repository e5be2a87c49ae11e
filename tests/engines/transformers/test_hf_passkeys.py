"""The trained tiny checkpoint finds a passkey through transformers, in the engine's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_pair import load

from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.llm import LLM
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.retrieval import hide

TINY = Path(__file__).parents[3] / "examples" / "tiny"
pytestmark = pytest.mark.skipif(
    transformers.__version__.startswith("5.23."),
    reason="5.23 dequantises FP8 weights to bfloat16, and cannot multiply them in float32",
)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


@pytest.fixture(scope="module")
def model() -> Any:
    return load(TINY / "checkpoint", "anymla")


@pytest.mark.parametrize(
    ("length", "depth"),
    [(1024, 0.25), *(pytest.param(8192, depth, marks=pytest.mark.slow) for depth in DEPTHS)],
)
def test_a_passkey_is_found_with_the_engines_tokens(model: Any, length: int, depth: float) -> None:
    llm = LLM(TINY / "checkpoint")
    hidden = hide(llm, (TINY / "persuasion.txt").read_text("utf-8"), length, depth)
    ids = torch.tensor([hidden.token_ids])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
    )[0, ids.shape[1] :].tolist()
    assert hidden.digits in llm.tokenizer.decode(tokens)
    network = load_model(TINY / "checkpoint", dtype=torch.float32, progress=False)
    request = Request("one", hidden.token_ids, max_new_tokens=len(tokens))
    engine = Engine.for_requests(network, EngineOptions(kv_cache="fp32"), [request])
    assert list(engine.run([request])[0].token_ids)[: len(tokens)] == tokens
