import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from healthy import case_of, table
from torch import Tensor

from anymla.audit import CHECKS, Case, judge, load_case, save_case
from anymla.audit.case import CaseError
from anymla.audit.replay import recompute, replay
from anymla.formats.e4m3 import decode_e4m3fnuz
from anymla.formats.interchange import fnuz_codes
from anymla.formats.mxfp4 import dequantize_mxfp4
from anymla.formats.page_layout import MAIN_FP8, get_layout

Fault = Callable[[dict[str, Tensor]], None]


@pytest.mark.parametrize("method", sorted(CHECKS))
def test_a_right_result_is_within_its_bound(method: str) -> None:
    found = judge(case_of(method))
    print(method, found)
    assert found.ok
    assert found.worst <= 1


@pytest.mark.parametrize("method", sorted(set(CHECKS) - {"slots", "at_rest"}))
def test_the_reference_is_within_the_same_bound(method: str) -> None:
    assert judge(recompute(case_of(method), "reference")).ok


def _shift(name: str, by: float) -> Fault:
    """One value of a result off by a share of the largest."""

    def fault(tensors: dict[str, Tensor]) -> None:
        flat = tensors[name].view(-1)
        flat[len(flat) // 3] += by * float(flat.float().abs().max())

    return fault


def _flip(name: str, place: int, bit: int) -> Fault:
    def fault(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(torch.uint8).view(-1)[place] ^= 1 << bit

    return fault


def _roll(name: str) -> Fault:
    """Results of another token."""

    def fault(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].roll(1, 0)

    return fault


def _without_sink(tensors: dict[str, Tensor]) -> None:
    case = dataclasses.replace(case_of("attention"))
    case.tensors["sink"] = torch.full_like(case.tensors["sink"], -torch.inf)
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _window_a_row_short(tensors: dict[str, Tensor]) -> None:
    case = case_of("attention")
    for plane in ("data", "scales"):
        case.tensors[f"window_{plane}"] = case.tensors[f"window_{plane}"][1:]
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _one_wrong_row(tensors: dict[str, Tensor]) -> None:
    case = case_of("attention")
    other = get_layout(MAIN_FP8).encode(torch.randn(1, 512))
    for plane, row in zip(("data", "scales"), other, strict=True):
        assert row is not None
        case.tensors[f"entries_{plane}"][11] = row[0]
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _stale_index_row(tensors: dict[str, Tensor]) -> None:
    """The best key was another one when the scores were made."""
    case = case_of("selection")
    best = int(tensors["chosen"][0])
    case.tensors["data"][best] = case.tensors["data"][best] ^ 0x80
    tensors["chosen"] = recompute(case, "torch").tensors["chosen"]


def _chosen_twice(tensors: dict[str, Tensor]) -> None:
    tensors["chosen"][1] = tensors["chosen"][0]


def _one_too_few(tensors: dict[str, Tensor]) -> None:
    tensors["chosen"][-1] = -1


def _another_position(method: str) -> Fault:
    """Turned by the angle of another position; of a right one where it is read."""

    def fault(tensors: dict[str, Tensor]) -> None:
        case = case_of(method)
        case.tensors["cos_sin"] = case.tensors["cos_sin"].roll(1, 0)
        tensors.update(recompute(case, "torch").tensors, cos_sin=tensors["cos_sin"])

    return fault


def _without_ape(tensors: dict[str, Tensor]) -> None:
    case = case_of("compressor_state")
    case.tensors["ape"] = torch.zeros_like(case.tensors["ape"])
    tensors["state"] = recompute(case, "torch").tensors["state"]


def _own_half_only(tensors: dict[str, Tensor]) -> None:
    """The window before left out of an entry that overlaps it."""
    case = case_of("compressed_row")
    case.tensors["present"] = torch.arange(8).expand(3, 8) >= 4
    tensors.update({n: recompute(case, "torch").tensors[n] for n in ("data", "scales")})


def _fewer_iterations(tensors: dict[str, Tensor]) -> None:
    case = case_of("hc_pre")
    case.numbers["iters"] = 3
    made = recompute(case, "torch").tensors
    tensors.update({name: made[name] for name in ("y", "post", "comb")})


def _scale_byte_wrong(tensors: dict[str, Tensor]) -> None:
    """Of one in sixteen blocks, twice what it should be."""
    case = case_of("linear")
    case.tensors["weight_scale"][0, 5] += 1
    tensors["y"] = recompute(case, "torch").tensors["y"]


def _another_expert(tensors: dict[str, Tensor]) -> None:
    case = case_of("experts")
    case.tensors["weights"] = case.tensors["weights"].flip(1)
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _without_shared(tensors: dict[str, Tensor]) -> None:
    case = case_of("experts")
    del case.tensors["shared"]
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _without_limit(tensors: dict[str, Tensor]) -> None:
    case = case_of("experts")
    case.numbers["limit"] = 100.0
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _without_router_bias(tensors: dict[str, Tensor]) -> None:
    case = case_of("router")
    case.tensors["bias"] = torch.zeros_like(case.tensors["bias"])
    tensors.update({name: recompute(case, "torch").tensors[name] for name in ("ids", "weights")})


def _gates_transposed(tensors: dict[str, Tensor]) -> None:
    case = case_of("hc_post")
    case.tensors["comb"] = case.tensors["comb"].mT.contiguous()
    tensors["streams"] = recompute(case, "torch").tensors["streams"]


def _one_group_of_another(tensors: dict[str, Tensor]) -> None:
    case = case_of("projection")
    case.tensors["wo_a"] = case.tensors["wo_a"].flip(0)
    tensors["out"] = recompute(case, "torch").tensors["out"]


def _nan(name: str) -> Fault:
    def fault(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[5] = torch.nan

    return fault


def _set(name: str, place: int, value: int) -> Fault:
    def fault(tensors: dict[str, Tensor]) -> None:
        tensors[name].view(-1)[place] = value

    return fault


FAULTS: list[tuple[str, str, Fault]] = [
    ("attention", "sink dropped", _without_sink),
    ("attention", "window a row short", _window_a_row_short),
    ("attention", "one wrong row of 90", _one_wrong_row),
    ("attention", "NaN", _nan("out")),
    ("attention", "a value off", _shift("out", 0.05)),
    ("selection", "stale index row", _stale_index_row),
    ("selection", "an entry twice", _chosen_twice),
    ("selection", "one too few", _one_too_few),
    ("selection", "an entry that is none", _set("chosen", 0, 50)),
    ("slots", "one slot wrong", _set("listed", 40, 999)),
    ("slots", "one slot twice", _set("listed", 40, 7 * 64)),
    ("window_row", "scale byte wrong", _flip("scales", 2, 0)),
    ("window_row", "code off by one", _flip("data", 10, 0)),
    ("window_row", "another token's row", _roll("data")),
    ("window_row", "another position", _another_position("window_row")),
    ("query", "another position", _another_position("query")),
    ("query", "a value off", _shift("out", 0.05)),
    ("qkv_norm", "another token's", _roll("kv_out")),
    ("qkv_norm", "a value off", _shift("qr_out", 0.02)),
    ("compressor_state", "bias left out", _without_ape),
    ("compressor_state", "another token's", _roll("state")),
    ("compressed_row", "scale byte wrong", _flip("scales", 0, 0)),
    ("compressed_row", "window before left out", _own_half_only),
    ("compressed_row", "another position", _another_position("compressed_row")),
    ("index_query", "code off by some", _flip("codes", 100, 3)),
    ("index_query", "weight without its scale", _shift("weights_out", 0.5)),
    ("projection", "groups exchanged", _one_group_of_another),
    ("projection", "not turned back", _another_position("projection")),
    ("projection", "another token's", _roll("out")),
    ("linear", "a value off", _shift("y", 0.5)),
    ("linear", "scale byte wrong", _scale_byte_wrong),
    ("linear", "another token's", _roll("y")),
    ("linear", "NaN", _nan("y")),
    ("experts", "a value off", _shift("out", 0.3)),
    ("experts", "another expert", _another_expert),
    ("experts", "scale byte wrong", _flip("w2_scale", 5, 2)),
    ("experts", "shared expert left out", _without_shared),
    ("experts", "no limit", _without_limit),
    ("router", "an expert twice", _set("ids", 1, 7)),
    ("router", "none", _set("ids", 1, -1)),
    ("router", "another token's experts", _roll("ids")),
    ("router", "bias left out", _without_router_bias),
    ("router", "a weight off", _shift("weights", 0.001)),
    ("hc_pre", "too few iterations", _fewer_iterations),
    ("hc_pre", "a gate off", _shift("post", 0.01)),
    ("hc_pre", "another token's", _roll("y")),
    ("hc_post", "gates transposed", _gates_transposed),
    ("hc_post", "another token's", _roll("streams")),
    ("hc_head", "a value off", _shift("y", 0.05)),
    ("at_rest", "a byte changed", _flip("after", 70, 5)),
]


@pytest.mark.parametrize(
    ("method", "fault"), [(m, f) for m, _, f in FAULTS], ids=[f"{m}: {n}" for m, n, _ in FAULTS]
)
def test_a_fault_is_seen(method: str, fault: Fault) -> None:
    case = case_of(method)
    fault(case.tensors)
    found = judge(case)
    print(found)
    assert not found.ok
    assert found.what


def test_a_code_that_is_nan_is_seen_though_the_row_did_not_change() -> None:
    case = case_of("at_rest")
    for name in ("before", "after"):
        case.tensors[name][1, 3] = 0x7F
    found = judge(case)
    assert "main entry 9: a code is NaN" in found.what
    assert found.token == 1


def test_a_router_is_judged_from_its_logits_and_from_known_experts() -> None:
    case = case_of("router")
    logits = case.tensors.pop("x").float() @ case.tensors.pop("weight").float().T
    case.tensors["logits"] = logits
    assert judge(case).ok
    assert judge(recompute(case, "torch")).ok
    known = dataclasses.replace(case, tensors=case.tensors | {"known": case.tensors["ids"].flip(1)})
    assert judge(known).ok
    assert judge(recompute(known, "torch")).ok
    known.tensors["known"] = known.tensors["known"].clone()
    known.tensors["known"][1, 2] = 31 - known.tensors["known"][1, 2]
    found = judge(known)
    assert not found.ok
    assert found.token == 1
    assert "known are" in found.what


def test_experts_in_bf16_are_judged_more_narrowly() -> None:
    case = case_of("experts")
    for name in ("w13", "w2"):
        scale = case.tensors.pop(f"{name}_scale")
        case.tensors[name] = dequantize_mxfp4(case.tensors[name], scale).bfloat16()
    assert not judge(case).ok  # made with inputs in e4m3
    found = judge(recompute(case, "torch"))
    assert found.ok
    assert found.worst > 0.05


def test_nothing_is_chosen_before_there_is_an_entry() -> None:
    case = case_of("selection")
    for name in ("data", "scales"):
        case.tensors[name] = case.tensors[name][:0]
    assert not judge(case).ok
    case.tensors["chosen"] = torch.full((16,), -1)
    assert judge(case).ok


def test_a_row_that_moved_is_not_compared() -> None:
    case = case_of("at_rest")
    case.tensors["after"] = case.tensors["after"].roll(1, 0)
    assert not judge(case).ok
    case.tensors["slots"] = case.tensors["slots"] + 1
    assert judge(case).ok


def test_a_list_counts_as_far_as_its_length() -> None:
    case = case_of("slots")
    listed = torch.cat((case.tensors["listed"], torch.tensor([3, -1])))
    case.tensors["listed"] = listed
    assert not judge(case).ok
    case.tensors["length"] = torch.tensor([len(listed) - 2])
    assert judge(case).ok
    del case.tensors["length"]
    listed[-2] = -1
    assert judge(case).ok


def test_entries_that_were_not_chosen_are_not_attended_to() -> None:
    case = case_of("attention")
    chosen = torch.arange(40)
    chosen[30:] = -1
    for name in ("entries_data", "entries_scales"):
        rest = torch.full((10, case.tensors[name].shape[1]), 5, dtype=torch.uint8)
        case.tensors[name] = torch.cat((case.tensors[name], rest))
    assert not judge(case).ok
    case.tensors["chosen"] = chosen
    assert judge(case).ok
    assert judge(recompute(case, "torch")).ok


def test_attention_that_is_rotated_back_is_judged_so() -> None:
    case = case_of("attention")
    case.tensors["cos_sin"] = table()[1:2]
    assert not judge(case).ok
    rotated = recompute(case, "torch")
    assert judge(rotated).ok
    del rotated.tensors["cos_sin"]
    assert not judge(rotated).ok


def test_a_rotated_head_without_the_sink_is_seen() -> None:
    case = case_of("attention")
    sink = case.tensors["sink"].clone()
    case.tensors |= {"cos_sin": table()[1:2], "sink": torch.full_like(sink, -torch.inf)}
    case = recompute(case, "torch")
    assert judge(case).ok
    case.tensors["sink"] = sink
    assert not judge(case).ok


def test_an_index_query_in_fnuz_codes_is_read_as_such() -> None:
    """The same code means half in e4m3fnuz, and the scale in the weight is twice as large."""
    case = case_of("index_query")
    case.tensors["codes"] = fnuz_codes(case.tensors["codes"].view(torch.uint8))
    case.tensors["weights_out"] = case.tensors["weights_out"] * 2
    assert not judge(case).ok
    case.numbers["fnuz"] = 1
    assert judge(case).ok
    assert judge(recompute(case, "torch")).ok
    case.tensors["codes"][0, 0, 0] = 0x80
    assert not judge(case).ok


def test_a_query_in_fnuz_codes_selects_the_same() -> None:
    case = case_of("selection")
    case.tensors["q"] = (case.tensors["q"] / 2).to(torch.float8_e4m3fnuz)
    assert judge(case).ok
    assert judge(recompute(case, "torch")).ok


def test_keys_that_a_reader_of_fnuz_loses_are_missed() -> None:
    """OCP's negative zero is NaN in e4m3fnuz, so that a key with one scores nothing."""
    case = case_of("selection")
    best = int(case.tensors["chosen"][0])
    case.tensors["data"][best, 5] = 0x80
    assert judge(recompute(case, "torch")).ok
    keys = decode_e4m3fnuz(case.tensors["data"]) * case.tensors["scales"].view(torch.float32)
    assert bool(keys[best].isnan().any())
    scores = case.tensors["weights"] @ (case.tensors["q"] @ keys.T).relu()
    order = scores.nan_to_num(nan=-torch.inf).sort(descending=True, stable=True).indices
    case.tensors["chosen"] = order[: len(case.tensors["chosen"])].int()
    assert best not in case.tensors["chosen"]
    assert not judge(case).ok


def test_every_method_has_a_fault() -> None:
    assert {method for method, _, _ in FAULTS} == set(CHECKS)


def test_the_token_with_the_fault_is_named() -> None:
    case = case_of("query")
    case.tensors["out"][2, 1, 7] += 1
    found = judge(case)
    assert found.token == 2
    assert "query[1, 7]" in found.what


@pytest.mark.parametrize("method", ["attention", "selection", "compressed_row"])
def test_a_dump_says_the_same_again(method: str, tmp_path: Path) -> None:
    case = case_of(method)
    save_case(tmp_path / "case.safetensors", case, {"what": "then"})
    again, found = load_case(tmp_path / "case.safetensors")
    assert found == {"what": "then"}
    assert again.digest() == case.digest()
    assert dataclasses.replace(again, tensors={}) == dataclasses.replace(case, tensors={})
    assert [(v.who, v.found and v.found.ok) for v in replay(again)][:3] == [
        ("engine", True),
        ("reference", True),
        ("torch", True),
    ]


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(CaseError, match=r"x\.safetensors"):
        load_case(path)
    with pytest.raises(ValueError, match="no check of 'nothing'"):
        judge(Case("nothing", "", [], [], {}))
    with pytest.raises(ValueError, match="lacks 'q'"):
        judge(Case("query", "", [], [], {"out": torch.zeros(1, 1, 64)}, {"eps": 1.0}))
