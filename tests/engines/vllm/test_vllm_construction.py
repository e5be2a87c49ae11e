"""vLLM's model is built with each part of anymla's, where a CPU pretends to be another device."""

import json
import os
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import pytest
from servers import SOURCE, look_up, needs_source, needs_vllm

pytestmark = needs_vllm

# Layers of ratio 0, 4, 128, 4: two indexers; three main compressors and two of index keys.
COUNTS = {
    "attention": {"AnymlaAttention": 4},
    "indexer": {"AnymlaIndexer": 2, "AnymlaIndexerCache": 2, "AnymlaSparseAttnIndexer": 2},
    "compressor": {"AnymlaCompressor": 5},
    "mhc": {},  # functions of the model's module
    # of weights in FP8 and MXFP4: test_vllm_pretended.py
    "experts": {},
    "linears": {},
}
THEIRS = {
    "attention": {"DeepseekV4FlashMLAAttention": 4},
    "indexer": {"DeepseekV4Indexer": 2, "DeepseekV4IndexerCache": 2, "SparseAttnIndexer": 2},
    "compressor": {"DeepseekCompressor": 5},
    "mhc": {},
    "experts": {},
    "linears": {},
}


MODEL = "AnymlaDeepseekV4"  # itself, which says why it replaces nothing

# What ``auto`` takes on sm_90 for speed, on one GPU, beside 0.32; beside 0.33 it takes everything.
FASTER = {"attention", "indexer", "compressor", "mhc", "experts"}
# What vLLM lacks on other devices, so that it is anymla's whatever is asked for.
LACKING = {
    "sm_86": {"attention", "indexer", "compressor", "mhc"},
    "sm_89": {"attention", "indexer", "mhc"},
    "XPU": {"attention"},
    "gfx942": {"indexer"},
    "gfx950": set[str](),
}
# What a part brings along, since index keys are stored differently there.
BRINGS = {
    "attention": {"indexer", "compressor"},
    "indexer": {"compressor"},
    "compressor": {"indexer"},
}
RECORDED = (
    "_run_parallel_input_projections",
    "_split_qkv_and_norm",
    "_fused_qnorm_rope_kv_insert",
    "forward_mqa",
    "_o_proj",
)
COMPRESSORS = {"AnymlaCompressor", "DeepseekCompressor", "DeepseekV4RocmMxfp4Compressor"}
HYPER_CONNECTIONS = {"MHCPreOp": 4, "MHCPostOp": 4, "MHCFusedPostPreOp": 4, "HCHeadOp": 1}


def assert_each_part_is_anymlas_where_asked(
    found: dict[str, Any],
    auto: set[str],
    lacking: Set[str] = frozenset(),
    theirs: Mapping[str, dict[str, int]] = THEIRS,
    brings: Mapping[str, Set[str]] = {},
) -> None:
    images = found.pop("force with images")
    assert not [name for name in images["classes"] if name.startswith("Anymla") and name != MODEL]
    assert (images["exchanged"], images["for all"]) == ({}, False)
    of_modes = {"auto": auto, "auto on two GPUs": set(), "force": set(COUNTS)}
    for chosen, built in found.items():
        assert built["for all"]
        asked = of_modes.get(chosen, {chosen} | brings.get(chosen, frozenset())) | lacking
        for part in COUNTS:
            ours, others = (COUNTS, theirs) if part in asked else (theirs, COUNTS)
            for name, count in ours[part].items():
                assert built["classes"].get(name) == count, (chosen, name)
            for name in others[part]:
                assert name not in built["classes"], (chosen, name)
    assert found.keys() == {*of_modes, *COUNTS}


def test_the_model_of_the_vllm_installed_here(checkpoint: Path, tmp_path: Path) -> None:
    """0.32 has the classes of what it has built exchanged."""
    found = look_up("construct.py", tmp_path, "off", str(checkpoint), "sm_90")
    assert_caches_are_vllms(
        {chosen: each for chosen, each in found.items() if "image" not in chosen}
    )
    assert_each_part_is_anymlas_where_asked(found, FASTER)
    index = {"AnymlaIndexer": 2, "AnymlaIndexerCache": 2}
    assert found["force"]["exchanged"] == {"AnymlaCompressor": 5, **index}
    assert found["attention"]["exchanged"] == {}


