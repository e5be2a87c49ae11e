"""Run Gluon kernels on a CPU, and find what they do not wait for."""

from crossrun.hopper.errors import Deadlock, Hazard, NotModelled
from crossrun.hopper.launches import install
from crossrun.hopper.machine import Machine, run
from crossrun.hopper.nvidia import Descriptor
from crossrun.hopper.values import Value, as_value

__all__ = [
    "Deadlock",
    "Descriptor",
    "Hazard",
    "Machine",
    "NotModelled",
    "Value",
    "as_value",
    "install",
    "run",
]
