"""From trained tensors to a checkpoint in DeepSeek's own layout."""

from __future__ import annotations

import json
import pathlib
import re

import torch
from safetensors.torch import save_file
from torch import Tensor

from anymla.model.checkpoint import Checkpoint
from anymla.model.config import ModelConfig
from anymla.model.loading import load_weights
from anymla.model.schema import expected_linears
from anymla.testing.tiny_storage import store_fp8, store_mxfp4

_FP8 = re.compile(
    r"\.(attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)|ffn\.shared_experts\.w[123]|[eh]_proj)\.weight$"
)
_EXPERT = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.weight$")
_FLOAT32 = re.compile(r"(attn_sink|\.ape|\.bias|hc_\w+)$")


def stored(weights: dict[str, Tensor], constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """All tensors as they are stored: FP8 linear layers, MXFP4 experts, bfloat16, float32."""
    out: dict[str, Tensor] = {}
    for name, value in {**weights, **constants}.items():
        value = value.detach().cpu()
        prefix = name.removesuffix(".weight")
        found = re.match(r"(.*\.ffn\.experts)\.(w[123])\.weight$", name)
        if found:
            for expert, each in enumerate(value):
                out |= store_mxfp4(f"{found[1]}.{expert}.{found[2]}", each.contiguous())[0]
        elif _FP8.search(name):
            out |= store_fp8(prefix, value, "ue8m0")[0]
        elif name.endswith(".tid2eid"):
            out[name] = value.long()
        else:
            out[name] = value.float() if _FLOAT32.search(name) else value.bfloat16()
    return {name: tensor.contiguous() for name, tensor in sorted(out.items())}


def write(
    directory: pathlib.Path, config: dict, weights: dict[str, Tensor], constants: dict[str, Tensor]
) -> None:
    """Write ``config.json`` and ``model.safetensors``."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(stored(weights, constants), directory / "model.safetensors", {"format": "pt"})


def read(directory: pathlib.Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The trainable tensors and the constants that a checkpoint holds, in float32."""
    config, checkpoint = ModelConfig.from_dir(directory), Checkpoint.open(directory)
    stored = load_weights(checkpoint, config, progress=False)
    values = {f"{name}.weight": name for name in expected_linears(config)}
    tensors: dict[str, Tensor] = {
        name: stored.linear(prefix).dense(torch.float32) for name, prefix in values.items()
    }
    scales = {name for name in checkpoint if name.endswith(".scale")}
    for name in set(checkpoint) - set(tensors) - scales:
        tensors[name] = stored.tensor(name)
    experts: dict[str, list[Tensor]] = {}
    for name in sorted(tensors, key=_expert_number):
        if found := _EXPERT.match(name):
            experts.setdefault(f"{found[1]}.{found[3]}.weight", []).append(tensors.pop(name))
    tensors |= {name: torch.stack(each) for name, each in experts.items()}
    kept = {name for name in tensors if name.endswith((".tid2eid", ".gate.bias"))}
    constants = {name: tensors.pop(name) for name in kept}
    return {name: tensor.float() for name, tensor in tensors.items()}, constants


def _expert_number(name: str) -> int:
    found = _EXPERT.match(name)
    return int(found[2]) if found else -1
