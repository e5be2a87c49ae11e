"""Padding of a checkpoint to the sizes that an engine's kernels demand.

The padding has no effect on the results, so that a trained checkpoint can run in engines that do
not support its sizes:

=======================  ==================================================  ====================
size                     padded by                                           the model's function
=======================  ==================================================  ====================
n_routed_experts         experts that are never chosen                       same
num_experts_per_tok      every expert n times, so that each choice is made   same but for the
                         n times at 1/n of its weight                        rounding of the sum
num_attention_heads      heads of which ``wo_a`` reads nothing               same
o_lora_rank              channels of zeros                                   same
moe_intermediate_size    channels of zeros                                   same
index_n_heads            index heads of weight 0; scores shrink alike        same
index_topk               nothing: more entries are attended to               **another**
=======================  ==================================================  ====================

"Same" refers to real numbers: sums may be computed in another order.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from anymla.formats.files import naming
from anymla.formats.untrusted import read_object
from anymla.model.checkpoint import SINGLE_FILE, Checkpoint
from anymla.model.config import ModelConfig
from anymla.model.loading import Weights, load_weights
from anymla.model.schema import expected_linears, expected_plain, weight_kind
from anymla.testing.tiny_storage import Stored, store_fp8, store_mxfp4, store_plain

SIZES = (
    "n_routed_experts",
    "num_experts_per_tok",
    "num_attention_heads",
    "o_lora_rank",
    "moe_intermediate_size",
    "index_n_heads",
    "index_topk",
)
# Added to the score that chooses experts, which is below 100.
_NEVER = -1e4
_EXPERT = re.compile(r"(?P<before>.*\.ffn\.experts\.)(?P<number>\d+)(?P<after>\.w[123])$")


def widen(
    directory: str | Path, out: str | Path, sizes: Mapping[str, int], *, plain: bool = False
) -> None:
    """Write a checkpoint padded to larger sizes, with the tokenizer beside it.

    Linear layers stay in the kind that they are stored in (FP8, MXFP4 or plain), with exactly their
    values.

    Args:
        directory: checkpoint that is small enough to be held in memory.
        out: directory to create. Files of the same names in it are replaced.
        sizes: new sizes by their name in ``config.json``, one of SIZES; others stay.
        plain: True to store linear layers in bfloat16, which holds FP8 and MXFP4 values exactly.

    Raises:
        ValueError: a size cannot be padded, would shrink, or is a number of experts that the old
            one does not divide.
        CheckpointError: there is no checkpoint.
    """
    source, target = Path(directory), Path(out)
    before = read_object(source / "config.json")
    _require_growth(before, sizes)
    after = before | dict(sizes)
    if plain:
        after = {k: v for k, v in after.items() if k not in ("quantization_config", "expert_dtype")}
    padding = _Padding(ModelConfig.from_dict(before), ModelConfig.from_dict(after))
    with load_weights(Checkpoint.open(source), padding.before, progress=False) as weights:
        tensors = _padded(weights, padding, plain=plain)
    target.mkdir(parents=True, exist_ok=True)
    with naming(target):
        save_file(tensors, target / SINGLE_FILE, {"format": "pt"})
        (target / "config.json").write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
        for path in source.glob("*.json"):
            if path.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copy(path, target / path.name)


def _require_growth(config: Mapping[str, object], sizes: Mapping[str, int]) -> None:
    unknown = sorted(set(sizes) - set(SIZES))
    if unknown:
        raise ValueError(f"cannot pad {', '.join(unknown)}, only {', '.join(SIZES)}")
    for name, value in sizes.items():
        had = config[name]
        assert isinstance(had, int)
        if value < had:
            raise ValueError(f"{name} is {had} and cannot become {value}")
        if name == "num_experts_per_tok" and value % had:
            raise ValueError(f"{name} is {had} and can become a multiple of it, not {value}")


def _padded(weights: Weights, padding: _Padding, *, plain: bool) -> dict[str, Tensor]:
    """Return all tensors of the padded checkpoint as they are stored."""
    out: dict[str, Tensor] = {}
    for name in expected_plain(padding.before):
        if name != "head.weight" or name in weights.checkpoint:
            out[name] = padding.tensor(name, weights.tensor(name))
    kinds: dict[str, Callable[[str, Tensor], tuple[Stored, Tensor]]] = {
        "fp8": functools.partial(store_fp8, scale_format="ue8m0"),
        "mxfp4": store_mxfp4,
    }
    values = {
        prefix: weights.linear(prefix).dense(torch.float32)
        for prefix in expected_linears(padding.before)
    }
    for prefix, shape in expected_linears(padding.after).items():
        origin = padding.origin(prefix)
        kind = "plain" if plain else weight_kind(weights.checkpoint, origin or padding.like(prefix))
        if origin is None:
            value = torch.zeros(shape.rows, shape.columns)
        else:
            value = padding.tensor(f"{prefix}.weight", values[origin])
        stored, exact = kinds.get(kind, store_plain)(prefix, value)
        assert torch.equal(exact.float(), value), f"{prefix} changed while it was stored again"
        out |= stored
    return {name: tensor.contiguous() for name, tensor in sorted(out.items())}


class _Padding:
    """Positions of a smaller model's values in the tensors of a larger one."""

    def __init__(self, before: ModelConfig, after: ModelConfig) -> None:
        self.before, self.after = before, after
        self.copies = after.num_experts_per_tok // before.num_experts_per_tok
        if self.copies * before.n_routed_experts > after.n_routed_experts:
            raise ValueError(
                f"{before.n_routed_experts} experts, each {self.copies} times, "
                f"do not go into {after.n_routed_experts}"
            )
        shapes = [
            {name: expected.shape for name, expected in expected_plain(config).items()}
            | {f"{p}.weight": (s.rows, s.columns) for p, s in expected_linears(config).items()}
            for config in (before, after)
        ]
        self._shapes_before, self._shapes_after = shapes

    def origin(self, prefix: str) -> str | None:
        """Return the linear layer whose values a layer of the larger model has; None for none."""
        found = _EXPERT.match(prefix)
        if found is None:
            return prefix
        number = int(found["number"])
        if number >= self.copies * self.before.n_routed_experts:
            return None
        return f"{found['before']}{number % self.before.n_routed_experts}{found['after']}"

    def like(self, prefix: str) -> str:
        """Return an expert of the smaller model whose storage kind an added expert copies."""
        found = _EXPERT.match(prefix)
        assert found is not None
        return f"{found['before']}0{found['after']}"

    def tensor(self, name: str, value: Tensor) -> Tensor:
        """Pad a tensor of the smaller model to the larger one's."""
        if ".ffn.gate." in name:
            return self._gate(name, value)
        if name in self._shapes_before:  # a copy of an expert has the same shapes
            assert value.shape == self._shapes_before[name]
        old = _factors(name, self.before) or tuple(value.shape)
        new = _factors(name, self.after) or self._shapes_after[name]
        out = value.new_zeros(new)
        out[tuple(slice(size) for size in old)] = value.view(old)
        return out.view(self._shapes_after[name])

    def _gate(self, name: str, value: Tensor) -> Tensor:
        """Pad the router's tensors: expert e is also e + n, e + 2 n, ...; others are unused."""
        experts = self.before.n_routed_experts
        if name.endswith(".tid2eid"):
            return torch.cat([value + copy * experts for copy in range(self.copies)], 1)
        size = self.after.n_routed_experts - self.copies * experts
        fill = _NEVER if name.endswith(".bias") else 0.0
        unused = torch.full((size, *value.shape[1:]), fill, dtype=value.dtype)
        return torch.cat([*[value] * self.copies, unused])


def _factors(name: str, config: ModelConfig) -> tuple[int, ...] | None:
    """Split a tensor's composite axes into their factors; None if there are none."""
    groups = config.o_groups
    heads, rank, width = config.num_attention_heads // groups, config.o_lora_rank, config.head_dim
    ending = name.partition(".attn.")[2]
    return {
        "attn_sink": (groups, heads),
        "wq_b.weight": (groups, heads, width, config.q_lora_rank),
        "wo_a.weight": (groups, rank, heads, width),
        "wo_b.weight": (config.hidden_size, groups, rank),
    }.get(ending)
