"""Conversion of a pytest report from a GPU to rows of evidence, one a family of operations.

pytest -k "triton or device" tests/ops tests/test_conformance.py --junitxml report.xml
python -m lab.gpu_record report.xml COMMIT >> benchmarks/results/gpu_tests.jsonl
"""

from __future__ import annotations

import collections
import datetime
import json
import pkgutil
import platform
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import anymla.ops
from anymla.ops.device import target_of

COMMAND = 'pytest -k "triton or device" tests/ops tests/test_conformance.py'


def rows(report: Path, facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Count passed, failed and skipped tests by family; conformance is a family as well.

    Args:
        report: path of JUnit XML as pytest writes it.
        facts: fields that every row carries.
    """
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in ElementTree.parse(report).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            outcome = "failed"
        else:
            outcome = "skipped" if "skipped" in outcomes else "passed"
        counts[_family(str(case.get("classname")), str(case.get("name")))][outcome] += 1
    for family, found in sorted(counts.items()):
        tallies = {name: found[name] for name in ("passed", "failed", "skipped")}
        yield {"family": family, **tallies, **facts}


def device_facts(commit: str) -> dict[str, Any]:
    """Describe the device and the versions of a test run."""
    import triton

    device = torch.device("cuda")
    return {
        "target": target_of(device).name,
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "command": COMMAND,
    }


def _family(classname: str, test: str) -> str:
    """Return the family of a test: its folder, or a part of its file's or own name."""
    *folders, name = classname.split(".")
    name = name.removeprefix("test_")
    families = [module.name for module in pkgutil.iter_modules(anymla.ops.__path__) if module.ispkg]
    matching = [family for family in families if family in folders]
    matching = matching or [family for family in families if name.startswith(family)]
    matching = matching or [family for family in families if family in test]
    if matching:
        return max(matching, key=len)
    return "conformance" if "conformance" in classname or name == "cases" else name


if __name__ == "__main__":
    for row in rows(Path(sys.argv[1]), device_facts(sys.argv[2])):
        print(json.dumps(row))
