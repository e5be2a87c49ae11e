"""Compiled kernels touch no memory beside their tensors; one that does ends the test run here."""

import faulthandler
import functools
import os
import signal

import pytest
import torch
from guard_pages import guarded, guarded_empty
from sample_calls import operations, sample_call
from test_operations import NAMES

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from anymla.ops.moe import experts  # noqa: E402


def ends_by(body):
    """The signal that ends a process which runs ``body``; 0 if it returns."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        body()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


@pytest.mark.parametrize(("behind", "beside"), [(False, 64), (True, -1)])
def test_what_touches_a_guard_page_ends(behind, beside):
    tensor = guarded(torch.arange(64.0), behind=behind)
    assert torch.equal(tensor, torch.arange(64.0))
    with guarded_empty(behind=behind):
        for each in (tensor, torch.empty(64), torch.empty_like(tensor), tensor.new_empty(64)):
            other = each.as_strided((1,), (1,), each.storage_offset() + beside)
            assert ends_by(other.item) == signal.SIGSEGV
            assert ends_by(functools.partial(other.fill_, 1.0)) == signal.SIGSEGV
            assert ends_by(functools.partial(each.fill_, 1.0)) == 0


@triton.jit
def _choosing_kernel(chosen, starts, x, out, steps, BLOCK: tl.constexpr):
    """A loop with barriers over the rows from a program's choice on; nothing if it is negative."""
    choice = tl.load(chosen + tl.program_id(0))
    if choice >= 0:
        lane = tl.arange(0, BLOCK)
        row = x + tl.load(starts + choice)
        total = tl.zeros((BLOCK,), tl.float32)
        for i in range(0, steps):
            part = tl.load(row + i * BLOCK + lane)
            total += part - tl.sum(part, 0)
        tl.store(out + tl.program_id(0) * BLOCK + lane, total)


def test_a_load_stays_in_its_branch(runtime):
    """The runtime's compiler moves that of ``starts`` to where the kernel begins."""
    chosen = torch.tensor([1, -1, 0, -1], dtype=torch.int32)
    starts, x, out = torch.tensor([0, 128]), torch.randn(5, 64), torch.zeros(4, 64)
    given = [guarded(each, behind=True) for each in (chosen, starts, x)]
    _choosing_kernel[(4,)](*given, out, 3, BLOCK=64, num_warps=4)
    want = torch.zeros(4, 64, dtype=torch.float64)
    for program, rows in ((0, x[2:5]), (2, x[:3])):
        want[program] = (rows.double() - rows.double().sum(1, keepdim=True)).sum(0)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_operations_stay_inside_their_tensors(runtime, name, behind):
    given = {key: _guarded(value, behind) for key, value in sample_call(name).items()}
    with guarded_empty(behind=behind):
        operations()[name](**given, backend="triton")


@pytest.mark.parametrize("behind", [False, True])
def test_grouped_experts_stay_inside_their_tensors(runtime, behind):
    """Blocks of pairs, some of them nobody's, and matrices that a table finds."""
    torch.manual_seed(0)
    (tokens, k), (number, inner, d) = (24, 4), (16, 128, 256)
    x, weights = torch.randn(tokens, d).bfloat16(), torch.rand(tokens, k)
    ids = torch.stack([torch.randperm(number)[:k] for _ in range(tokens)]).int()
    codes, scales = [], []
    for rows, width in ((inner, d), (inner, d), (d, inner)):
        codes.append([torch.randint(256, (rows, width // 2)).byte() for _ in range(number)])
        scales.append([torch.randint(118, 126, (rows, width // 32)).byte() for _ in range(number)])
    given = [_guarded(each, behind) for each in (x, ids, weights, *codes, *scales)]
    options = {"weight_format": "mxfp4", "swiglu_limit": 10.0, "quantize_activations": True}
    with guarded_empty(behind=behind):
        got = experts(*given, **options, backend="triton")
    want = experts(x, ids, weights, *codes, *scales, **options, backend="torch")
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.abs().max()))


def _guarded(value, behind):
    if isinstance(value, list):
        return [_guarded(each, behind) for each in value]
    return guarded(value, behind=behind) if isinstance(value, torch.Tensor) else value
