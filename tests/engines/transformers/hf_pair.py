"""One small checkpoint in transformers, with its own attention and with anymla's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from hf_checkpoints import write_pair
from hf_reference import HuggingFace
from torch import Tensor
from traces import narrowest_choice
from transformers import AutoModelForCausalLM

import anymla.engines.transformers  # noqa: F401
from anymla.testing.tiny_checkpoint import TinyOptions

# Choices that float32's noise decides are passed over, as in tests/model/test_transformers.py.
CLEAR = 2e-5


def load(directory: Path, implementation: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=implementation,
        experts_implementation="eager",
    ).eval()


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.abs().max())


@dataclasses.dataclass
class Pair:
    directory: Path
    eager: Any
    ours: Any
    ids: Tensor  # [2, T]

    @classmethod
    def of(
        cls, directory: Path, options: TinyOptions, changes: dict[str, Any], tokens: int
    ) -> Pair:
        """Write a checkpoint, and find two prompts in which no choice is a near-tie."""
        weights = write_pair(directory, options, changes)
        reference = HuggingFace(weights)
        prompts: list[list[int]] = []
        for seed in range(16):
            generator = torch.Generator().manual_seed(1000 * options.seed + seed)
            prompt = torch.randint(2, options.vocab, (tokens,), generator=generator).tolist()
            if narrowest_choice(*reference.run(prompt)) > CLEAR:
                prompts.append(prompt)
            if len(prompts) == 2:
                break
        ids = torch.tensor(prompts)
        assert len(ids) == 2, "near-ties in the prompts of nearly all seeds"
        return cls(weights, reference.model, load(weights, "anymla"), ids)


def gradients(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of a batch, and the gradient of its loss for each parameter that has one."""
    with torch.enable_grad():
        model.zero_grad()
        out = model(**inputs)
        out.loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return out.logits.detach(), found


def gradient_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, str]:
    """The largest error of a parameter's gradient, relative to that gradient's largest value."""
    assert not set(got) ^ set(want)
    return max((relative(got[n], g), n) for n, g in want.items() if g.abs().max() > 0)
