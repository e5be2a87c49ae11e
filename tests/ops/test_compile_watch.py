"""Kernels that Triton compiles after a warm-up are named and counted, or refused."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from anymla.ops import compile_watch
from anymla.ops.device import has_triton

needs_triton = pytest.mark.skipif(not has_triton(), reason="triton is an extra")
KERNELS = """
    import triton
    import triton.language as tl
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    @triton.jit
    def add(x, y, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at) + 1)

    @gluon.jit
    def negate(x, BLOCK: gl.constexpr):
        at = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
        gl.store(x + at, -gl.load(x + at))
"""
START = """
    import logging, sys
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from kernels import add, negate
    from anymla.ops.compile_watch import WATCH, CompiledInService

    logging.basicConfig(format="%(levelname)s %(message)s", stream=sys.stdout)
    def compile(block, kernel=add, source=triton.compiler.ASTSource):
        types = {name: "*fp32" for name in kernel.arg_names[:-1]} | {"BLOCK": "constexpr"}
        made = source(kernel, types, {"BLOCK": block}, {(0,): [["tt.divisibility", 16]]})
        return triton.compile(made, target=GPUTarget("cuda", 90, 32))
"""


def python(folder: Path, code: str, mode: str | None) -> list[str]:
    """Run code that compiles kernels, without their interpreter; return what it prints."""
    (folder / "kernels.py").write_text(textwrap.dedent(KERNELS))
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    chosen = {} if mode is None else {"ANYMLA_COMPILE_WATCH": mode}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(START) + textwrap.dedent(code)],
        capture_output=True, text=True,
        env={**os.environ, **settings, **chosen, "PYTHONPATH": paths},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@needs_triton
def test_a_kernel_after_the_warm_up_is_named_and_counted(tmp_path: Path) -> None:
    """Before it, and from the cache, it is not; a listener that was there hears of all."""
    said = python(
        tmp_path,
        """
        heard = []
        triton.knobs.compilation.listener = lambda **given: heard.append(given["cache_hit"])
        compile(128)
        assert WATCH.begin()
        assert WATCH.begin()
        WATCH.noticed.append(lambda said: print("noticed", said[:40]))
        compile(128)
        with WATCH.paused():
            compile(64)
        print(WATCH.compiled)
        compile(256)
        print(WATCH.compiled)
        compile(128, negate, GluonASTSource)
        print(WATCH.compiled, heard)
        """,
        "warn",
    )
    first = "kernel compiled in service: add(x: *fp32 aligned, y: *fp32, BLOCK=256)"
    assert said == [
        "0",
        f"WARNING anymla: {first}",
        f"noticed {first[:40]}",
        "1",
        "WARNING anymla: kernel compiled in service: negate(x: *fp32 aligned, BLOCK=128)",
        "noticed kernel compiled in service: negate(x: *f",
        "2 [False, True, False, False, False]",
    ]


@needs_triton
def test_an_error_is_raised_where_it_is_launched(tmp_path: Path) -> None:
    said = python(
        tmp_path,
        """
        compile(128)
        WATCH.begin()
        try:
            compile(256)
        except CompiledInService as error:
            print(error)
        compile(128)
        """,
        "error",
    )
    assert said[-1] == "kernel compiled in service: add(x: *fp32 aligned, y: *fp32, BLOCK=256)"
    assert len(said) == 2


@needs_triton
@pytest.mark.parametrize("mode", [None, "off"])
def test_it_is_off_where_nobody_asked_for_it(tmp_path: Path, mode: str | None) -> None:
    said = python(
        tmp_path,
        """
        print(WATCH.begin(), triton.knobs.compilation.listener)
        compile(256)
        print(WATCH.compiled)
        """,
        mode,
    )
    assert said == ["False None", "0"]


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYMLA_COMPILE_WATCH", "on")
    with pytest.raises(ValueError, match="must be one of off, warn, error, got 'on'"):
        compile_watch.CompileWatch().begin()


def test_a_source_of_another_kind_is_named() -> None:
    """Triton also compiles files of intermediate code."""
    assert compile_watch.describe(SimpleNamespace(name="read_from_a_file")) == "read_from_a_file"
    assert compile_watch.describe(object()) == "a kernel"


def test_parts_of_tuples_are_named() -> None:
    source = SimpleNamespace(
        name="k",
        fn=SimpleNamespace(arg_names=["x", "sizes"]),
        signature={"x": "*fp32", "sizes": ("i32", "constexpr")},
        constants={(1, 1): 8},
        attrs={},
    )
    said = compile_watch.describe(source)
    assert said.startswith("k(x: *fp32, sizes: ('i32', 'constexpr')")
