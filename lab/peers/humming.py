"""Humming: grouped products of e4m3 activations by MXFP4 weights, compiled when they are called."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from anymla.ops.registry import Support
from lab.peers.experts import E4M3_BOUND, ExpertsPeer, Run, Weights, kernels, stacked
from lab.peers.marlin import Marlin

_GEMM = "indexed"
_SWIGLU = (
    "[](float a, float b) {{ const float g = fminf(a, {limit}f);"
    " return g / (1.f + expf(-g)) * fmaxf(fminf(b, {limit}f), -{limit}f); }}(a, b)"
)


class Humming(ExpertsPeer):
    """Its products over pairs that vLLM's kernel has put in order."""

    name, title = "humming", "Humming"
    modules = ("humming.layer",)
    bound = E4M3_BOUND
    note = (
        "activations e4m3 {group}; what lies 12 binades below a row's largest scale is rounded "
        "when weights are loaded; clamped SwiGLU in its quantiser, pairs put in order by vLLM's "
        "kernel, the sum by one like vLLM's"
    )

    def __init__(self, vllm: Marlin, *, channels: int = 128, **options: Any) -> None:
        """Import nothing yet.

        Args:
            vllm: whose kernel puts pairs in order.
            channels: number of activation channels that share a scale; 0 for one scale a token.
            options: keyword arguments of ``Peer``.
        """
        super().__init__(**options)
        self._vllm, self._channels = vllm, channels
        if not channels:
            self.name, self.title = "humming_token", "Humming, a scale a token"
        self.note = self.note.format(group="in blocks of 128" if channels else "by the token")

    def available(self) -> Support:
        """Return support if both the library and vLLM's kernel are available."""
        own = super().available()
        return own and self._vllm.available()

    def version(self) -> str | None:
        """Return the version of the library's distribution; None if it states none."""
        try:
            return metadata.version("humming-kernels")
        except metadata.PackageNotFoundError:
            return None

    def layer(self, codes: Tensor, scales: Tensor) -> Any:
        """Make Humming's layer from MXFP4 codes [E, N, K/2] and scales [E, N, K/32]."""
        count, n, half = codes.shape
        given: dict[str, Any] = {"dtype": "float8e4m3", "quant_mode": "dynamic_token"}
        if self._channels:
            given |= {"quant_mode": "dynamic_group", "group_size": self._channels}
        with torch.device(codes.device):
            layer = self.module.HummingLayer(
                shape_n=n, shape_k=2 * half, weight_config={"quant_method": "mxfp4"},
                input_config=given, num_experts=count, torch_dtype=torch.bfloat16,
            )  # fmt: skip
        layer.load_from_tensors({"weight": codes, "weight_scale": scales})
        layer.transform()
        return layer

    def prepare(self, weights: Weights, limit: float) -> Run:
        """Convert weights to Humming's layout; see ``ExpertsPeer``."""
        own, count = kernels(), len(weights["w1"])
        # Making a layer changes it in place, which must be no inference tensor.
        with torch.inference_mode(False):
            gate_up, down = (
                self.layer(*(stacked(weights, *(kind + part for part in parts)) for kind in "ws"))
                for parts in (("1", "3"), ("2",))
            )
        tuned = [
            self.module.get_heuristics_config(layer_config=layer.humming_config, gemm_type=_GEMM)
            for layer in (gate_up, down)
        ]
        common = {"compute_config": json.dumps({"gemm_type": _GEMM})}
        activation = {
            "activation_type": "binary_split",
            "activation_impl": _SWIGLU.format(limit=float(limit)),
        }

        def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
            align = functools.cache(lambda block: self._vllm.align(ids, block, count))
            rows = x
            options: dict[str, str] = {}
            for layer, intervals, copies in zip(
                (gate_up, down), tuned, (ids.shape[1], 1), strict=True
            ):
                config = chosen_config(intervals, ids.numel())
                pairs, of_blocks, number = align(config["block_shape"][0])
                codes, by_group, by_token = self.module.may_process_input(
                    layer.humming_config, inputs=rows, **options
                )
                rows = layer(
                    codes, input_scale=by_token if by_group is None else by_group,
                    sorted_ids=pairs, expert_ids=of_blocks, num_tokens_padded=number,
                    top_k=copies, valid_shape_m=ids.numel(), tuning_config=json.dumps(config),
                    **common,
                )  # fmt: skip
                options = activation
            out: Tensor = own.weighted_sum(rows, routing)
            return out

        return run


def chosen_config(intervals: list[tuple[int, int, dict[str, Any]]], rows: int) -> dict[str, Any]:
    """Return the settings of the interval (least, most] that contains this number of rows."""
    for least, most, config in intervals:
        if least < rows <= most:
            return config
    raise ValueError(f"Humming has no settings for {rows} rows")
