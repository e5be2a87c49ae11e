"""Calls that ``anymla bench run`` times, made small and interpreted."""

import pytest

from anymla.bench.kernels import cache, engram, layer
from anymla.ops import device as device_facts
from anymla.ops.engram.shapes import EngramShape

pytestmark = pytest.mark.skipif(
    not (device_facts.has_triton() and device_facts.INTERPRETED),
    reason="Triton kernels do not run on the CPU here",
)


def test_what_surrounds_attention_is_a_call_that_works():
    """Two tokens of decoding, and a prefill where that is another scene."""
    decoding = list(cache.cases(tokens=(2,)))
    prefill = [case for case in cache.cases(tokens=(68,)) if " index" in case.label]
    # Seven operations without the compressor, its three kinds of states and four of entries.
    assert len({case.label for case in decoding}) == 7 + 3 + 4
    assert len(prefill) == 1 + 2
    for case in decoding + prefill:
        case.setup()()
        assert case.bytes_moved > 0


def test_n_grams_are_a_call_that_works():
    shape = EngramShape(hidden=64, streams=4, columns=3, width=64, block=32)
    every = list(engram.cases((2, 70), shape))
    assert [case.label for case in every[4:]] == [
        "engram_rows, 70 tokens",
        "engram_rows, 70 tokens, torch",
        "engram_gate, 70 tokens",
        "engram_gate, 70 tokens, torch",
    ]
    assert every[4].bytes_moved == 70 * 3 * (64 + 2 + 128)
    # Streams and keys are read, streams written, of each token; a value; a weight once.
    assert every[6].bytes_moved == 70 * (3 * 4 + 1) * 64 * 2 + 4 * 64 * 4
    for case in every:
        case.setup()()


def test_what_else_a_layer_does_is_a_call_that_works():
    """What does not take gigabytes of weights."""
    every = list(layer.cases(tokens=(2,), linear_tokens=(1,), site_tokens=(2,)))
    assert len({case.label for case in every}) == 5 + 3 + 4 + 2
    for case in every:
        assert case.bytes_moved > 0
        if case.label.startswith(("hc_", "swiglu", "inverse_rope")):
            case.setup()()
