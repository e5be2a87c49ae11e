"""Kernels that one machine compiled are found by another, and nothing else is let in."""

import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from unittest import mock

import pytest

from anymla.ops.device import has_triton

if not has_triton():
    pytest.skip("triton is an extra", allow_module_level=True)

from anymla.ops import kernel_archive
from anymla.ops.kernel_archive import ArchiveError, export_kernels, import_kernels

KERNELS = """
    import triton
    import triton.language as tl

    @triton.jit
    def add(x, y, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at) + 1)
"""
# For two architectures, one of them in two forms; says which were found in the cache.
COMPILE = """
    import sys
    import triton
    from triton.backends.compiler import GPUTarget
    from add_kernel import add

    def listener(*, src, metadata, cache_hit, **_):
        print(metadata["target"].arch if not cache_hit else metadata["target"]["arch"]
              if isinstance(metadata["target"], dict) else metadata["target"].arch,
              src.constants[(2,)], "found" if cache_hit else "compiled")

    triton.knobs.compilation.listener = listener
    for architecture, block in ((90, 128), (90, 256), (80, 128)):
        source = triton.compiler.ASTSource(
            add, {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": block})
        kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32))
        assert kernel.asm["cubin"][:4] == b"\\x7fELF"
"""


def _compile(folder: Path, cache: Path) -> list[str]:
    (folder / "add_kernel.py").write_text(textwrap.dedent(KERNELS))
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPILE)],
        capture_output=True,
        text=True,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels' source, and a cache that they were compiled into."""
    folder = tmp_path_factory.mktemp("compiled")
    seen = _compile(folder, folder / "cache")
    assert seen == ["90 128 compiled", "90 256 compiled", "80 128 compiled"]
    host = folder / "cache" / ("B" * 52)  # as Triton keeps its launchers, and helpers of the driver
    host.mkdir()
    (host / "cuda_utils.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF")
    return folder


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_archive, "this_device", lambda: None)


def _exported(place: Path, monkeypatch: pytest.MonkeyPatch, name: str = "kernels.zip") -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place / "cache"))
    assert export_kernels(place / name, "sm_90").kernels == 2
    return place / name


@pytest.fixture
def archive(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An archive of the kernels for sm_90; the cache in force is an empty one."""
    written = _exported(place, monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "empty"))
    return written


def test_triton_finds_what_was_imported_elsewhere(
    place: Path, archive: Path, tmp_path: Path
) -> None:
    """The folder is another one, so that the paths in Triton's group files are new."""
    shipped = import_kernels(archive)
    assert (shipped.device, shipped.kernels, shipped.known) == ("sm_90", 2, 0)
    assert not shipped.compared
    (place / "cache").rename(place / "gone")
    try:
        seen = _compile(place, tmp_path / "empty")
    finally:
        (place / "gone").rename(place / "cache")
    assert seen == ["90 128 found", "90 256 found", "80 128 compiled"]


def test_a_second_import_writes_nothing(archive: Path, tmp_path: Path) -> None:
    import_kernels(archive)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "empty").rglob("*") if p.is_file()}
    assert import_kernels(archive).known == 2
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_a_kernel_appears_when_it_is_whole(archive: Path, tmp_path: Path) -> None:
    """A process that reads beside an import, or after one that was killed, sees no half."""
    from triton.runtime.cache import FileCacheManager

    put = FileCacheManager.put

    def killed(self: FileCacheManager, data: bytes, filename: str, binary: bool = True) -> str:
        if len(list((tmp_path / "empty").rglob("*.cubin"))) == 2:
            raise KeyboardInterrupt
        return str(put(self, data, filename, binary=binary))

    with mock.patch.object(FileCacheManager, "put", killed), pytest.raises(KeyboardInterrupt):
        import_kernels(archive)
    for group in (tmp_path / "empty").rglob("__grp__*"):
        assert all(Path(p).is_file() for p in json.loads(group.read_text())["child_paths"].values())
    assert not list((tmp_path / "empty").rglob("tmp.*"))
    assert import_kernels(archive).known < 2
    assert import_kernels(archive).known == 2


def test_equal_kernels_make_equal_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _exported(place, monkeypatch).read_bytes()
    assert _exported(place, monkeypatch, "again.zip").read_bytes() == first


