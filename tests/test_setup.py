"""What installs the package: pinned versions, least versions, and the Makefile's messages."""

import os
import runpy
import shutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements(*extras: str) -> list[Requirement]:
    texts = PROJECT["dependencies"] + [
        each for extra in extras for each in PROJECT["optional-dependencies"][extra]
    ]
    return [each for each in map(Requirement, texts) if each.name != "anymla"]


def test_everything_is_pinned_within_what_is_allowed() -> None:
    pinned = pins("constraints.txt")
    for each in requirements("triton", "cpu", "transformers", "test", "report", "docs", "dev"):
        assert each.specifier.contains(pinned[each.name]), each


def test_the_least_versions_are_those_that_are_run() -> None:
    least = {
        each.name: next(s.version for s in each.specifier if s.operator == ">=")
        for each in requirements("triton")
    }
    run = pins("constraints-lowest.txt")
    assert set(run) == set(least)
    for name, version in least.items():
        assert run[name] == version or run[name].startswith(f"{version}."), name


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_triton_is_asked_for_where_it_has_wheels(system) -> None:
    triton = next(each for each in requirements("triton") if each.name == "triton")
    assert triton.marker is not None
    assert triton.marker.evaluate({"sys_platform": "linux"})
    assert not triton.marker.evaluate({"sys_platform": system})


def _make(tmp_path: Path, python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run make with a Python of our own, in a copy of what make reads; ``make demo`` by default."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{python}\n")
    fake.chmod(0o755)
    plain = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    return subprocess.run(
        ["make", *(words or ["demo"]), f"PYTHON={fake}"],
        cwd=tmp_path,
        env=plain,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_without_venv_is_told_what_to_install(tmp_path) -> None:
    done = _make(tmp_path, '[ "$1" != -m ]')
    assert done.returncode
    assert "apt install python3-venv" in done.stderr


def test_pips_reason_is_shown_once_it_fails(tmp_path) -> None:
    pip = "echo The conflict is caused by: somebody; exit 1"
    done = _make(
        tmp_path,
        '[ "$1" = -c ] && exit 0\nmkdir -p "$3/bin"\n'
        f'printf \'#!/bin/sh\\n{pip}\\n\' > "$3/bin/python"\nchmod +x "$3/bin/python"',
    )
    assert done.returncode
    assert "The conflict is caused by: somebody" in done.stderr
    assert not (tmp_path / ".venv" / ".ready").exists()


def test_an_old_python_is_named(tmp_path) -> None:
    done = _make(tmp_path, "exit 1")
    assert done.returncode
    assert "3.11 or newer" in done.stderr


@pytest.mark.parametrize("words", [("F=indexers",), ()])
def test_a_family_that_there_is_not_is_refused(words, tmp_path) -> None:
    ready = tmp_path / ".venv" / ".ready"
    (tmp_path / "src" / "anymla" / "ops" / "indexer").mkdir(parents=True)
    ready.parent.mkdir()
    ready.touch()
    done = _make(tmp_path, "exit 1", "family", f"--old-file={ready.relative_to(tmp_path)}", *words)
    assert done.returncode
    assert "name a folder of src/anymla/ops: make family F=indexer" in done.stderr


@pytest.mark.parametrize(
    ("remote", "home"),
    [
        ("https://host.example/owner/name.git", "https://host.example/owner/name"),
        ("https://user:secret@host.example/owner/name", "https://host.example/owner/name"),
        ("git@host.example:owner/name.git", "https://host.example/owner/name"),
        ("ssh://git@host.example/owner/name", "https://host.example/owner/name"),
        ("/srv/git/name.git", None),
        ("file:///srv/git/name", None),
        ("", None),
    ],
)
def test_the_metadata_names_where_it_was_built_from(remote, home, monkeypatch) -> None:
    hatchling = types.ModuleType("hatchling.metadata.plugin.interface")  # pip builds with its own
    hatchling.MetadataHookInterface = object
    monkeypatch.setitem(sys.modules, hatchling.__name__, hatchling)
    urls = runpy.run_path(str(ROOT / "hatch_build.py"))["project_urls"](remote)
    pages = {"Homepage": home, "Repository": home, "Issues": f"{home}/issues"}
    assert urls == (pages if home else {})


def test_the_metadata_says_what_it_is() -> None:
    assert {"deepseek-v4", "flashmla", "sparse-attention", "triton"} <= {*PROJECT["keywords"]}
    assert any(each.startswith("Topic :: ") for each in PROJECT["classifiers"])
    assert "urls" in PROJECT["dynamic"]


def test_this_python_is_one_that_is_listed() -> None:
    name = f"Programming Language :: Python :: {sys.version_info[0]}.{sys.version_info[1]}"
    if sys.version_info[:2] <= (3, 13):
        assert name in PROJECT["classifiers"]


def test_every_slow_test_exists(gone: list[str]) -> None:
    """A worker of xdist that raises instead ends without a word."""
    assert gone == []
