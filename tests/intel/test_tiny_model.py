"""The trained tiny checkpoint on compiled kernels: the tokens of the torch backend."""

from unittest import mock

import pytest
from trained_tiny import NEW_TOKENS, greedy_tokens


@pytest.mark.slow  # minutes, the first time
def test_compiled_kernels_speak_the_same_tokens(runtime):
    with mock.patch.object(runtime, "run", wraps=runtime.run) as run:
        got = greedy_tokens("triton")
    assert run.call_count > 100 * NEW_TOKENS
    assert len(got) == NEW_TOKENS
    assert got == greedy_tokens("torch")
