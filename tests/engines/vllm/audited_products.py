"""Products of a layer under an audit, on weights as a checkpoint has them: ``.. ANSWER.json``."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from anymla.audit.auditor import Auditor
from anymla.audit.rows import RowRecorder
from anymla.audit.settings import Settings
from anymla.engines.vllm.audit import Hooks
from anymla.engines.vllm.audit.at_rest import RowsAtRest
from anymla.engines.vllm.audit.streams import StreamCalls
from anymla.engines.vllm.audit.table import METHODS
from anymla.engines.vllm.pinned import CUDA_MODELS
from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.linear import fp8_block_linear
from anymla.ops.moe import experts, route_biased, swiglu

TOKENS, WIDTH, INNER, EXPERTS, K, LIMIT, SCALE = 6, 256, 128, 8, 3, 2.0, 1.5
FAULT = [""]


def _held(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Fp8(nn.Module):
    """A linear layer of FP8 blocks that returns its bias as well, as vLLM's do."""

    tp_size, reduce_results = 1, False

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        codes, scale = quantize_fp8_weight(torch.randn(outputs, inputs) / inputs**0.5, "fp32")
        self.weight = _held(codes.view(torch.float8_e4m3fn))
        self.weight_scale_inv = _held(scale)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        scale = self.weight_scale_inv.data.clone()
        if FAULT[0] == "scale byte wrong":
            scale[:, 0] *= 2
        codes = self.weight.data.view(torch.uint8)
        return fp8_block_linear(x, codes, scale, quantize_activations=True), None


class Gate(nn.Module):
    tid2eid = bias_vl = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = _held((torch.randn(EXPERTS, WIDTH) / WIDTH**0.5).bfloat16())
        self.e_score_correction_bias = _held(torch.randn(EXPERTS) / 5)

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("the router multiplies by itself")


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Fp8(2 * INNER, WIDTH), Fp8(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x)[0].chunk(2, dim=-1)
        return self.down_proj(swiglu(gate, up, LIMIT))[0]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, rows, width in (("w13", 2 * INNER, WIDTH), ("w2", WIDTH, INNER)):
            made = quantize_mxfp4(torch.randn(EXPERTS, rows, width) / width**0.5)
            setattr(self, f"{name}_weight", _held(made[0]))
            setattr(self, f"{name}_weight_scale", _held(made[1]))
        self.quant_method = SimpleNamespace(run=self.run)

    def forward_modular(self, **kwargs: Any) -> Tensor:
        raise AssertionError("the layer calls its method")

    def run(self, x: Tensor, ids: Tensor, weights: Tensor, limit: float, shared: Any) -> Tensor:
        if FAULT[0] == "experts exchanged":
            ids = ids.roll(1, 1)
        parts = {
            "w1": self.w13_weight[:, :INNER],
            "w3": self.w13_weight[:, INNER:],
            "w2": self.w2_weight,
            "s1": self.w13_weight_scale[:, :INNER],
            "s3": self.w13_weight_scale[:, INNER:],
            "s2": self.w2_weight_scale,
        }
        return experts(
            x,
            ids,
            weights,
            **{name: list(part.unbind()) for name, part in parts.items()},
            weight_format="mxfp4",
            swiglu_limit=limit,
            quantize_activations=True,
            shared=shared,
        )


class AnymlaMoE(nn.Module):
    """As ours, which routes by itself."""

    prefix, scoring_func, renormalize, tp_size = "layers.0.ffn", "sqrtsoftplus", True, 1
    n_routed_experts, n_activated_experts, hidden_size = EXPERTS, K, WIDTH
    routed_scaling_factor, swiglu_limit = SCALE, LIMIT

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.shared_experts, self.experts = Gate(), Shared(), nn.Module()
        self.experts.routed_experts = Routed()

    def forward(self, x: Tensor, input_ids: Any = None) -> Tensor:
        bias = self.gate.e_score_correction_bias
        bias = torch.zeros_like(bias) if FAULT[0] == "bias left out" else bias
        ids, weights = route_biased(x, self.gate.weight, bias, k=K, scale=SCALE)
        shared = self.shared_experts(x)
        return self.experts.routed_experts.quant_method.run(x, ids, weights, LIMIT, shared)


class Attention(nn.Module):
    """Names that the hooks ask for; of it only the window is there."""

    prefix, compress_ratio, window_size = "layers.0.attn", 1, 4
    padded_heads = n_local_heads = 1
    head_dim, hidden_size, indexer, compressor = 512, WIDTH, None, None

    def __init__(self) -> None:
        super().__init__()
        self.fused_wqa_wkv = self.wq_b = self.wo_b = nn.Identity()
        cache = get_layout(MAIN_FP8).allocate(2, 64)
        self.swa_cache_layer = SimpleNamespace(prefix="layers.0.window", kv_cache=cache)

    def _unused(self) -> None:
        raise AssertionError("not called here")

    _run_parallel_input_projections = _split_qkv_and_norm = _unused
    _fused_qnorm_rope_kv_insert = forward_mqa = _o_proj = _unused


