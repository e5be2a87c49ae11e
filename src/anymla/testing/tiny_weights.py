"""Random values of a tiny checkpoint: every part of the network matters, none dominates."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from anymla.testing.tiny_noise import Noise

# Gains of linear layers over 1 / sqrt(columns). The experts' inner activations are made large
# enough that the SwiGLU limit clamps some, their outputs about as large as the attention's; the two
# halves of an MTP layer's input add up to one.
_LINEAR_GAINS = (
    (r"\.w[13]$", 1.5),
    (r"\.w2$", 0.5),
    (r"\.[eh]_proj$", 0.7),
)


def linear_values(noise: Noise, prefix: str, rows: int, columns: int) -> Tensor:
    """A linear layer's weight, float32 [rows, columns]."""
    gain = next((g for pattern, g in _LINEAR_GAINS if re.search(pattern, prefix)), 1.0)
    return noise.normal(prefix, rows, columns) * (gain / columns**0.5)


def plain_values(noise: Noise, name: str, shape: tuple[int, ...]) -> Tensor:
    """Any other tensor, float32.

    Raises:
        KeyError: no rule for this name.
    """
    sample = noise.normal(name, *shape)
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "kv_norm":
        # Sharper attention than unit keys would give: a few keys, not all, share the mass.
        return 1.5 + 0.3 * sample
    if leaf in ("q_weight", "k_weight"):
        # Agreement of a stream and its key is small: the gates shall not all be a half.
        return 2 + 0.5 * sample
    if leaf in ("norm", "q_norm", "k_norm", "attn_norm", "ffn_norm", "enorm", "hnorm", "main_norm"):
        return 1 + 0.2 * sample
    if leaf == "embed":
        return sample
    if leaf in ("head", "gate"):
        # Logits of deviation 2: neither uniform nor certain.
        return sample * (2 / shape[1] ** 0.5)
    if leaf == "markov_w1":
        return sample
    if leaf in ("markov_w2", "proj"):
        # A bias as large as a quarter of the logits; confidences on both sides of even.
        return sample * (0.5 / shape[1] ** 0.5 if leaf == "markov_w2" else shape[1] ** -0.5)
    if leaf in ("bias", "bias_vl"):
        return 0.2 * sample
    if leaf == "attn_sink":
        # About the log-sum-exp of a dozen keys, so that sinks take a visible share.
        return 2 + 1.5 * sample
    if leaf == "ape":
        return 0.5 * sample
    if leaf.startswith("hc_"):
        return _gates(leaf, sample)
    raise KeyError(f"no rule for the values of {name}")


def _gates(leaf: str, sample: Tensor) -> Tensor:
    """Hyper-connection gates: mixes of deviation 1, streams that mostly keep to themselves."""
    if leaf.endswith("_fn"):
        return sample / sample.shape[1] ** 0.5
    if leaf.endswith("_scale"):
        return 0.7 + 0.2 * sample
    base = 0.5 * sample
    streams = _streams(len(base))
    if streams:
        base[2 * streams :] += 1.5 * torch.eye(streams).flatten()
    return base


def _streams(gates: int) -> int:
    """The N of (2 + N) * N gates; 0 for the head, which has N of them and no mixing matrix."""
    streams = round((gates + 1) ** 0.5) - 1
    return streams if (2 + streams) * streams == gates else 0
