"""Kernels compiled by Intel's compiler and run on this CPU: `make test-intel`."""

import pytest

from anymla.testing import opencl


@pytest.fixture(scope="session")
def runtime():
    """The CPU as a device, on which the operations' Triton backends run from then on."""
    if opencl.missing():
        pytest.skip(opencl.missing())
    return opencl.install()
