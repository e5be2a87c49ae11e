"""What the tests give to vLLM: a checkpoint and prompts."""

import dataclasses
import json
from pathlib import Path

from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing, default_shared_ratios

# vLLM 0.32.0's CPU experts in bf16 do not clamp (they never read ``swiglu_limit``), so the
# checkpoint's limit is one that no activation reaches.
UNREACHED_LIMIT = 1000.0
V41_RATIOS = default_shared_ratios(8)
# 300 entries of ratio 1 for a selection of 16, within 4 blocks of 8.
V41_LENGTHS = (300, 61)


def bf16_twin(directory: Path, options: TinyOptions) -> Path:
    """The bf16 checkpoint with the exact values of an FP4 one: vLLM reads FP4 on few CPUs."""
    twin = directory / "bf16"
    write_tiny_checkpoint(directory / "fp4", options, twin=twin)
    config = json.loads((twin / "config.json").read_text())
    config["swiglu_limit"] = UNREACHED_LIMIT
    (twin / "config.json").write_text(json.dumps(config))
    return twin


def v41_twin(directory: Path) -> Path:
    """DeepSeek-V4.1 in bfloat16: eight layers of ratio 0, 0, 2, 2, 1, 1, 1, 1."""
    sharing = dataclasses.replace(TinySharing.of(V41_RATIOS), candidate_blocks=4)
    options = TinyOptions(ratios=V41_RATIOS, hash_layers=0, mtp=0, index_topk=16, sharing=sharing)
    twin = directory / "bf16"
    write_tiny_checkpoint(directory / "fp4", options, twin=twin)
    config = json.loads((twin / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = UNREACHED_LIMIT
    (twin / "config.json").write_text(json.dumps(config))
    return twin


def prompt_of(tokens: int) -> list[int]:
    """Token ids that repeat nothing for long."""
    return [2 + (i * 7919 + i * i * 31) % 250 for i in range(tokens)]
