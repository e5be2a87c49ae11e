"""Scratch memory that the caller owns."""

import weakref

import pytest
import torch

from anymla.formats.fp8_block import quantize_fp8_weight
from anymla.formats.mxfp4 import quantize_mxfp4
from anymla.ops.linear import fp8_block_linear
from anymla.ops.moe import experts
from anymla.ops.streams import Workspace, active_workspace, scratch, stream_lane

CPU = torch.device("cpu")


def test_without_a_workspace_memory_is_allocated():
    assert active_workspace() is None
    assert scratch((3, 5), torch.float32, CPU).shape == (3, 5)


def test_a_workspace_may_lie_in_memory_of_somebody_else():
    buffer = torch.empty(1024, dtype=torch.uint8)
    workspace = Workspace.over(buffer)
    with workspace.active():
        assert scratch((4,), torch.float32, CPU).data_ptr() == buffer.data_ptr()
        assert scratch((1024,), torch.uint8, CPU).data_ptr() != buffer.data_ptr()
    assert workspace.overflows == 1


def test_parts_are_apart_and_free_after_the_call():
    workspace = Workspace(CPU, 4096)
    with workspace.active():
        with workspace.scope():
            first = scratch((3,), torch.uint8, CPU)
            second = scratch((2, 5), torch.float32, CPU)
            assert first.data_ptr() % 4 == second.data_ptr() % 4 == 0
            first.fill_(1)
            second.fill_(2)
            assert first.tolist() == [1, 1, 1]
            with workspace.scope():
                inner = scratch((1,), torch.int64, CPU)
            with workspace.scope():
                assert scratch((1,), torch.int64, CPU).data_ptr() == inner.data_ptr()
        with workspace.scope():
            assert scratch((9,), torch.uint8, CPU).data_ptr() == first.data_ptr()
    assert workspace.needed_bytes == 3 * 256
    assert workspace.overflows == 0


def test_what_does_not_fit_is_allocated_and_counted_until_reserved():
    workspace = Workspace(CPU)
    for overflows in (1, 1):
        with workspace.active(), workspace.scope():
            taken = scratch((1000,), torch.float32, CPU)
        assert taken.shape == (1000,)
        assert workspace.overflows == overflows
        workspace.reserve()
    assert workspace.num_bytes == workspace.needed_bytes == 4096


def test_memory_that_graphs_may_know_stays():
    workspace = Workspace(CPU)
    known = []
    for size in (1000, 1000, 3000):
        with workspace.active(), workspace.scope():
            scratch((size,), torch.uint8, CPU)
        workspace.reserve()
        known.append(weakref.ref(workspace._lanes[0].buffer))
    assert known[0]() is known[1]() is not known[2]()
    assert known[0]() is not None
    assert workspace.num_bytes == 1024 + 3072


def test_other_queues_share_nothing():
    workspace = Workspace(CPU)
    for _ in range(2):
        with workspace.active(), workspace.scope():
            main = scratch((4,), torch.float32, CPU)
            beside = []
            for number in (1, 2):
                with stream_lane(number), workspace.scope():
                    beside.append(scratch((4,), torch.float32, CPU))
        workspace.reserve()
    assert len({part.data_ptr() for part in (main, *beside)}) == 3
    assert workspace.num_bytes == 768


def _cases():
    torch.manual_seed(0)
    x = torch.randn(3, 1024)
    weight = quantize_fp8_weight(torch.randn(64, 1024))
    packed = [quantize_mxfp4(torch.randn(32, 128)) for _ in range(6)]
    down = [quantize_mxfp4(torch.randn(128, 32)) for _ in range(3)]
    w1, w3 = packed[:3], packed[3:]
    ids = torch.tensor([[0, 2], [1, 0], [2, 1]], dtype=torch.int32)
    lists = [[each[part] for each in group] for part in (0, 1) for group in (w1, w3, down)]
    yield lambda: fp8_block_linear(x, *weight, quantize_activations=True, backend="triton")
    yield lambda: experts(
        x[:, :128].contiguous(),
        ids,
        torch.rand(3, 2, generator=torch.Generator().manual_seed(1)),
        *lists,
        weight_format="mxfp4",
        swiglu_limit=10.0,
        quantize_activations=False,
        backend="triton",
    )


@pytest.mark.parametrize("number", [0, 1])
def test_operations_find_their_scratch_in_whatever_lies_there(number):
    """Same bits, from memory full of 0xFF, and nothing is allocated for it."""
    pytest.importorskip("triton")
    call = list(_cases())[number]
    expected = call()
    workspace = Workspace(CPU)
    with workspace.active():
        call()
        assert workspace.overflows > 0
        workspace.reserve()
        workspace.overflows = 0
        for lane in workspace._lanes:
            lane.buffer.fill_(0xFF)
        assert torch.equal(call(), expected)
    assert workspace.overflows == 0
    assert all(not lane.used for lane in workspace._lanes)
