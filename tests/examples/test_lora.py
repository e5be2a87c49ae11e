"""The LoRA example takes a step and writes an adapter that has learnt something."""

import pathlib
import runpy
import sys

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", minversion="5.24", reason="older ones read no FP8 in float32")
pytest.importorskip("peft")
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_step_of_lora(tmp_path, monkeypatch, capsys):
    words = ["finetune.py", "--steps=1", "--tokens=64", "--held=1", f"--out={tmp_path}", "--text"]
    monkeypatch.setattr(sys, "argv", [*words, str(EXAMPLES / "tiny" / "persuasion.txt")])
    with torch.enable_grad():
        runpy.run_path(str(EXAMPLES / "lora" / "finetune.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["held-out", "step", "held-out"]
    losses = [float(lines[place].rsplit(maxsplit=1)[1]) for place in (0, 2)]
    assert all(1 < loss < 7 for loss in losses)  # a guess is 7.3
    learnt = load_file(tmp_path / "adapter_model.safetensors")
    of_attention = [name for name in learnt if "self_attn.kv_proj.lora_B" in name]
    assert of_attention
    assert all(learnt[name].any() for name in of_attention)
