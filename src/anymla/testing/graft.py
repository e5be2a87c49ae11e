"""Grafting of a DSpark drafter, or of a layer that changes nothing, onto a trained checkpoint.

A layer that changes nothing lets a pipeline have layers of every kind on each of its ranks, which
vLLM requires of them.

The drafter's stages are random. Its Markov head is computed from the pairs of tokens in a given
text, so that a part of its guesses is right: a low-rank factorisation of the logarithms of the
pairs' counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from anymla.formats.files import naming
from anymla.formats.untrusted import read_object
from anymla.model.checkpoint import SINGLE_FILE
from anymla.model.config import ModelConfig
from anymla.testing.tiny_checkpoint import TinyOptions, random_tensors

_TAPS = 3
# Layers of the drafter, tokens that it guesses at once, and the width of its Markov tables.
_LAYERS, _BLOCK, _RANK = 3, 5, 128
# Offset in log(times seen + _UNSEEN): a pair seen once is e ** 3 as likely as an unseen one.
_UNSEEN = 0.05
# Factor of the norm before the stages' logits, which decide where no pair is known.
_STAGES = 0.2
_LAYER = re.compile(r"layers\.(\d+)\.")
# Logit of a stream's own share in a layer that changes nothing; other shares get exp(-_OWN).
_OWN = 30.0


def graft_dspark(directory: str | Path, token_ids: Sequence[int]) -> None:
    """Replace a checkpoint's MTP layers by a DSpark drafter.

    Args:
        directory: checkpoint of one file, which is replaced, as is its ``config.json``.
        token_ids: token ids of the text whose pairs the Markov head learns.

    Raises:
        ValueError: the checkpoint has a DSpark drafter already, or fewer than three layers.
    """
    path = Path(directory)
    config = read_object(path / "config.json")
    before = ModelConfig.from_dict(config)
    if before.dspark is not None:
        raise ValueError(f"{directory}: has a DSpark drafter")
    layers = before.num_hidden_layers
    if layers < _TAPS:
        raise ValueError(f"{directory}: {layers} layers, a drafter reads behind {_TAPS}")
    config |= {
        "num_nextn_predict_layers": 1,  # as in published checkpoints, whatever they hold
        "compress_ratios": [*before.backbone_ratios, *[0] * _LAYERS],
        "dspark_block_size": _BLOCK,
        "dspark_noise_token_id": before.vocab_size - 1,
        "dspark_target_layer_ids": list(range(layers))[-_TAPS:],
        "dspark_markov_rank": _RANK,
    }
    after = ModelConfig.from_dict(config)
    quantised = "quantization_config" in config
    options = TinyOptions(weights="fp4" if quantised else "bf16")
    drafter, _ = random_tensors(options, after, prefix="mtp.")
    last = f"mtp.{_LAYERS - 1}."
    drafter[f"{last}norm.weight"] *= _STAGES
    first, second = after.family.markov_tables
    tables = markov_tables(token_ids, after.vocab_size, _RANK)
    for name, table in zip((first, second), tables, strict=True):
        drafter[f"{last}markov_head.{name}.weight"] = table.bfloat16()
    kept = load_file(path / SINGLE_FILE)
    kept = {name: tensor for name, tensor in kept.items() if not name.startswith("mtp.")}
    tensors = {name: tensor.contiguous() for name, tensor in (kept | drafter).items()}
    with naming(path):
        save_file(tensors, path / SINGLE_FILE, {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def graft_passing_layer(directory: str | Path, of: int) -> None:
    """Insert a copy of a layer before it that adds nothing to the streams and leaves them apart.

    The copy computes everything that the layer does, from its own caches, up to the last products
    of attention and experts, whose weights are zero.

    Args:
        directory: checkpoint of one file, which is replaced, as is its ``config.json``.
        of: index of the layer, which must not choose experts by token id.

    Raises:
        ValueError: there is no such layer.
    """
    path = Path(directory)
    config = read_object(path / "config.json")
    before = ModelConfig.from_dict(config)
    if not before.num_hash_layers <= of < before.num_hidden_layers:
        raise ValueError(f"{directory}: no layer {of} that chooses experts by score")
    ratios = list(config["compress_ratios"])
    config |= {
        "num_hidden_layers": before.num_hidden_layers + 1,
        "compress_ratios": [*ratios[:of], ratios[of], *ratios[of:]],
    }
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path / SINGLE_FILE).items():
        found = _LAYER.match(name)
        number = int(found[1]) if found else -1
        rest = name[found.end() :] if found else ""
        tensors[f"layers.{number + 1}.{rest}" if number >= of else name] = tensor
        if number == of:
            tensors[name] = _passing(rest, tensor, before.hc_mult)
    with naming(path):
        kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(kept, path / SINGLE_FILE, {"format": "pt"})
        (path / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _passing(name: str, tensor: Tensor, streams: int) -> Tensor:
    """Return the tensor of that name of a layer that changes nothing."""
    if name.endswith((".wo_b.weight", ".w2.weight")) or re.fullmatch(r"hc_\w+_fn", name):
        return torch.zeros_like(tensor)
    if re.fullmatch(r"hc_\w+_base", name):
        own = torch.zeros_like(tensor)
        own[2 * streams :] = _OWN * torch.eye(streams, dtype=tensor.dtype).flatten()
        return own
    return tensor.clone()


def markov_tables(token_ids: Sequence[int], vocab: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return two float32 [V, rank] whose product is nearest to log((seen + u) / u) of all pairs."""
    ids = torch.as_tensor(token_ids)
    seen = torch.zeros(vocab * vocab)
    seen.scatter_add_(0, ids[:-1] * vocab + ids[1:], torch.ones(len(ids) - 1))
    bias = ((seen + _UNSEEN) / _UNSEEN).log().view(vocab, vocab)
    left, sizes, right = torch.linalg.svd(bias, full_matrices=False)
    root = sizes[:rank].sqrt()
    return left[:, :rank] * root, right[:rank].T * root
