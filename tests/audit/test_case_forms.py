"""Dumps that somebody sends: whatever is in them, one line and soon."""

import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from healthy import case_of
from safetensors.torch import save

from anymla.audit import CHECKS, Case, load_case, save_case
from anymla.audit.case import CaseError, to_bytes
from anymla.audit.case_forms import check_form
from anymla.audit.replay import replay
from anymla.cli.main import main


@pytest.mark.parametrize("method", CHECKS)
def test_right_cases_have_their_form(method: str) -> None:
    check_form(case_of(method))


def spoilt(case: Case) -> Iterator[tuple[str, Case]]:
    """The case with one tensor or number of another kind."""
    for name, tensor in case.tensors.items():
        others: dict[str, torch.Tensor | None] = {"lacks": None, "scalar": torch.zeros(())}
        for dim, size in enumerate(tensor.shape):
            plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
            double = torch.cat((plain, plain), dim).view(tensor.dtype)
            others[f"double {dim}"] = double
            others[f"longer {dim}"] = double.narrow(dim, 0, size + 1)
            others[f"empty {dim}"] = double.narrow(dim, 0, 0)
        others["flat"] = tensor.flatten()
        others["deeper"] = tensor.unsqueeze(0)
        for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64):
            others[str(dtype)] = torch.ones(tensor.shape, dtype=dtype)
        if tensor.is_floating_point() and tensor.itemsize > 1:
            for value in (float("nan"), float("inf"), 3e38):
                others[f"all {value}"] = torch.full_like(tensor, value)
        if tensor.dtype in (torch.int32, torch.int64):
            for value in (-1, 2**31 - 1, -(2**31)):
                others[f"all {value}"] = torch.full_like(tensor, value)
        for what, other in others.items():
            tensors = {n: t for n, t in case.tensors.items() if n != name}
            if other is not None:
                tensors[name] = other
            yield f"{name} {what}", dataclasses.replace(case, tensors=tensors)
    for name in case.numbers:
        for value in (None, 0, -1, 10**12, -1e30, 1e300, float("nan"), "x", "", [1], {}):
            numbers: dict[str, Any] = {n: v for n, v in case.numbers.items() if n != name}
            if value is not None:
                numbers[name] = value
            yield f"{name} {value}", dataclasses.replace(case, numbers=numbers)
    yield "no positions", dataclasses.replace(case, positions=[])
    yield "other positions", dataclasses.replace(case, positions=[2**63] * 99, requests=["a"] * 99)


@pytest.mark.parametrize("method", CHECKS)
def test_no_case_breaks_a_replay(method: str, monkeypatch) -> None:
    monkeypatch.setattr("anymla.audit.replay.BACKENDS", ("torch",))
    refused = 0
    for what, case in spoilt(case_of(method)):
        began = time.monotonic()
        said = outcome(case)
        assert time.monotonic() - began < 20, what
        assert "\n" not in said, what
        assert len(said) < 400, what
        assert not said or method in said, what
        refused += bool(said)
    assert refused > 20


def outcome(case: Case) -> str:
    """Why a case is refused; nothing for one that is judged."""
    try:
        verdicts = replay(case)
    except ValueError as error:
        return str(error)
    assert verdicts[0].found is not None
    return ""


