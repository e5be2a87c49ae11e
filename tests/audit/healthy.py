"""A right case of every method, small, with results of anymla's torch backend."""

from __future__ import annotations

import torch
from torch import Tensor

from anymla.audit.case import Case
from anymla.audit.replay import recompute
from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.formats.page_layout import INDEX_FP8, MAIN_FP8, get_layout

TOKENS, HEADS, STREAMS, WIDTH = 3, 4, 4, 256
POSITIONS = [127, 515, 1023]
NUMBERS = {"norm_eps": 1e-6, "hc_eps": 1e-6}


def bf16(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def table() -> Tensor:
    angle = torch.tensor(POSITIONS).float().unsqueeze(1) * 0.7 ** torch.arange(32).float()
    return torch.cat((angle.cos(), angle.sin()), -1)


def stored(layout: str, rows: Tensor) -> dict[str, Tensor]:
    data, scales = get_layout(layout).encode(rows)
    assert scales is not None
    return {"data": data, "scales": scales}


def inputs(method: str) -> tuple[dict[str, Tensor], dict[str, float | int | str]]:
    """What a method is given; results are computed from it."""
    if method == "qkv_norm":
        weights = {"qr_weight": bf16(WIDTH), "kv_weight": bf16(512)}
        return {"qr": bf16(TOKENS, WIDTH), "kv": bf16(TOKENS, 512), **weights}, {"eps": 1e-6}
    if method == "query":
        return {"q": bf16(TOKENS, HEADS, 512), "cos_sin": table()}, {"eps": 1e-6}
    if method == "window_row":
        return {"kv": bf16(TOKENS, 512), "cos_sin": table()}, {"layout": MAIN_FP8}
    if method == "compressor_state":
        return {"kv_score": torch.randn(TOKENS, 1024), "ape": torch.randn(4, 512)}, {"ratio": 4}
    if method == "compressed_row":
        present = torch.ones(TOKENS, 8, dtype=torch.bool)
        present[0, :4] = False  # a request's first entry
        tensors = {
            "state": torch.randn(TOKENS, 8, 2 * 2 * 512),
            "present": present,
            "norm_weight": 1 + 0.1 * torch.randn(512),
            "cos_sin": table(),
        }
        return tensors, {"ratio": 4, "overlap": 1, "eps": 1e-6, "layout": MAIN_FP8}
    if method == "index_query":
        tensors = {"q": bf16(TOKENS, 8, 128), "weights": bf16(TOKENS, 8), "cos_sin": table()}
        return tensors, {"softmax_scale": 128**-0.5, "head_scale": 8**-0.5}
    if method == "selection":
        q = bf16(8, 128).to(torch.float8_e4m3fn).float()
        keys = stored(INDEX_FP8, torch.randn(50, 128))
        return {"q": q, "weights": torch.randn(8), **keys}, {"k": 16, "layout": INDEX_FP8}
    if method == "attention":
        tensors = {"q": bf16(HEADS, 512), "sink": torch.randn(HEADS)}
        for name, rows in (("window", 60), ("entries", 30)):
            held = stored(MAIN_FP8, torch.randn(rows, 512))
            tensors |= {f"{name}_{plane}": each for plane, each in held.items()}
        return tensors, {"scale": 512**-0.5}
    if method == "projection":
        codes, scale = quantize_fp8_weight(torch.randn(2 * 128, 1024) / 32, "ue8m0")
        weight = {"wo_a": codes.view(2, 128, 1024), "wo_a_scale": scale.view(2, 1, 8)}
        return {"o": bf16(TOKENS, HEADS, 512), "cos_sin": table(), **weight}, {}
    if method == "linear":
        codes, scale = quantize_fp8_weight(torch.randn(128, 2048) / 45, "ue8m0")
        return {"x": bf16(TOKENS, 2048), "weight": codes, "weight_scale": scale}, {}
    if method == "experts":
        tensors = {"x": bf16(1, WIDTH), "weights": torch.rand(1, 3), "shared": bf16(1, 32)}
        for name, rows, width in (("w13", 256, WIDTH), ("w2", 32, 128)):
            codes, scales = quantize_mxfp4(torch.randn(3, rows, width) * 1.5 / width**0.5)
            tensors |= {name: codes, f"{name}_scale": scales}
        return tensors, {"limit": 2.0}
    if method == "router":
        tensors = {"x": bf16(TOKENS, WIDTH), "weight": bf16(32, WIDTH, scale=WIDTH**-0.5)}
        return tensors | {"bias": torch.randn(32) / 5}, {"scale": 1.5, "k": 6}
    n, mixes = STREAMS, STREAMS * (STREAMS + 2)
    streams = {"h": bf16(TOKENS, n, WIDTH)}
    if method == "hc_post":
        gates = {"post": torch.rand(TOKENS, n), "comb": torch.rand(TOKENS, n, n) / n}
        return {"u": bf16(TOKENS, WIDTH), **gates, **streams}, {}
    count, scales = (n, 1) if method == "hc_head" else (mixes, 3)
    streams["fn"] = torch.randn(count, n * WIDTH) / (n * WIDTH) ** 0.5
    streams |= {"base": torch.randn(count) / 2, "scale": torch.full((scales,), 0.7)}
    if method == "hc_head":
        return streams, {**NUMBERS}
    return streams | {"norm_weight": bf16(WIDTH)}, {**NUMBERS, "iters": 20}


def case_of(method: str, backend: str = "torch") -> Case:
    """The case with what anymla computes."""
    torch.manual_seed(sum(map(ord, method)))
    if method == "slots":
        wanted = torch.arange(390, 518)
        pages = torch.tensor([7, 3, 9, 0, 4, 11, 2, 8, 5])
        listed = pages[wanted // 64] * 64 + wanted % 64
        tensors = {"table": pages, "listed": listed.flip(0)}
        numbers = {"page_size": 64, "what": "rows of the window", "first": 390, "last": 518}
        return Case(method, "layer 0", ["a"], [517], tensors, numbers)
    if method == "at_rest":
        rows = torch.cat(list(stored(MAIN_FP8, torch.randn(2, 512)).values()), -1)
        tensors = {"before": rows, "after": rows.clone()}
        tensors |= {"entries": torch.tensor([3, 9]), "since": torch.tensor([5, 6])}
        tensors |= {"slots": torch.tensor([77, 12]), "slots_before": torch.tensor([77, 12])}
        return Case(
            method, "layer 0", ["a", "b"], [40, 70], tensors, {"what": "main", "codes": 448}
        )
    tensors, numbers = inputs(method)
    count = 1 if method in ("selection", "attention", "experts") else TOKENS
    names = [f"request {i}" for i in range(count)]
    return recompute(Case(method, "layer 0", names, POSITIONS[:count], tensors, numbers), backend)
