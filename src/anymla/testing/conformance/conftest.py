"""Settings of ``pytest --pyargs anymla.testing.conformance``."""

from anymla.testing.pytest_plugin import (  # noqa: F401
    inference_rules,
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_configure,
)
