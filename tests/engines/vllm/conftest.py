from pathlib import Path

import pytest
from inputs import bf16_twin

from anymla.testing.tiny_checkpoint import TinyOptions


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of ratio 0, 4, 128, 4 at the sizes that vLLM's CPU kernels demand."""
    return bf16_twin(tmp_path_factory.mktemp("tiny"), TinyOptions())
