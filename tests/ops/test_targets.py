"""Devices by what torch says of them."""

import types

import pytest
import torch

from anymla.ops import device as device_facts
from anymla.ops.device import TARGETS, XPU


def target_with(monkeypatch, **properties):
    found = types.SimpleNamespace(**properties)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: found)
    return device_facts.target_of.__wrapped__(torch.device("xpu"))


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ((12, 57, 0), "xpu_dg2"), ((12, 60, 7), "xpu_pvc"), ((20, 1, 4), "xpu_bmg"),
        ((20, 4, 4), "xpu_lnl"), ((30, 0, 4), "xpu_ptl"),
    ],
)  # fmt: skip
def test_intel_gpus_are_told_by_their_architecture(monkeypatch, version, name):
    number = version[0] << 22 | version[1] << 14 | version[2]
    found = target_with(monkeypatch, architecture=number, gpu_subslice_count=5)
    assert (found.name, found.sm_count) == (name, 5)
    assert found.shared_bytes == TARGETS[name].shared_bytes


def test_an_intel_gpu_that_is_not_listed_has_the_least(monkeypatch):
    found = target_with(monkeypatch, architecture=99 << 22, gpu_subslice_count=9)
    assert (found.name, found.shared_bytes, found.sm_count) == ("xpu", XPU.shared_bytes, 9)
    assert target_with(monkeypatch).name == "xpu"
