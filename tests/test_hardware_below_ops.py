"""Layers, models, runtime and engines do not choose kernels: what asks for hardware is in ``ops``.

They pass ``backend=`` on and compare it with None. Where a device decides how memory, graphs,
streams or collectives are used, that is not a choice of a kernel.
"""

import ast
import re
from pathlib import Path

import pytest

import anymla

ROOT = Path(anymla.__path__[0])
ROOMS = ("layers", "model", "runtime", "engines", "compat", "train")
# Facts about a device's architecture, and files that say how a kernel is launched.
FACTS = {"Target", "target_of", "has_triton", "has_gluon", "has_pdl", "target_has_pdl", "runs_on"}
LAUNCHING = re.compile(
    r"anymla\.ops\.(\w+\.)*_?(gluon|triton|numba|torch)_\w+|anymla\.ops\..*config"
)
BACKENDS = re.compile(r"triton|reference|(gluon|numba|torch)_\w+")
# What remains, and why.
EXCEPTIONS = {
    # Collectives through peers' memory are Triton kernels that only ``PeerMemory`` launches.
    "layers/ranks.py": {"anymla.ops._triton_rank_sum", "anymla.ops.choice.triton_ranks"},
    # The backend of a product for which Triton has no kernel.
    "layers/compressor.py": {"anymla.ops.linear.config"},
    "layers/dspark.py": {"anymla.ops.linear.config"},
    "layers/linear.py": {"anymla.ops.linear.config"},
    "model/transformer.py": {"anymla.ops.linear.config"},
    # The shape of FlashMLA's metadata, which has a row for each SM.
    "compat/_scheduling.py": {"target_of"},
}


def asked(text: str) -> set[str]:
    """Find the imports and comparisons by which a file asks for hardware or a backend."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {alias.name for alias in node.names}
            found |= names & FACTS if module.startswith("anymla.ops") else set()
            found |= {
                m for m in (module, *(f"{module}.{n}" for n in names)) if LAUNCHING.fullmatch(m)
            }
        elif isinstance(node, ast.Compare):
            for each in (node.left, *node.comparators):
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    found |= {each.value} if BACKENDS.fullmatch(each.value) else set()
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_no_kernel_is_chosen_above_ops(room: str) -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in sorted((ROOT / room).rglob("*.py"))
        if (names := asked(path.read_text(encoding="utf-8")))
    }
    assert found == {file: names for file, names in EXCEPTIONS.items() if file.startswith(room)}


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from anymla.ops.device import target_of", "target_of"),
        (
            "from anymla.ops.attention.prefill_config import X",
            "anymla.ops.attention.prefill_config",
        ),
        ("from anymla.ops.moe import triton_experts", "anymla.ops.moe.triton_experts"),
        ("good = operation.resolve(x).name == 'gluon_sm90'", "gluon_sm90"),
        ("good = 'triton' != backend", "triton"),
    ],
)
def test_every_way_to_ask_is_seen(line: str, name: str) -> None:
    assert asked(line) == {name}