@pytest.mark.parametrize("missing", ["__grp__add.json", "add.json", "add.cubin"])
def test_what_another_process_is_writing_is_left_out(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    shutil.copytree(place / "cache", tmp_path / "cache")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernels = kernel_archive._cached_kernels(tmp_path / "cache")
    key = next(key for key, each in kernels.items() if each.target["arch"] == 90)
    (tmp_path / "cache" / key / missing).unlink()
    (tmp_path / "cache" / key / "tmp.pid_1").mkdir()
    assert export_kernels(tmp_path / "kernels.zip", "sm_90").kernels == 1


def test_a_device_is_chosen_or_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place / "cache"))
    with pytest.raises(ArchiveError, match="has kernels for sm_80, sm_90: name one"):
        export_kernels(tmp_path / "x.zip")
    with pytest.raises(ArchiveError, match="no kernels for sm_100, but sm_80, sm_90"):
        export_kernels(tmp_path / "x.zip", "sm_100")
    assert not list(tmp_path.iterdir())
    target = {"backend": "cuda", "arch": 80, "warp_size": 32}
    monkeypatch.setattr(kernel_archive, "this_device", lambda: target)
    assert export_kernels(tmp_path / "x.zip").device == "sm_80"


def test_host_code_is_not_shipped(place: Path, archive: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        names = file.namelist()
    assert len(names) > 4
    assert not [name for name in names if name.endswith(".so") or "__grp__" in name]


def test_one_message_names_every_difference(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = {"backend": "cuda", "arch": 100, "warp_size": 32}
    monkeypatch.setattr(kernel_archive, "this_device", lambda: target)
    version = kernel_archive._version
    monkeypatch.setattr(
        kernel_archive, "_version", lambda *names: "9.9" if "torch" in names else version(*names)
    )
    monkeypatch.setattr(kernel_archive, "_code", lambda: "abc")
    with pytest.raises(ArchiveError) as raised:
        import_kernels(archive)
    said = str(raised.value)
    assert said.startswith(f"{archive}: made for something else: device sm_90, here sm_100; ")
    assert f"torch {version('torch')}, here 9.9" in said
    assert "anymla's kernels" in said
    assert "here abc" in said
    assert said.count(", here ") == 3
    assert not (tmp_path / "empty").exists()


def test_tritons_environment_is_compared(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    with pytest.raises(ArchiveError, match="triton's environment none, here DISABLE_LLVM_OPT=true"):
        import_kernels(archive)


def test_a_change_to_a_kernel_changes_the_digest(tmp_path: Path) -> None:
    folder = tmp_path / "ops"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    found = set()
    for text in ("a = 1", "a = 2"):
        (folder / "config.py").write_text(text)
        with mock.patch.object(kernel_archive.anymla.ops, "__file__", str(folder / "__init__.py")):
            found.add(kernel_archive._code.__wrapped__())
    assert len(found) == 2


KEY = "A" * 52
MARK = f"anymla-{'0' * 32}.json"


def _rewritten(archive: Path, folder: Path, change: object) -> Path:
    """Write the archive again with other entries: ``change`` gets them by name."""
    with zipfile.ZipFile(archive) as file:
        entries = {e.filename: (e.external_attr, file.read(e)) for e in file.infolist()}
    change(entries)  # type: ignore[operator]
    with zipfile.ZipFile(folder / "hostile.zip", "w") as file:
        for name, (mode, held) in entries.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode
            file.writestr(entry, held)
    return folder / "hostile.zip"


def _manifest(entries: dict[str, tuple[int, bytes]]) -> dict[str, object]:
    return json.loads(entries["manifest.json"][1])


def _add(name: str, held: bytes = b"x", mode: int = 0o644, listed: bool = True):
    def change(entries: dict[str, tuple[int, bytes]]) -> None:
        entries[name] = mode << 16, held
        if listed:
            manifest = _manifest(entries)
            key, _, rest = name.partition("/")
            kernel = manifest["kernels"].setdefault(key, {"metadata": rest, "files": {}})
            kernel["files"][rest] = hashlib.sha256(held).hexdigest()
            entries["manifest.json"] = 0, json.dumps(manifest).encode()

    return change


def _add_mark(name: str, held: bytes, digest: str = ""):
    def change(entries: dict[str, tuple[int, bytes]]) -> None:
        entries[name] = 0, held
        manifest = _manifest(entries)
        manifest["marks"] = {name: digest or hashlib.sha256(held).hexdigest()}
        entries["manifest.json"] = 0, json.dumps(manifest).encode()

    return change


def _first(entries: dict[str, tuple[int, bytes]], ending: str) -> str:
    return next(name for name in entries if name.endswith(ending))


def _damaged(entries: dict[str, tuple[int, bytes]]) -> None:
    name = _first(entries, ".cubin")
    entries[name] = 0, entries[name][1][:-1] + b"?"


def _without_manifest(entries: dict[str, tuple[int, bytes]]) -> None:
    del entries["manifest.json"]


def _odd_manifest(entries: dict[str, tuple[int, bytes]]) -> None:
    manifest = _manifest(entries)
    manifest["kernels"] = [1]
    entries["manifest.json"] = 0, json.dumps(manifest).encode()


def _deep_manifest(entries: dict[str, tuple[int, bytes]]) -> None:
    entries["manifest.json"] = 0, b"[" * 100_000


def _other_target(entries: dict[str, tuple[int, bytes]]) -> None:
    manifest = _manifest(entries)
    manifest["target"]["arch"] = 80
    entries["manifest.json"] = 0, json.dumps(manifest).encode()


def _odd_target(entries: dict[str, tuple[int, bytes]]) -> None:
    manifest = _manifest(entries)
    manifest["target"] = {"backend": "abacus", "arch": 1, "warp_size": 1}
    manifest["kernels"] = {}
    for name in [name for name in entries if name != "manifest.json"]:
        del entries[name]
    entries["manifest.json"] = 0, json.dumps(manifest).encode()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_add("../outside", listed=False), "no file of a kernel"),
        (_add("/etc/passwd", listed=False), "no file of a kernel"),
        (_add(f"{KEY}/../../outside", listed=False), "no file of a kernel"),
        (_add(f"{KEY}/..", listed=False), "no file of a kernel"),
        (_add(f"{KEY}/deeper/x", listed=False), "no file of a kernel"),
        (_add(f"{KEY}/a\\b", listed=False), "no file of a kernel"),
        (_add("short/x.cubin", listed=False), "no file of a kernel"),
        (_add(f"{KEY}/launcher.so"), "no file of a kernel"),
        (_add(f"{KEY}/x.cubin", b"/etc/passwd", stat.S_IFLNK | 0o777), "link"),
        (_add(f"{KEY}/x.cubin", listed=False), "lists other files"),
        (_add(f"{KEY}/x.cubin", bytes((64 << 20) + 1)), "larger than 64 MiB"),
        (_add(f"{KEY}/x.json", b"{}"), "is not for sm_90"),
        (_add(f"{KEY}/x.json", b"no JSON"), "not JSON"),
        (_add(MARK, b"{}", listed=False), "lists other files"),
        (_add_mark(MARK, b"[]"), "no archive of kernels"),
        (_add_mark(MARK, b"{}", "0" * 64), "is damaged"),
        (_add_mark(MARK, bytes((4 << 20) + 1)), "larger than 4 MiB"),
        (_add_mark("../" + MARK, b"{}"), "no file of a kernel"),
        (_damaged, "is damaged"),
        (_without_manifest, "no manifest"),
        (_odd_manifest, "lacks what a manifest says"),
        (_deep_manifest, "no archive of kernels"),
        (_other_target, "is not for sm_90"),
        (_odd_target, "compiles nothing for"),
    ],
)
def test_what_is_no_archive_of_kernels_is_refused_whole(
    archive: Path, tmp_path: Path, change: object, said: str
) -> None:
    hostile = _rewritten(archive, tmp_path, change)
    with pytest.raises(ArchiveError, match=said) as raised:
        import_kernels(hostile)
    assert str(hostile) in str(raised.value)
    assert set(tmp_path.iterdir()) <= {hostile, archive}


def test_other_files_are_refused(archive: Path, tmp_path: Path) -> None:
    held = archive.read_bytes()
    for name, text in {"empty": b"", "text": b"kernels", "cut": held[: len(held) // 2]}.items():
        (tmp_path / name).write_bytes(text)
        with pytest.raises(ArchiveError, match="no archive of kernels"):
            import_kernels(tmp_path / name)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ArchiveError, match="a pipe"):
        import_kernels(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        import_kernels(tmp_path / "nothing")


def test_too_many_bytes_are_refused_before_any_is_read(
    archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_archive, "_MOST_BYTES", 1 << 10)
    unread = mock.patch.object(zipfile.ZipFile, "read", side_effect=AssertionError)
    with unread, pytest.raises(ArchiveError, match="holds more than"):
        import_kernels(archive)


def test_two_files_of_one_name_are_refused(archive: Path, tmp_path: Path) -> None:
    held = tmp_path / "twice.zip"
    held.write_bytes(archive.read_bytes())
    with zipfile.ZipFile(held, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("manifest.json", "{}")
    with pytest.raises(ArchiveError, match="two files of one name"):
        import_kernels(held)
