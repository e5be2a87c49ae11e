"""Grouped experts at a model's sizes, against the bytes they must read, next to other libraries."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anymla.bench.gpu_timing import sums
from anymla.bench.random_weights import random_experts
from anymla.bench.runner import Call, Case, Clock, Subject, Values, Verdict, rounded
from anymla.ops.moe import experts
from anymla.ops.moe.config import choose_w4a8_config
from anymla.ops.moe.inputs import ExpertInputs
from anymla.ops.moe.shapes import MODELS, V41_MODELS
from anymla.testing.tolerance import relative_l2

if TYPE_CHECKING:
    from lab.peers.experts import ExpertsPeer, Run

TOKENS = (1, 2, 8, 32, 128, 4096)
_LIMIT = 10.0
_BATCHES = 4
_NAME = 48  # characters of a kernel's name that tell it apart
_CHECKED = 256  # tokens of a peer's result that are compared with the reference's


@dataclasses.dataclass(frozen=True)
class _Given:
    """Inputs and settings that all cases of a model share.

    Attributes:
        weights: weights drawn once for all numbers of tokens.
        chosen: number of experts of a token.
        backends: backends to time beside the chosen one.
        blocks: block sizes of W4A8 to time beside the chosen one.
        peers: other libraries to time beside it.
        options: keyword arguments of the operation, by name.
        prepared: a peer's function of tokens, made once, or why there is none.
    """

    weights: Callable[[torch.device], dict[str, Any]]
    chosen: int
    backends: tuple[str, ...]
    blocks: tuple[int, ...]
    peers: tuple[ExpertsPeer, ...]
    options: dict[str, Any]
    prepared: dict[str, Run | str] = dataclasses.field(default_factory=dict)


def cases(
    models: Iterable[str],
    count: int,
    tokens: Iterable[int],
    backends: Iterable[str] = (),
    peers: Iterable[ExpertsPeer] = (),
    tensor_parallel: int = 1,
    blocks: Iterable[int] = (),
) -> Iterator[Case]:
    """Yield experts of every model for every number of tokens."""
    tokens, backends, peers, blocks = tuple(tokens), tuple(backends), tuple(peers), tuple(blocks)
    shard = "" if tensor_parallel == 1 else f", 1/{tensor_parallel} of each"
    for model in models:
        shape = (MODELS | V41_MODELS)[model](1, count)
        inner = shape.inner // tensor_parallel
        given = _Given(
            functools.cache(functools.partial(random_experts, count, shape.d, inner)),
            shape.experts_per_token,
            backends,
            blocks,
            peers,
            {"quant_block": 32} if model in V41_MODELS else {},
        )
        for batch in tokens:
            yield Case(
                "experts",
                f"{model} experts, mxfp4, {count} of them{shard}, {batch} tokens",
                functools.partial(_subjects, given, batch),
                judge=_row,
            )


def _subjects(given: _Given, tokens: int, clock: Clock) -> Iterator[Subject]:
    device, weights, chosen = clock.device, given.weights(clock.device), given.chosen
    count, (inner, packed) = len(weights["w1"]), weights["w1"][0].shape
    d = 2 * packed
    calls, read = [], 0
    for _ in range(_BATCHES if tokens <= 512 else 2):
        ids = torch.rand(tokens, count, device=device).argsort(1)[:, :chosen].int()
        read += len(ids.unique())
        call = functools.partial(
            experts,
            torch.randn(tokens, d, device=device).bfloat16(),
            ids,
            torch.rand(tokens, chosen, device=device),
            **weights,
            weight_format="mxfp4",
            swiglu_limit=_LIMIT,
            quantize_activations=True,
            **given.options,
        )
        calls.append(call)
    visited = read / len(calls)
    matrices = 3 * inner * d
    moved = visited * (matrices // 2 + matrices // 32)
    flops = 2 * tokens * chosen * matrices

    def after(us: float) -> Values:
        kernels = ((name[:_NAME], taken) for name, taken in clock.kernel_times(calls[0]))
        return {
            "visited_experts": visited,
            "bytes_us": moved / clock.copy_bandwidth() * 1e6,
            "gb_per_s": moved / us * 1e-3,
            "share_of_copy": moved / us * 1e6 / clock.copy_bandwidth(),
            "tflops": flops / us * 1e-6,
            "share_of_product": flops / us * 1e6 / clock.matmul_rate(),
            "kernels_us": sums(kernels),
        }

    yield Subject("us", calls, after=after)
    named: dict[str, Sequence[Call]] = {
        name: [functools.partial(call, backend=name) for call in calls] for name in given.backends
    }
    for block in given.blocks:
        by_blocks = functools.partial(_w4a8, block)
        named[f"w4a8_{block}"] = [
            functools.partial(by_blocks, *call.args, **call.keywords) for call in calls
        ]
    for name, others in named.items():

        def distance(name: str = name, others: Sequence[Call] = others) -> Values:
            return {f"{name}_distance": relative_l2(others[0](), calls[0]())}

        def rate(us: float, name: str = name) -> Values:
            return {f"{name}_tflops": flops / us * 1e-6}

        yield Subject(f"{name}_us", others, before=distance, after=rate)
    exact = functools.cache(functools.partial(_reference, calls[0]))
    for peer in given.peers:
        timed = functools.partial(_timed, peer, given, calls, exact, flops, clock)
        yield Subject(f"{peer.name}_us", before=timed)


def _w4a8(block_m: int, x: Tensor, ids: Tensor, weights: Tensor, **given: Any) -> Tensor:
    """Call ``experts`` by W4A8 with blocks of this many pairs."""
    launch = importlib.import_module("anymla.ops.moe.gluon_sm90_w4a8_launch")
    experts_of = importlib.import_module("anymla.ops.moe.triton_launch")

    def multiply(inputs: ExpertInputs, results: Tensor) -> None:
        config = choose_w4a8_config(inputs.shape, inputs.quant_block, block_m)
        assert config is not None
        launch.grouped_gemm(inputs, results, config)

    gemms = experts_of.Gemms(multiply, weight_alignment=16, scale_alignment=16)
    out: Tensor = experts_of.run_experts(lambda *_: gemms, x, ids, weights, **given)
    return out


def _reference(call: functools.partial[Tensor]) -> Tensor:
    """Compute the reference's result for the first tokens, without quantised activations."""
    x, ids, routing = (given[:_CHECKED] for given in call.args)
    exact = call.keywords | {"quantize_activations": False, "backend": "reference"}
    return experts(x, ids, routing, **exact).double()


