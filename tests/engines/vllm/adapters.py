"""Layers that an audit reads beside LoRA: ``adapters.py ANSWER.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA

from anymla.engines.vllm.audit.weights import is_readable


class Wrapper(BaseLinearLayerWithLoRA):
    """vLLM's layer around another one, without the distributed state that it asks for."""

    def __init__(self, base_layer: nn.Module) -> None:
        nn.Module.__init__(self)
        self.base_layer: Any = base_layer


def main(answer: Path) -> None:
    """Ask for a layer by itself, and with an adapter around it."""
    layer = nn.Linear(256, 128, bias=False, dtype=torch.bfloat16)
    wrapper = Wrapper(layer)
    found = {"seen": list(wrapper.weight.shape), "plain": is_readable(layer, 256)}
    answer.write_text(json.dumps(found | {"with an adapter": is_readable(wrapper, 256)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
