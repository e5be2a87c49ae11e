"""One small call of every operation, compiled and run on a CPU, beside the torch backend."""

import pytest
from agreement import NAMES, assert_backends_agree
from sample_calls import operations

from anymla.ops import device as device_facts


@pytest.fixture
def arc_b(runtime, monkeypatch):
    """Tiles of Arc B, whose products are additions here as well."""
    with monkeypatch.context() as patch:
        patch.setattr(device_facts, "CPU", device_facts.TARGETS["xpu_bmg"])
        _forget()
        yield
    _forget()


def _forget():
    device_facts.target_of.cache_clear()
    for operation in operations().values():
        operation.forget()


@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_torch_agree(runtime, name):
    assert_backends_agree(name)


@pytest.mark.parametrize("name", ["hc_pre_backward", "prefill_attention_backward"])
def test_gradients_by_tiles_of_arc_b_agree(arc_b, name):
    assert_backends_agree(name)
