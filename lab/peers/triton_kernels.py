"""triton_kernels: ``matmul_ogs`` of bfloat16 activations by MXFP4 weights in Hopper's layouts."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from lab.peers.experts import BFLOAT16_BOUND, ExpertsPeer, Run, Weights, kernels, stacked

# vLLM's settings for Hopper.
_WARPS, _SPLIT_K = 8, 1
_GROUP = 16  # experts that are brought into the layout at once: it takes eight times their size


class TritonKernels(ExpertsPeer):
    """The package that is developed in Triton's repository, as vLLM ships it."""

    name, title = "triton_kernels", "triton_kernels"
    modules = ("triton_kernels.matmul_ogs",)
    bound = BFLOAT16_BOUND
    note = (
        "activations bfloat16; its own SwiGLU is (up + 1) * gate * sigmoid(alpha * gate), so this "
        "package's is its fused activation; chosen experts come as its bit matrix by a kernel here"
    )

    def _part(self, name: str) -> Any:
        assert self.available()
        return importlib.import_module(f"triton_kernels.{name}")

    def version(self) -> str | None:
        """Return the name of the API, since it has no number."""
        return "matmul_ogs with routing_data"

    def layouts(self, codes: Tensor, scales: Tensor) -> tuple[Any, Any]:
        """Convert MXFP4 codes [E, N, K/2] and scales [E, N, K/32] to the library's [E, K, N]."""
        tensor, kinds = self._part("tensor"), self._part("tensor_details.layout")
        converted = []
        for given, dtype, kind, options in (
            (codes, tensor.FP4, kinds.HopperMXValueLayout, {"mx_axis": 1}),
            (scales, None, kinds.HopperMXScaleLayout, {"mx_axis": 1, "num_warps": _WARPS}),
        ):
            parts = [
                tensor.convert_layout(tensor.wrap_torch_tensor(part.mT, dtype), kind, **options)
                for part in given.split(_GROUP)
            ]
            # Groups are transposed views of what is contiguous, and so is all of them.
            data = torch.cat([part.data.mT for part in parts]).mT
            shape = [len(given), *parts[0].shape[1:]]
            layout = kind(given.mT.shape, **options)
            converted.append(tensor.Tensor(tensor.Storage(data, layout), parts[0].dtype, shape))
        return converted[0], converted[1]

    def prepare(self, weights: Weights, limit: float) -> Run:
        """Swizzle weights, with rows of gate and up alternating; see ``ExpertsPeer``."""
        own = kernels()
        ogs, routes, tensor = self.module, self._part("routing"), self._part("tensor")
        flags = self._part("matmul_ogs_details.opt_flags")
        flags.update_opt_flags_constraints({"split_k": _SPLIT_K})
        count = len(weights["w1"])
        products = []
        for parts in (("1", "3"), ("2",)):
            both = [stacked(weights, *(kind + part for part in parts)) for kind in "ws"]
            if len(parts) == 2:
                both = [alternating(each) for each in both]
            matrix, scale = self.layouts(*both)
            products.append((matrix, ogs.PrecisionConfig(weight_scale=scale)))
        (gate_up, gate_up_scale), (down, down_scale) = products
        activation = ogs.FusedActivation(
            ogs.FnSpecs("clamped_swiglu", own.interleaved_swiglu, ("limit",)), (limit,), 2
        )

        def run(x: Tensor, ids: Tensor, routing: Tensor) -> Tensor:
            bits, wide_ids, wide_weights = own.chosen_bits(ids, routing, count)
            shape = [len(x), 32 * bits.shape[1]]
            matrix = tensor.Bitmatrix(bits.view(torch.uint32), shape, list(shape))
            data, gather, scatter = routes.routing_from_bitmatrix(
                matrix, wide_weights, wide_ids, count, wide_ids.shape[1]
            )
            given = ogs.matmul_ogs(
                x, gate_up, None, data, gather_indx=gather, precision_config=gate_up_scale,
                fused_activation=activation,
            )  # fmt: skip
            out: Tensor = ogs.matmul_ogs(
                given, down, None, data, scatter_indx=scatter, precision_config=down_scale,
                gammas=data.gate_scal,
            )  # fmt: skip
            return out

        return run


def alternating(both: Tensor) -> Tensor:
    """Interleave rows [E, 2N, ...] of two matrices that follow each other."""
    return torch.stack(both.chunk(2, 1), 2).flatten(1, 2)
