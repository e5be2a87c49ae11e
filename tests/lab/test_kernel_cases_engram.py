import pytest

from anymla.bench.kernels.engram import cases
from anymla.ops import device as device_facts
from anymla.ops.engram.shapes import EngramShape


@pytest.mark.skipif(
    not (device_facts.has_triton() and device_facts.INTERPRETED),
    reason="Triton kernels do not run on the CPU here",
)
def test_what_is_timed_is_a_call_that_works():
    shape = EngramShape(hidden=64, streams=4, columns=3, width=64, block=32)
    every = list(cases((2, 70), shape))
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
