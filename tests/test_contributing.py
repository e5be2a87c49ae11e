"""What a contributor meets first: versions agree, templates and hooks name what there is."""

import pathlib
import re

import pytest
import yaml

import anymla

ROOT = pathlib.Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github").rglob("*.yml"))
TEXTS = [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.*")]


def read(path: pathlib.Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_file_names_one_version() -> None:
    headings = re.findall(r"^## (\S+)$", read(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == anymla.__version__
    versions = [tuple(map(int, each.split("."))) for each in headings]
    assert versions == sorted(versions, reverse=True)
    citation = yaml.safe_load(read(ROOT / "CITATION.cff"))
    assert citation["version"] == anymla.__version__
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] in read(ROOT / "pyproject.toml")
    assert {"title", "authors", "message"} <= citation.keys()


def test_hooks_run_the_ruff_that_is_pinned_and_files_that_there_are() -> None:
    hooks = yaml.safe_load(read(ROOT / ".pre-commit-config.yaml"))["repos"][0]["hooks"]
    pinned = re.search(r"^ruff==\S+$", read(ROOT / "constraints.txt"), re.MULTILINE)[0]
    ruffs = [hook for hook in hooks if hook["entry"].startswith("ruff ")]
    assert [hook["entry"].split()[1] for hook in ruffs] == ["check", "format"]
    assert all(hook["additional_dependencies"] == [pinned] for hook in ruffs)
    (docstrings,) = [hook["entry"] for hook in hooks if hook not in ruffs]
    program, file = docstrings.split()
    assert program == "python3"
    assert (ROOT / file).is_file()


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load(read(ROOT / ".github" / "workflows" / "ci.yml"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert workflow["permissions"] == {"contents": "read"}
    assert job["timeout-minutes"] <= 120


@pytest.mark.parametrize(
    "form", [f for f in FORMS if "workflows" not in f.parts], ids=lambda f: f.stem
)
def test_forms_ask_for_what_a_fault_is_found_by(form) -> None:
    found = yaml.safe_load(read(form))
    assert {"name", "description", "body"} <= found.keys()
    ids = [field["id"] for field in found["body"]]
    assert len(ids) == len({*ids})
    assert all(field["attributes"]["label"] for field in found["body"])
    if form.stem != "proposal":
        assert {"device", "report", "conformance"} <= {*ids}


@pytest.mark.parametrize("text", TEXTS, ids=lambda path: path.name)
def test_targets_of_make_that_are_named_exist(text) -> None:
    targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    assert {*re.findall(r"`make ([a-z-]+)", read(text))} <= {*targets}
