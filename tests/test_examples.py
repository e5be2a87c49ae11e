"""Every block of the README and the documents runs as it is printed.

A fence says what it holds: ``python`` (with ``file=NAME``: a file to save; ``after=LINE``: into one
that is there, which tests/test_new_operation.py does), ``bash`` (a command a
line) or ``console`` (``$ `` before a command, what it prints below it), ``text`` what is no code,
``python fragment`` what lacks its surroundings. A page runs from top to bottom in one directory.
Its Python blocks continue each other, but the README's stand for themselves.
"""

import contextlib
import dataclasses
import io
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from anymla.cli.main import main

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NO_CODE = ("text", "mermaid", "python fragment")  # and Sphinx's own, in braces

# Programs that are not run here, and why.
OTHERS = {
    "make": "sets up environments, runs this suite",
    "git": "needs the network",
    "cd": "is the shell's own",
    "python3": "makes an environment",
    "pip": "needs the network",
    "source": "is the shell's own",
    "export": "is the shell's own",
    "pytest": "runs other tests",
    "torchrun": "needs several GPUs",
    "vllm": "needs vLLM",
    "sglang": "needs SGLang and a GPU",
    "python": "needs vLLM",
    "curl": "needs vLLM's server",
    "ncu": "needs a GPU and Nsight Compute",
    "nsys": "needs a GPU and Nsight Systems",
    "proton-viewer": "needs a recording of a GPU",
    "unzip": "looks into a report",
}
# Words of anymla's commands that are parsed but not run, and why.
ELSEWHERE = {
    "cuda": "needs a GPU",
    "--flash-mla": "needs FlashMLA",
    "xpu": "needs an Intel GPU",
    "flash_mla": "needs FlashMLA",
    "cudnn_frontend": "needs cuDNN frontend and a Hopper GPU",
    "--vllm": "needs vLLM",
    "gpu": "needs a GPU",
    "--timeline": "needs a GPU",
    "--report": "takes minutes",
    "build-matrix": "takes minutes",
    "same-code": "takes minutes",
    "before.jsonl": "takes minutes where kernels are interpreted",
    "kernels.zip": "needs kernels of one GPU in Triton's cache",
    "xpu-attention": "needs Intel's compilers",
    "vllm": "needs vLLM",
    "mypackage.attention:sparse_attention": "the reader's own package",
    "mypackage.attention:decode=sparse_attention": "the reader's own package",
    "mypackage.kernels:backward=prefill_attention_backward": "the reader's own package",
}
# Added to commands that take minutes: other tests run the whole of them.
SHORTER = {
    "conformance": ("--jobs", "0", "--case", "I5"),
    "doctor": ("--family", "step_indices"),
}


@dataclasses.dataclass
class Command:
    """A command, what it is given and shall print, and whether it shall fail."""

    words: list[str]
    given: str | None = None
    printed: list[str] = dataclasses.field(default_factory=list)
    fails: bool = False


def commands(language: str, code: str) -> Iterator[Command]:
    """The commands of a block."""
    found: list[Command] = []
    for line in code.replace("\\\n", " ").splitlines():
        if language == "console" and not line.startswith("$ "):
            found[-1].printed.append(line)
            continue
        fails = line.endswith("# fails")
        for part in line.removeprefix("$ ").split(" && "):
            words, given = shlex.split(part, comments=True), None
            if words[:1] == ["echo"] and words[2] == "|":
                _, given, _, *words = words
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                del words[0]
            if words:
                found.append(Command(words, given, fails=fails))
    yield from found


def blocks(page: pathlib.Path) -> list[tuple[str, str]]:
    return FENCE.findall(page.read_text(encoding="utf-8"))


def every_command() -> list[Command]:
    found = [block for page in PAGES for block in blocks(page)]
    shells = [block for block in found if block[0] in ("bash", "console")]
    return [command for block in shells for command in commands(*block)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda p: p.name)
def test_a_page_runs(page, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    # A text of that name, but a short one.
    (tmp_path / "README.md").write_text("Sparse attention, from an official checkpoint to tokens.")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {}
    for kind, code in blocks(page):
        language, _, rest = kind.partition(" ")
        if language in ("bash", "console"):
            for command in commands(language, code):
                run(command)
        elif rest.startswith("file="):
            file = tmp_path / rest.removeprefix("file=").partition(" after=")[0]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(code, encoding="utf-8")
        elif kind == "python":
            names = {} if page.name == "README.md" else names
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed), torch.enable_grad():  # as for a reader
                exec(compile(code, page.name, "exec"), names)
            assert bool(printed.getvalue().strip()) == bool(re.search(r"^print\(", code, re.M))
        else:
            assert kind in NO_CODE or kind.startswith("{"), (
                f"{page.name}: a fence must say what it holds, got {kind!r}"
            )


def run(command: Command) -> None:
    """Run a command of this package; parse it where this machine cannot run it."""
    program, *words = command.words
    name = pathlib.Path(program).name
    if name in OTHERS:
        return
    assert name == "anymla", f"{program} is neither run nor listed as another program"
    if program != name or ELSEWHERE.keys() & {*words}:  # another environment's, or as said there
        found = main.get_command(main.make_context("anymla", list(words)), words[0])
        found.make_context(words[0], words[1:])
        return
    chosen = {"--case", "--list", "--end-to-end"} & {*words}
    short = () if chosen else SHORTER.get(words[0], ())
    result = CliRunner().invoke(main, [*words, *short], input=command.given)
    assert result.exit_code == command.fails, (command, result.output)
    for line in command.printed:
        assert line in result.output.splitlines()
    if command.fails:
        expected = ("FAIL A1", "ok   A4") if words[0] == "conformance" else ("engine: WRONG",)
        assert all(each in result.output for each in expected)


def test_what_is_not_run_is_there() -> None:
    words = {word for command in every_command() for word in command.words[1:]}
    programs = {pathlib.Path(command.words[0]).name for command in every_command()}
    assert programs == {"anymla", *OTHERS}
    assert words >= ELSEWHERE.keys()


def test_installs_name_no_index_that_lacks_the_package() -> None:
    """The package is on no index: it is installed from a clone."""
    sources = [*PAGES, *sorted((ROOT / "src").rglob("*.py"))]
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip3? install( -\S+)* ['\"]?anymla\b", text), path
