"""Comparison of an operation's compiled Triton backend with its torch backend, on a CPU."""

import torch
from sample_calls import copied, operations, sample_call

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.testing.tolerance import accumulation, assert_close, ulps

NAMES = [
    name
    for name, operation in operations().items()
    if {"torch", "triton"} <= set(operation.backends)
]


def close(got, want):
    """Integers are the same; floats within float32's error of sums of 1,024 terms."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    if not want.is_floating_point():
        assert torch.equal(got, want)
        return
    got, want = got.double(), want.double()
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    assert torch.equal(got[~finite].nan_to_num(7.0), want[~finite].nan_to_num(7.0))
    got, want = got[finite], want[finite]
    if want.numel():
        size = float(want.abs().max())
        assert_close(got, want, atol=accumulation(1024, torch.float32, c=4.0), scale=max(size, 1.0))


def same_rows(got, want):
    """Rows of a cache: a value at the border of two codes may be either of them."""
    layout = get_layout(MAIN_FP8)
    slots = torch.arange(got.shape[0] * got.shape[1])
    got, want = (layout.read(cache, slots, torch.float64) for cache in (got, want))
    assert (got == want).double().mean() > 0.99
    step = ulps(torch.float8_e4m3fn, 1) + ulps(torch.bfloat16, 1)
    assert_close(got.nan_to_num(0.0), want.nan_to_num(0.0), rtol=step, atol=2.0**-9, scale=1.0)


def assert_backends_agree(name):
    """One small call of an operation: results and what it writes."""
    operation, given = operations()[name], sample_call(name)
    calls = [{key: copied(value) for key, value in given.items()} for _ in range(2)]
    results = []
    for arguments, backend in zip(calls, ("triton", "torch"), strict=True):
        found = operation(**arguments, backend=backend)
        results.append(found if isinstance(found, tuple) else (found,))
    for got, want in zip(*results, strict=True):
        if want is not None:
            close(got, want)
    for key, got in calls[0].items():
        if key == "k_cache":
            same_rows(got, calls[1][key])
        elif isinstance(got, torch.Tensor):
            close(got, calls[1][key])
