import pytest

from anymla.bench.kernels.cache import cases
from anymla.ops import device as device_facts


@pytest.mark.skipif(
    not (device_facts.has_triton() and device_facts.INTERPRETED),
    reason="Triton kernels do not run on the CPU here",
)
def test_what_is_timed_is_a_call_that_works():
    """Interpreted: two tokens of decoding, and a prefill where that is another scene."""
    decoding = list(cases(tokens=(2,)))
    prefill = [case for case in cases(tokens=(68,)) if " index" in case.label]
    # Seven operations without the compressor, its three kinds of states and four of entries.
    assert len({case.label for case in decoding}) == 7 + 3 + 4
    assert len(prefill) == 1 + 2
    for case in decoding + prefill:
        case.setup()()
        assert case.bytes_moved > 0
