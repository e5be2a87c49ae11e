"""A mark holds where every kernel is in the cache and nothing differs, and nowhere else."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from anymla.ops.device import has_triton

if not has_triton():
    pytest.skip("triton is an extra", allow_module_level=True)

from anymla.ops import compile_mark, kernel_archive
from anymla.ops.compile_mark import CompileMark
from anymla.ops.device import TARGETS

KERNEL = """
    import sys
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget

    @triton.jit
    def add(x, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(x + at, tl.load(x + at) + 1)

    for block in (128, 256):
        source = triton.compiler.ASTSource(
            add, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": block})
        print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).hash)
"""
PURPOSE = {"steps": [1, 2, 8], "model": {"layers": 4}}
CPU = torch.device("cpu")
Change = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A cache, and the hashes of its kernels."""
    folder = tmp_path_factory.mktemp("compiled")
    (folder / "add_kernel.py").write_text(textwrap.dedent(KERNEL))
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, str(folder / "add_kernel.py")],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    return folder / "cache", done.stdout.split()


@pytest.fixture
def marked(
    compiled: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A cache of a machine with a GPU, marked."""
    cache = tmp_path / "cache"
    shutil.copytree(compiled[0], cache)
    target = {"backend": "cuda", "arch": 90, "warp_size": 32}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    monkeypatch.setattr(compile_mark, "INTERPRETED", False)
    monkeypatch.setattr(compile_mark, "this_device", lambda: target)
    monkeypatch.setattr(compile_mark, "target_of", lambda device: TARGETS["sm_90"])
    assert not CompileMark(PURPOSE, CPU).is_valid()
    CompileMark(PURPOSE, CPU).leave(compiled[1])
    assert CompileMark(PURPOSE, CPU).is_valid()
    return cache


def _mark(cache: Path) -> Path:
    (found,) = cache.glob("anymla-*.json")
    return found


def _set(owner: object, name: str, value: object) -> Change:
    return lambda patch: patch.setattr(owner, name, value)


SMALLER = dataclasses.replace(TARGETS["sm_90"], sm_count=114)
CHANGES: dict[str, Change] = {
    "the number of SMs": _set(compile_mark, "target_of", lambda device: SMALLER),
    "the architecture": _set(
        compile_mark, "this_device", lambda: {"backend": "cuda", "arch": 80, "warp_size": 32}
    ),
    "no device": _set(compile_mark, "this_device", lambda: None),
    "the interpreter": _set(compile_mark, "INTERPRETED", True),
    "a package": _set(kernel_archive, "_version", lambda *names: "9.9"),
    "this package": _set(compile_mark, "_code", lambda: "abc"),
    "Triton's environment": lambda patch: patch.setenv("DISABLE_LLVM_OPT", "1"),
    "what is replaced": lambda patch: patch.setenv("ANYMLA_VLLM", "attention"),
    "an option of the engine": lambda patch: patch.setenv("VLLM_MOE_SKIP_PADDING", "0"),
    "kernels are always compiled": lambda patch: patch.setenv("TRITON_ALWAYS_COMPILE", "1"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_mark_holds_only_where_nothing_differs(
    marked: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    with monkeypatch.context() as patch:
        CHANGES[what](patch)
        assert not CompileMark(PURPOSE, CPU).is_valid()
    assert CompileMark(PURPOSE, CPU).is_valid()


@pytest.mark.parametrize(
    "purpose", [PURPOSE | {"steps": [1, 2]}, PURPOSE | {"model": {"layers": 5}}, {}]
)
def test_another_purpose_has_another_mark(marked: Path, purpose: dict[str, object]) -> None:
    assert not CompileMark(purpose, CPU).is_valid()


@pytest.mark.parametrize("missing", ["__grp__add.json", "add.json", "add.cubin", ""])
def test_a_mark_holds_only_while_every_kernel_is_whole(marked: Path, missing: str) -> None:
    folder = next(each for each in sorted(marked.iterdir()) if (each / "add.cubin").exists())
    if missing:
        (folder / missing).unlink()
    else:
        shutil.rmtree(folder)
    assert not CompileMark(PURPOSE, CPU).is_valid()


@pytest.mark.parametrize(
    "held",
    [b"", b"{", b"[]", b'{"kernels": []}', b"\xff", "no kernels", "another's", "a name beyond"],
)
def test_a_damaged_mark_does_not_hold(marked: Path, held: bytes | str) -> None:
    mark = _mark(marked)
    if isinstance(held, str):
        words = json.loads(mark.read_text())
        change = {
            "no kernels": {"kernels": []},
            "another's": {"made_for": words["made_for"] | {"code": "abc"}},
            "a name beyond": {"kernels": [f"../{marked.name}/{words['kernels'][0]}"]},
        }[held]
        held = json.dumps(words | change).encode()
    mark.write_bytes(held)
    assert not CompileMark(PURPOSE, CPU).is_valid()


def test_a_cache_in_another_place_has_no_mark(
    marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    mark = CompileMark(PURPOSE, CPU)
    assert not mark.is_valid()
    mark.leave(["00" * 32])  # no folder to write it to: nothing is raised
    assert not mark.is_valid()


def test_a_cache_that_moves_keeps_its_mark(
    marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths say nothing of what is compiled."""
    marked.rename(tmp_path / "moved")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "moved"))
    monkeypatch.setenv("ANYMLA_METRICS_DIR", "/tmp/of-this-start")
    assert CompileMark(PURPOSE, CPU).is_valid()


