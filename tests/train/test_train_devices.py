"""Layers with gradients on a GPU: CUDA graphs, compiled, and beside a CPU."""

import pytest
import torch
from test_compile import LAYERS, chain, loss

CASES = [(name, "frozen") for name in LAYERS] + [("ratio 4", "sparse"), ("V4.1", "sparse")]


def made(name, stage, **options):
    return chain(LAYERS[name], stage, "nvfp4" if name == "V4.1" else "fp8", **options)


def gradients(run, inputs):
    return torch.autograd.grad(loss(run(*inputs)), inputs, allow_unused=True)


def assert_same(got, want, bound):
    assert any(each is not None for each in want)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if b is None:
            continue
        if not bound:
            assert torch.equal(a, b)
        else:
            a, b = a.double().cpu(), b.double().cpu()
            assert (a - b).norm() <= bound * b.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_a_graph_replays_the_gradients(name, stage):
    """Bits, but for the loss of indexers, whose sums over entries are atomic on a GPU."""
    run, inputs = made(name, stage, dtype=torch.bfloat16, device="cuda", deterministic=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            gradients(run, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = gradients(run, inputs)
    with torch.no_grad():
        inputs[0].mul_(0.5).add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(recorded, gradients(run, inputs), 0.0 if stage == "frozen" else 1e-2)


@pytest.mark.gpu
@pytest.mark.compiles
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_compiled_gradients_are_the_eager_ones(name, stage):
    run, inputs = made(name, stage, dtype=torch.bfloat16, device="cuda", deterministic=True)
    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True)
    assert_same(gradients(compiled, inputs), gradients(run, inputs), 3e-2)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"])
@pytest.mark.parametrize(("name", "stage"), CASES)
def test_gradients_of_float32_are_those_of_float64(name, stage, device):
    """With caches that do not round, so that nothing is selected otherwise."""
    single = chain(LAYERS[name], stage, "fp32", device=device)
    double = chain(LAYERS[name], stage, "fp32", dtype=torch.float64)
    assert_same(gradients(*single), gradients(*double), 1e-4 if device == "cuda" else 2e-5)
