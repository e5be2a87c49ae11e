"""Our functions take what today's FlashMLA and DeepGEMM take: names, order and defaults."""

import importlib
import importlib.util
import inspect
import json
from importlib import resources
from pathlib import Path

import pytest
from packaging.version import Version
from recorded import MODULES, recorded

from anymla import compat

RECORDED = json.loads(resources.files(compat).joinpath("signatures.json").read_text())
FUNCTIONS = [
    (module, name, parameters)
    for package in RECORDED.values()
    for module, functions in package["modules"].items()
    for name, parameters in functions.items()
]
# Defaults that ours have where theirs have none: values with a meaning in older libraries.
MORE_DEFAULTS = {("fp8_fp4_mqa_logits", "max_seqlen_k"): 0}


def ours(module, name):
    return getattr(importlib.import_module(f"anymla.compat.{module.split('.')[-1]}"), name)


def written(parameter):
    kinds = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return f"{kinds.get(parameter.kind, '')}{parameter.name}{default}"


def provided(module, name):
    home = importlib.import_module(f"anymla.compat.{module.split('.')[-1]}")
    return name in vars(home)


@pytest.mark.parametrize(
    ("module", "name", "parameters"), [each for each in FUNCTIONS if provided(*each[:2])]
)
def test_signatures_are_todays(module, name, parameters):
    signature = inspect.signature(ours(module, name))
    mine = list(signature.parameters.values())
    if parameters is None:  # a function of C++
        assert name in ("get_num_sms", "set_num_sms")
        return
    theirs = [each for each in parameters.split(", ") if each]
    leading = [
        parameter.replace(default=parameter.empty)
        if MORE_DEFAULTS.get((name, parameter.name), parameter) == parameter.default
        else parameter
        for parameter in mine[: len(theirs)]
    ]
    assert [written(parameter) for parameter in leading] == theirs
    # What is ours comes behind: as keywords, or as FlashMLA's ``out`` of the build in vLLM.
    rest = mine[len(theirs) :]
    assert all(each.kind is each.KEYWORD_ONLY or written(each) == "out=None" for each in rest)


def test_what_is_provided():
    names = {module: [] for module, *_ in FUNCTIONS}
    for module, name, _ in FUNCTIONS:
        if provided(module, name):
            names[module].append(name)
    assert names == {
        "flash_mla": [
            "flash_attn_varlen_func", "flash_mla_sparse_fwd", "flash_mla_with_kvcache",
            "get_mla_decoding_metadata", "get_mla_metadata", "has_legacy",
        ],
        "flash_mla.fused_norm_rope_attn_rope_cast": [
            "decode", "permute_q_b_proj", "permute_wv_proj", "prefill",
        ],
        "deep_gemm": [
            "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "fp8_fp4_paged_sparse_mqa_logits",
            "fp8_fp4_sparse_mqa_logits", "get_mqa_logits_metadata", "get_num_sms",
            "get_paged_mqa_logits_metadata", "get_paged_sparse_mqa_logits_metadata",
            "get_sparse_mqa_logits_metadata", "set_num_sms",
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"), [each[:2] for each in FUNCTIONS if not provided(*each[:2])]
)
def test_a_call_of_what_is_not_provided_says_so(module, name):
    with pytest.raises(
        NotImplementedError, match=rf"anymla\.compat\.\w+: .*{name} is not provided"
    ):
        ours(module, name)(1, two=2)


def test_other_names_are_no_attributes():
    for module in ("flash_mla", "deep_gemm"):
        with pytest.raises(AttributeError, match="nothing_like_it"):
            ours(module, "nothing_like_it")


@pytest.mark.parametrize("package", RECORDED)
def test_versions_are_those_of_the_interface(package):
    version = Version(ours(package, "__version__"))
    assert version.public == RECORDED[package]["version"]
    assert version.local == "anymla"


@pytest.mark.parametrize("package", RECORDED)
def test_the_record_is_that_of_the_library_at_hand(package):
    """Runs where the library is installed; it is not imported."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    folder = Path(found.origin).parent
    version = folder / "VERSION"
    if not version.is_file() or version.read_text().strip() != RECORDED[package]["version"]:
        pytest.skip(f"{package} has another version")
    assert recorded(package, folder) == RECORDED[package]["modules"]


def test_a_record_is_made_of_sources(tmp_path):
    package = tmp_path / "deep_gemm"
    (package / "mega").mkdir(parents=True)
    (package / "mega" / "__init__.py").write_text("def moe(x: int, n=2): ...\ndef _own(): ...\n")
    (package / "__init__.py").write_text(
        "from .mega import moe, _own\nfrom .mega import moe as _hidden\nset_sms = _C.set_sms\n"
        "try:\n    def gemm(a, b: str = 'nk', *, c=None): ...\n    other = gemm\n"
        "except AttributeError: pass\n"
    )
    assert MODULES["deep_gemm"] == {"deep_gemm": "__init__"}
    assert recorded("deep_gemm", package) == {
        "deep_gemm": {
            "gemm": "a, b='nk', *, c=None",
            "moe": "x, n=2",
            "other": "a, b='nk', *, c=None",
            "set_sms": None,
        }
    }
