import pytest
import torch


@pytest.fixture(autouse=True)
def with_gradients(inference_rules):
    """Elsewhere tests run without autograd, as engines do."""
    with torch.enable_grad():
        yield
