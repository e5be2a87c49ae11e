"""Contracts of the mixture of experts.

Source: DeepSeek-V4 reference, inference/model.py. Letters: T tokens, D hidden size, E experts,
K experts per token, I an expert's inner size, V vocabulary.
"""

import torch
from torch import Tensor

from anymla.formats.fp8_block import FP8_BLOCK
from anymla.formats.mxfp4 import MXFP4_BLOCK
from anymla.formats.nvfp4 import NVFP4_BLOCK
from anymla.ops._check import check_list
from anymla.ops._quantized import QUANT_BLOCKS, check_codes, in_blocks_of, in_blocks_of_128
from anymla.ops.device import Support, float32_support, has_numba
from anymla.ops.moe.config import (
    gluon_support,
    numba_support,
)
from anymla.ops.registry import (
    FLOAT32_UP,
    FLOATS,
    INT32,
    INT64,
    check,
    operation,
    require,
    wide_dtype,
)

_FORMATS = ("plain", "fp8", "mxfp4", "nvfp4")


def _routed(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], k)
    return x.new_empty(shape, dtype=INT32), x.new_empty(shape, dtype=wide_dtype(x.dtype))


@operation(outputs=lambda x, tid2eid, **rest: _routed(x, tid2eid.shape[1]))
def route_hash(
    x: Tensor,
    gate: Tensor,
    token_ids: Tensor,
    tid2eid: Tensor,
    *,
    scale: float,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Route every token to the experts that a table lists for its id.

    With s = sqrt(softplus(x @ gate^T)) at the K listed experts, the weights are s / (sum of s +
    1e-20) * scale: the table chooses experts, the learned scores weigh them.

    Args:
        x: activations of the tokens, [T, D] any float dtype; scores are computed in float32
            (float64 for float64).
        gate: weight of the scores' projection, [E, D] any float dtype.
        token_ids: vocabulary ids of the tokens, [T] int64; a token outside [0, V) gets no expert.
        tid2eid: expert ids by vocabulary id, [V, K] int64 within [0, E).
        scale: the model's routed_scaling_factor.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Expert ids [T, K] int32, -1 for a token without experts, and weights [T, K] float32 (float64
        if x is), 0 for such a token.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above.
    """
    check(
        "route_hash",
        x=(x, "T D", FLOATS),
        gate=(gate, "E D", FLOATS),
        token_ids=(token_ids, "T", INT64),
        tid2eid=(tid2eid, "V K", INT64),
    )


@operation(outputs=lambda x, k, **rest: _routed(x, k))
def route_biased(
    x: Tensor,
    gate: Tensor,
    bias: Tensor,
    *,
    k: int,
    scale: float,
    is_valid: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Route every token to the k experts with the best biased scores.

    With s = sqrt(softplus(x @ gate^T)), the experts are the k largest of s + bias, best first, the
    lowest id first among equals. Their weights are s / (sum of s + 1e-20) * scale, without the
    bias.

    Args:
        x: activations of the tokens, [T, D] any float dtype; scores are computed in float32
            (float64 for float64).
        gate: weight of the scores' projection, [E, D] any float dtype.
        bias: added to scores for the choice of experts, [E] float32 or float64.
        k: number of experts per token, 1..E.
        scale: the model's routed_scaling_factor.
        is_valid: mask of the tokens to route, [T] bool; the others get no expert. None to route
            all.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Expert ids [T, k] int32, -1 for a token without experts, and weights [T, k] float32 (float64
        if x is), 0 for such a token.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or k is not within 1..E.
    """
    sizes = check(
        "route_biased",
        x=(x, "T D", FLOATS),
        gate=(gate, "E D", FLOATS),
        bias=(bias, "E", FLOAT32_UP),
        is_valid=(is_valid, "T", torch.bool),
    )
    require(1 <= k <= sizes["E"], "route_biased", "k", f"within 1..{sizes['E']}", k)


