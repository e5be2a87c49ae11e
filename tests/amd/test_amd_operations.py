"""One small call of every operation, compiled for AMD and interpreted, beside the torch backend."""

import pytest
from agreement import NAMES, assert_backends_agree


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_torch_agree(device, name):
    before = device.launches
    assert_backends_agree(name)
    assert device.launches > before
