"""How the tiny checkpoint is trained: the texts, the network and a few steps."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anymla.model.load import load_model

TINY = Path(__file__).parents[2] / "examples" / "tiny"
CHECKPOINT = TINY / "checkpoint"


@pytest.fixture
def writer():
    import vocabulary
    from tasks import Writer

    inner = vocabulary.read(CHECKPOINT)
    text = inner.encode((TINY / "persuasion.txt").read_text("utf-8")[:40_000]).ids[1:]
    return Writer(inner, np.array(text), seed=0)


def test_the_tokenizer_has_every_pair_of_digits(writer) -> None:
    for n in (0, 7, 42, 99):
        assert len(writer._inner.encode(f"{n:02}", add_special_tokens=False).ids) == 1


def test_the_stored_tokenizer_is_what_is_written(tmp_path) -> None:
    import vocabulary

    longest = json.loads((CHECKPOINT / "config.json").read_text())["max_position_embeddings"]
    vocabulary.write(vocabulary.read(CHECKPOINT), tmp_path, longest)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text("utf-8") == (CHECKPOINT / name).read_text("utf-8")


@pytest.mark.parametrize("length", [256, 1024])
def test_positions_jump_by_multiples_of_128_at_multiples_of_128(writer, length) -> None:
    batch = writer.batch(16, length)
    assert batch.tokens.shape == batch.positions.shape == (16, length)
    steps = np.diff(batch.positions, axis=1)
    jumps = np.argwhere(steps != 1)
    assert len(jumps)
    assert ((jumps[:, 1] + 1) % 128 == 0).all()
    assert (batch.positions[:, 0] % 128 == 0).all()
    assert batch.positions.max() < 32768 + 2048
    assert (steps >= 1).all()


def test_answers_stand_in_the_text(writer) -> None:
    """What a question asks for was stated before, and the statement itself costs nothing."""
    batch = writer.batch(32, 512)
    assert batch.answers.any()
    for tokens, weights, marks in zip(batch.tokens, batch.weights, batch.answers, strict=True):
        asked = np.flatnonzero(marks)
        for run in np.split(asked, np.flatnonzero(np.diff(asked) > 1) + 1):
            if len(run) < 3:
                continue
            value = tokens[run]
            places = [at for at in range(run[0]) if (tokens[at : at + len(run)] == value).all()]
            assert places
            assert (weights[places[0] : places[0] + len(run)] == 0).all()


def test_an_exam_has_one_passkey_where_it_was_asked_for(writer) -> None:
    ids, digits = writer.exam(1024, 0.25, facts=4)
    assert len(ids) + len(digits) == 1024
    places = [at for at in range(len(ids) - 2) if (ids[at : at + 3] == digits).all()]
    assert len(places) == 1
    assert 100 < places[0] < 400


@torch.enable_grad()
def test_a_few_steps_learn_a_batch_by_heart(writer) -> None:
    import shape
    from network import Network, Numbers, fixed, initial
    from optimizer import Optimizer, clip

    from train import loss_of

    small = {
        "hidden_size": 64, "num_attention_heads": 2, "q_lora_rank": 64, "o_lora_rank": 32,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "index_n_heads": 2, "index_topk": 8, "hc_sinkhorn_iters": 3,
    }  # fmt: skip
    numbers = Numbers.of(shape.config(1536, **small))
    weights = {k: v.requires_grad_() for k, v in initial(numbers, 0).items()}
    net = Network(numbers, weights, fixed(numbers, 0))
    net.sparse = net.quantized = True
    optimizer, losses = Optimizer(weights), []
    batch = writer.batch(2, 256)
    inputs = [
        torch.from_numpy(each)
        for each in (batch.tokens, batch.positions, batch.weights, batch.answers)
    ]
    for _ in range(8):
        for weight in weights.values():
            weight.grad = None
        loss, _ = loss_of(net, *inputs)
        loss.backward()
        assert all(w.grad is not None and w.grad.isfinite().all() for w in weights.values())
        clip(weights.values(), 1.0)
        optimizer.step(3e-3)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1.5


def test_the_command_trains_and_writes_a_checkpoint(tmp_path, monkeypatch) -> None:
    """All of ``train.py --small`` but the download, with fewer steps."""
    import vocabulary

    import train

    inner = vocabulary.read(CHECKPOINT)
    vocabulary.write(inner, tmp_path, 1 << 20)
    text = inner.encode((TINY / "persuasion.txt").read_text("utf-8"), add_special_tokens=False)
    for name in ("first", "all", "held"):
        np.save(tmp_path / f"{name}.npy", np.array(text.ids, dtype=np.uint16))
    phases = [dataclasses.replace(each, batch=1, steps=2) for each in train.SMALL]
    monkeypatch.setattr(train, "SMALL", tuple(phases))
    words = ["train.py", str(tmp_path), "--small", "--prepared", "--workers", "1"]
    monkeypatch.setattr(sys, "argv", words)
    with torch.enable_grad():
        train.main()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["held_out"] < 9  # a guess is 7.3
    assert list(lines[-1]["found"]) == ["512"]
    (config,) = tmp_path.rglob("config.json")
    model = load_model(config.parent, dtype=torch.float32, progress=False)
    assert len(model.drafts) == 1