class Model(nn.Module):
    """One layer; its attention does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        layer = nn.Module()
        layer.attn, layer.ffn = Attention(), AnymlaMoE()
        self.model.layers = nn.ModuleList([layer])
        self.model.forward = self.run

    def run(self, hidden: Tensor, positions: Tensor) -> Tensor:
        return self.model.layers[0].ffn(hidden, positions.int())


def stand_in(module: str) -> ModuleType:
    """Put a module in the place of one of vLLM's CUDA models, with a sum of streams to call."""
    made = ModuleType(module)
    made.mhc_post_tilelang = lambda x, residual, post, comb: residual
    sys.modules[module] = made
    return made


def capture_a_draft(hooks: Hooks, model: ModuleType, draft: ModuleType) -> list[str]:
    """Call sums of streams as while vLLM captures a draft model's graph, of one token.

    Returns:
        The names of the modules, of the model's and the draft's, whose call was recorded.
    """
    streams = torch.zeros(1, 4, WIDTH)
    given = (torch.zeros(1, WIDTH), streams, torch.zeros(1, 4), torch.zeros(1, 4, 4))
    found = []
    hooks.recorder.tokens = 1
    with mock.patch.object(RowRecorder, "captured", new_callable=mock.PropertyMock) as captured:
        captured.return_value = True
        for module in (draft, model):
            module.mhc_post_tilelang(*given)
            if hooks.recorder.pending:
                found.append(module.__name__)
    hooks.recorder.flush()
    return found


def capture_a_step(hooks: Hooks, model: Model, theirs: ModuleType) -> list[str]:
    """Run the model as while vLLM captures its graph, with a sum of streams behind the layer.

    Returns:
        The section that each launch of the graph records.
    """
    launches: list[str] = []
    launch = RowRecorder.flush

    def flush(recorder: RowRecorder) -> None:
        launches.extend(dict.fromkeys(section for section, *_ in recorder._waiting))
        launch(recorder)

    streams = torch.zeros(TOKENS, 4, WIDTH)
    mixes = torch.zeros(TOKENS, 4), torch.zeros(TOKENS, 4, 4)
    layer = model.model.layers[0]

    def run(hidden: Tensor, positions: Tensor) -> Tensor:
        note = hooks._methods[layer.attn.prefix][0].note
        note(hidden=hidden)  # of attention, whose methods do nothing here
        out = model.run(hidden, positions)
        theirs.mhc_post_tilelang(out, streams, *mixes)
        return out

    with (
        mock.patch.object(RowRecorder, "captured", new_callable=mock.PropertyMock) as captured,
        mock.patch.object(RowRecorder, "flush", flush),
    ):
        captured.return_value = True
        hooks._forward(run)(torch.randn(TOKENS, WIDTH).bfloat16(), torch.arange(TOKENS))
    return launches


def main(answer: Path) -> None:
    torch.manual_seed(0)
    cuda_model, mtp = stand_in(CUDA_MODELS[0]), stand_in(CUDA_MODELS[1])
    model = Model()
    auditor = Auditor(Settings(every=1, requests=2), logging.getLogger("audit"), {})
    hooks = Hooks(model, auditor)
    hooks.streams.wrap_functions()
    positions = torch.arange(TOKENS)
    slots = SimpleNamespace(
        slot_mapping=positions,
        block_table=torch.zeros(1, 2, dtype=torch.int32),
        num_decode_tokens=TOKENS,
        decode_swa_indices=None,
        decode_swa_lens=None,
    )
    told: dict[str, Any] = {}
    hooks.runner_chooses = True
    for name in ("right", "experts exchanged", "scale byte wrong", "bias left out"):
        FAULT[0] = name
        model.model.forward(torch.randn(TOKENS, WIDTH).bfloat16(), positions)  # not audited
        for _ in range(80):
            auditor.begin()
            owners, valid = np.zeros(TOKENS, dtype=np.int64), np.ones(TOKENS, dtype=bool)
            hooks.begin(positions.numpy(), owners, ["a"], valid)
            model.model.forward(torch.randn(TOKENS, WIDTH).bfloat16(), positions)
            hooks.end({"layers.0.window": slots})
            auditor.end(TOKENS)
            auditor.drain()
        told[name] = {n: (tally.judged, tally.alarms) for n, tally in auditor.tallies.items()}
        auditor.tallies.clear()
    recorded = capture_a_draft(hooks, cuda_model, mtp)
    launches = capture_a_step(hooks, model, cuda_model)
    kinds = (*METHODS, StreamCalls, RowsAtRest)
    judged_by = sorted({name for kind in kinds for name in kind.judged_by})
    words = {**told, "recorded": recorded, "skipped": auditor.skipped, "judged_by": judged_by}
    words["launches"] = launches
    answer.write_text(json.dumps(words))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
