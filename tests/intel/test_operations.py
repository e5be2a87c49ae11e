"""One small call of every operation, compiled and run on a CPU, beside the torch backend."""

import pytest
from agreement import NAMES, assert_backends_agree


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_torch_agree(runtime, name):
    assert_backends_agree(name)
