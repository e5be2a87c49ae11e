"""The oracle's V4.1 drafter against nemo-automodel's, an independent implementation, in float32.

The layers are judged by the oracle (``tests/layers/test_dspark.py``). nemo-automodel's drafter runs
on a whole context with a mask; its confidence head takes the normed state, which the released one
does not, so confidences are not compared.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip(
    "nemo_automodel", reason="the comparison needs nemo-automodel 0.7.0, which is no dependency"
)

from v41_cases import DRAFTER, DRAFTER_LENGTHS, drafter_taps

from anymla.testing.oracle import DSparkOracle
from anymla.testing.tiny_checkpoint import write_tiny_checkpoint

# Of rows that are rounded, one number on a tie may go the other way in float32.
BOUNDS = {"exact": 1e-5, "nvfp4": 5e-3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("drafter")
    write_tiny_checkpoint(directory, DRAFTER)
    return directory


@pytest.fixture(scope="module")
def theirs(directory: Path) -> Any:
    return drafter_of(directory)


def drafter_of(directory: Path) -> Any:
    """nemo-automodel's drafter of a checkpoint directory, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41TextConfig
        from nemo_automodel.components.models.deepseek_v41.dspark import DeepseekV41DSparkModel

        text = json.loads((directory / "config.json").read_text())["text_config"]
        del text["model_type"]
        config = DeepseekV41TextConfig(**(text | {"dtype": "float32"}))
        model = DeepseekV41DSparkModel(config, num_anchors=1, enable_confidence_head=True).eval()
    stored = load_file(directory / "model.safetensors")
    known = {
        name: value.float()
        for name, value in stored.items()
        if name.startswith("mtp.") or name in ("embed.weight", "head.weight")
    }
    found = model.load_state_dict(model.state_dict_adapter.from_hf(known), strict=False)
    assert all(name.endswith("bias_vl") for name in found.missing_keys)
    for name, value in model.named_parameters():
        if name.endswith("bias_vl"):  # of image tokens: seen if a text's token used it
            value.data.fill_(torch.nan)
    assert not found.unexpected_keys
    return model


@torch.no_grad()
def logits_of(model: Any, taps: Tensor, anchor: int, tokens: tuple[int, ...]) -> Tensor:
    """Logits [k, vocab] of a block behind a context of taps [T, taps, D], its guesses given."""
    length, config = len(taps), model.config
    ids = torch.tensor([[anchor] + [config.dspark_noise_token_id] * (len(tokens) - 1)])
    at = torch.tensor([[length]])
    present = torch.ones(1, 1, dtype=torch.bool)
    out = super(type(model), model).forward(
        model.embed_tokens(ids),
        taps.flatten(1).unsqueeze(0),
        position_ids=model.build_position_ids(at, length),
        attention_mask=model.build_attention_mask(at, present, length, torch.float32),
        previous_token_ids=torch.tensor([[anchor, *tokens[:-1]]]),
    )
    base: Tensor = model.compute_logits(out.normalized_hidden_states)[0]
    return base.float() + out.transition_logits[0].float()


@pytest.mark.parametrize("kv", ["exact", "nvfp4"])
@pytest.mark.parametrize("length", DRAFTER_LENGTHS)
def test_a_block_is_theirs(
    directory: Path, theirs: Any, length: int, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rows as they are computed, and as the released model keeps them, from bfloat16."""
    from nemo_automodel.components.models.deepseek_v41 import dspark

    quantize = dspark.quantize_cache

    def rounded(rows: Tensor, **how: Any) -> Tensor:
        kept: Tensor = rows if kv == "exact" else quantize(rows.bfloat16().float(), **how)
        return kept

    monkeypatch.setattr(dspark, "quantize_cache", rounded)
    oracle = DSparkOracle(directory)
    taps = drafter_taps(length)
    context = oracle.context(taps.double(), kv=kv)
    block = oracle.block(context, 9, kv=kv)
    got = logits_of(theirs, taps, 9, block.tokens).double()
    error = float((got - block.logits).abs().max() / block.logits.abs().max())
    print(f"{length} positions, {kv} rows: {error:.1e}")
    assert error < BOUNDS[kv]
    assert got.argmax(1).tolist() == list(block.tokens)
    wrong = oracle.block([rows[:-1] for rows in context], 9, kv=kv, tokens=block.tokens)
    assert float((got - wrong.logits).abs().max() / block.logits.abs().max()) > 2 * BOUNDS[kv]