def wide(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A large tensor in no memory."""
    return torch.zeros((), dtype=dtype).expand(shape)


LARGE = {
    "linear": {"x": wide(2**20, 8), "weight": wide(2**20, 8), "y": wide(1)},
    "router": {"x": wide(2**20, 8), "weight": wide(2**20, 8)},
    "selection": {
        "q": wide(2**14, 128),
        "weights": wide(2**14),
        "chosen": wide(4, dtype=torch.int64),
        "data": wide(2**19, 128, dtype=torch.uint8),
        "scales": wide(2**19, 4, dtype=torch.uint8),
    },
    "qkv_norm": {"qr": wide(2**20, 2**20)},
}
NUMBERS = {"k": 4, "scale": 1.0, "eps": 1e-6, "layout": "v4_index_fp8"}


@pytest.mark.parametrize("method", LARGE)
def test_products_beyond_any_models_are_refused(method: str) -> None:
    tensors = dict(LARGE[method])
    if method == "linear":
        tensors["y"] = wide(2**20, 2**20)
    case = Case(method, "layer 0", ["a"], [1], tensors, dict(NUMBERS))
    with pytest.raises(ValueError, match=f"^a case of {method} is too large: .*, at most"):
        replay(case)


def test_lists_of_slots_are_bounded() -> None:
    case = case_of("slots")
    for last in (10**12, 9 * 64 + 1):
        numbers = case.numbers | {"last": last}
        with pytest.raises(ValueError, match="last must be a number from 0 to 576, got"):
            replay(dataclasses.replace(case, numbers=numbers))


def test_iterations_are_bounded() -> None:
    case = case_of("hc_pre")
    numbers = case.numbers | {"iters": 10**9}
    with pytest.raises(ValueError, match="iters must be a number from 1 to 1000, got 1000000000"):
        replay(dataclasses.replace(case, numbers=numbers))


def test_a_message_names_the_tensor_and_its_shape() -> None:
    case = case_of("attention")
    tensors = case.tensors | {"out": torch.zeros(3, 512)}
    with pytest.raises(
        ValueError, match=r"^a case of attention: out must be \[4, 512\], got \[3, 512\]$"
    ):
        replay(dataclasses.replace(case, tensors=tensors))
    tensors = case.tensors | {"q": torch.zeros(4, 512, dtype=torch.int64)}
    with pytest.raises(ValueError, match=r"q must be float64 or .* float16, got 'int64'$"):
        replay(dataclasses.replace(case, tensors=tensors))


def header(**changes: Any) -> bytes:
    """A dump whose words are changed."""
    words = {
        "method": "query",
        "layer": "l",
        "requests": ["a"],
        "positions": [1],
        "numbers": {"eps": 1e-6},
        "step": 1,
        "made_by": {},
        "found": {},
    }
    metadata = {"format": "anymla-audit-case", "version": "1", "case": json.dumps(words | changes)}
    return save({"q": torch.zeros(1, 1, 512)}, metadata=metadata)


FILES = {
    "positions": header(positions=["x"]),
    "positions without a list": header(positions=5),
    "requests": header(requests=5),
    "numbers": header(numbers=[1]),
    "deep": header(found=json.loads("[" * 60 + "]" * 60)),
    "step": header(step="x"),
    "method": header(method=["x"]),
    "words": save({"q": torch.zeros(1)}, metadata={"format": "anymla-audit-case", "version": "1"}),
    "no words": save({"q": torch.zeros(1)}),
    "nothing": b"",
    "short": b"\x01",
    "a huge shape": (
        b'{"q":{"dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,0]}}'
    ),
    "a negative shape": b'{"q":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    "an unknown dtype": b'{"q":{"dtype":"F4","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_case(name: str, tmp_path: Path) -> None:
    held = FILES[name]
    if held[:1] == b"{":
        held = len(held).to_bytes(8, "little") + held + bytes(4)
    path = tmp_path / "dump.safetensors"
    path.write_bytes(held)
    result = CliRunner().invoke(main, ["replay", str(path)])
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CaseError, match=r"dump: longer than 1073741824 bytes"):
        load_case(path)


# What an audit writes.


def test_dumps_are_their_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "case.safetensors"
    old = os.umask(0)
    try:
        save_case(path, case_of("query"))
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_case(path)[0].method == "query"


def test_dumps_go_through_no_link_and_overwrite_nothing(tmp_path: Path) -> None:
    case, victim = case_of("query"), tmp_path / "victim"
    victim.write_text("precious")
    for name, make in (
        ("link", lambda path: path.symlink_to(victim)),
        ("dangling", lambda path: path.symlink_to(tmp_path / "elsewhere")),
        ("file", lambda path: path.write_text("mine")),
        ("pipe", os.mkfifo),
    ):
        path = tmp_path / name
        make(path)
        with pytest.raises(OSError, match="exists"):
            save_case(path, case)
    assert victim.read_text() == "precious"
    assert not (tmp_path / "elsewhere").exists()
    assert len(to_bytes(case)) > 0