def assert_caches_are_vllms(found: dict[str, Any]) -> None:
    """A connector registers caches by their layers' names, and moves pages of these sizes.

    So two engines can hand each other requests, whatever each of them replaces. Layers of ratios 0,
    4, 128, 4 have four windows, and three main caches and two of index keys, each with its states.
    """
    (caches,) = {json.dumps(each["caches"], sort_keys=True) for each in found.values()}
    there = [name for name, spec in json.loads(caches).items() if spec != "None"]
    assert len(there) == 4 + 2 * (3 + 2)


@needs_source
def test_the_model_of_another_vllm_is_asked_for_its_classes(
    checkpoint: Path, tmp_path: Path
) -> None:
    """From 0.33 on no class is exchanged but that of the main compressors."""
    source = Path(os.environ[SOURCE])
    found = look_up("construct.py", tmp_path, "off", str(checkpoint), "sm_90", source=source)
    assert_caches_are_vllms(
        {chosen: each for chosen, each in found.items() if "image" not in chosen}
    )
    assert_each_part_is_anymlas_where_asked(found, set(COUNTS))
    main = {"AnymlaCompressor": 3}
    expected = {"compressor": main, "force": main, "auto": main}
    assert {chosen: each["exchanged"] for chosen, each in found.items()} == {
        chosen: expected.get(chosen, {}) for chosen in found
    }


def assert_built(found: dict[str, Any], device: str) -> None:
    architecture, _, aiter = device.partition("+")
    theirs, brings = dict(THEIRS), {}
    if device.startswith("gfx"):
        theirs["attention"] = {"DeepseekV4ROCMAiterMLAAttention": 4}
        assert_layers_suit_rocm(found, device)
    if aiter:
        theirs["indexer"] = {
            "DeepseekV4RocmMxfp4Indexer": 2,
            "DeepseekV4RocmMxfp4IndexerCache": 2,
            "RocmSparseAttnIndexer": 2,
        }
        theirs["compressor"] = {"DeepseekCompressor": 3, "DeepseekV4RocmMxfp4Compressor": 2}
    if architecture == "gfx950":
        brings = BRINGS
    lacking = LACKING[architecture]
    assert_each_part_is_anymlas_where_asked(found, set(), lacking, theirs, brings)


def assert_layers_suit_rocm(found: dict[str, Any], device: str) -> None:
    """Anymla's attention uses no second stream, and its weights are not shuffled for AITER.

    Hyper-connections are vLLM's layers there, which are replaced by their names. An audit records
    the same methods of either attention, and knows the codes that each stores and which of them
    rotates its result back.
    """
    for built in found.values():
        theirs = built["classes"].get("DeepseekV4ROCMAiterMLAAttention", 0)
        assert built["shuffled"] == built["rotated back"] == theirs
        assert built["streams"] == (3 if theirs else 0)
        assert built["fnuz rows"] == (theirs if device == "gfx942" else 0)
        attention = "DeepseekV4ROCMAiterMLAAttention" if theirs else "AnymlaAttention"
        for method in RECORDED:
            assert built["audited"][f"{attention}.{method}"] == 4
        compressors = COMPRESSORS & built["classes"].keys()
        assert sum(built["audited"][f"{name}.forward"] for name in compressors) == 5
    for name, count in HYPER_CONNECTIONS.items():
        assert found["force"]["classes"].get(f"Anymla{name}") == count
        assert found["auto"]["classes"].get(name) == count


@pytest.mark.parametrize("device", LACKING)
def test_the_model_on_another_device(checkpoint: Path, tmp_path: Path, device: str) -> None:
    assert_built(look_up("construct.py", tmp_path, "off", str(checkpoint), device), device)


@needs_source
@pytest.mark.parametrize("device", [*LACKING, "gfx950+AITER"])
def test_the_model_of_another_vllm_on_another_device(
    checkpoint: Path, tmp_path: Path, device: str
) -> None:
    source = Path(os.environ[SOURCE])
    found = look_up("construct.py", tmp_path, "off", str(checkpoint), device, source=source)
    assert_built(found, device)