def test_nothing_compiled_leaves_no_mark(marked: Path) -> None:
    _mark(marked).unlink()
    CompileMark(PURPOSE, CPU).leave([])
    assert not list(marked.glob("anymla-*"))
    assert not list(marked.glob(".anymla-*"))


def test_a_mark_travels_with_its_kernels(
    marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_archive, "builds_launchers", lambda: False)
    assert kernel_archive.export_kernels(tmp_path / "kernels.zip", "sm_90").marks == 1
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
    assert not CompileMark(PURPOSE, CPU).is_valid()
    assert kernel_archive.import_kernels(tmp_path / "kernels.zip").marks == 1
    assert CompileMark(PURPOSE, CPU).is_valid()
    for changed in CHANGES.values():
        with monkeypatch.context() as patch:
            changed(patch)
            assert not CompileMark(PURPOSE, CPU).is_valid()


def test_a_mark_stays_where_kernels_have_host_libraries(
    marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not travel, so that the next start has to look its kernels up to build them."""
    monkeypatch.setattr(kernel_archive, "builds_launchers", lambda: True)
    assert kernel_archive.export_kernels(tmp_path / "kernels.zip", "sm_90").marks == 0


def test_a_mark_that_is_there_stays(
    marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_archive, "builds_launchers", lambda: False)
    kernel_archive.export_kernels(tmp_path / "kernels.zip", "sm_90")
    _mark(marked).write_text("{}")
    kernel_archive.import_kernels(tmp_path / "kernels.zip")
    assert _mark(marked).read_text() == "{}"


@pytest.mark.parametrize("what", ["a kernel is gone", "for another device", "damaged"])
def test_a_mark_without_its_kernels_stays_behind(
    marked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(kernel_archive, "builds_launchers", lambda: False)
    words = json.loads(_mark(marked).read_text())
    if what == "a kernel is gone":
        shutil.rmtree(marked / words["kernels"][0])
    elif what == "for another device":
        words["made_for"]["target"]["arch"] = 80
        _mark(marked).write_text(json.dumps(words))
    else:
        _mark(marked).write_text("[]")
    shipped = kernel_archive.export_kernels(tmp_path / "kernels.zip", "sm_90")
    assert (shipped.marks, shipped.kernels) == (0, 1 if what == "a kernel is gone" else 2)
