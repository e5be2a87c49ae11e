import json
import sys
from pathlib import Path
from typing import Any

import pytest
from servers import HERE, environment, finish, needs_worker

from anymla.audit import CHECKS

pytestmark = needs_worker

# What must be named. Later methods are given something wrong, but are right: each is judged from
# its own inputs.
METHODS = {
    "sink dropped": {"attention"},
    "window off by one": {"attention"},
    "wrong slot": {"slots", "attention"},
    "scale byte wrong": {"window_row"},
    "stale index row": {"compressed_row"},
    "best entry missed": {"selection"},
    "page freed early": {"at_rest"},
    "without inverse RoPE": {"projection"},
    "score bias lost": {"compressor_state"},
    "rotated back, unsaid": {"attention", "projection"},
}
# What lay in an index page that is not written may be no index keys at all.
ALSO = {"stale index row": {"at_rest"}}
# A graph's caches are read when all of it has run: what was overwritten since its method ran.
IN_GRAPHS = {"page freed early": {"attention", "compressed_row"}}


# On a CPU vLLM packs the weights of its products for its own kernels.
JUDGED = set(CHECKS) - {"linear", "experts"}


@pytest.fixture(scope="module")
def found(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("audited")
    answer = directory / "answer.json"
    command = [sys.executable, str(HERE / "audited.py"), str(checkpoint), str(answer)]
    # Hyper-connections as well.
    env = environment("audit,force", ANYMLA_AUDIT="every=1,requests=4,layers=2")
    finish(command, env, directory / "log.txt", 1500)
    return json.loads(answer.read_text())


@pytest.mark.parametrize("kind", ["", ", in graphs"])
def test_a_healthy_engine_gives_no_alarm_and_every_method_is_judged(
    found: dict[str, Any], kind: str
) -> None:
    healthy = found["healthy" + kind]
    print(healthy["summary"])
    assert not healthy["alarms"]
    assert set(healthy["tallies"]) == JUDGED
    assert " 0 skipped" in healthy["summary"]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", ["", ", in graphs"])
def test_a_fault_is_named_by_its_method_and_no_other(
    found: dict[str, Any], name: str, kind: str
) -> None:
    alarms = found[name + kind]["alarms"]
    assert alarms
    named = {alarm["method"] for alarm in alarms}
    also = ALSO.get(name, set()) | (IN_GRAPHS.get(name, set()) if kind else set())
    assert METHODS[name] <= named <= METHODS[name] | also
    for alarm in alarms:
        assert alarm["layer"].startswith("model.layers.")
        assert alarm["what"]


@pytest.mark.parametrize("kind", ["", ", in graphs"])
def test_attention_may_rotate_heads_back_if_it_says_so(found: dict[str, Any], kind: str) -> None:
    back = found["rotated back" + kind]
    assert not back["alarms"]
    assert set(back["tallies"]) == JUDGED


def test_a_stale_index_row_is_told_from_a_compressed_one(found: dict[str, Any]) -> None:
    alarms = found["stale index row"]["alarms"]
    layers = {alarm["layer"] for alarm in alarms if alarm["method"] == "compressed_row"}
    assert layers
    assert all(layer.endswith("indexer.compressor") for layer in layers)


def test_an_audit_that_fails_does_not_stop_the_engine(found: dict[str, Any]) -> None:
    broken = found["audit broken"]
    assert broken["tokens"] == 2 * [4]
    assert broken["skipped"] > 0
    assert not broken["alarms"]
