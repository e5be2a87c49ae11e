"""Verification steps' cases, made small: what a row says, and that both sides do the same."""

import pytest

from anymla.bench.runner import run
from anymla.compat import flash_mla
from lab.cases import sparse_attention as lists
from lab.cases import verification as family
from lab.cases.verification import Verification
from lab.peers.flash_mla import FlashMla

PEERS = [FlashMla(lambda _: flash_mla)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(family, "_WINDOW_SLOTS", 2048)
    monkeypatch.setattr(family, "_EXTRA_SLOTS", 512)
    monkeypatch.setattr(family, "_MOST_LISTS", 2)


@pytest.mark.parametrize(
    "shape",
    [
        Verification(2, 3, 8),
        Verification(3, 2, 16, 64),
        Verification(2, 2, 8, 128),
        Verification(2, 2, 64, 64, chosen=True),
    ],
)
@pytest.mark.parametrize("pays", [False, True])
def test_all_sides_are_right(shape, pays, clock, monkeypatch):
    monkeypatch.setattr(family, "decoding_pays_in_steps", lambda *_: pays)
    (result,) = run(family.verification_cases([shape], "torch", PEERS), clock)
    values = result.values
    decoded = pays and not shape.chosen
    assert values["decoded"] is decoded
    for kind in ("", "quantized_"):
        assert f"{kind}microseconds" in values
        assert (f"slots_{kind}microseconds" in values) is decoded
        assert (f"decoded_{kind}microseconds" in values) is (not decoded and not shape.chosen)
    for name in ("error", "flash_mla_error", "slots_error", "decoded_error"):
        assert values.get(name, 0) < 3e-3
    assert values["ratio"] == 1.0
    assert result.met is False
    assert result.case == shape.label
    assert values.items() >= shape.fields.items()


@pytest.mark.parametrize(("chosen", "ratio", "met"), [(False, 2.0, True), (True, 1.2, False)])
def test_what_is_asked(chosen, ratio, met, scripted):
    shape = Verification(1, 2, 8, 128, chosen=chosen)
    # By slots and quantised, decoded and quantised, FlashMLA.
    times = (10, 11, *([] if chosen else [7, 8]), 10 * ratio)
    (result,) = run(family.verification_cases([shape], "torch", PEERS), scripted(*times))
    assert result.met is met


def test_shapes_are_distinct():
    every = list(family.shapes())
    assert len(set(every)) == len(every) == 48 + 4 + 18
    assert lists.FLASH_DECODE.window == 128
