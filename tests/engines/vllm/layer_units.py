"""Experts and linear layers of the plugin, without vLLM: ``layer_units.py ANSWER.json [DEVICE]``.

vLLM's modules are stand-ins here, in which the plugin's methods find the attributes that the real
ones have; weights are random. Results are compared with vLLM's formulas in float64.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import layer_formulas as formulas
import stand_ins
import torch
from torch import Tensor, nn

stand_ins.install()

from kept_layer import bare  # noqa: E402
from measures import ulps  # noqa: E402

from anymla.engines.vllm import attention, codes, experts, hyper_connection, linears  # noqa: E402
from anymla.formats.fp8_block import (  # noqa: E402
    dequantize_fp8_rows,
    dequantize_fp8_weight,
    quantize_fp8_rows,
    quantize_fp8_weight,
)
from anymla.formats.mxfp4 import dequantize_mxfp4  # noqa: E402
from anymla.formats.quantized_rows import QuantizedRows  # noqa: E402
from anymla.layers.side_stream import INLINE, SideStream  # noqa: E402
from anymla.ops.norm_rope import rope  # noqa: E402

HIDDEN, INNER, EXPERTS, PER_TOKEN, VOCABULARY = 512, 256, 16, 3, 50
LIMIT, SCALE, TOKENS, PADDING = 2.0, 1.5, 9, 3


class Mixture:
    """A mixture of experts, whole or shared out among ranks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.w13 = self._codes(EXPERTS, 2 * INNER, HIDDEN // 2)
        self.w2 = self._codes(EXPERTS, HIDDEN, INNER // 2)
        self.s13 = self._scales(EXPERTS, 2 * INNER, HIDDEN // 32)
        self.s2 = self._scales(EXPERTS, HIDDEN, INNER // 32)
        self.gate = _bf16(EXPERTS, HIDDEN, device=device) / HIDDEN**0.5
        self.bias = torch.rand(EXPERTS, device=device) / 4
        self.table = torch.rand(VOCABULARY, EXPERTS, device=device).topk(PER_TOKEN).indices.int()
        self.x = _bf16(TOKENS + PADDING, HIDDEN, device=device)
        self.ids = torch.randint(VOCABULARY, (TOKENS + PADDING,), device=device).int()
        self.shared = _bf16(TOKENS + PADDING, HIDDEN, device=device)

    def _codes(self, *shape: int) -> Tensor:
        return torch.randint(256, shape, dtype=torch.uint8, device=self.device)

    def _scales(self, *shape: int) -> Tensor:
        return torch.randint(120, 124, shape, dtype=torch.uint8, device=self.device)

    def matrices(self, e: int) -> tuple[Tensor, Tensor, Tensor]:
        """One expert's w1, w3 and w2."""
        w1, w3 = dequantize_mxfp4(self.w13[e], self.s13[e], torch.float64).chunk(2)
        return w1, w3, dequantize_mxfp4(self.w2[e], self.s2[e], torch.float64)

    def wanted(self, *, by_table: bool) -> formulas.Estimate:
        """What vLLM's formula gives for the tokens that are none of padding."""
        x = self.x[:TOKENS]
        if by_table:
            given = self.ids[:TOKENS], self.table
            ids, weights = formulas.route_by_table(x, self.gate, *given, SCALE)
        else:
            ids, weights = formulas.route(x, self.gate, self.bias, PER_TOKEN, SCALE)
        found = formulas.mixture(x, ids, weights, self.matrices, LIMIT, quantised=True)
        return found + formulas.Estimate.exact(self.shared[:TOKENS])

    def layer(
        self,
        *,
        by_table: bool = False,
        here: list[int] | None = None,
        columns: slice = slice(None),
        shared: Tensor | None = None,
    ) -> Any:
        """The plugin's layer of one rank.

        Args:
            by_table: it routes by token id.
            here: its experts; None for all.
            columns: its channels of the experts' inner size.
            shared: its part of the shared expert's output.
        """
        ids, expert_map = list(range(EXPERTS)), None
        if here is not None:
            ids, expert_map = here, torch.full((EXPERTS,), -1, device=self.device)
            expert_map[here] = torch.arange(len(here), device=self.device)
        routed = types.SimpleNamespace(
            layer_name="experts",
            expert_map_manager=types.SimpleNamespace(expert_map=expert_map),
        )
        half = slice(ids[0], ids[-1] + 1)
        channels = range(INNER)[columns]
        of32 = slice(channels.start // 32, channels.stop // 32)
        packed = slice(channels.start // 2, channels.stop // 2)

        def rows(both: Tensor) -> Tensor:
            first, second = both[half].chunk(2, 1)
            return torch.cat((first[:, columns], second[:, columns]), 1)

        routed.w13_weight = nn.Parameter(rows(self.w13), requires_grad=False)
        routed.w13_weight_scale = nn.Parameter(rows(self.s13), requires_grad=False)
        w2, s2 = self.w2[half, :, packed].contiguous(), self.s2[half, :, of32].contiguous()
        routed.w2_weight = nn.Parameter(w2, requires_grad=False)
        routed.w2_weight_scale = nn.Parameter(s2, requires_grad=False)
        routed.quant_method = bare(experts.Mxfp4Experts)
        routed.quant_method.process_weights_after_loading(routed)
        gate = types.SimpleNamespace(
            weight=self.gate,
            tid2eid=nn.Parameter(self.table, requires_grad=False) if by_table else None,
            e_score_correction_bias=None if by_table else self.bias,
        )
        made = bare(
            experts.AnymlaMoE,
            gate=gate,
            routed_scaling_factor=SCALE,
            n_activated_experts=PER_TOKEN,
            swiglu_limit=LIMIT,
            shared_experts=lambda x: (self.shared if shared is None else shared)[: len(x)],
            side=SideStream(self.device) if self.device.type == "cuda" else INLINE,
        )
        made.experts = types.SimpleNamespace(
            routed_experts=routed,
            router=types.SimpleNamespace(capture_fn=None),
            _maybe_reduce_final_output=lambda out, trunc_size: out,
        )
        made._keep_table(gate)
        return made

    def run(self, layer: Any, *, padded: bool = True) -> Tensor:
        """The layer's output for tokens and padding."""
        _step(self.x, PADDING if padded else None)
        return layer.forward(self.x, self.ids, None)


def _step(x: Tensor, padding: int | None) -> None:
    """The forward context of a step, whose last tokens are padding."""
    rows = torch.arange(len(x), device=x.device)
    mask = None if padding is None else rows >= len(x) - padding
    stand_ins.context.is_padding, stand_ins.context.additional_kwargs = mask, {}


def _bf16(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(shape, device=device).to(torch.bfloat16)


def mixtures(device: torch.device) -> dict[str, Any]:
    """Errors of the plugin's layers in standard deviations, by how they are shared out."""
    made = Mixture(device)
    found: dict[str, Any] = {}
    for name, by_table in (("by score", False), ("by table", True)):
        wanted = made.wanted(by_table=by_table)
        layer = made.layer(by_table=by_table)
        out = made.run(layer)
        found[name] = formulas.excess(out[:TOKENS], wanted)
        found[f"{name}, not padded"] = {
            "ulps": ulps(made.run(layer, padded=False)[:TOKENS], out[:TOKENS])
        }
        # Padding has no experts: what is left is the shared one.
        left = torch.equal(out[TOKENS:], made.shared[TOKENS:])
        found[f"{name}, padding"] = {"is the shared expert's": left}
    shared = made.shared / 2
    half = EXPERTS // 2
    sharded = {
        "tensor parallel": [
            {"columns": slice(0, INNER // 2)},
            {"columns": slice(INNER // 2, None)},
        ],
        "expert parallel": [{"here": [*range(half)]}, {"here": [*range(half, EXPERTS)]}],
    }
    wanted = made.wanted(by_table=False)
    for name, ranks in sharded.items():
        parts = [made.run(made.layer(**each, shared=shared)).double() for each in ranks]
        found[name] = formulas.excess(sum(parts)[:TOKENS], wanted)
    wrong = made.layer()
    matrices = wrong.experts.routed_experts.quant_method.matrices
    matrices["w1"] = matrices["w1"].flip(0)
    found["experts in another order"] = formulas.excess(made.run(wrong)[:TOKENS], wanted)
    return found


def recorded_routes(device: torch.device) -> list[str]:
    """Whose layer runs where somebody listens to vLLM's router, and where ids are missing."""
    ran = []
    experts.DeepseekV4MoE.forward = lambda self, *args: ran.append("vLLM's")
    made = Mixture(device)
    listened = made.layer()
    listened.experts.router.capture_fn = print
    for layer, ids in ((listened, made.ids), (made.layer(by_table=True), None)):
        _step(made.x, None)
        layer.forward(made.x, ids, None)
    return ran


def kept_layers() -> dict[str, str | None]:
    """Why mixtures of experts stay vLLM's, for one that need not and for others."""

    def layer(**changes: Any) -> Any:
        parallel = types.SimpleNamespace(enable_eplb=False)
        config = types.SimpleNamespace(
            moe_parallel_config=parallel, dp_size=1, pcp_size=1, is_sequence_parallel=False,
            is_lora_enabled=False, hidden_dim=HIDDEN,
        )  # fmt: skip
        method = bare(experts.Mxfp4MoEMethod)
        routed = types.SimpleNamespace(quant_method=method)
        runner = types.SimpleNamespace(moe_config=config, routed_experts=routed, enable_dbo=False)
        gate = types.SimpleNamespace(bias_vl=None, tid2eid=None, e_score_correction_bias="bias")
        made = types.SimpleNamespace(
            use_native_mega_moe=False, experts=runner, gate=gate, scoring_func="sqrtsoftplus",
            renormalize=True, hidden_size=HIDDEN, swiglu_limit=LIMIT,
        )  # fmt: skip
        for path, value in changes.items():
            *way, name = path.split("__")
            place = made
            for step in way:
                place = getattr(place, step)
            assert hasattr(place, name)
            setattr(place, name, value)
        return made

    config = "experts__moe_config__"
    changes: dict[str, Any] = {
        "none": {},
        "megakernel": {"use_native_mega_moe": True},
        "unquantised": {"experts__routed_experts__quant_method": None},
        "data parallel": {f"{config}dp_size": 2},
        "context parallel": {f"{config}pcp_size": 2},
        "sequence parallel": {f"{config}is_sequence_parallel": True},
        "balanced": {f"{config}moe_parallel_config__enable_eplb": True},
        "two batches": {"experts__enable_dbo": True},
        "LoRA": {f"{config}is_lora_enabled": True},
        "images": {"gate__bias_vl": "bias"},
        "softmax": {"scoring_func": "softmax"},
        "not normalised": {"renormalize": False},
        "no bias": {"gate__e_score_correction_bias": None},
        "padded": {f"{config}hidden_dim": 2 * HIDDEN},
        "no limit": {"swiglu_limit": None},
    }
    return {name: experts.kept(layer(**each)) for name, each in changes.items()}


class _Loaded(nn.Module):
    """A linear layer as vLLM has loaded it."""

    def __init__(self, rows: int, channels: int, scale_format: str, device: torch.device) -> None:
        super().__init__()
        dense = torch.randn(rows, channels, device=device) / channels**0.5
        held, scale = quantize_fp8_weight(dense, scale_format)
        self.dense = dequantize_fp8_weight(held, scale, torch.float64)
        scale = scale.view(torch.float8_e8m0fnu) if scale_format == "ue8m0" else scale
        self.weight = nn.Parameter(held.view(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)
        self.quant_method = bare(linears.Fp8Linear)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """As vLLM's layers call their method."""
        return self.quant_method.apply(self, x, None), None


def products(device: torch.device) -> dict[str, Any]:
    """Linear layers beside the exact product of quantised rows, and who multiplies what."""
    prepared: list[Any] = [lambda layer: None]
    calls = []
    linears.Fp8LinearMethod.process_weights_after_loading = lambda self, layer: prepared[0](layer)
    linears.Fp8LinearMethod.apply = lambda self, layer, x, bias: calls.append(len(x))
    x = _bf16(TOKENS, HIDDEN, device=device)
    exact = dequantize_fp8_rows(*quantize_fp8_rows(x), torch.float64)
    found: dict[str, Any] = {}
    for name in ("ue8m0", "fp32"):
        layer = _Loaded(384, HIDDEN, name, device)
        layer.quant_method.process_weights_after_loading(layer)
        found[name] = {"ulps": ulps(layer(x)[0], exact @ layer.dense.T)}
    rows = QuantizedRows.empty(TOKENS, HIDDEN, device)
    held, scales = quantize_fp8_rows(x)
    rows.codes[:TOKENS], rows.scales[:TOKENS] = held, scales
    # On a CPU products quantise what they read; elsewhere x itself may be anything.
    given = x.clone() if device.type == "cpu" else torch.full_like(x, torch.nan)
    out = layer(codes.attach(given, rows))[0]
    found["attached"] = {"ulps": ulps(out, exact @ layer.dense.T)}
    layer(torch.zeros(codes.MOST_CODED_TOKENS + 1, HIDDEN, device=device))
    found["by vLLM"] = calls

    def repack(layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.data.clone(), requires_grad=False)

    def rescale(layer: Any) -> None:
        layer.weight_scale_inv.data.mul_(2)

    for name, change, scale_format in (
        ("repacked", repack, "ue8m0"),
        ("rescaled", rescale, "fp32"),
    ):
        layer, prepared[0] = _Loaded(384, HIDDEN, scale_format, device), change
        layer.quant_method.process_weights_after_loading(layer)
        found[name] = layer.quant_method.held is None
    prepared[0] = lambda layer: None
    return found


def shared_experts(device: torch.device) -> dict[str, float]:
    """The shared expert beside vLLM's formula."""
    gate_up = _Loaded(2 * INNER, HIDDEN, "ue8m0", device)
    down = _Loaded(HIDDEN, INNER, "ue8m0", device)
    for layer in (gate_up, down):
        layer.quant_method.process_weights_after_loading(layer)
    act_fn = types.SimpleNamespace(swiglu_limit=LIMIT)
    made = bare(linears.SharedExpert, gate_up_proj=gate_up, down_proj=down, act_fn=act_fn)
    x = _bf16(TOKENS, HIDDEN, device=device)
    return formulas.excess(
        made.forward(x), formulas.shared_expert(x, gate_up.dense, down.dense, LIMIT)
    )


def output_projections(device: torch.device) -> dict[str, Any]:
    """Heads rotated back and projected by groups, beside the formula; and what is kept."""
    called = []

    def einsum(formula: str, heads: Any, weight: Any, out: Tensor, *, recipe: Any) -> None:
        assert recipe == (1, 128, 128)
        called.append(len(out))
        (codes_, scales), (held, factors) = heads, weight
        rows = codes_.double() * scales.double().repeat_interleave(128, -1)
        matrix = held.double() * factors.double().repeat_interleave(128, -1).repeat_interleave(
            128, 1
        )
        out.copy_(torch.einsum(formula, rows, matrix))

    linears.fp8_einsum = einsum
    linears.compute_fp8_einsum_recipe = lambda: ((1, 128, 128), False)
    many = codes.MOST_CODED_TOKENS + 1
    found: dict[str, Any] = {}
    for name, stored, tokens, deep_gemm in (
        ("ue8m0", "ue8m0", TOKENS, True),
        ("fp32", "fp32", TOKENS, True),
        ("bf16", "bf16", TOKENS, True),
        ("many", "ue8m0", many, False),
        ("many by DeepGEMM", "ue8m0", many, True),
    ):
        linears.is_deep_gemm_supported = lambda answer=deep_gemm: answer
        found[name] = _projected(stored, tokens, device)
    return found | {"by DeepGEMM": called}


def _projected(stored: str, tokens: int, device: torch.device) -> dict[str, Any]:
    groups, rank, heads, width = 2, 128, 4, 512
    positions = torch.arange(tokens, device=device)
    angles = torch.rand(tokens, 32, device=device)
    table = torch.cat((angles.cos(), angles.sin()), 1)
    o = _bf16(tokens, heads, width, device=device)
    back = torch.cat((table[:, :32], -table[:, 32:]), 1)
    unrotated = rope(o.double(), positions, back.double())
    scale_format = "fp32" if stored == "bf16" else stored
    layer: Any = _Loaded(groups * rank, heads // groups * width, scale_format, device)
    if stored == "bf16":
        layer.weight = nn.Parameter(layer.dense.bfloat16(), requires_grad=False)
        layer.dense = layer.weight.double()
    made = bare(
        type("Attention", (linears.Fp8Attention, attention.AnymlaAttention), {}),
        n_local_groups=groups,
        o_lora_rank=rank,
        rotary_emb=types.SimpleNamespace(cos_sin_cache=table),
        wo_b=nn.Identity(),
    )
    made.prepare_wo_a = made._keep_wo_a
    made._hold_wo_a(layer)
    quantised = made.wo_a_codes is not None
    given = formulas.Estimate.exact(unrotated.flatten(1))
    given = given.quantised() if quantised else given.rounded()
    weights = layer.dense.view(groups, rank, -1)
    parts = [
        formulas.Estimate(value, variance).times(weight)
        for value, variance, weight in zip(
            given.value.chunk(groups, 1), given.variance.chunk(groups, 1), weights, strict=True
        )
    ]
    wanted = formulas.Estimate(
        torch.cat([part.value for part in parts], 1),
        torch.cat([part.variance for part in parts], 1),
    )
    found = formulas.excess(made._o_proj(o, positions), wanted)
    return found | {"quantised": quantised, "bytes of a weight": _bytes_kept(made)}


def _bytes_kept(attention: Any) -> float:
    weight = attention.wo_a_groups if attention.wo_a_codes is None else attention.wo_a_codes
    return weight.element_size()


def attached_rows(device: torch.device) -> dict[str, Any]:
    """Which results carry quantised rows, and whether those are the rows of that result."""
    streams, width = 4, 256
    gates = (2 + streams) * streams
    numbers = (1e-6, 1e-6, 1e-6, 2.0, 20)
    normed = {
        "norm_weight": _bf16(width, device=device).abs(),
        "norm_eps": 1e-6,
    }
    found: dict[str, Any] = {}
    for name, tokens, marked in (
        ("few", TOKENS, True),
        ("many", codes.MOST_CODED_TOKENS + 1, True),
        ("unread", TOKENS, False),
    ):
        fn = nn.Parameter(torch.randn(gates, streams * width, device=device) / 32, False)
        site = fn, torch.randn(3, device=device), torch.randn(gates, device=device), *numbers
        if marked:
            codes.mark(fn)
        h = _bf16(tokens, streams, width, device=device)
        x = _bf16(tokens, width, device=device)
        post = torch.rand(tokens, streams, 1, device=device)
        comb = torch.rand(tokens, streams, streams, device=device)
        results = {
            "pre": hyper_connection.pre(h, *site, **normed)[-1],
            "post_pre": hyper_connection.post_pre(x, h, post, comb, *site, **normed)[-1],
            "pre_broadcast": hyper_connection.pre_broadcast(x, *site, **normed)[-1],
        }
        found[name] = {each: _told_rows(y) for each, y in results.items()}
    weight = normed["norm_weight"]
    norm = bare(
        type("Attention", (linears.Fp8Attention, attention.AnymlaAttention), {}),
        q_lora_rank=width,
        head_dim=width // 2,
        q_norm=types.SimpleNamespace(weight=weight),
        kv_norm=types.SimpleNamespace(weight=weight[: width // 2]),
        eps=1e-6,
    )
    for name, tokens in (("few", TOKENS), ("many", codes.MOST_CODED_TOKENS + 1)):
        qr, _, kv = norm._split_qkv_and_norm(_bf16(tokens, width // 2 * 3, device=device))
        found[name] |= {"latent": _told_rows(qr), "key": _told_rows(kv)}
    return found


def _told_rows(x: Tensor) -> bool | None:
    """None without rows; else whether they are x's."""
    rows = codes.attached(x)
    if rows is None:
        return None
    held, scales = quantize_fp8_rows(x)
    tokens = len(x)
    return torch.equal(rows.codes[:tokens], held) and torch.equal(rows.scales[:tokens], scales)


def shared_by_layers(device: torch.device) -> list[str]:
    """What the layers of a padded step make once and share."""
    made = Mixture(device)
    _step(made.x, PADDING)
    for by_table in (False, True, False, True):
        made.layer(by_table=by_table).forward(made.x, made.ids, None)
    return sorted(stand_ins.context.additional_kwargs["anymla"])


if __name__ == "__main__":
    torch.manual_seed(0)
    place = torch.device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    with torch.no_grad():
        answer = {
            "mixtures": mixtures(place),
            "recorded": recorded_routes(place),
            "kept": kept_layers(),
            "products": products(place),
            "shared": shared_experts(place),
            "projections": output_projections(place),
            "rows": attached_rows(place),
            "once": shared_by_layers(place),
        }
    Path(sys.argv[1]).write_text(json.dumps(answer))
