import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anymla.model.checkpoint import Checkpoint, CheckpointError, deepseek_name

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4),
    "a.codes": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn),
    "a.scale": torch.tensor([100, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "b.packed": torch.tensor([-1, 3, 127], dtype=torch.int8),
    "b.table": torch.tensor([[1, 2]]),
    "b.scalar": torch.tensor(0.5),
    "b.empty": torch.zeros(0, 4),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = sorted(TENSORS)
    weight_map = {}
    for shard, part in enumerate((names[:3], names[3:])):
        file = f"model-{shard}.safetensors"
        save_file({name: TENSORS[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(tmp_path, weight_map)
    return tmp_path


def write_index(directory: Path, weight_map: object) -> None:
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def read_index(directory: Path) -> dict[str, str]:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return dict(index["weight_map"])


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_every_tensor_is_there_bit_for_bit(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint.open(request.getfixturevalue(layout))
    assert sorted(checkpoint) == sorted(TENSORS)
    for name, expected in TENSORS.items():
        info, tensor = checkpoint[name], checkpoint.tensor(name)
        assert info.shape == tuple(expected.shape) == tuple(tensor.shape)
        assert info.nbytes == expected.nbytes
        assert tensor.dtype == expected.dtype
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        )
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())
    assert checkpoint["a.scale"].dtype == "F8_E8M0"
    assert checkpoint["a.codes"].dtype == "F8_E4M3"


def test_tensors_are_views_of_one_mapping(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    first, second = checkpoint.tensor("a.weight"), checkpoint.tensor("a.weight")
    assert first.data_ptr() == second.data_ptr()
    first[0, 0] = 99
    assert second[0, 0] == 99
    assert torch.equal(load_file(single / "model.safetensors")["a.weight"], TENSORS["a.weight"])


MEASURE = """
import os, sys
from anymla.model.checkpoint import Checkpoint

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

checkpoint = Checkpoint.open(sys.argv[1])
checkpoint.tensor("small").sum()
before = resident()
big = checkpoint.tensor("big")
opened = resident()
big[: len(big) // 4].sum()
print(opened - before, resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm")
def test_memory_is_used_only_where_it_is_touched(tmp_path: Path) -> None:
    size = 64 << 20
    tensors = {"big": torch.ones(size, dtype=torch.uint8), "small": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    # A fresh process, so that nothing else grows meanwhile.
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    opened, touched = map(int, out.stdout.split())
    assert opened < size / 16
    assert size / 8 < touched < size / 2


def test_names_that_transformers_saves() -> None:
    pairs = {
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "model.hc_head.hc_fn": "hc_head_fn",
        "model.layers.3.attn.norm.weight": "layers.3.attn.kv_norm.weight",
        "model.layers.3.attn.compressor.norm.weight": "layers.3.attn.compressor.norm.weight",
        "model.layers.3.attn_norm.weight": "layers.3.attn_norm.weight",
        "head.weight": "head.weight",
        "mtp.0.norm.weight": "mtp.0.norm.weight",
    }
    assert {name: deepseek_name(name) for name in pairs} == pairs


def test_translated_names_lead_to_the_stored_tensor(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    assert list(checkpoint) == ["embed.weight"]
    assert torch.equal(checkpoint.tensor("embed.weight"), torch.ones(2, 2))


def refused(directory: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint.open(directory)
    assert "\n" not in str(caught.value)


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.ones(2), "norm.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    refused(tmp_path, r"holds norm.weight twice")


def test_no_directory(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", r"nowhere: no such directory$")


def test_no_safetensors(tmp_path: Path) -> None:
    refused(tmp_path, r"not a checkpoint, it has neither model.safetensors nor ")


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_file(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: keep if keep >= 0 else len(data) + keep])
    reason = "not a safetensors file" if 0 <= keep < 8 else "truncated"
    refused(single, rf"model\.safetensors: {reason}")


def test_file_with_bytes_too_many(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    refused(single, r"truncated or overwritten, it has \d+ bytes and should have \d+$")


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{]", r"not a safetensors file: "),
        ([1], r"not a safetensors file: header: not a JSON object"),
        ({"w": {"dtype": "F32"}}, r"bad header entry for w$"),
        ({"w": 3}, r"bad header entry for w$"),
        (
            {"w": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}},
            r"w has dtype F4, can read F64, ",
        ),
        (
            {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            r"w is F32 \[2\] in 4 bytes, which do not fit",
        ),
        (b"[" * 100_000, r"not a safetensors file: header: nested more than 64 deep$"),
        (b'{"w":' * 100_000, r"not a safetensors file: header: nested more than 64 deep$"),
        (
            b'{"w": {"dtype": "F32", "shape": [Infinity], "data_offsets": [0, 4]}}',
            r"header: Infinity is not JSON",
        ),
        (
            b'{"w": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 4]}}',
            r"header: the number 1e400 is too large$",
        ),
        (
            b'{"w": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 4]}}',
            r"header: the integer 10*\.\.\. does not fit in 64 bits$",
        ),
        ({"w": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, r"bad header entry"),
        ({"w": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}, r"bad header entry"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, r"bad header entry"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, r"bad header entry"),
        ({"w": {"dtype": "F32", "shape": [1] * 999, "data_offsets": [0, 4]}}, r"bad header entry"),
    ],
)
def test_bad_header(tmp_path: Path, header: object, message: str) -> None:
    write_header(tmp_path / "model.safetensors", header, b"\0" * 4)
    refused(tmp_path, message)


@pytest.mark.parametrize("length", [100_000_001, 2**31, 2**63, 2**64 - 1])
def test_a_header_that_claims_to_be_long_is_not_read(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", length))
    refused(tmp_path, rf"truncated, its header alone is {length} bytes$")
    # A file with a hole takes no room on the disk.
    with path.open("r+b") as file:
        file.truncate(length + 8 if length < 2**33 else 2**33)
    refused(tmp_path, rf"its header (alone )?is {length} bytes")


def test_index_names_a_file_that_is_not_there(sharded: Path) -> None:
    (sharded / "model-1.safetensors").unlink()
    refused(sharded, r"index.json: names model-1.safetensors, which does not exist")


def test_index_names_a_tensor_that_is_not_there(sharded: Path) -> None:
    write_index(sharded, read_index(sharded) | {"c.weight": "model-1.safetensors"})
    refused(sharded, r"model-1.safetensors: does not hold c.weight$")


def test_many_absent_tensors_are_counted(sharded: Path) -> None:
    more = {f"c{n}": "model-0.safetensors" for n in range(9)}
    write_index(sharded, read_index(sharded) | more)
    refused(sharded, r"does not hold c0, c1, c2 and 6 more$")


def test_file_holds_a_tensor_that_the_index_puts_elsewhere(sharded: Path) -> None:
    index = read_index(sharded)
    write_index(sharded, {name: file for name, file in index.items() if name != "a.weight"})
    refused(sharded, r"model-0.safetensors: holds a.weight, which .*index.json puts elsewhere")


def test_index_must_not_leave_its_directory(sharded: Path) -> None:
    write_index(sharded, {"a.weight": "../model-0.safetensors"})
    refused(sharded, r"names '../model-0.safetensors', which is not a plain file name")


@pytest.mark.parametrize("weight_map", [None, ["a"], 3])
def test_index_without_weight_map(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    refused(sharded, r"index.json: has no weight_map from tensor names to files")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON: "),
        ("[" * 100_000, "nested more than 64 deep$"),
        ("[]", "not a JSON object"),
    ],
)
def test_index_that_is_no_json_object(sharded: Path, text: str, reason: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)
    refused(sharded, rf"index.json: cannot be read: {reason}")


def test_unknown_tensor(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tensor c.weight$"):
        Checkpoint.open(single).tensor("c.weight")


def test_file_that_vanishes_after_opening(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    (single / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot read a.weight: "):
        checkpoint.tensor("a.weight")


def test_file_that_the_system_will_not_map(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)\nbacktrace")

    monkeypatch.setattr("anymla.model.checkpoint.safe_open", refuse)
    with pytest.raises(CheckpointError, match=r"cannot read a.weight: unable to mmap .* \(12\)$"):
        Checkpoint.open(single).tensor("a.weight")


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5234567890\n",
            r"model.safetensors: not a safetensors file, but a Git LFS pointer; git lfs pull",
        ),
        (b"", r"but empty; its download did not finish$"),
        (bytes(999), r"but zeros; its download did not finish$"),
        (b"<html><head>404</head></html>", r"but a web page, not the file; "),
        (b"GGUF" + bytes(99), r"but a GGUF file of llama.cpp"),
        (b"\x80\x02\x8a\nl\xfc\x9c\x46\xf9\x20", r"but a pickle"),
        (b"PK\x03\x04\0\0\x08\x08\0\0", r"but a zip archive, as torch.save writes it"),
        (b"Entry not found", r"but text: 'Entry not found'$"),
    ],
)
def test_another_file_in_the_place_of_tensors(tmp_path: Path, held: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(held)
    refused(tmp_path, message)


def test_lengths_that_begin_like_a_pickle(tmp_path: Path) -> None:
    """A header of 640 bytes begins with a pickle's first two; one of 35,615 like gzip."""
    for length in (640, 0x8B1F):
        header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
        text = header.ljust(length).encode()
        file = tmp_path / "model.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
        assert list(Checkpoint.open(tmp_path)) == ["w"]


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_in_the_place_of_a_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    refused(tmp_path, f"{name}: .*not a file, but a pipe$")


def test_a_dangling_link(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "0")
    refused(tmp_path, r"model.safetensors: not a safetensors file: header: .*No such file")


def test_other_weights_beside_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    refused(tmp_path, r"index.json \(it holds pytorch_model.bin, a pickle of PyTorch, which is ")
    (tmp_path / "0.incomplete").write_bytes(b"")
    refused(tmp_path, r"\(its download did not finish: 0.incomplete\)$")
