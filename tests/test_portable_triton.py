"""The subset of Triton that portable kernels keep to, on which every other vendor rests."""

import ast
import pathlib

import pytest

import anymla

ROOT = pathlib.Path(anymla.__file__).parent
BUILDS = pathlib.Path(__file__).parents[1] / "lab" / "builds"
FILES = sorted({*ROOT.rglob("triton_*.py"), *ROOT.rglob("_triton_*.py")})
# A family lists the builds of a kernel that several share.
KERNEL_FILES = [path for path in FILES if path.parent.parent == ROOT / "ops"]

# Name -> why a portable kernel does without it.
FORBIDDEN = {
    "inline_asm_elementwise": "no inline assembly: it ties a kernel to one vendor",
    "make_block_ptr": "removed from newer Triton releases",
    "advance": "goes with make_block_ptr",
    "autotune": "slow to start, and may change bits from run to run",
    "make_tensor_descriptor": "needs TMA, or a fallback that is slower than plain addresses",
    "num_threads": "no assumption about the size of a warp",
}


def names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Name):
            yield node.id, node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_keeps_to_the_portable_subset(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = [
        f"line {line}: {name} ({FORBIDDEN[name]})"
        for name, line in names(tree)
        if name in FORBIDDEN
    ]
    assert not used


@pytest.mark.parametrize("path", KERNEL_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_can_be_built_without_a_device(path):
    """A file that defines a kernel lists its builds, or they are derived from launches."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    kernels = [function.name for function in functions if function.name.endswith("_kernel")]
    if not kernels or (BUILDS / f"{path.parent.name}.py").exists():
        return
    assert "builds" in {function.name for function in functions}, kernels


def test_the_lint_sees_what_it_forbids():
    tree = ast.parse("import triton\n@triton.autotune([], [])\ndef f():\n    tl.advance(p, 1)\n")
    assert {name for name, _ in names(tree)} >= {"autotune", "advance"}
