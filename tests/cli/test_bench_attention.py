"""What a row of decode attention beside FlashMLA says; timing needs a GPU."""

import pytest
from click.testing import CliRunner

from anymla.bench.flash_mla_decode import Decode
from anymla.cli.bench_attention import as_result
from anymla.cli.main import main


@pytest.mark.parametrize(
    ("heads", "ratio", "met"), [(64, 1.01, True), (64, 0.97, False), (16, 1.5, False)]
)
def test_a_shape_that_loses_is_said_to(heads, ratio, met) -> None:
    shape = Decode(8, 1, heads, 512)
    result = as_result(shape, {"label": shape.label, "microseconds": 10.0, "ratio": ratio})
    assert (result.case, result.met) == (f"h{heads} b8 s_q1 128+512", met)
    assert "times FlashMLA's speed" in str(result.target)


def test_without_flash_mla_nothing_is_judged() -> None:
    shape = Decode(8, 1, 64, 512)
    result = as_result(shape, {"label": shape.label, "microseconds": 10.0})
    assert (result.target, result.met) == (None, None)


def test_it_needs_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(main, ["bench", "attention"])
    assert result.exit_code == 2
    assert "torch sees no GPU" in result.output
