"""The trained tiny checkpoint does its work, and its training form is the same model."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from anymla.model.load import load_model
from anymla.model.tokenizer import Tokenizer
from anymla.runtime.engine import Engine
from anymla.runtime.options import EngineOptions
from anymla.runtime.request import Request
from anymla.testing.oracle.model import OracleModel

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CHECKPOINT = TINY / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(CHECKPOINT)


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def text(tokenizer) -> np.ndarray:
    words = (TINY / "persuasion.txt").read_text("utf-8")[:20_000]
    return np.array(tokenizer.encode(words)[1:])


def complete(model, ids, new, drafts=1):
    request = Request("one", tuple(map(int, ids)), max_new_tokens=new)
    options = EngineOptions(draft_tokens=drafts)
    return Engine.for_requests(model, options, [request]).run([request])[0]


def test_it_is_small_enough_to_be_kept() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) < 15e6


def test_it_is_v4_in_all_its_parts() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["compress_ratios"] == [0, 4, 128, 4, 0]
    assert config["num_nextn_predict_layers"] == 1
    assert config["hc_mult"] == 4
    assert config["num_hash_layers"] == 1
    assert config["expert_dtype"] == "fp4"
    assert config["index_topk"] < 32768 // 4


@pytest.mark.parametrize(("length", "bound"), [(256, 0.02), (1024, 0.04)])
def test_the_training_form_gives_the_oracles_logits(text, length, bound) -> None:
    """At 256 tokens all entries are chosen; at 1024 near-ties of the indexer may differ."""
    import export
    from network import Network, Numbers

    config = json.loads((CHECKPOINT / "config.json").read_text())
    net = Network(Numbers.of(config), *export.read(CHECKPOINT))
    net.quantized, net.sparse = True, True
    ids = torch.tensor([0, *text[: length - 1]])
    with torch.no_grad():
        out = net(ids[None], torch.arange(length)[None])
        logits, drafts = net.logits(out.hidden)[0], net.logits(out.drafts)[0, :-1]
    oracle = OracleModel(CHECKPOINT)
    expected = oracle.run(ids.tolist(), kv="fp8")
    guesses = oracle.run_draft(expected.streams[:-1], ids[1:].tolist(), kv="fp8")
    for ours, theirs in ((logits, expected.logits), (drafts, guesses)):
        assert (ours - theirs).abs().mean() < bound
        assert (ours.argmax(-1) == theirs.argmax(-1)).float().mean() > 0.98


@pytest.mark.parametrize("depth", [0.0, 0.5])
def test_a_passkey_is_found(model, tokenizer, text, depth) -> None:
    """2,048 tokens have eight times as many entries as the indexer chooses."""
    import vocabulary
    from tasks import Writer

    writer = Writer(vocabulary.read(CHECKPOINT), text, seed=3)
    ids, digits = writer.exam(2048, depth, facts=4)
    done = complete(model, ids, len(digits))
    assert done.token_ids == tuple(digits)


def test_drafts_are_often_right(model, text) -> None:
    done = complete(model, [0, *text[:200]], 60)
    assert done.accepted / done.drafted > 0.4
    assert done.token_ids == complete(model, [0, *text[:200]], 60, drafts=0).token_ids


def test_text_that_it_never_saw_is_likely_english(model, text) -> None:
    """Better than 4 nats a token of 3 letters; a uniform guess is 7.3."""
    request = Request("one", (0, *map(int, text[:511])), max_new_tokens=0, prompt_logprobs=True)
    done = Engine.for_requests(model, EngineOptions(), [request]).run([request])[0]
    assert -np.mean(done.prompt_logprobs[1:]) < 4.0
