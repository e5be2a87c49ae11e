"""vLLM's mixture of experts of DeepSeek-V4 on anymla's router and MXFP4 experts.

The experts' weights stay as the checkpoint stores them for every number of tokens: they are not
repacked for Marlin, and there is no second copy.
"""

from __future__ import annotations

from typing import Any

import torch
import vllm.envs as vllm_envs
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod
from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MoE

from anymla.engines.vllm.step import once
from anymla.layers.side_stream import INLINE, SideStream
from anymla.ops.moe import experts, route_biased, route_hash
from anymla.ops.streams import deferred_stream_wait

# Up to this many tokens the shared expert leaves SMs free for the router and the routed experts.
# The threshold is vLLM's own.
_BESIDE_TOKENS = 256


def install(model: nn.Module) -> None:
    """Replace the classes of a model's mixtures of experts, before their weights are loaded."""
    found: list[Any] = [each for each in model.modules() if type(each) is DeepseekV4MoE]
    layers = [each for each in found if kept(each) is None]
    device = layers[0].gate.weight.device if layers else torch.device("cpu")
    side = SideStream(device) if device.type == "cuda" else INLINE
    for layer in layers:
        layer.experts.routed_experts.quant_method.__class__ = Mxfp4Experts
        layer.__class__ = AnymlaMoE
        layer.side = side
        layer.gate.quant_method.process_weights_after_loading = layer._keep_table


def kept(layer: Any) -> str | None:
    """Return the reason why a mixture of experts must stay vLLM's; None if anymla's can run."""
    if layer.use_native_mega_moe:
        return "experts of DeepGEMM's megakernel"
    runner = layer.experts
    config, parallel = runner.moe_config, runner.moe_config.moe_parallel_config
    reasons = {
        "experts that are not MXFP4": type(runner.routed_experts.quant_method)
        is not Mxfp4MoEMethod,
        "data or context parallel experts": config.dp_size * config.pcp_size > 1,
        "sequence parallel experts": config.is_sequence_parallel,
        "balanced experts (EPLB)": parallel.enable_eplb,
        "two batches at a time (DBO)": runner.enable_dbo,
        "LoRA": config.is_lora_enabled,
        "experts of image tokens": layer.gate.bias_vl is not None,
        "another score": layer.scoring_func != "sqrtsoftplus" or not layer.renormalize,
        "no bias": layer.gate.tid2eid is None and layer.gate.e_score_correction_bias is None,
        "padded channels": config.hidden_dim != layer.hidden_size,
        "no limit": not layer.swiglu_limit,
    }
    return next((reason for reason, found in reasons.items() if found), None)


class Mxfp4Experts(Mxfp4MoEMethod):
    """The routed experts of one layer; never constructed, a method's class is replaced by it.

    Attributes:
        matrices: arguments of ``experts``; matrices and scales are views of vLLM's parameters.
        first: global id of the first expert on this rank.
    """

    supports_pre_processed_weights = False
    is_monolithic = False
    skip_forward_padding = False
    has_unpadded_output = False
    backend: str | None = None
    matrices: dict[str, Any]
    first: int

    def process_weights_after_loading(self, layer: Any) -> None:
        """Leave the weights as loaded; nothing is repacked."""
        half = layer.w13_weight.shape[1] // 2
        self.matrices = {
            "w1": layer.w13_weight.data[:, :half],
            "w3": layer.w13_weight.data[:, half:],
            "w2": layer.w2_weight.data,
            "s1": layer.w13_weight_scale.data[:, :half],
            "s3": layer.w13_weight_scale.data[:, half:],
            "s2": layer.w2_weight_scale.data,
        }
        # indexed by global id, -1 for experts of other ranks
        local_ids = layer.expert_map_manager.expert_map
        self.first = 0
        if local_ids is not None:
            here = (local_ids >= 0).nonzero().flatten().tolist()
            self.first = here[0]
            if here != list(range(here[0], here[0] + len(here))):
                raise NotImplementedError(f"{layer.layer_name}: experts that are not neighbours")

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: none of vLLM's kernels runs, so none needs scales."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Run the experts; vLLM's runner calls it after its own routing."""
        return self.run(x, topk_ids.to(torch.int32), topk_weights, layer.swiglu_limit, None)

    def run(
        self, x: Tensor, ids: Tensor, weights: Tensor, limit: float, shared: Tensor | None
    ) -> Tensor:
        """Return the sum [T, D] of each token's experts on this rank, and of ``shared``."""
        return experts(
            x,
            ids,
            weights,
            **self.matrices,
            weight_format="mxfp4",
            swiglu_limit=limit,
            quantize_activations=True,
            expert_offset=self.first,
            shared=shared,
            backend=self.backend,
        )


class AnymlaMoE(DeepseekV4MoE):
    """Router, routed experts and shared expert; never constructed, its class is assigned.

    Attributes:
        side: CUDA streams that the model's mixtures of experts share.
        token_experts: int64 [V, K], experts of every token id; None in layers that score.
    """

    backend: str | None = None
    side: SideStream = INLINE
    token_experts: Tensor | None = None

    def _keep_table(self, gate: Any) -> None:
        """Keep the experts of token ids in the operation's form."""
        table = gate.tid2eid
        self.token_experts = None if table is None else table.data.long()

    def forward(
        self,
        hidden_states: Tensor,
        input_ids: Tensor | None = None,
        mega_gate_metadata: Any = None,
    ) -> Tensor:
        """Map [T, hidden] to [T, hidden]; the shared expert may run in parallel with the others."""
        runner, x = self.experts, hidden_states
        hashed = self.gate.tid2eid is not None
        # A recorder of the chosen experts is attached to vLLM's router, so that router must run.
        if runner.router.capture_fn is not None or (hashed and input_ids is None):
            return super().forward(hidden_states, input_ids, mega_gate_metadata)
        side = self.side if len(x) <= _BESIDE_TOKENS else INLINE
        with side.beside():
            shared = None if self.shared_experts is None else self.shared_experts(x)
        ids, weights = self._route(x, input_ids)
        with deferred_stream_wait(side.join):
            method = runner.routed_experts.quant_method
            out = method.run(x, ids, weights, self.swiglu_limit, shared)
        return runner._maybe_reduce_final_output(out, None)

    def _route(self, x: Tensor, input_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return expert ids int32 [T, K] and weights float32 [T, K]; padding goes to no expert."""
        context, gate = get_forward_context(), self.gate
        padding = context.is_padding if vllm_envs.VLLM_MOE_SKIP_PADDING else None
        padding = None if padding is None else padding[: len(x)]
        scale, chosen = self.routed_scaling_factor, self.backend
        if self.token_experts is None:
            is_valid = None if padding is None else once("valid", padding.logical_not)
            return route_biased(
                x,
                gate.weight,
                gate.e_score_correction_bias,
                k=self.n_activated_experts,
                scale=scale,
                is_valid=is_valid,
                backend=chosen,
            )
        assert input_ids is not None

        def known() -> Tensor:
            ids = input_ids.long()
            return ids if padding is None else ids.masked_fill_(padding, -1)

        return route_hash(
            x,
            gate.weight,
            once("ids", known),
            self.token_experts,
            scale=scale,
            backend=chosen,
        )