@operation(mutates=("codes", "code_scales"), outputs=lambda gate, **rest: (torch.empty_like(gate),))
def swiglu(
    gate: Tensor,
    up: Tensor,
    limit: float,
    *,
    codes: Tensor | None = None,
    code_scales: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Clamped SwiGLU: silu(min(gate, limit)) * clamp(up, -limit, limit).

    Args:
        gate: gate projection, [T, I] any float dtype; clamped from above only.
        up: up projection, [T, I] of gate's dtype; clamped on both sides.
        limit: bound of the clamps, positive; infinity for none.
        codes: buffer for the result quantised to FP8 (see ``formats.quantized_rows``), or None.
        code_scales: buffer for the scales of ``codes``, given if and only if ``codes`` is.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Result [T, I] in gate's dtype, computed in float32 (float64 for float64) and rounded once.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if an argument has another shape than above, or limit is not positive.
    """
    check("swiglu", gate=(gate, "T I", FLOATS), up=(up, "T I", gate.dtype))
    require(limit > 0, "swiglu", "limit", "positive", limit)
    check_codes("swiglu", gate, codes, code_scales)


@operation(outputs=lambda x, **rest: (torch.empty_like(x),))
def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: list[Tensor] | Tensor,
    w3: list[Tensor] | Tensor,
    w2: list[Tensor] | Tensor,
    s1: list[Tensor] | Tensor,
    s3: list[Tensor] | Tensor,
    s2: list[Tensor] | Tensor,
    *,
    weight_format: str,
    swiglu_limit: float,
    quantize_activations: bool,
    expert_offset: int = 0,
    shared: Tensor | None = None,
    quant_block: int = FP8_BLOCK,
    global_scales: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Run each token through its experts and add up their outputs.

        y[t] = shared[t] + sum_j w2_e (weights[t, j] * swiglu(w1_e x[t], w3_e x[t])),  e = ids[t, j]

    The weight is multiplied in before w2, as in DeepSeek's reference, so if activations are
    quantised, w2's input is quantised with the weight included; transformers and vLLM multiply
    after w2, which only differs by rounding. The product of the two halves and the weight is
    computed in float32 and rounded once to x's dtype; every GEMM's result is rounded to x's dtype;
    the sum over experts and ``shared`` is float32 (float64 for float64 x) and rounded once.

    Weights are lists, one tensor an expert, so that memory-mapped files are used in place; or one
    tensor each with a first dimension E, which costs less on the host: lists of 256 take it a
    millisecond a call. Only experts that have tokens are read. The torch backend picks them in
    Python, so on devices other than the CPU it copies the ids (or their counts) to the host once a
    call.

    Args:
        x: activations of the tokens, [T, D] any float dtype.
        ids: global expert ids of each token, [T, K] int32; those outside [expert_offset,
            expert_offset + E) are skipped, whatever their weight.
        weights: routing weights of each token's experts, [T, K] float32 or float64.
        w1: gate projections of the E experts, of one dtype: float [I, D] ("plain"), uint8 e4m3
            codes [I, D] ("fp8"), or uint8 packed e2m1 [I, D/2] ("mxfp4" and "nvfp4").
        w3: up projections of the E experts, of w1's shape and dtype.
        w2: down projections of the E experts, [D, I] in the same format.
        s1: scales of w1, one for each expert: none, [] ("plain"), uint8 or float32 [ceil(I/b),
            ceil(D/b)] with b = quant_block ("fp8"), uint8 [I, D/32] ("mxfp4"), or uint8 e4m3 codes
            [I, D/16] ("nvfp4").
        s3: scales of w3, of the same form.
        s2: scales of w2, of the same form for [D, I].
        weight_format: format of the weights, "plain", "fp8", "mxfp4" or "nvfp4".
        swiglu_limit: bound of SwiGLU's clamps, positive, see ``swiglu``.
        quantize_activations: True to quantise the inputs of w1, w3 and w2 to e4m3 in blocks of
            channels; only used for "fp8" and "mxfp4".
        expert_offset: global id of the first expert in the lists (expert parallelism).
        shared: output of the shared expert to add, [T, D] of x's dtype; or None.
        quant_block: number of rows and columns of an FP8 weight, and of channels of activations,
            that share a scale: 128 in DeepSeek-V4, 32 in V4.1.
        global_scales: factors of each expert's w1, w3 and w2 for "nvfp4", float32 [E, 3]; else
            None.
        backend: name of the backend that runs; None for the best that can.

    Returns:
        Sum over experts and ``shared``, [T, D] in x's dtype.

    Raises:
        TypeError: if an argument has another dtype than above.
        ValueError: if a shape or a list's length differs from above, weight_format is unknown, or
            swiglu_limit is not positive. Every tensor of a list is examined.
    """
    name = "experts"
    require(weight_format in _FORMATS, name, "weight_format", f"one of {_FORMATS}", weight_format)
    require(quant_block >= 1, name, "quant_block", ">= 1", quant_block)
    require(swiglu_limit > 0, name, "swiglu_limit", "positive", swiglu_limit)
    sizes = check(
        name,
        x=(x, "T D", FLOATS),
        ids=(ids, "T K", INT32),
        weights=(weights, "T K", FLOAT32_UP),
        shared=(shared, "T D", x.dtype),
    )
    given_scales = None if global_scales is None else list(global_scales.shape)
    wanted_scales = [len(w1), 3] if weight_format == "nvfp4" else None
    wanted = 'float32 [E, 3] with "nvfp4", else None'
    require(given_scales == wanted_scales, name, "global_scales", wanted, given_scales)
    check(name, global_scales=(global_scales, "_ 3", torch.float32))
    scale_count = 0 if weight_format == "plain" else len(w1)
    for argument, given, count in (
        ("w3", w3, len(w1)),
        ("w2", w2, len(w1)),
        ("s1", s1, scale_count),
        ("s3", s3, scale_count),
        ("s2", s2, scale_count),
    ):
        if len(given) != count:
            require(False, name, argument, f"a list of {count} tensors", len(given))
    if not len(w1):
        return  # type: ignore[return-value]
    pack = 2 if weight_format in ("mxfp4", "nvfp4") else 1
    first = w1[0]
    inner = first.shape[0] if isinstance(first, Tensor) and first.ndim else 0
    d = sizes["D"]
    dims = {"I": inner, "D": d, "X": d // pack, "Y": inner // pack}
    check_list(name, "w1", w1, "I X", FLOATS if weight_format == "plain" else torch.uint8, dims)
    check_list(name, "w3", w3, "I X", w1[0].dtype, dims)
    check_list(name, "w2", w2, "D Y", w1[0].dtype, dims)
    if weight_format == "fp8":
        dims = {"A": -(-inner // quant_block), "B": -(-d // quant_block)}
        check_list(name, "s1", s1, "A B", (torch.uint8, torch.float32), dims)
        check_list(name, "s3", s3, "A B", s1[0].dtype, dims)
        check_list(name, "s2", s2, "B A", s1[0].dtype, dims)
    elif weight_format != "plain":
        block = MXFP4_BLOCK if weight_format == "mxfp4" else NVFP4_BLOCK
        dims |= {"X": d // block, "Y": inner // block}
        for argument, scales, spec in (("s1", s1, "I X"), ("s3", s3, "I X"), ("s2", s2, "D Y")):
            check_list(name, argument, scales, spec, torch.uint8, dims)


def _experts_support(*args: object, **kwargs: object) -> Support:
    for value in (*args, *kwargs.values()):
        # The contract has checked that a list's tensors are alike.
        if isinstance(value, list) and value and value[0].dtype == torch.float64:
            return Support(False, "computes in float32, but the experts are float64")
    return float32_support(*args, **kwargs)


_FAMILY = "anymla.ops.moe"
_TRITON = f"{_FAMILY}.triton_"
# torch's routers are the reference's: they read no values on the host and are as fast on a CPU.
for _operation, _torch in (
    (route_hash, "reference"),
    (route_biased, "reference"),
    (swiglu, "torch_experts"),
    (experts, "torch_experts"),
):
    _operation.register_lazy("reference", f"{_FAMILY}.reference")
    _operation.register_lazy("torch", f"{_FAMILY}.{_torch}")
route_hash.register_lazy("triton", f"{_TRITON}router", supports=float32_support)
route_biased.register_lazy("triton", f"{_TRITON}router", supports=float32_support)
swiglu.register_lazy("triton", f"{_TRITON}swiglu", supports=float32_support)
experts.register_lazy(
    "triton", f"{_TRITON}launch", supports=in_blocks_of(QUANT_BLOCKS, _experts_support)
)
experts.register_lazy(
    "numba",
    "anymla.ops.moe.numba_experts",
    supports=in_blocks_of_128(numba_support),
    automatic=has_numba(),
    by_kind=True,
)
experts.register_lazy(
    "gluon_sm90",
    "anymla.ops.moe.gluon_sm90_launch",
    supports=in_blocks_of(QUANT_BLOCKS, gluon_support, told=True),
)
