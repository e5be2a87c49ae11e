"""Gluon kernels on a CPU: what they compute, and what they do not wait for."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

import gluon_example as example

from anymla.testing.gluon import Descriptor, run


def matmul(seed=0, tiles=6, **more):
    a, b = torch.randn(64, 64 * tiles).half(), torch.randn(64 * tiles, 64).half()
    out = torch.full((64, 64), torch.nan)
    run(
        example.matmul_kernel, 1, Descriptor(a, [64, 64]), Descriptor(b, [64, 64]), out, tiles,
        seed=seed, **more,
    )  # fmt: skip
    torch.testing.assert_close(out, a.float() @ b.float(), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("seed", [None, *range(10)])
def test_the_example(seed):
    matmul(seed)