def _timed(
    peer: ExpertsPeer,
    given: _Given,
    calls: Sequence[functools.partial[Tensor]],
    exact: Callable[[], Tensor],
    flops: int,
    clock: Clock,
) -> Values:
    """Return a peer's fields: its time and error, or why it has none."""
    if peer.name not in given.prepared:
        given.prepared[peer.name] = _prepared(peer, given, clock)
    run = given.prepared[peer.name]
    if isinstance(run, str):
        return {f"{peer.name}_absent": run}
    named = [functools.partial(run, *call.args) for call in calls]
    try:
        error = relative_l2(named[0]()[:_CHECKED], exact())
        if not error <= peer.bound:
            wrong = f"its results are {error:.3g} off the reference, more than {peer.bound}"
            return {f"{peer.name}_absent": wrong}
        us = clock.time_us(named)
    except Exception as problem:
        return {f"{peer.name}_absent": _said(problem)}
    return {
        f"{peer.name}_us": us,
        f"{peer.name}_error": error,
        f"{peer.name}_tflops": flops / us * 1e-6,
        f"{peer.name}_note": peer.note,
    }


def _prepared(peer: ExpertsPeer, given: _Given, clock: Clock) -> Run | str:
    support = peer.available()
    if not support:
        return support.reason
    try:
        return peer.prepare(given.weights(clock.device), _LIMIT)
    except Exception as problem:
        return _said(problem)


def _said(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:160]}"


def _row(values: Values) -> tuple[Values, Verdict]:
    digits = dict.fromkeys(("us", "visited_experts", "bytes_us", "gb_per_s", "tflops"), 1)
    for name in values:
        if name.endswith(("_us", "_tflops")) and name != "kernels_us":
            digits[name] = 1
    return rounded(values, digits | {"share_of_copy": 3, "share_of_product": 3}), None
