"""Log-probabilities of transformers' whole model, on anymla's attention, beside the engine's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import anymla.engines.transformers  # noqa: F401
from anymla.model.load import load_model
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request

CHECKPOINT = Path(__file__).parents[3] / "examples" / "tiny" / "checkpoint"
TOKENS = 400


@pytest.mark.parametrize("train", [False, True], ids=["forward", "with gradients"])
def test_a_trained_model_scores_as_the_engine_does(train: bool) -> None:
    """Not to the bit: norms, rotations, streams, experts and selection are torch's there.

    Rows are not rounded, the selection of 64 of 100 entries included.
    """
    tokens = tuple(random.Random(0).choices(range(3, 1500), k=TOKENS))
    model = load_model(CHECKPOINT, dtype=torch.float32, progress=False)
    engine = Engine(model, EngineOptions(kv_cache="fp32", max_requests=1, max_seq_len=TOKENS + 1))
    with torch.inference_mode():
        (done,) = engine.run([Request("a", tokens, 0, prompt_logprobs=True)])
    theirs = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, attn_implementation="anymla"
    )
    ids = torch.tensor([tokens])
    with torch.set_grad_enabled(train):
        logits = theirs(ids, use_cache=False).logits[0, :-1].double()
    logprobs = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    wanted = torch.tensor(done.prompt_logprobs[1:], dtype=torch.float64)
    assert (logprobs - wanted).abs().max() < 5e-5
