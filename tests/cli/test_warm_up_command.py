import re
from unittest import mock

import pytest
from click.testing import CliRunner

from anymla.cli.main import main
from anymla.ops import kernel_archive


def test_a_warm_up_runs_every_size(tiny, monkeypatch):
    """And what is compiled from then on is compiled in service."""
    watch = mock.MagicMock()
    monkeypatch.setattr("anymla.runtime.engine.WATCH", watch)
    arguments = ["--max-requests", "2", "--max-seq-len", "150", "--chunk-size", "8"]
    result = CliRunner().invoke(
        main, ["warm-up", "--checkpoint", str(tiny), *arguments, "--draft-tokens", "1"]
    )
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"[\d.]+ s, [\d.]+ MB of caches, 0\.0 MB of workspace\n", result.stdout)
    names = [call[0] for call in watch.mock_calls]
    assert names == ["paused", "paused().__enter__", "paused().__exit__", "begin"]


def test_drafts_need_a_layer_that_drafts(tiny_without_mtp):
    result = CliRunner().invoke(
        main, ["warm-up", "--checkpoint", str(tiny_without_mtp), "--draft-tokens", "1"]
    )
    assert result.exit_code == 2
    assert "speculation needs a drafter" in result.stderr


def test_kernels_are_shipped_without_a_checkpoint(tmp_path, monkeypatch):
    """And one message says what is wrong with a file that holds none."""
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "kernels.zip"
    result = CliRunner().invoke(main, ["warm-up", "--export", str(file), "--for", "sm_90"])
    assert result.exit_code == 2
    assert "no kernels for sm_90, but no kernels" in result.stderr
    assert not file.exists()
    file.write_text("kernels")
    result = CliRunner().invoke(main, ["warm-up", "--import", str(file)])
    assert result.exit_code == 2
    assert "no archive of kernels" in result.stderr
    shipped = kernel_archive.Shipped("sm_90", 140, 250_000_000, known=3, compared=False)
    monkeypatch.setattr("anymla.cli.warm_up.import_kernels", lambda path: shipped)
    result = CliRunner().invoke(main, ["warm-up", "--import", str(file)])
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "140 kernels for sm_90 imported, 250.0 MB, 3 of them known; no GPU here to compare with\n"
    )


def test_kernels_are_exported_after_the_steps(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "anymla.cli.warm_up.export_kernels",
        lambda path, device: kernel_archive.Shipped(device, 1, 1_000_000),
    )
    arguments = ["--max-requests", "1", "--max-seq-len", "64", "--for", "sm_90"]
    result = CliRunner().invoke(
        main, ["warm-up", str(tiny), *arguments, "--export", str(tmp_path / "kernels.zip")]
    )
    assert result.exit_code == 0, result.output
    steps, exported = result.stdout.splitlines()
    assert "of caches" in steps
    assert exported == "1 kernels for sm_90 exported, 1.0 MB"


def test_a_warm_up_needs_something_to_do():
    result = CliRunner().invoke(main, ["warm-up", "--max-requests", "1"])
    assert result.exit_code == 2
    assert "--checkpoint" in result.stderr
