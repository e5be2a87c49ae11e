"""Greedy tokens of the trained tiny checkpoint, after the beginning of what it has learned."""

from pathlib import Path

from anymla.model.load import load_model
from anymla.model.tokenizer import Tokenizer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request

TINY = Path(__file__).parents[2] / "examples" / "tiny"
PROMPT_TOKENS, NEW_TOKENS = 24, 6


def greedy_tokens(backend: str) -> tuple[int, ...]:
    """Tokens of one request on a backend."""
    checkpoint = TINY / "checkpoint"
    words = (TINY / "persuasion.txt").read_text("utf-8")[:2000]
    prompt = tuple(Tokenizer.from_dir(checkpoint).encode(words)[:PROMPT_TOKENS])
    model = load_model(checkpoint, backend=backend, drafts="off", progress=False)
    request = Request("one", prompt, max_new_tokens=NEW_TOKENS)
    engine = Engine.for_requests(model, EngineOptions(), [request])
    return tuple(engine.run([request])[0].token_ids)
