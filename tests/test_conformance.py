"""The public conformance suite, collected with ours."""

from anymla.testing.conformance.test_cases import test_case

__all__ = ["test_case"]
