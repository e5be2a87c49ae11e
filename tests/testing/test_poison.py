import pytest
import torch

from anymla.testing.poison import poison_, poisoned_empty


def _call_as(module: str, expression: str) -> torch.Tensor:
    return eval(expression, {"torch": torch, "__name__": module})


EXPRESSIONS = [
    "torch.empty(3, 4)",
    "torch.empty((3, 4), dtype=torch.bfloat16)",
    "torch.empty_like(torch.zeros(3, 4))",
    "torch.empty_strided((3, 4), (8, 1))",
    "torch.zeros(1).new_empty(3, 4)",
    "torch.zeros(1).new_empty_strided((3, 4), (8, 1))",
]


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize("module", ["anymla", "anymla.ops.x"])
def test_empty_inside_the_package_is_nan(expression: str, module: str) -> None:
    with poisoned_empty():
        assert _call_as(module, expression).isnan().all()


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_callers_outside_and_callers_afterwards_are_left_alone(expression: str) -> None:
    with poisoned_empty("anymla_of_someone"):
        outside = _call_as("anymla", expression)
        assert outside.shape == (3, 4)
    before = (torch.empty, torch.Tensor.new_empty)
    with poisoned_empty(), pytest.raises(KeyError):
        raise KeyError
    assert before == (torch.empty, torch.Tensor.new_empty)


def test_names_that_only_begin_like_the_package_are_outside() -> None:
    with poisoned_empty("anymla_of_someone"):
        values = _call_as("anymla_of_someone_else", "torch.empty(0)")
    assert values.numel() == 0


@pytest.mark.parametrize(
    ("dtype", "shows"),
    [
        (torch.float64, lambda x: x.isnan()),
        (torch.float16, lambda x: x.isnan()),
        (torch.float8_e4m3fn, lambda x: x.float().isnan()),
        (torch.float8_e4m3fnuz, lambda x: x.float().isnan()),
        (torch.float8_e8m0fnu, lambda x: x.view(torch.uint8) == 0xFF),
        (torch.uint8, lambda x: x == 0xFF),
        (torch.bool, lambda x: x),
        (torch.int32, lambda x: x == 0x5A5A5A5A),
        (torch.int64, lambda x: x == 0x5A5A5A5A5A5A5A5A),
    ],
)
def test_every_dtype_has_a_poison(dtype: torch.dtype, shows) -> None:
    assert shows(poison_(torch.zeros(5, dtype=torch.uint8).repeat(8).view(dtype))).all()


def test_this_suite_runs_poisoned_seeded_and_without_gradients(request) -> None:
    assert _call_as("anymla.ops", "torch.empty(2)").isnan().all()
    assert not torch.is_grad_enabled()
    assert torch.get_num_threads() <= 2


def test_compiled_code_is_not_disturbed() -> None:
    def fill(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(x)
        return out + 1

    with poisoned_empty():
        compiled = torch.compile(fill, backend="eager", fullgraph=True)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
