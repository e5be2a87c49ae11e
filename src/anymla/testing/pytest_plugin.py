"""Pytest settings that the package's tests and the public conformance suite share."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import random
import zlib
from collections.abc import Iterator

import pytest
import torch

# Triton and anymla read the variable when first imported, and the compiler imports triton.
if not torch.cuda.is_available() and not torch.xpu.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from anymla.ops.compile_notice import NOTICE
from anymla.ops.device import target_of
from anymla.testing.poison import poisoned_empty
from crossrun import amd, ptx

MARKERS = {
    "gpu(target=None)": "needs a GPU, of this target if one is named; skipped elsewhere",
    "slow": "takes long, and is left to make test-all",
    "bench": "measures time",
    "compiles": "traces with torch.compile, and therefore runs without poisoned allocations",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--ptx-target`` and ``--amd-target``."""
    parser.addoption(
        "--ptx-target",
        choices=list(ptx.TARGETS),
        help="compile kernels for this older NVIDIA target, and execute its PTX on the newer GPU",
    )
    parser.addoption(
        "--amd-target",
        choices=list(amd.TARGETS),
        help="with TRITON_INTERPRET=0: compile kernels for this AMD target, and interpret its code",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, choose the hypothesis profile, and limit torch's threads."""
    _execute_as(config.getoption("--ptx-target"))
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.getoption("--amd-target"):
        _interpret_amd(config.getoption("--amd-target"))
    else:
        _interpret_triton()
    _hypothesis_profiles()
    # The tests' tensors are small; on a busy machine threads mostly wait for each other (a file of
    # 8 s took 164 s with two).
    torch.set_num_threads(1)
    NOTICE.patience = math.inf  # the contents of stderr in a test must not depend on caches


def _execute_as(target: str | None) -> None:
    if target is None:
        return
    try:
        ptx.install(target)
        ptx.require_newer_gpu()
    except ptx.WrongTarget as error:
        raise pytest.UsageError(f"--ptx-target {target}: {error}") from error


def _interpret_amd(target: str) -> None:
    from anymla.testing import amd_on_cpu

    if amd_on_cpu.missing():
        raise pytest.UsageError(f"--amd-target {target}: {amd_on_cpu.missing()}")
    amd_on_cpu.install(target)


def _hypothesis_profiles() -> None:
    """Choose hypothesis' profile if it is installed; the conformance suite does not need it.

    Drawing numbers is torch's part (from the seed), so examples are cheap to draw but not to run:
    no deadline, and slow data generation is not a health problem.
    """
    if importlib.util.find_spec("hypothesis") is None:
        return
    from hypothesis import HealthCheck, settings

    common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("ci", derandomize=True, max_examples=20, **common)  # type: ignore[arg-type]
    settings.register_profile("dev", max_examples=20, **common)  # type: ignore[arg-type]
    settings.register_profile("night", max_examples=500, **common)  # type: ignore[arg-type]
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _interpret_triton() -> None:
    """Let Triton kernels run in the repaired interpreter on machines without a GPU.

    With TRITON_INTERPRET=0 they are compiled for the CPU, if that is possible.
    """
    from anymla.ops.device import has_triton
    from anymla.testing import intel_on_cpu

    if not torch.cuda.is_available() and not intel_on_cpu.missing():
        intel_on_cpu.install()
    elif not has_triton():
        return
    elif os.environ.get("TRITON_INTERPRET") == "1":
        from crossrun.interpreter import install

        install()
    elif torch.cuda.is_available():
        from anymla.testing.device_bridge import install as install_bridge

        install_bridge()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked gpu where torch sees none, or one of another target."""
    here = None
    if torch.cuda.is_available() or torch.xpu.is_available():
        here = target_of(torch.device("cuda" if torch.cuda.is_available() else "xpu", 0)).name
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        if here is None:
            reason = "needs a GPU, and torch sees none on this machine"
        elif marker.args and marker.args[0] != here:
            reason = f"needs a GPU of {marker.args[0]}, and this one is of {here}"
        else:
            continue
        item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def inference_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed from the test's name, disable autograd, and poison the package's empty tensors."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    # Tracing cannot see through the poisoned functions, so tests of torch.compile run without them.
    traces = request.node.get_closest_marker("compiles") is not None
    with torch.no_grad(), contextlib.nullcontext() if traces else poisoned_empty():
        yield
