"""Which scales float16 holds exactly, and that every kernel means the same ones."""

import pytest
import torch

from anymla.formats.e4m3 import decode_e4m3
from anymla.ops.attention import float16_range
from anymla.ops.attention.float16_range import exact_scale_bytes, exact_scale_exponents


@pytest.mark.parametrize("lift", [0, 7])
def test_the_window_is_where_every_code_is_exact(lift):
    codes = decode_e4m3(torch.arange(256, dtype=torch.uint8), torch.float64)
    codes = codes[codes.isfinite()]
    exact = []
    for byte in range(1, 255):
        product = codes * 2.0 ** (byte - 127 + lift)
        if torch.equal(product.to(torch.float16).double(), product):
            exact.append(byte)
    first, last = exact_scale_bytes(lift)
    assert exact == list(range(first, last + 1))
    assert exact_scale_exponents(lift) == (first - 127, last - 127)


def test_the_window_begins_at_the_smallest_scale_that_a_writer_emits():
    assert exact_scale_bytes() == (112, 134)
    assert exact_scale_bytes(float16_range.LIFT) == (105, 127)


def test_triton_takes_its_limits_from_there():
    rows = pytest.importorskip("anymla.ops.attention.triton_decode")
    first, last = exact_scale_bytes(float16_range.LIFT)
    assert (rows._LEAST_BYTE.value, rows._LAST_BYTE.value) == (first, last)
    assert rows.LIFT.value == 2.0**float16_range.LIFT


def test_gluon_finds_the_same_bytes():
    gluon = pytest.importorskip("crossrun.hopper")
    from anymla.ops.attention import gluon_sm90_decode_kv_producer as producer

    machine = gluon.Machine()
    assert producer.LIFT.value == 2.0**float16_range.LIFT
    inexact = machine.function(producer._inexact_bytes)
    first, last = exact_scale_bytes(float16_range.LIFT)
    for place in range(8):
        bytes_ = torch.full((256, 8), 119, dtype=torch.uint8)
        bytes_[:, place] = torch.arange(256, dtype=torch.uint8)
        low, high = bytes_.view(torch.int32).unbind(1)
        found = (inexact(gluon.as_value(low), gluon.as_value(high)) != 0).tensor
        byte = torch.arange(256)
        outside = (byte < first) | (byte > last)
        # The eighth byte of an entry is padding.
        assert torch.equal(found, outside if place < 7 else torch.zeros(256, dtype=torch.bool))
    scales = 2.0 ** torch.arange(-126, 128).double()
    bits = gluon.as_value(scales.float().view(torch.int32))
    found = (machine.function(producer._inexact_scale)(bits) != 0).tensor
    outside = (scales < 2.0 ** (first - 127)) | (scales > 2.0 ** (last - 127))
    assert torch.equal(found, outside & (scales > 2.0**-100))
