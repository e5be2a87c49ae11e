"""Clocks of GPUs, with a pretended Intel GPU whose memory is the CPU's."""

from __future__ import annotations

import types

import pytest
import torch

from anymla.bench import gpu, gpu_timing
from anymla.bench.kernels import TimedCall
from anymla.bench.runner import run
from anymla.cli.bad_input import BadInput
from anymla.cli.bench_rows import require_gpu


class Event:
    """Its time is the number of calls so far, a millisecond each."""

    calls = 0

    def __init__(self, enable_timing=False):
        assert enable_timing, "events without a time"

    def record(self):
        self.at = Event.calls

    def synchronize(self):
        """Nothing is in flight."""

    def elapsed_time(self, end):
        return float(end.at - self.at)


@pytest.fixture
def xpu(monkeypatch):
    """Torch sees an Arc B580 and no CUDA."""
    Event.calls = 0
    properties = types.SimpleNamespace(
        name="Intel(R) Arc(TM) B580 Graphics",
        architecture=20 << 22 | 1 << 14,
        gpu_subslice_count=20,
    )
    for name, answer in {
        "is_available": True, "get_device_properties": properties, "synchronize": None,
        "empty_cache": None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.xpu, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.xpu, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def launch():
    Event.calls += 1


@pytest.mark.usefixtures("xpu")
def test_an_intel_gpu_is_timed_between_events():
    clock = gpu_timing.gpu_clock()
    assert clock.device == torch.device("xpu")
    # Two calls of one launch and one of three, once before and five times between events.
    calls = [launch, launch, lambda: [launch() for _ in range(3)]]
    assert clock.time_us(calls, repetitions=5) == pytest.approx(5 * 1000 / 3)
    assert Event.calls == 5 * (1 + 5)


@pytest.mark.usefixtures("xpu")
def test_a_row_is_measured_without_cuda(monkeypatch):
    """Of a case and of the ceilings, whose tensors are the CPU's here."""
    drawn = []

    def setup():
        drawn.append(torch.get_default_device().type)
        return launch

    class CpuClock(gpu_timing.EventClock):
        device = torch.device("cpu")

    case = TimedCall("nothing", setup, 1 << 27, beside_copy=True)
    module = types.SimpleNamespace(cases=lambda: [case])
    monkeypatch.setattr(gpu.importlib, "import_module", lambda name: module)
    for name, measured in {"copy_bandwidth": 1e12, "copy_us": 500.0}.items():
        monkeypatch.setattr(CpuClock, name, lambda *_, measured=measured: measured)
    (result,) = run(gpu.cases(["one"]), CpuClock())
    assert drawn == ["cpu"] * gpu_timing.copies_for(1 << 27)
    assert result.values["us"] == 1000.0
    assert result.values["share_of_copy"] == pytest.approx((1 << 27) / 1e-3 / 1e12, rel=1e-2)


@pytest.mark.usefixtures("xpu")
def test_rows_name_an_intel_gpu():
    pytest.importorskip("triton")
    facts = gpu.device_facts()
    assert facts["device"] == "Intel(R) Arc(TM) B580 Graphics"
    assert facts["multiprocessors"] == 20
    assert "cuda" not in facts


def test_a_gpu_of_cuda_replays_graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert isinstance(gpu_timing.gpu_clock(), gpu_timing.GraphClock)


@pytest.mark.parametrize("measured", ["copy_bandwidth", "copy_us", "matmul_rate"])
def test_ceilings_are_drawn_on_the_intel_gpu(monkeypatch, measured):
    """What is timed is asked for on XPU, which this torch has not."""
    asked = []

    def refused(*size, device=None, **_):
        asked.append(device)
        raise NotImplementedError

    monkeypatch.setattr(torch, "zeros", refused)
    monkeypatch.setattr(torch, "randn", refused)
    arguments = (1 << 20,) if measured == "copy_us" else ()
    with pytest.raises(NotImplementedError):
        getattr(gpu_timing.EventClock(), measured)(*arguments)
    assert asked == ["xpu"]


@pytest.mark.usefixtures("xpu")
def test_commands_that_need_cuda_say_so():
    require_gpu(intel=True)
    with pytest.raises(BadInput, match="needs CUDA"):
        require_gpu()
