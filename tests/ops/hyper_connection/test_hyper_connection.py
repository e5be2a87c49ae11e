"""Hyper-connections against the formulas written out number by number, and the laws they obey."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from paged import a_device, skip_float64, without_waiting
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from anymla.formats.fp8_block import quantize_fp8_rows
from anymla.formats.quantized_rows import QuantizedRows
from anymla.ops import _host
from anymla.ops.device import has_triton
from anymla.ops.hyper_connection import (
    hc_head,
    hc_post,
    hc_post_pre_norm,
    hc_pre,
    torch_streams,
)
from anymla.testing.tolerance import assert_close, assert_identical, relative_error, ulps

no_triton = pytest.mark.skipif(not has_triton(), reason="triton is not installed")
BACKENDS = ["reference", "torch", pytest.param("triton", marks=no_triton)]
OPTIONS: dict[str, Any] = {"norm_eps": 1e-6, "hc_eps": 1e-6, "iters": 20}


def site(
    tokens: int, n: int = 4, d: int = 48, dtype: torch.dtype = torch.float64, spread: float = 1.0
) -> dict[str, Tensor]:
    """Streams and weights of a site; ``spread`` sets how far the gates are from uniform."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = (2 + n) * n
    return {
        "h": torch.randn(tokens, n, d, dtype=torch.float64).to(dtype),
        "fn": torch.randn(rows, n * d, dtype=torch.float64).to(wide) * spread / math.sqrt(n * d),
        "base": torch.randn(rows, dtype=torch.float64).to(wide) * spread,
        "scale": 1 + 0.3 * torch.randn(3, dtype=torch.float64).to(wide),
    }


