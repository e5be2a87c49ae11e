"""One small call of every operation, compiled and run on a CPU, beside the torch backend."""

import pytest
from agreement import NAMES as ALL_NAMES
from agreement import assert_backends_agree

from anymla.ops.registry import BackendUnavailable

# Triton's kernels refuse Intel's GPUs, where torch computes them.
_REASON = "fit the registers of Intel's GPUs"
REFUSED = {
    "prefill_attention_backward": _REASON,
    "hc_pre_backward": _REASON,
    "hc_post_backward": _REASON,
}
NAMES = [name for name in ALL_NAMES if name not in REFUSED]


@pytest.mark.parametrize("name", REFUSED)
def test_what_triton_refuses_is_refused_by_name(runtime, name):
    with pytest.raises(BackendUnavailable, match=REFUSED[name]):
        assert_backends_agree(name)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_torch_agree(runtime, name):
    assert_backends_agree(name)
