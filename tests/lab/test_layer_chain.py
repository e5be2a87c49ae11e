"""Several layers as one graph, on a device; on a CPU, that a chain can be run again."""

import pytest
import torch
from layer_chain import LayerChain
from small_shapes import CONFIG

from anymla.bench.layer_setup import LayerSetup
from anymla.layers.side_stream import INLINE, SideStream


def _state(chain, run):
    """Copies of what a run returns and leaves in the caches."""
    (streams,) = run()
    return [streams.clone(), *chain.written()]


def test_the_same_inputs_have_the_same_results():
    setup = LayerSetup("flash", 4, torch.device("cpu"), experts=6, copies=1, changes=CONFIG)
    # One request in eight is padding; of eight, some write.
    chain = LayerChain(setup, 8, 300, length=2)
    seen = []
    for _ in range(2):
        chain.shuffle()
        before = chain.written()
        first, again = (_state(chain, chain.run) for _ in range(2))
        assert all(map(torch.equal, first, again))
        assert not any(map(torch.equal, before, first[1:])), "every cache is written"
        seen.append(first[0])
    assert not torch.equal(*seen)


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", [4, 128])
def test_a_graph_of_layers_has_the_bits_of_single_launches(ratio):
    setup = LayerSetup("flash", ratio, torch.device("cuda"), experts=8)
    with torch.inference_mode():
        chain = LayerChain(setup, 8, 8192)
        chain.compile_ahead()
        graphs = [chain.graph(side) for side in (INLINE, SideStream(setup.device))]
        for _ in range(20):
            chain.shuffle()
            want = _state(chain, chain.run)
            for graph in graphs:
                for _ in range(4):
                    assert all(map(torch.equal, _state(chain, graph), want))
