"""Prompt log-probabilities by transformers: ``score_hf.py CHECKPOINT PROMPT.json ANSWER.json``.

vLLM keeps keys and values in the 584-byte FP8 records. Here every row that attention reads passes
through such a record, with products in float32 and in bfloat16: how far the two are apart is the
noise that a comparison with vLLM has to allow.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, DeepseekV4ForCausalLM
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4

from anymla.formats.page_layout import MAIN_FP8, get_layout

NAME = "fp8_rows"


def attend(module: Any, q: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Eager attention over rows as the cache returns them."""
    layout = get_layout(MAIN_FP8)
    rows = key.flatten(0, -2)
    decoded = layout.decode(*layout.encode(rows), rows.dtype).view(key.shape)
    return modeling_deepseek_v4.eager_attention_forward(
        module, q, decoded, decoded, *args, **kwargs
    )


@torch.no_grad()
def score(checkpoint: str, prompt: list[int], bfloat16: bool) -> list[float]:
    """Log-probability of each token after the first; products in bfloat16 or in float32."""
    model = DeepseekV4ForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation="eager", attn_implementation=NAME
    ).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        logits = model(torch.tensor([prompt])).logits[0, :-1].float()
    chosen = torch.tensor(prompt[1:]).unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, chosen).squeeze(-1).tolist()


if __name__ == "__main__":
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    ids = json.loads(Path(sys.argv[2]).read_text())
    precisions = {"float32": False, "bfloat16": True}
    scores = {name: score(sys.argv[1], ids, narrow) for name, narrow in precisions.items()}
    Path(sys.argv[3]).write_text(json.dumps(scores))
