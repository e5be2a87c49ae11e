import re

from click.testing import CliRunner

from anymla.cli.main import main


def test_a_warm_up_runs_every_size(tiny):
    arguments = ["--max-requests", "2", "--max-seq-len", "150", "--chunk-size", "8"]
    result = CliRunner().invoke(
        main, ["warm-up", "--checkpoint", str(tiny), *arguments, "--draft-tokens", "1"]
    )
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"[\d.]+ s, [\d.]+ MB of caches, 0\.0 MB of workspace\n", result.stdout)


def test_drafts_need_a_layer_that_drafts(tiny_without_mtp):
    result = CliRunner().invoke(
        main, ["warm-up", "--checkpoint", str(tiny_without_mtp), "--draft-tokens", "1"]
    )
    assert result.exit_code == 2
    assert "speculation needs a drafter" in result.stderr
