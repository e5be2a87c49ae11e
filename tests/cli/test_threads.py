"""How many CPU threads a command runs with."""

import pytest
import torch
from click.testing import CliRunner

from anymla.cli.main import main
from anymla.runtime import threads as module
from anymla.runtime.threads import BYTES_A_THREAD, threads_for, weights_per_token
from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint


@pytest.fixture
def asked(monkeypatch):
    """Numbers of threads that torch was told, on a machine where it would take sixteen."""
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: told[-1] if told else 16)
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    return told


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("threads") / "tiny"
    write_tiny_checkpoint(directory, TinyOptions())
    return directory


def test_a_thread_for_each_share_of_the_weights(monkeypatch):
    monkeypatch.setattr(module.torch, "get_num_threads", lambda: 16)
    shares = [0, BYTES_A_THREAD, 3 * BYTES_A_THREAD, 100 * BYTES_A_THREAD]
    assert [threads_for(nbytes) for nbytes in shares] == [1, 1, 3, 16]


def test_a_token_touches_the_experts_it_goes_to(tiny):
    size = sum(file.stat().st_size for file in tiny.glob("*.safetensors"))
    assert 0 < weights_per_token(tiny) < size


@pytest.mark.parametrize(("words", "expected"), [((), 1), (("--threads", "3"), 3)])
def test_a_tiny_model_runs_with_one_unless_asked(tiny, asked, words, expected):
    prompt = ["--prompt", "a", "--max-new-tokens", "1"]
    result = CliRunner().invoke(main, ["generate", "--checkpoint", str(tiny), *prompt, *words])
    assert result.exit_code == 0, result.output
    assert asked == [expected]


@pytest.mark.parametrize("number", ["100000", "0", "-1"])
def test_a_number_that_no_machine_runs_is_refused(tiny, asked, number):
    words = ["generate", "--checkpoint", str(tiny), "--prompt", "a", "--threads", number]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert f"--threads {number}: 1 to 128" in result.output
    assert not asked
