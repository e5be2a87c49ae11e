"""Operations: one folder a family, each with its contract, its mathematics and its backends.

What a backend of one's own needs is here: ``Support`` answers whether it can take a call,
``BackendUnavailable`` says that this machine cannot, and ``TARGETS`` is what kernels know of a GPU.
"""

from anymla.ops.device import TARGETS, Support, Target
from anymla.ops.registry import BackendUnavailable, Operation

__all__ = ["TARGETS", "BackendUnavailable", "Operation", "Support", "Target"]
