"""Plans: work that is shared out once for several calls."""

import pytest
import torch
from paged import a_device

from anymla.formats.page_layout import MAIN_FP8, get_layout
from anymla.ops.attention import CacheRows, sparse_attention, sparse_attention_plan
from anymla.testing.conformance.scene import Scene, scope
from anymla.testing.device_bridge import on_device, to_device


def counts(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def test_other_devices_need_none():
    assert sparse_attention_plan(counts(3, 4000), heads=64, width=4096) is None
    assert sparse_attention_plan(None, heads=64, width=4096) is None
    with pytest.raises(TypeError, match="lengths must be int32"):
        sparse_attention_plan(counts(3).long(), heads=64, width=4096)
    with pytest.raises(ValueError, match="extra_lengths"):
        sparse_attention_plan(counts(3), counts(3, 4), heads=64, width=4096, extra_width=9)


def test_other_backends_ignore_it():
    made = Scene(torch.randn(2, 3, 512), scope(2, 5))
    arguments, keywords = made.arguments()
    made.expected().check(sparse_attention(*arguments, **keywords, plan=counts(1, 2, 3)))
    with pytest.raises(TypeError, match="plan must be int32"):
        sparse_attention(*arguments, **keywords, plan=torch.zeros(3))


def test_a_plan_for_other_shapes_is_refused():
    pytest.importorskip("triton")
    launcher = pytest.importorskip("anymla.ops.attention.gluon_sm90_decode_launch")
    q, cache = torch.randn(8, 40, 512).bfloat16(), get_layout(MAIN_FP8).allocate(1, 64)
    slots = torch.zeros(8, 2048, dtype=torch.int32)
    rows = [CacheRows(cache, MAIN_FP8, slots, counts(*range(8)))]

    def call(numbers):
        plan = torch.zeros(numbers, dtype=torch.int32)
        return launcher.Call.of(q, rows, None, None, False, plan)

    sms = 1  # of a machine without a GPU
    fitting = 8 + 1
    chosen = call(fitting).schedule
    assert (chosen.ctas, chosen.longest_first, chosen.planned) == (sms, True, True)
    for numbers in (fitting + 1, fitting - 1, 0):
        with pytest.raises(ValueError, match="plan"):
            call(numbers)


# On a GPU ---------------------------------------------------------------------------------------


@pytest.fixture
def attention():
    """The operation on CPU tensors, run on the GPU on the same bytes."""
    return on_device(sparse_attention, a_device())


@pytest.mark.gpu("sm_90")
@pytest.mark.parametrize("heads", [8, 64, 128])
@pytest.mark.parametrize(("tokens", "width"), [(60, 2000), (200, 600)], ids=["ranges", "order"])
@pytest.mark.parametrize("stale", [False, True])
def test_results_do_not_depend_on_it(attention, heads, tokens, width, stale):
    widths = (128, width)
    lengths = [torch.randint(0, width + 1, (tokens,)) for width in widths]
    made = Scene(
        torch.randn(tokens, heads, 512).bfloat16(),
        scope(tokens, widths[0], lengths=lengths[0].tolist()),
        scope(tokens, widths[1], lengths=lengths[1].tolist(), page=2, poison_behind=True),
        torch.randn(heads),
    )
    given = [to_device(each.flip(0) if stale else each, a_device()).int() for each in lengths]
    plan = sparse_attention_plan(*given, heads=heads, width=widths[0], extra_width=widths[1])
    assert plan is not None
    arguments, keywords = made.arguments()
    keywords |= {"plan": plan.cpu(), "backend": "gluon_sm90"}
    results = [attention(*arguments, **keywords) for _ in range(2)]
    made.expected().check(results[0])
    assert torch.equal(results[0][0], results[1][0])
