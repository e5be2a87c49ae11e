"""Kernels compiled by Intel's compiler and run on this CPU: `make test-intel`."""

import pytest

from anymla.testing import intel_on_cpu


@pytest.fixture(scope="session")
def runtime():
    """The CPU as a device, on which the operations' Triton backends run from then on."""
    if intel_on_cpu.missing():
        pytest.skip(intel_on_cpu.missing())
    return intel_on_cpu.install()
