"""Write some of what nemo-automodel computes for small models, and log-probabilities for vLLM's.

PYTHONPATH=src:DIRECTORY_WITH_NEMO:tests/engines/vllm python tests/model/record_nemo.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RECORDED_DRAFTS = Path(__file__).with_name("nemo_drafts_recorded.json")
RECORDED = Path(__file__).with_name("nemo_recorded.json")
_FOR_VLLM = Path(__file__).parents[1] / "engines" / "vllm" / "nemo_log_probabilities.json"
POSITIONS = (0, 1, 2, 15, 16, 50, 96)
_CHANNELS, _TOKENS = 2, 6
# Guesses of a block behind token 9.
DRAFTS = (3, 1, 4, 1, 5)


def sample(streams: Tensor) -> Tensor:
    """A few channels of streams [T, N, D] at a few positions."""
    return streams[list(POSITIONS), :, :_CHANNELS].flatten(1)


def sample_logits(logits: Tensor) -> Tensor:
    """A few logits of [T, V] at the same positions."""
    return logits[list(POSITIONS), :_TOKENS]


def main() -> None:
    """Record every case."""
    from test_nemo import Pair
    from v41_cases import CASES

    recorded: dict[str, Any] = {}
    for name, options in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            pair = Pair.of(Path(directory), options)
        recorded[name] = {
            "prompt": list(pair.prompt),
            "largest": [float(s.abs().max()) for s in pair.trace.streams],
            "streams": [_rounded(sample(s)) for s in pair.trace.streams],
            "largest_logit": float(pair.trace.logits.abs().max()),
            "logits": _rounded(sample_logits(pair.trace.logits)),
        }
    RECORDED.write_text(json.dumps(recorded, separators=(",", ":")) + "\n", encoding="utf-8")
    _record_drafts()
    _record_log_probabilities()


def _record_log_probabilities() -> None:
    """Record those of prompts' tokens after the first, with the model that vLLM's tests serve."""
    from inputs import V41_LENGTHS, prompt_of, v41_twin
    from nemo_reference import Nemo

    recorded = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Nemo(v41_twin(Path(directory)))
        for length in V41_LENGTHS:
            prompt = prompt_of(length)
            scored = model.run(prompt)[0].logits[:-1].log_softmax(-1)
            taken = scored.gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
            (recorded[str(length)],) = _rounded(taken.T)
    text = json.dumps(recorded, separators=(",", ":")) + "\n"
    _FOR_VLLM.write_text(text, encoding="utf-8")


def _record_drafts() -> None:
    """Record blocks of the drafter, of rows that are not rounded."""
    from nemo_automodel.components.models.deepseek_v41 import dspark
    from test_nemo_drafter import drafter_of, logits_of
    from v41_cases import DRAFTER, DRAFTER_LENGTHS, drafter_taps

    from anymla.testing.tiny_checkpoint import write_tiny_checkpoint

    dspark.quantize_cache = lambda rows, **_: rows
    recorded: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_checkpoint(directory, DRAFTER)
        drafter = drafter_of(Path(directory))
        for length in DRAFTER_LENGTHS:
            logits = logits_of(drafter, drafter_taps(length), 9, DRAFTS)
            recorded[str(length)] = {
                "largest": float(logits.abs().max()),
                "logits": _rounded(logits[:, :_TOKENS]),
            }
    text = json.dumps(recorded, separators=(",", ":")) + "\n"
    RECORDED_DRAFTS.write_text(text, encoding="utf-8")


def _rounded(values: Tensor) -> list[list[float]]:
    return [[float(f"{value:.7g}") for value in row] for row in values.tolist()]


if __name__ == "__main__":
    main()
