"""Kernels compiled for an AMD GPU and interpreted: `make test-amd`, or pytest --amd-target."""

import pytest

from anymla.testing import amd_on_cpu


@pytest.fixture(scope="session")
def device(request):
    """The pretended GPU, which --amd-target has installed."""
    target = request.config.getoption("--amd-target")
    if target is None:
        pytest.skip("needs --amd-target: make test-amd")
    return amd_on_cpu.install(target)
