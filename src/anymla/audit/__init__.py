"""Audit of a live engine: each method of a layer again, from its own inputs and cached bytes.

The checks know no engine: ``anymla.engines`` collects the cases, ``judge`` judges one of them.
"""

from anymla.audit.case import Case, load_case, save_case
from anymla.audit.checks import CHECKS, Finding, judge

__all__ = ["CHECKS", "Case", "Finding", "judge", "load_case", "save_case"]
