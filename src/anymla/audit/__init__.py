"""Audit of a live engine: recomputes a layer's methods from their inputs and cached bytes.

The checks know no engine: ``anymla.engines`` collects the cases, and ``judge`` judges one of them.
"""

from anymla.audit.case import Case, load_case, save_case
from anymla.audit.checks import CHECKS, Finding, judge

__all__ = ["CHECKS", "Case", "Finding", "judge", "load_case", "save_case"]
