"""Triton kernels compiled for Intel's GPUs, run on a CPU beside the torch backend."""

import json

import pytest
import torch
from click.testing import CliRunner
from paged import LAYOUTS

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from anymla.cli.main import main  # noqa: E402
from anymla.formats.page_layout import get_layout  # noqa: E402
from anymla.formats.triton_cast import fp32_to_e4m3, widen  # noqa: E402
from anymla.ops.device import TARGETS  # noqa: E402
from anymla.ops.kv_cache import quantize_and_insert_k_cache  # noqa: E402
from anymla.ops.norm_rope import rms_norm  # noqa: E402
from anymla.testing.tolerance import accumulation, assert_close, ulps  # noqa: E402
from crossrun.intel.runtime import OpenCLError  # noqa: E402
from lab.build import Build  # noqa: E402
from lab.compiled import compiled  # noqa: E402


@triton.jit
def _product_kernel(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    row, column, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + row[:, None] * K + k[None, :])
    right = tl.load(b + k[:, None] * N + column[None, :])
    tl.store(c + row[:, None] * N + column[None, :], tl.dot(left, right))


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "f16")])
def test_matrix_instructions_are_emulated(runtime, dtype, name):
    shape = {"M": 16, "N": 32, "K": 32}
    pointer = {"bf16": "*bf16", "f16": "*fp16"}[name]
    types = {"a": pointer, "b": pointer, "c": "*fp32"}
    build = Build("product", _product_kernel, types, shape, num_warps=2)
    made = compiled(build, TARGETS["xpu_bmg"])
    assert f"intel_sub_group_{name}_{name}_matrix_mad_k16" in made.asm["llir"]
    a, b = torch.randn(16, 32).to(dtype), torch.randn(32, 32).to(dtype)
    c = torch.full((16, 32), torch.nan)
    kernel = runtime.kernel(made.asm["spv"], made.metadata.name)
    addresses = [a.data_ptr(), b.data_ptr(), c.data_ptr()]
    lanes = made.metadata.num_warps * made.metadata.threads_per_warp
    runtime.run(kernel, addresses, made.metadata.shared, (1, 1, 1), lanes)
    magnitude = a.double().abs() @ b.double().abs()
    assert_close(c, a.double() @ b.double(), atol=accumulation(32, torch.float32), scale=magnitude)


@triton.jit
def _round_kernel(x, rounded, codes, TYPE: tl.constexpr, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    value = tl.load(x + at)
    wide = widen(value.to(TYPE))
    tl.store(rounded + at, wide)
    tl.store(codes + at, fp32_to_e4m3(wide, False))


@pytest.mark.parametrize(
    ("dtype", "type_"), [(torch.bfloat16, tl.bfloat16), (torch.float16, tl.float16)]
)
def test_roundings_are_not_dropped(runtime, dtype, type_):
    """The compiler drops a rounding to 16 bits that is widened as Triton does it."""
    # All sizes that a float16 has, values beyond them, and none.
    sizes = torch.randn(1016) * torch.exp2(torch.arange(1016) % 44 - 26.0)
    ends = [0.0, -0.0, 2.0**-24, -(2.0**-25), 65504.0, torch.inf, -torch.inf, torch.nan]
    x = torch.cat((sizes, torch.tensor(ends)))
    rounded, codes = torch.zeros(1024), torch.zeros(1024, dtype=torch.uint8)
    _round_kernel[(1,)](x, rounded, codes, TYPE=type_, COUNT=1024)
    want = x.to(dtype).float()
    assert torch.equal(rounded[:-1].view(torch.int32), want[:-1].view(torch.int32))
    assert rounded[-1].isnan()
    coded = want.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes[:-1], coded[:-1])


def test_what_is_no_module_is_refused(runtime):
    with pytest.raises(ValueError, match="not a SPIR-V module"):
        runtime.kernel(b"nothing of the kind", "kernel")


def test_a_kernel_that_a_module_lacks_is_refused(runtime):
    types = {"a": "*bf16", "b": "*bf16", "c": "*fp32"}
    build = Build("product", _product_kernel, types, {"M": 16, "N": 32, "K": 32}, num_warps=2)
    with pytest.raises(OpenCLError, match="kernel another"):
        runtime.kernel(compiled(build, TARGETS["xpu_bmg"]).asm["spv"], "another")


def test_kernels_are_compiled_once(runtime):
    x, weight = torch.randn(3, 512).bfloat16(), torch.randn(512)
    rms_norm(x, weight, 1e-6, backend="triton")
    count = runtime.compiled
    got = rms_norm(x[:2], weight, 1e-6, backend="triton")
    assert runtime.compiled == count
    want = rms_norm(x[:2].double(), weight.double(), 1e-6, backend="reference")
    assert_close(got, want, rtol=ulps(torch.bfloat16, 0.5) + 1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inserted_rows_have_the_same_bytes(runtime, layout):
    layout = get_layout(layout)
    caches = [layout.allocate(pages=3, entries=16) for _ in range(2)]
    rows, slots = torch.randn(40, layout.channels).bfloat16(), torch.randperm(48)[:40]
    for cache, backend in zip(caches, ("torch", "triton"), strict=True):
        cache.zero_()
        quantize_and_insert_k_cache(rows, cache, slots, layout=layout.layout_id, backend=backend)
    assert torch.equal(caches[0].view(torch.uint8), caches[1].view(torch.uint8))


def test_conformance_says_that_it_ran_compiled(runtime, tmp_path):
    file = tmp_path / "rows.jsonl"
    words = [
        "conformance",
        "--backend",
        "triton",
        "--compiled",
        "--case",
        "L1",
        "--json",
        str(file),
    ]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    row = json.loads(file.read_text())
    assert (row["subject"], row["status"]) == ("triton, compiled", "passed")
    assert "--compiled" in row["command"]
