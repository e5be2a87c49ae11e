"""Heads that attend to shared windows: what they do by slots, also by the Hopper kernel's text."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("triton")

from anymla.bench.layer_setup import LayerSetup
from anymla.bench.random_caches import fill_randomly
from anymla.formats.fp8_block import dequantize_fp8_rows
from anymla.layers import heads as module
from anymla.layers.heads import AttentionInputs, Heads
from anymla.ops.device import TARGETS
from anymla.ops.sparse_attention import gluon_sm90_windows_launch as launcher
from anymla.runtime import workspaces
from anymla.runtime.device_step import Batch, BatchSizes, Reads, device_step
from crossrun.hopper import run as run_kernel

SMALL = {
    "hidden_size": 256,
    "o_groups": 2,
    "o_lora_rank": 128,
    "q_lora_rank": 128,
    "moe_intermediate_size": 128,
}
QUERIES, CONTEXT = 6, 300
# Position of the first query and queries of each request: the start, before and behind the end of
# the first window, over the end of a page, one query, and two requests that are not there.
REQUESTS = ((0, 6), (3, 5), (124, 6), (61, 6), (200, 1), (0, 0), (294, 6), (0, 0))


class Scene:
    """A layer's caches, and the same queries as a step by slots and as one that shares windows."""

    def __init__(self, heads):
        changes = SMALL | {"num_attention_heads": heads}
        setup = LayerSetup("flash", 0, torch.device("cpu"), experts=8, copies=1, changes=changes)
        store = setup._store(CONTEXT)
        fill_randomly(store)
        starts, counts = torch.tensor(REQUESTS).int().T.contiguous()
        tokens = len(REQUESTS) * QUERIES
        tables = {}
        for group in store.groups:
            shape = len(REQUESTS), -(-CONTEXT // group.tokens_per_page)
            tables[group.name] = torch.randint(1, store.pools[group.name].num_pages, shape).int()
            tables[group.name][6, 0] = -5  # a page that is not there, the first of two
        batch = Batch(
            torch.zeros(tokens, dtype=torch.int32),
            torch.arange(0, tokens + 1, QUERIES, dtype=torch.int32),
            counts, starts, tables,
        )  # fmt: skip
        sizes = BatchSizes((QUERIES,) * len(REQUESTS), len(REQUESTS), CONTEXT)
        self.inputs = {}
        for reads in (Reads.SLOTS, Reads.SHARED):
            step = device_step(batch, store.groups, sizes, reads=lambda _, chosen=reads: chosen)
            of = functools.partial(AttentionInputs.of, setup.spec, step, store.layers[0])
            self.inputs[reads] = of(None, None)
        self.there = step.is_valid
        self.q = torch.randn(tokens, heads, 512).bfloat16()
        self.turn = step.positions, torch.randn(CONTEXT, 64)
        self.heads = Heads(torch.randn(heads), 2, None)

    def check(self):
        by_slots, shared = (
            self.heads.attend(self.q, self.inputs[reads]).float()
            for reads in (Reads.SLOTS, Reads.SHARED)
        )
        assert by_slots[self.there].any(-1).all()
        # Weights and outputs are rounded to bfloat16 by either.
        assert (shared - by_slots).norm() < 5e-3 * by_slots.norm()
        assert not shared[~self.there].any()
        quantised = [
            self.heads.quantised(self.q, self.inputs[reads], *self.turn)
            for reads in (Reads.SLOTS, Reads.SHARED)
        ]
        want, got = (
            dequantize_fp8_rows(codes.view(torch.uint8), scales, torch.float32)
            for codes, scales in quantised
        )
        assert (got - want).norm() < 2.5e-2 * want.norm()
        assert not got[~self.there].any()


@pytest.mark.parametrize("heads", [2, 8])
def test_shared_windows_are_those_of_the_lists(heads):
    Scene(heads).check()


@dataclasses.dataclass
class OnCpu:
    """Stands for ``PreparedLaunch``: the kernel's text on a CPU."""

    kernel: object
    grid: tuple[int, ...]
    numbers: tuple[object, ...]
    constants: dict[str, object]

    @classmethod
    def prepare(cls, kernel, grid, *numbers, num_warps, launch_pdl, **constants):
        assert num_warps == 4
        return cls(kernel, grid, numbers, constants)

    def __call__(self, *tensors):
        run_kernel(self.kernel, self.grid, *tensors, *self.numbers, **self.constants)


@pytest.fixture
def hopper(monkeypatch):
    """The launcher of the Hopper kernel in the operations' place, on few SMs."""
    target = dataclasses.replace(TARGETS["sm_90"], sm_count=len(REQUESTS))
    monkeypatch.setattr(launcher, "target_of", lambda device: target)
    monkeypatch.setattr(launcher, "PreparedLaunch", OnCpu.prepare)
    launcher._attention.cache_clear()
    calls = []

    def call(function, *args, backend, **named):
        calls.append(function)
        return function(*args, **named)

    for name in ("sparse_attention_windows", "sparse_attention_windows_fp8_quant"):
        instead = functools.partial(call, getattr(launcher, name))
        monkeypatch.setattr(module, name, instead)
    yield calls
    launcher._attention.cache_clear()


@pytest.mark.parametrize("heads", [8, 128])
def test_the_hopper_kernel_gives_layers_what_they_have_by_slots(heads, hopper):
    """By its own text and its own launcher, as FP8 too."""
    Scene(heads).check()
    assert len(hopper) == 2


@pytest.mark.parametrize(
    ("heads", "entries", "fp8", "quantized", "reads"),
    [
        (64, 0, True, False, Reads.SHARED), (64, 0, True, True, Reads.SHARED),
        (64, 0, False, False, Reads.DECODED), (64, 64, True, False, Reads.DECODED),
        (8, 0, True, False, Reads.SHARED), (8, 0, True, True, Reads.SLOTS),
        (8, 64, True, False, Reads.SLOTS),
    ],
)  # fmt: skip
def test_a_bucket_has_one_choice(heads, entries, fp8, quantized, reads):
    assert workspaces._choice(32, 8, heads, 132, fp8, quantized, entries) == reads
