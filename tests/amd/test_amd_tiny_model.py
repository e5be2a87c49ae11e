"""The trained tiny checkpoint on AMD's compiled kernels: the tokens of the torch backend."""

from pathlib import Path

import pytest

from anymla.model.load import load_model
from anymla.model.tokenizer import Tokenizer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CHECKPOINT = TINY / "checkpoint"
PROMPT_TOKENS, NEW_TOKENS = 24, 6


def complete(backend: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Greedy tokens of one request."""
    model = load_model(CHECKPOINT, backend=backend, drafts="off", progress=False)
    request = Request("one", prompt, max_new_tokens=NEW_TOKENS)
    engine = Engine.for_requests(model, EngineOptions(), [request])
    return tuple(engine.run([request])[0].token_ids)


@pytest.mark.slow  # minutes
def test_compiled_kernels_speak_the_same_tokens(device):
    words = (TINY / "persuasion.txt").read_text("utf-8")[:2000]
    prompt = tuple(Tokenizer.from_dir(CHECKPOINT).encode(words)[:PROMPT_TOKENS])
    before = device.launches
    got = complete("triton", prompt)
    assert device.launches > before + 100 * NEW_TOKENS
    assert len(got) == NEW_TOKENS
    assert got == complete("torch", prompt)