def to_double(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def written_out(
    h: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    *,
    norm_eps: float,
    hc_eps: float,
    iters: int,
    variant: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """hc_pre in Python numbers; ``variant`` makes one of the mistakes that are known to be made."""

    def sigmoid(z: float) -> float:
        return 1 / (1 + math.exp(-z))

    ys, posts, combs = [], [], []
    n, d = h.shape[1:]
    for streams in h.tolist():
        f = [value for stream in streams for value in stream]
        square = sum(value * value for value in f) / len(f)
        rms = (
            math.sqrt(square) + norm_eps
            if variant == "eps outside"
            else math.sqrt(square + norm_eps)
        )
        mix = [sum(a * b for a, b in zip(row, f, strict=True)) / rms for row in fn.tolist()]
        s, b = scale.tolist(), base.tolist()
        eps_pre = 0.0 if variant == "no eps on pre" else hc_eps
        pre = [sigmoid(mix[i] * s[0] + b[i]) + eps_pre for i in range(n)]
        post = [2 * sigmoid(mix[n + i] * s[1] + b[n + i]) for i in range(n)]
        c = []
        for i in range(n):
            at = 2 * n + i * n
            logits = [mix[at + j] * s[2] + b[at + j] for j in range(n)]
            if variant == "softmax over rows":
                logits = [mix[2 * n + j * n + i] * s[2] + b[2 * n + j * n + i] for j in range(n)]
            top = sum(math.exp(z) for z in logits)
            eps_softmax = 0.0 if variant == "no eps on softmax" else hc_eps
            c.append([math.exp(z) / top + eps_softmax for z in logits])
        eps_sum = 0.0 if variant == "no eps on sums" else hc_eps

        def columns(c: list[list[float]], eps: float = eps_sum) -> list[list[float]]:
            sums = [sum(row[j] for row in c) + eps for j in range(n)]
            return [[row[j] / sums[j] for j in range(n)] for row in c]

        def rows(c: list[list[float]], eps: float = eps_sum) -> list[list[float]]:
            return [[value / (sum(row) + eps) for value in row] for row in c]

        c = columns(c)
        for _ in range(iters - (2 if variant == "19 iterations" else 1)):
            c = columns(rows(c))
        if variant == "ends on rows":
            c = rows(c)
        ys.append([sum(pre[i] * streams[i][e] for i in range(n)) for e in range(d)])
        posts.append(post)
        combs.append(c)
    make: Callable[[Any], Tensor] = lambda values: torch.tensor(values, dtype=torch.float64)  # noqa: E731
    return make(ys), make(posts), make(combs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_pre_is_the_formula(backend: str, n: int, eps: float) -> None:
    dtype = torch.float32 if backend == "triton" else torch.float64
    given_site = site(3, n=n, d=6, dtype=dtype)
    options = {"norm_eps": eps, "hc_eps": eps, "iters": 20}
    got = hc_pre(**given_site, **options, backend=backend)
    # 39 divisions of sums of n, each a few roundings; measured below 10 ulps.
    bound = ulps(dtype, 200)
    for name, a, b in zip(
        ("y", "post", "comb"), got, written_out(**given_site, **options), strict=True
    ):
        assert_close(a, b, rtol=bound, atol=bound, name=name)


@pytest.mark.parametrize(
    "variant",
    [
        "eps outside",
        "no eps on pre",
        "no eps on softmax",
        "no eps on sums",
        "softmax over rows",
        "19 iterations",
        "ends on rows",
    ],
)
def test_known_mistakes_are_told_apart(variant: str) -> None:
    # M2: the eps of 1e-6 is visible in float64, where 1e-10 is far above rounding.
    given_site = site(4, d=6, spread=3.0)
    given_site["h"] *= 1e-2  # so that norm_eps matters
    right = hc_pre(**given_site, **OPTIONS)
    wrong = written_out(**given_site, **OPTIONS, variant=variant)
    differences = [relative_error(b, a) for a, b in zip(right, wrong, strict=True)]
    assert max(differences) > 1e-9, differences


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_agree(backend: str, tokens: int, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    if backend == "triton":
        tokens = min(tokens, 18)  # two blocks; every token more is a program to interpret
    given_site = site(tokens, dtype=dtype, spread=2.0)
    want = hc_pre(**to_double(given_site), **OPTIONS, backend="reference")
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    y, post, comb = hc_pre(**given_site, **OPTIONS, backend=backend)
    assert (y.dtype, post.dtype, comb.dtype) == (dtype, gate, gate)
    # Gates: a product over N D = 192 channels and sigmoid or exp of it: absolute errors of
    # some ulps; Sinkhorn divides 39 times, half an ulp and the sum's rounding each time.
    assert_close(post, want[1], atol=ulps(gate, 16), name="post")
    assert_close(comb, want[2], atol=ulps(gate, 32), name="comb")
    # y: the gates' error on 4 streams of magnitude up to 4, and one rounding.
    assert_close(y, want[0], atol=ulps(gate, 64), rtol=ulps(dtype, 0.5), name="y")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 17])
@pytest.mark.parametrize("backend", BACKENDS)
def test_post_is_one_rounding_of_the_formula(backend: str, tokens: int, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    h, u = torch.randn(tokens, 4, 40).to(dtype), torch.randn(tokens, 40).to(dtype)
    post, comb = torch.rand(tokens, 4).to(gate), torch.rand(tokens, 4, 4).to(gate)
    want = torch.einsum("tj,td->tjd", post.double(), u.double())
    want += torch.einsum("tij,tid->tjd", comb.double(), h.double())
    got = hc_post(u, h, post, comb, backend=backend)
    assert got.dtype == dtype
    # Five products of numbers below 5 in float32, then the one rounding.
    bound = ulps(dtype, 0.5) if dtype == torch.bfloat16 else 0.0
    assert_close(got, want, atol=ulps(gate, 20), rtol=bound)
    if tokens:
        transposed = hc_post(u, h, post, comb.transpose(1, 2).contiguous(), backend=backend)
        assert relative_error(transposed, want) > 0.05


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_head_is_the_pre_gate_alone(backend: str, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    given_site = site(5, dtype=dtype)
    y, _, _ = hc_pre(**given_site, **OPTIONS, backend=backend)
    head = hc_head(
        given_site["h"],
        given_site["fn"][:4],
        given_site["base"][:4],
        given_site["scale"][:1],
        norm_eps=1e-6,
        hc_eps=1e-6,
        backend=backend,
    )
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    assert head.dtype == dtype
    assert_close(head, y, atol=ulps(gate, 64), rtol=ulps(dtype, 1))


def assert_quantised(quantised: QuantizedRows, y: Tensor) -> None:
    codes, scales = quantize_fp8_rows(y)
    assert_identical(quantised.codes[: len(y)], codes, name="codes")
    assert_identical(quantised.scales[: len(y)], scales, name="scales")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_fusion_is_the_parts(backend: str, tokens: int, dtype: torch.dtype) -> None:
    skip_float64(backend, dtype)
    before, after = site(tokens, dtype=dtype), site(tokens, dtype=dtype)
    y, post, comb = hc_pre(**before, **OPTIONS, backend=backend)
    u = torch.randn_like(y)
    norm_weight = (1 + 0.1 * torch.randn(y.shape[1])).to(dtype)
    weights = {name: after[name] for name in ("fn", "base", "scale")}
    quantised = QuantizedRows.empty(tokens, y.shape[1], y.device)
    options = {**OPTIONS, "codes": quantised.codes, "code_scales": quantised.scales}
    h1, normed, post1, comb1 = hc_post_pre_norm(
        u, before["h"], post, comb, **weights, norm_weight=norm_weight, **options, backend=backend
    )
    assert_quantised(quantised, normed)
    h2 = hc_post(u, before["h"], post, comb, backend=backend)
    y2, post2, comb2 = hc_pre(h2, **weights, **OPTIONS, backend=backend)
    again, _, _ = hc_pre(h2, **weights, **OPTIONS, norm_weight=norm_weight, backend=backend)
    if backend == "triton":
        # A compiler joins products and sums into one rounding in one kernel and not in another.
        gates = ulps(torch.float32, 64)
        assert_close(h1, h2, atol=ulps(torch.float32, 4), rtol=ulps(dtype, 1), name="h'")
        assert_close(post1, post2, atol=gates, rtol=ulps(dtype, 4), name="post'")
        assert_close(comb1, comb2, atol=gates, rtol=ulps(dtype, 4), name="comb'")
    else:
        assert_identical(h1, h2, name="h'")
        assert_identical(post1, post2, name="post'")
        assert_identical(comb1, comb2, name="comb'")
    wide = y2.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm_weight.double()
    gate = torch.float64 if dtype == torch.float64 else torch.float32
    assert normed.dtype == dtype
    for got in (normed, again):
        assert_close(got, want, atol=ulps(gate, 16), rtol=ulps(dtype, 0.5), name="normed y")


def test_many_tokens_equal_few() -> None:
    # M1: 8192 tokens go through in blocks; every token must come out as it does alone.
    given_site = site(8192, d=64, dtype=torch.float32)
    assert torch_streams._block_tokens(given_site["h"]) < 8192
    y, post, comb = hc_pre(**given_site, **OPTIONS)
    want = hc_pre(**to_double(given_site), **OPTIONS, backend="reference")
    for name, a, b in zip(("y", "post", "comb"), (y, post, comb), want, strict=True):
        assert_close(a, b, atol=ulps(torch.float32, 64), name=name)
    streams = hc_post(y, given_site["h"], post, comb)
    expected = hc_post(y, given_site["h"], post, comb, backend="reference")
    assert_close(streams, expected, atol=ulps(torch.float32, 20))
    weights = {name: given_site[name] for name in ("fn", "base", "scale")}
    alone = given_site["h"][8191:]
    last = hc_pre(alone, **weights, **OPTIONS)
    assert_close(y[8191:], last[0], atol=ulps(torch.float32, 64), name="last token alone")
    head = hc_head(
        given_site["h"], weights["fn"][:4], weights["base"][:4], weights["scale"][:1],
        norm_eps=1e-6, hc_eps=1e-6,
    )  # fmt: skip
    assert_close(head, y, atol=ulps(torch.float32, 64), name="head")


@no_triton
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float32, "few"),
        (torch.bfloat16, "few"),
        (torch.bfloat16, "direct"),
        (torch.bfloat16, "many"),
        (torch.float32, "many"),
    ],
)
def test_long_rows_and_many_tokens_by_triton(
    dtype: torch.dtype, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tiles that a short row does not reach: D in several tiles of each kernel, the last not full.
    from anymla.ops.hyper_connection import (
        config,
        triton_collapse,
        triton_launch,
        triton_mix,
        triton_mix_many_tokens,
    )

    bulk = form == "many"
    monkeypatch.setattr(config, "_WIDEST", 128)
    monkeypatch.setattr(config, "MOST_NARROW_TOKENS", 5)
    for module in (triton_mix, triton_collapse):
        monkeypatch.setattr(module, "MANY_TOKENS", 1 if bulk else 100)
    monkeypatch.setattr(triton_collapse, "TOGETHER_MANY", 32)
    monkeypatch.setattr(
        triton_launch, "takes_many_tokens", lambda h: bulk and h.dtype == torch.bfloat16
    )
    many = config.ManyTokensConfig(32, 32, 4, 2, 64)
    monkeypatch.setattr(triton_mix_many_tokens, "choose_many_tokens_config", lambda *of: many)
    if form == "direct":
        tile = config.MixConfig(32, 32, 1, 2, direct=True)
        monkeypatch.setattr(triton_mix, "choose_mix_config", lambda *of: tile)
    tokens = {"few": 18, "direct": 33, "many": 37}[form]  # two blocks
    d = 200 if form == "few" else 72
    before, after = site(tokens, d=d, dtype=dtype), site(tokens, d=d, dtype=dtype)
    weights = {name: after[name] for name in ("fn", "base", "scale")}
    norm_weight = 1 + 0.1 * torch.randn(d)
    quantised = QuantizedRows.empty(tokens, d, norm_weight.device)
    coded = {"codes": quantised.codes, "code_scales": quantised.scales}
    y, post, comb = hc_pre(**before, **OPTIONS, **coded, backend="triton")
    assert_quantised(quantised, y)
    want = hc_pre(**before, **OPTIONS, backend="reference")
    slack = ulps(torch.float32, 64)
    for name, a, b in zip(("y", "post", "comb"), (y, post, comb), want, strict=True):
        assert_close(a, b, atol=slack, rtol=ulps(a.dtype, 1), name=name)
    arguments = (y, before["h"], post, comb)
    fused, parts = (
        hc_post_pre_norm(*arguments, **weights, norm_weight=norm_weight, **OPTIONS, backend=backend)
        for backend in ("triton", "reference")
    )
    for name, a, b in zip(("h'", "normed y", "post'", "comb'"), fused, parts, strict=True):
        # A stream that rounds the other way moves what is computed from all of them by less.
        assert_close(a, b, atol=slack + ulps(dtype, 1), rtol=ulps(a.dtype, 1), name=name)


@given(
    tokens=st.integers(1, 5),
    n=st.integers(1, 6),
    spread=st.floats(0.01, 30),
    iters=st.integers(1, 25),
)
def test_sinkhorn_forms_agree(tokens: int, n: int, spread: float, iters: int) -> None:
    logits = spread * torch.randn(tokens, n, n, dtype=torch.float64)
    want = sinkhorn_by_sums(logits, iters)
    for got in (
        torch_streams.sinkhorn(logits, eps=1e-6, iters=iters),
        torch_streams._balance_numpy(torch.softmax(logits, -1) + 1e-6, 1e-6, iters),
    ):
        assert_close(got, want, rtol=ulps(torch.float64, 8 * (iters + 1)))
    # The last step divides columns by their sums + eps, which leaves sums just below 1.
    assert_close(want.sum(1), torch.ones(tokens, n), atol=1e-4)
    assert bool((want.sum(1) < 1).all())


def sinkhorn_by_sums(logits: Tensor, iters: int) -> Tensor:
    """The branch for devices other than the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_host, "on_host", lambda x: False)
        return torch_streams.sinkhorn(logits, eps=1e-6, iters=iters)


def test_doubly_stochastic_after_twenty_iterations() -> None:
    _, _, comb = hc_pre(**site(50), **OPTIONS)
    # Rows converge geometrically; gates of a spread near 1 are within 1e-3 after 20 rounds.
    assert_close(comb.sum(2), torch.ones(50, 4), atol=1e-3)
    assert_close(comb.sum(1), torch.ones(50, 4), atol=1e-5)


@pytest.mark.parametrize("spread", [30.0, 1e4, 1e30])
@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_saturated_gates(backend: str, tokens: int, spread: float) -> None:
    # Logits beyond the range of exp: sigmoids of 0 and 1, permutation-like combs, no exception.
    given_site = site(tokens, dtype=torch.float32)
    given_site["base"] *= spread
    want = hc_pre(**to_double(given_site), **OPTIONS, backend="reference")
    got = hc_pre(**given_site, **OPTIONS, backend=backend)
    # The gates' own logits are rounded at magnitude ``spread`` up to 30 * 4; beyond, all saturate.
    slack = ulps(torch.float32, 32 * min(spread, 150.0))
    for name, a, b in zip(("y", "post", "comb"), got, want, strict=True):
        assert not a.isnan().any()
        assert_close(a, b, atol=slack, name=name)


@pytest.mark.parametrize("tokens", [2, 7])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_nan_stays_in_its_token(backend: str, tokens: int) -> None:
    given_site = site(tokens, dtype=torch.float32)
    clean = hc_pre(**given_site, **OPTIONS, backend=backend)
    given_site["h"] = given_site["h"].clone()
    given_site["h"][1, 2, 3] = torch.nan
    for a, b in zip(hc_pre(**given_site, **OPTIONS, backend=backend), clean, strict=True):
        others = torch.arange(tokens) != 1
        assert_identical(a[others], b[others])
        assert bool(a[1].isnan().any())


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_strided_streams(backend: str) -> None:
    given_site = site(6, dtype=torch.float32)
    spaced = torch.full((6, 4, 96), torch.nan)
    spaced[:, :, ::2] = given_site["h"]
    y, post, comb = hc_pre(**given_site, **OPTIONS, backend=backend)
    strided = hc_pre(**{**given_site, "h": spaced[:, :, ::2]}, **OPTIONS, backend=backend)
    # The copy is aligned differently, so the matrix product may sum in another order.
    for a, b in zip(strided, (y, post, comb), strict=True):
        assert_close(a, b, atol=ulps(torch.float32, 64))
    assert_identical(
        hc_post(y, spaced[:, :, ::2], post, comb, backend=backend),
        hc_post(y, given_site["h"], post, comb, backend=backend),
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_streams_may_be_one(backend: str) -> None:
    given_site = site(3, dtype=torch.float32)
    one = given_site["h"][:, :1].expand(-1, 4, -1)
    weights = {name: given_site[name] for name in ("fn", "base", "scale")}
    got = [hc_pre(h, **weights, **OPTIONS, backend=backend) for h in (one, one.contiguous())]
    for h, (y, post, comb) in zip((one, one.contiguous()), tuple(got), strict=True):
        got.append((hc_post(y, h, post, comb, backend=backend),))
        norm = {"norm_weight": torch.ones(48), "backend": backend}
        got.append(hc_post_pre_norm(y, h, post, comb, **weights, **OPTIONS, **norm))
    for a, b in ((got[0], got[1]), (got[2], got[4]), (got[3], got[5])):
        for each, other in zip(a, b, strict=True):
            assert_identical(each, other)


class Calls(TorchDispatchMode):
    """Count the kernels that a block of code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_decode_step_is_few_calls() -> None:
    # A site of a decode step is bound by its calls; the 39 normalisations must not be among them.
    given_site = site(1, dtype=torch.bfloat16)
    y, post, comb = hc_pre(**given_site, **OPTIONS)
    with Calls() as calls:
        hc_pre(**given_site, **OPTIONS)
    print("hc_pre:", calls.count)
    assert calls.count <= 40
    with Calls() as calls:
        hc_post(y, given_site["h"], post, comb)
    print("hc_post:", calls.count)
    assert calls.count <= 12


@pytest.mark.compiles
def test_unseen_token_counts_do_not_recompile() -> None:
    # M4
    given_site = site(5, dtype=torch.float32)
    graphs = 0

    def count(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(hc_pre, backend=count, dynamic=True, fullgraph=True)
    for tokens in (5, 6, 9, 31):
        given_site["h"] = torch.randn(tokens, 4, 48)
        for a, b in zip(
            compiled(**given_site, **OPTIONS), hc_pre(**given_site, **OPTIONS), strict=True
        ):
            assert_identical(a, b)
    assert graphs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 40, 1100])
def test_a_device_does_the_same_without_waiting(tokens: int, dtype: torch.dtype) -> None:
    device = a_device()
    given_site = site(tokens, dtype=dtype)
    moved = {name: tensor.to(device) for name, tensor in given_site.items()}
    norm_weight = 1 + 0.1 * torch.randn(48)
    u = torch.randn(tokens, 48).to(dtype)

    def whole(
        h: Tensor, fn: Tensor, base: Tensor, scale: Tensor, u: Tensor, w: Tensor
    ) -> tuple[Tensor, ...]:
        y, post, comb = hc_pre(h, fn, base, scale, **OPTIONS)
        site_weights = {"fn": fn, "base": base, "scale": scale, "norm_weight": w}
        fused = hc_post_pre_norm(u, h, post, comb, **site_weights, **OPTIONS)
        head = hc_head(h, fn[:4], base[:4], scale[:1], norm_eps=1e-6, hc_eps=1e-6)
        return y, post, comb, *fused, head

    on_device = {"u": u.to(device), "w": norm_weight.to(device)}
    whole(**moved, **on_device)  # constants are made at first use
    with without_waiting(device):
        on = whole(**moved, **on_device)
    got = [tensor.cpu() for tensor in on]
    want = list(whole(**given_site, u=u, w=norm_weight))
    # A stream that leaves the site may round the other way, which is more than what lies behind it
    # is off by itself: that is judged on the streams that it was made of.
    entered, want[5], want[6] = hc_pre(**given_site | {"h": got[3]}, **OPTIONS)
    root = (entered.double().square().mean(-1, keepdim=True) + OPTIONS["norm_eps"]).sqrt()
    want[4] = (entered.double() / root * norm_weight.double()).to(dtype)
    for a, b in zip(got, want, strict=True):
        # Gates as in test_backends_agree; what is rounded to bf16 may round the other way.
        assert_close(a, b, atol=ulps(torch.float32, 64), rtol=ulps(a.dtype, 2))


def break_site(**changes: Any) -> dict[str, Any]:
    return {**site(2, dtype=torch.float32), **OPTIONS, **changes}


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ValueError, r"fn must be float32 or float64 \[G=24, F=192", {"fn": torch.zeros(24, 190)}),
        (ValueError, "hc_pre: base", {"base": torch.zeros(23)}),
        (ValueError, "hc_pre: scale", {"scale": torch.zeros(1)}),
        (TypeError, "hc_pre: fn", {"fn": torch.zeros(24, 192, dtype=torch.bfloat16)}),
        (TypeError, "hc_pre: h must be", {"h": torch.zeros(2, 4, 48, dtype=torch.int32)}),
        (ValueError, "hc_pre: h must be", {"h": torch.zeros(2, 192)}),
        (ValueError, "hc_pre: iters must be at least 1, got 0", {"iters": 0}),
    ],
)  # fmt: skip
def test_pre_errors(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        hc_pre(**break_site(**arguments))


def test_other_errors() -> None:
    h, u = torch.zeros(2, 4, 8), torch.zeros(2, 8)
    post, comb = torch.zeros(2, 4), torch.zeros(2, 4, 4)
    with pytest.raises(TypeError, match="hc_post: u must be float32"):
        hc_post(u.double(), h, post, comb)
    with pytest.raises(ValueError, match=r"hc_post: comb must be float32 \[T=2, N=4, N=4\]"):
        hc_post(u, h, post, comb[:, :3])
    with pytest.raises(ValueError, match="hc_head: scale"):
        hc_head(h, torch.zeros(4, 32), torch.zeros(4), torch.zeros(3), norm_eps=0.0, hc_eps=0.0)
    with pytest.raises(ValueError, match="hc_post_pre_norm: norm_weight"):
        hc_post_pre_norm(
            u, h, post, comb, torch.zeros(24, 32), torch.zeros(24), torch.zeros(3),
            torch.zeros(7), **OPTIONS,
        )  # fmt: skip
