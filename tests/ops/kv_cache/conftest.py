"""What tests of this family share."""

from __future__ import annotations

import pytest
from paged import ALL_BACKENDS, use_backend


@pytest.fixture(params=ALL_BACKENDS)
def backend(request, monkeypatch):
    return use_backend(request.param, monkeypatch)
