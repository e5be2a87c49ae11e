"""Tests for faults that real implementations of this attention have had.

Each case is a function of the operations under test. ``pytest --pyargs
anymla.testing.conformance`` runs all of them for every backend; another library joins by naming
its functions in ``Ops(replacements=...)``.
"""

from anymla.testing.conformance.ops import Ops
from anymla.testing.conformance.registry import CASES, Case, load_cases

__all__ = ["CASES", "Case", "Ops", "load_cases"]
