"""vLLM's DeepSeek-V4.1 is built with anymla's parts, where a CPU pretends to be another device."""

import dataclasses
import os
from pathlib import Path

import pytest
from servers import SOURCE, look_up, needs_source, needs_vllm

from anymla.testing.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from anymla.testing.tiny_options import TinySharing, default_shared_ratios

pytestmark = needs_vllm

EVERY = ["attention", "compressor", "engram", "indexer", "mhc"]
# Eight layers: two write entries, one of them states; three select; two read n-grams.
OURS = {
    "attention": {"AnymlaV41Attention": 8},
    "compressor": {"AnymlaV41Compressor": 2, "AnymlaStateCache": 1},
    "engram": {"AnymlaEngram": 2, "AnymlaEngramTable": 2, "AnymlaNgrams": 1},
    "indexer": {
        "AnymlaV41Indexer": 3,
        "AnymlaV41Scores": 3,
        "AnymlaV41IndexerCache": 2,
    },
    "mhc": {},  # functions of the model's module
}
THEIRS = {
    "attention": "DeepseekV4FlashMLAAttention",
    "compressor": "DeepseekCompressor",
    "engram": "Engram",
    "indexer": "DeepseekV4Indexer",
    "mhc": None,
}
DEVICES = {
    "sm_80": EVERY,
    "sm_86": EVERY,
    "sm_89": ["attention", "indexer", "mhc"],
    "sm_90": [],
    "XPU": EVERY,
}


def assert_the_parts_that_vllm_lacks_are_anymlas(
    device: str, directory: Path, source: Path | None = None
) -> None:
    ratios, lacking = default_shared_ratios(8), DEVICES[device]
    sharing = TinySharing.of(ratios)
    if "engram" not in lacking:  # vLLM's own asks a GPU for its number of processors
        sharing = dataclasses.replace(sharing, engram_layers=())
    options = TinyOptions(ratios=ratios, hash_layers=0, mtp=0, weights="bf16", sharing=sharing)
    write_tiny_checkpoint(directory / "tiny", options)
    found = look_up(
        "v41_construct.py", directory, "off", str(directory / "tiny"), device, source=source
    )
    for chosen, each in found.items():
        replaced = lacking if chosen == "auto" else EVERY
        assert each["replaced"] == replaced
        for part, classes in OURS.items():
            absent = part == "engram" and not sharing.engram_layers
            for name, count in classes.items():
                wanted = count if part in replaced and not absent else 0
                assert each["classes"].get(name, 0) == wanted, (chosen, name)
            if THEIRS[part] is not None and not absent:
                assert (THEIRS[part] in each["classes"]) == (part not in replaced)
        streams = "mhc" in replaced
        assert len(each["functions"]) == (4 if streams else 0)
        assert each["whole first site"] == (4 if streams else 1) * options.hidden


@pytest.mark.parametrize("device", DEVICES)
def test_the_model_of_the_vllm_installed_here(device: str, tmp_path: Path) -> None:
    assert_the_parts_that_vllm_lacks_are_anymlas(device, tmp_path)


@needs_source
@pytest.mark.parametrize("device", DEVICES)
def test_the_model_of_another_vllm(device: str, tmp_path: Path) -> None:
    assert_the_parts_that_vllm_lacks_are_anymlas(device, tmp_path, Path(os.environ[SOURCE]))
