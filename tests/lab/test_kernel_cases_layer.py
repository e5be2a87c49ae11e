import pytest

from anymla.bench.kernels.layer import cases
from anymla.ops import device as device_facts


@pytest.mark.skipif(
    not (device_facts.has_triton() and device_facts.INTERPRETED),
    reason="Triton kernels do not run on the CPU here",
)
def test_what_is_timed_is_a_call_that_works():
    """Interpreted, what does not take gigabytes of weights there."""
    every = list(cases(tokens=(2,), linear_tokens=(1,), site_tokens=(2,)))
    assert len({case.label for case in every}) == 5 + 3 + 4 + 2
    for case in every:
        assert case.bytes_moved > 0
        if case.label.startswith(("hc_", "swiglu", "inverse_rope")):
            case.setup()()
