"""What the tests give to vLLM: a checkpoint and prompts."""

import json
from pathlib import Path

from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

# vLLM 0.32.0's CPU experts in bf16 do not clamp (they never read ``swiglu_limit``), so the
# checkpoint's limit is one that no activation reaches.
UNREACHED_LIMIT = 1000.0


def bf16_twin(directory: Path, options: TinyOptions) -> Path:
    """The bf16 checkpoint with the exact values of an FP4 one: vLLM reads FP4 on few CPUs."""
    twin = directory / "bf16"
    write_tiny_checkpoint(directory / "fp4", options, twin=twin)
    config = json.loads((twin / "config.json").read_text())
    config["swiglu_limit"] = UNREACHED_LIMIT
    (twin / "config.json").write_text(json.dumps(config))
    return twin


def prompt_of(tokens: int) -> list[int]:
    """Token ids that repeat nothing for long."""
    return [2 + (i * 7919 + i * i * 31) % 250 for i in range(tokens)]
