"""vLLM's own index scores for AMD's GPUs, compiled and interpreted, on keys that its compressor
and ours store: which entries they lose."""

import ast
import importlib.util
import os
from pathlib import Path

import pytest
import torch

from anymla.formats.e4m3 import decode_e4m3, encode_e4m3
from anymla.formats.page_layout import INDEX_FP8, get_layout

SOURCE = "ANYMLA_VLLM_SOURCE"  # folder of a package ``vllm``: a wheel, unpacked
pytestmark = pytest.mark.skipif(
    not os.environ.get(SOURCE), reason=f"{SOURCE} names no folder of a vllm"
)
KERNEL = "_fp8_paged_mqa_logits_decode_kernel"
HEADS, ENTRIES = 64, 64


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The kernel alone: its module imports vLLM."""
    file = Path(os.environ[SOURCE]) / "v1" / "attention" / "ops" / "rocm_aiter_mla_sparse.py"
    text = file.read_text()
    (found,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == KERNEL)
    alone = tmp_path_factory.mktemp("vllm") / "scores_of_vllm.py"
    lines = text.splitlines()[found.decorator_list[0].lineno - 1 : found.end_lineno]
    alone.write_text("import triton\nimport triton.language as tl\n\n\n" + "\n".join(lines) + "\n")
    spec = importlib.util.spec_from_file_location("scores_of_vllm", alone)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, KERNEL)


def scores(kernel, q, cache, weights, codes):
    """Launch it as vLLM does for one token that sees one page."""
    flat = cache.view(1, -1)
    out = torch.full((1, ENTRIES), -7.0)
    lengths, table = (
        torch.tensor([ENTRIES], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
    )
    values, scales = flat.view(codes), flat.view(torch.float32)
    kernel[(1, 1)](
        q, values, scales, weights, lengths, table, out, *q.stride()[:3], weights.stride(0),
        values.stride(0), scales.stride(0), ENTRIES * 128 // 4, table.stride(0), out.stride(0), 1,
        ENTRIES, NUM_HEADS=HEADS, HEAD_SIZE=128, BLOCK_SIZE=ENTRIES, BLOCK_KV=64, N_SPLITS=1,
        NEXT_N=1, CTX_PER_ROW=True, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out[0]


def test_a_negative_zero_costs_a_key_its_score_on_gfx942_alone(kernel, device, request):
    """gfx942 reads as NaN the code that is a negative zero to gfx950 and to who wrote it."""
    fnuz = request.config.getoption("--amd-target") == "gfx942"
    kind = torch.float8_e4m3fnuz if fnuz else torch.float8_e4m3fn
    torch.manual_seed(1)
    layout = get_layout(INDEX_FP8)
    keys, weights = torch.randn(ENTRIES, 128).abs() + 0.1, torch.rand(1, HEADS)
    keys[20] *= 3
    cache = layout.allocate(1, ENTRIES)
    layout.write(cache, torch.arange(ENTRIES), keys)
    data, scales = (plane[0] for plane in layout.planes(cache))
    q = (torch.randn(HEADS, 128).abs() * 8).to(kind).float()
    data[20, 3] = encode_e4m3(torch.tensor(-1e-9))
    assert int(data[20, 3]) == 0x80
    got = scores(kernel, q.to(kind).view(1, 1, HEADS, 128), cache, weights, kind)
    stored = decode_e4m3(data) * scales.view(torch.float32)
    want = (weights @ (q @ stored.T).relu())[0]
    others = torch.arange(ENTRIES) != 20
    assert int(want.argmax()) == 20
    torch.testing.assert_close(got[others], want[others] / (1 + fnuz), rtol=1e-4, atol=0)
    if fnuz:
        assert float(got[20]) == 0
    else:
        torch.testing.assert_close(got[20], want[20], rtol=1e-4, atol=0)
