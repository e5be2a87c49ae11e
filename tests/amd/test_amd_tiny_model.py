"""The trained tiny checkpoint on AMD's compiled kernels: the tokens of the torch backend."""

import pytest
from trained_tiny import NEW_TOKENS, greedy_tokens


@pytest.mark.slow  # minutes
def test_compiled_kernels_speak_the_same_tokens(device):
    before = device.launches
    got = greedy_tokens("triton")
    assert device.launches > before + 100 * NEW_TOKENS
    assert len(got) == NEW_TOKENS
    assert got == greedy_tokens("torch")
