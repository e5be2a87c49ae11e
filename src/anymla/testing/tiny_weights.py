"""Random values of a tiny checkpoint: every part of the network matters, none dominates."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from anymla.testing.tiny_noise import Noise

# Gains of linear layers over 1 / sqrt(columns). The experts' inner activations are large enough for
# the SwiGLU limit to clamp some, their outputs about as large as the attention's; the two halves of
# an MTP layer's input add up to one.
_LINEAR_GAINS = (
    (r"\.w[13]$", 1.5),
    (r"\.w2$", 0.5),
    (r"\.[eh]_proj$", 0.7),
)


def linear_values(noise: Noise, prefix: str, rows: int, columns: int) -> Tensor:
    """Draw a linear layer's weight, float32 [rows, columns]."""
    gain = next((g for pattern, g in _LINEAR_GAINS if re.search(pattern, prefix)), 1.0)
    return noise.normal(prefix, rows, columns) * (gain / columns**0.5)


def plain_values(noise: Noise, name: str, shape: tuple[int, ...]) -> Tensor:
    """Any other tensor, float32.

    Raises:
        KeyError: there is no rule for this name.
    """
    sample = noise.normal(name, *shape)
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "kv_norm":
        # Sharper attention than with unit keys: a few keys, not all, share the mass.
        return 1.5 + 0.3 * sample
    if leaf in ("q_weight", "k_weight"):
        # A stream and its key agree little, so that not all gates are one half.
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
        # The bias is a quarter as large as the logits; confidences are on both sides of one half.
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
    """Draw hyper-connection gates: mixes of deviation 1, streams that mostly stay separate."""
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
    """Return the N of (2 + N) * N gates; 0 for the head, which has N gates and no mixing matrix."""
    streams = round((gates + 1) ** 0.5) - 1
    return streams if (2 + streams) * streams == gates else 0
