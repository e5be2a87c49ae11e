"""The public conformance suite, collected with ours."""

from anymla.testing.conformance.test_cases import pytest_generate_tests, test_case

__all__ = ["pytest_generate_tests", "test_case"]
