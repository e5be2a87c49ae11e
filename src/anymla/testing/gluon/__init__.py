"""Run Gluon kernels on a CPU, and find what they do not wait for."""

from anymla.testing.gluon.errors import Deadlock, Hazard, NotModelled
from anymla.testing.gluon.hopper import Descriptor
from anymla.testing.gluon.machine import Machine, run
from anymla.testing.gluon.values import Value, as_value

__all__ = [
    "Deadlock",
    "Descriptor",
    "Hazard",
    "Machine",
    "NotModelled",
    "Value",
    "as_value",
    "run",
]
