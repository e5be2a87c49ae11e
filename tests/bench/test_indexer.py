"""Shapes of the indexer's benchmark."""

from anymla.bench.indexer_cases import pages_needed
from anymla.ops.indexer.shapes import DECODES, PREFILLS, SelectShape


def test_shapes_cover_decoding_and_prefill():
    assert len(set(DECODES)) == 32
    assert {(s.queries, s.keys) for s in PREFILLS} == {
        (m, n) for m in (2048, 8192) for n in (8192, 65_536, 262_144)
    }
    assert SelectShape(8, 2, 2048).rows == 16
    assert SelectShape(8, 2, 2048).label == "decode 8 x 2 x 2048"
    assert SelectShape(1, 2048, 8192, prefill=True).label == "prefill 2048 x 8192"


def test_the_pool_holds_the_largest_shape():
    assert pages_needed([SelectShape(128, 1, 262_144)]) == 128 * 262_144 // 64
    # Small shapes still rotate through more than any cache holds.
    assert pages_needed([SelectShape(1, 1, 2048)]) * 64 * 132 > 256 << 20
