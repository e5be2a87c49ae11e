"""Drafts: several passes over the same metadata, steps of uneven requests, a context's rows."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from servers import HERE, SOURCE, look_up, needs_source, needs_vllm

from anymla.cli.main import main


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answer = tmp_path_factory.mktemp("drafts") / "answer.json"
    command = [sys.executable, str(HERE / "draft_passes.py"), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(answer.read_text()))


def test_each_pass_plans_by_its_own_lengths_and_its_layers_share_that(
    found: dict[str, Any],
) -> None:
    assert found["planned"] == [[63, 7]] * 2 + [[64, 8]] * 2


def test_rows_of_a_context_are_those_of_the_layers_own_kernel(found: dict[str, Any]) -> None:
    assert found["inserted"] == {"same bytes": True, "others are theirs": True}


def test_graphs_replay_steps_of_up_to_all_drafts_a_request(found: dict[str, Any]) -> None:
    """VLLM refuses to verify adaptively where a builder has no such bound."""
    assert found["bounds"] == [6, 6, 6]


@needs_vllm
def test_builders_go_by_the_requests_that_the_device_knows(tmp_path: Path) -> None:
    """Requests of 3, 1 and 2 tokens, of which the host thinks that they have 2 each."""
    uneven = look_up("uneven_builders.py", tmp_path, "auto")
    positions = [127, 128, 129, 7, 255, 256]
    assert uneven["requests"] == [0, 0, 0, 1, 2, 2]
    assert uneven["window"] == [min(at + 1, 128) for at in positions] + [0, 0]
    assert uneven["entries"] == [(at + 1) // 128 for at in positions] + [0, 0]
    assert uneven["visible"] == [(at + 1) // 4 for at in positions] + [0, 0]
    assert uneven["accepted"] is None  # by vLLM, of graphs for such steps


@needs_vllm
@needs_source
@pytest.mark.parametrize(
    ("device", "theirs"),
    [
        ("sm_90", "DeepseekV4FlashMLAAttention"),
        # Whose rows of a context hold other codes than those that anymla's attention reads.
        ("gfx942", "DeepseekV4ROCMAiterMLAAttention"),
    ],
)
def test_the_drafter_of_another_vllm_is_built_with_anymlas_attention(
    device: str, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three stages. For speed alone nothing is taken beside drafts: nothing was timed with them."""
    done = CliRunner().invoke(main, ["make-tiny", str(tmp_path / "tiny"), "--drafter", "dspark"])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # which alone drafts so
    source = Path(os.environ[SOURCE])
    given = str(tmp_path / "tiny"), device
    found = look_up("draft_construct.py", tmp_path, "force", *given, source=source)
    ours = "AnymlaAttention"
    expected = {"off": theirs, "auto": theirs, "force": ours}
    for chosen, classes in found["classes"].items():
        assert classes.pop(expected[chosen]) == 3
        assert not {ours, theirs} & classes.keys()
    assert found["classes"].keys() == expected.keys()
    assert found["stores"] == "anymla.engines.vllm.drafts"
