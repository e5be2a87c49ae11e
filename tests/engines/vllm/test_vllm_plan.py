import ast
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

import anymla.engines.vllm
from anymla.engines.vllm import pinned, plugin, report
from anymla.engines.vllm.report import Machine

ADMITTED = "0.33.0"


def cuda(major: int, minor: int = 0, flashinfer: bool = False) -> Machine:
    return Machine("cuda", (major, minor), flashinfer)


def replaced(machine: Machine, mode: str) -> set[str]:
    return {part.name for part in report.plan(machine, mode) if part.replaced}


GFX942, GFX950 = (Machine("rocm", architecture=name) for name in ("gfx942", "gfx950"))
ALL = {report.ATTENTION, report.INDEXER, report.COMPRESSOR, report.MHC}
LACKING = {
    Machine("cpu"): {report.ATTENTION, report.INDEXER},
    Machine("xpu"): {report.ATTENTION},
    cuda(8): ALL,
    cuda(8, 6): ALL,
    cuda(8, 9): ALL - {report.COMPRESSOR},
    cuda(9): set(),
    cuda(10): set(),
    cuda(10, 3): set(),
    cuda(11): ALL - {report.COMPRESSOR},
    cuda(12): {report.ATTENTION},
    cuda(12, flashinfer=True): set(),
    GFX942: {report.INDEXER},
    GFX950: set(),
}
machines = pytest.mark.parametrize("machine", LACKING, ids=lambda machine: machine.name)


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken for speed."""
    monkeypatch.setattr(report, "FASTER", {})


@machines
def test_by_itself_a_device_gets_what_vllm_lacks_there(machine: Machine) -> None:
    assert replaced(machine, "auto") & ALL == LACKING[machine]
    for part in report.plan(machine, "auto"):
        if part.name in ALL - LACKING[machine]:
            assert f"ANYMLA_VLLM={part.name}" in part.why


@machines
def test_forced_it_gets_everything_and_off_nothing(machine: Machine) -> None:
    assert replaced(machine, "force") >= ALL
    assert not replaced(machine, "off")


@machines
@pytest.mark.parametrize("name", sorted(ALL))
def test_one_part_comes_with_what_the_device_lacks_and_no_more(machine: Machine, name: str) -> None:
    asked = {name}
    if machine.capability in ((10, 0), (10, 3)) and name in (report.INDEXER, report.COMPRESSOR):
        asked = {report.INDEXER, report.COMPRESSOR}
    if machine == GFX950 and name != report.MHC:
        asked = {name, report.INDEXER, report.COMPRESSOR}
    assert replaced(machine, name) & ALL == asked | LACKING[machine]


def test_a_list_asks_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.VARIABLE, "attention, mhc")
    found = {part.name: part for part in report.plan(cuda(9), report.mode())}
    assert {part.name for part in found.values() if part.replaced} == {
        report.ATTENTION,
        report.MHC,
        report.DRAFT_MODEL,
    }
    assert found["mhc"].why == "ANYMLA_VLLM asks for it"
    assert found["indexer"].why == "ANYMLA_VLLM does not ask for it"


@pytest.mark.parametrize(
    ("chosen", "wanted"),
    [("audit", set()), ("audit, mhc", {report.MHC}), ("force,audit", ALL), ("auto,audit", set())],
)
def test_an_audit_replaces_only_what_is_asked_for_beside_it(
    chosen: str, wanted: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(report.VARIABLE, chosen)
    assert report.audited()
    assert replaced(cuda(9), report.mode()) & ALL == wanted
    assert replaced(Machine("cpu"), report.mode()) >= LACKING[Machine("cpu")]
    monkeypatch.setenv(report.VARIABLE, "force")
    assert not report.audited()


def test_what_comes_along_says_so() -> None:
    """vLLM 0.33 stores scales of index keys in another format on sm_100."""
    for asked, other in (("indexer", "compressor"), ("compressor", "indexer")):
        (part,) = [p for p in report.plan(cuda(10), asked) if p.name == other]
        assert part.why.startswith(f"with the {asked}: vLLM 0.33")
        (apart,) = [p for p in report.plan(cuda(9), asked) if p.name == other]
        assert not apart.replaced
    (attention,) = [p for p in report.plan(Machine("cpu"), "mhc") if p.name == "attention"]
    assert "stops without a Triton compiler" in attention.why


def test_what_was_measured_faster_is_taken_there_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(report.FASTER, (report.MHC, "sm_90", "0.32.0"), "a file")
    monkeypatch.setattr(report, "installed_version", lambda: "0.32.0")
    assert replaced(cuda(9), "auto") == {report.MHC}
    assert replaced(cuda(9), "attention") & ALL == {report.ATTENTION}
    assert not replaced(cuda(10), "auto")
    (mhc,) = [part for part in report.plan(cuda(9), "auto") if part.name == report.MHC]
    assert mhc.why == "measured faster: a file"
    monkeypatch.setattr(report, "installed_version", lambda: "0.31.0")
    assert not replaced(cuda(9), "auto")


def test_what_is_faster_as_a_whole_is_taken_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed_version", lambda: "0.33.0")
    taken = [part for part in report.plan(cuda(9), "auto") if part.name in report.PARTS]
    assert {part.name for part in taken} == set(report.PARTS)
    for part in taken:
        assert (part.replaced, part.for_speed) == (True, True)
        assert (
            part.why == "measured faster with all parts: H200, benchmarks/results/vllm_h200.jsonl"
        )
    assert not replaced(cuda(10), "auto")


@pytest.mark.parametrize(
    ("version", "drafts", "gpus", "tensor", "experts", "why"),
    [
        ("0.32.0", None, 1, 1, False, ""),
        ("0.33.0", None, 1, 1, True, ""),
        ("0.33.0", None, 2, 2, False, ""),
        ("0.32.0", object(), 1, 1, False, "with drafts"),
        ("0.33.0", object(), 2, 2, False, "with drafts"),
        ("0.32.0", None, 2, 2, False, "on 2 GPUs"),
        ("0.33.0", None, 4, 4, False, "on 4 GPUs"),
        ("0.33.0", None, 2, 1, False, "on 2 GPUs that are not one tensor parallel group"),
        ("0.33.0", None, 2, 2, True, "with expert parallelism"),
    ],
)
def test_speed_is_no_reason_where_no_whole_model_was_measured(
    version: str,
    drafts: object,
    gpus: int,
    tensor: int,
    experts: bool,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faster = (report.ATTENTION, report.MHC, report.EXPERTS)
    for part in faster:
        monkeypatch.setitem(report.FASTER, (part, "sm_90", "0.32.0"), "a file")
    monkeypatch.setattr(report, "installed_version", lambda: version)
    parallel = SimpleNamespace(
        world_size_across_dp=gpus, tensor_parallel_size=tensor, enable_expert_parallel=experts
    )
    config = SimpleNamespace(
        speculative_config=drafts, parallel_config=parallel, model_config=text_model()
    )
    found = report.within(report.plan(cuda(9), "auto"), config)
    kept = {part.name: part for part in found if not part.replaced}
    if not why:
        assert not {*faster, report.DRAFT_MODEL} & kept.keys()
        return
    # Hyper-connections are exchanged before there is a configuration, and are the same in all.
    assert {report.ATTENTION, report.EXPERTS, report.DRAFT_MODEL} <= kept.keys()
    assert report.MHC not in kept
    assert kept[report.ATTENTION].why.endswith(f"ANYMLA_VLLM=force takes it {why}")
    for asked in ("force", "attention"):  # and what a machine lacks is replaced in any case
        parts = report.plan(cuda(9), asked)
        assert report.within(parts, config) == parts
    lacking = report.plan(cuda(8), "auto")
    assert report.within(lacking, config) == lacking


def text_model(**fields: int) -> SimpleNamespace:
    return SimpleNamespace(hf_config=SimpleNamespace(**fields))


@pytest.mark.parametrize("machine", [cuda(8), cuda(9), Machine("cpu"), Machine("xpu")])
@pytest.mark.parametrize("chosen", ["auto", "force", "attention,mhc"])
def test_nothing_is_replaced_beside_a_vision_tower(machine: Machine, chosen: str) -> None:
    """Whatever is asked for: its windows are not causal over an image."""
    config = SimpleNamespace(
        speculative_config=None,
        parallel_config=SimpleNamespace(world_size_across_dp=1),
        model_config=text_model(vision_n_layers=32),
    )
    parts = report.plan(machine, chosen)
    found = report.within(parts, config)
    assert [part.name for part in found] == [part.name for part in parts]
    assert not any(part.replaced for part in found)
    assert all("vision tower" in line for line in report.lines(machine, found))
    config.model_config = text_model(vision_n_layers=0)
    assert report.within(parts, config) == parts


@pytest.mark.parametrize("chosen", ["auto", "force", "experts,linears"])
def test_experts_and_linear_layers_stay_beside_lora(
    chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is asked for: adapters would be lost, and nobody told."""
    monkeypatch.setattr(report, "installed_version", lambda: "0.33.0")
    parallel = SimpleNamespace(
        world_size_across_dp=1, tensor_parallel_size=1, enable_expert_parallel=False
    )
    config = SimpleNamespace(
        speculative_config=None,
        parallel_config=parallel,
        model_config=text_model(),
        lora_config=object(),
    )
    parts = report.plan(cuda(9), chosen)
    found = {part.name: part for part in report.within(parts, config)}
    for name in (report.EXPERTS, report.LINEARS):
        assert not found[name].replaced
        assert "LoRA" in found[name].why
        found.pop(name)
    assert all(found[part.name] == part for part in parts if part.name in found)
    config.lora_config = None
    assert report.within(parts, config) == parts


@pytest.mark.parametrize("chosen", ["force", "attention"])
def test_a_platform_without_an_adapter_keeps_everything(chosen: str) -> None:
    assert not replaced(Machine("tpu"), chosen)
    parts = report.plan(Machine("tpu"), chosen)
    assert all("TPU" in part.why for part in parts if part.name in ALL)


@pytest.mark.parametrize(("machine", "fnuz"), [(GFX942, True), (GFX950, False)])
def test_on_an_amd_gpu_the_codes_of_index_keys_decide(machine: Machine, fnuz: bool) -> None:
    """The compressor writes OCP codes everywhere; vLLM's indexer reads the platform's."""
    assert machine.fnuz == fnuz
    (indexer,) = [p for p in report.plan(machine, "auto") if p.name == report.INDEXER]
    assert indexer.replaced == fnuz
    assert ("as e4m3fnuz" in indexer.why) == fnuz
    assert report.DRAFT_MODEL in replaced(machine, "attention")


def test_only_a_cpu_needs_stand_ins_for_metadata_kernels_and_has_no_draft_model() -> None:
    assert report.METADATA_KERNELS in replaced(Machine("cpu"), "mhc")
    assert report.METADATA_KERNELS not in replaced(cuda(8), "auto")
    assert report.DRAFT_MODEL not in replaced(Machine("cpu"), "force")
    assert report.DRAFT_MODEL in replaced(cuda(8), "auto")
    assert report.DRAFT_MODEL not in replaced(cuda(9), "mhc")


def test_the_log_has_a_line_for_each_part_with_its_reason() -> None:
    machine = cuda(8, 6)
    parts = report.plan(machine, "auto")
    lines = report.lines(machine, parts)
    assert len(lines) == len(parts)
    attention = "anymla on sm_86: attention replaced"
    assert lines[0] == f"{attention} (vLLM's own needs FlashMLA, which does not run on sm_86)"
    assert "anymla on sm_86: experts kept (anymla's were not tried beside vLLM's on sm_86)" in lines


@pytest.mark.parametrize("chosen", ["on", "attention,auto", "attention,", ""])
def test_the_choice_is_a_mode_or_parts(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(report.VARIABLE, raising=False)
    assert report.mode() == "auto"
    monkeypatch.setenv(report.VARIABLE, chosen)
    with pytest.raises(ValueError, match="must be one of auto, force, off, audit, or parts"):
        report.mode()


@pytest.mark.parametrize("name", [report.EXPERTS, report.LINEARS])
def test_experts_and_linear_layers_are_replaced_where_they_were_measured(name: str) -> None:
    assert replaced(cuda(9), name) == {name}
    for machine in LACKING:
        for chosen in ("auto", "force", name):
            wanted = machine.capability == (9, 0) and chosen != "auto"
            assert (name in replaced(machine, chosen)) == wanted


def test_where_nothing_is_replaced_the_log_says_so_of_each_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(report.VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "installed_version", lambda: ADMITTED)
    monkeypatch.setattr(report, "this_machine", lambda: cuda(9))
    with caplog.at_level(logging.INFO):
        plugin.register()  # registers no model: vLLM need not be here
    said = [record.getMessage() for record in caplog.records]
    shared = report.lines(cuda(9), report.v41_plan(cuda(9), "auto"), report.V41)
    assert said == shared + report.lines(cuda(9), report.plan(cuda(9), "auto"))
    assert said[0].startswith("anymla on sm_90: DeepSeek-V4.1 attention kept (vLLM's own runs on")
    assert said[len(shared)].startswith("anymla on sm_90: attention kept (vLLM's own runs on sm_90")


@pytest.mark.parametrize("mode", ["auto", "force"])
def test_an_untested_vllm_is_left_alone_with_a_warning(
    mode: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(report.VARIABLE, mode)
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.99.0")
    # anything beyond the warning would ask which machine this is
    monkeypatch.setattr(report, "this_machine", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    (record,) = caplog.records
    assert "vLLM 0.99.0 is not among those that the plugin admits" in record.getMessage()
    assert ", ".join(pinned.VERSIONS) in record.getMessage()


def test_the_view_without_vllm_and_with_an_untested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "installed_version", lambda: None)
    (row,) = report.plugin_view()
    assert row["action"] == "not installed"
    monkeypatch.setattr(report, "installed_version", lambda: "0.99.0")
    (row,) = report.plugin_view()
    assert "0.99.0 is not among those that the plugin admits" in row["why"]


def test_the_view_has_a_row_for_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(report.VARIABLE, "attention")
    monkeypatch.setattr(report, "installed_version", lambda: ADMITTED)
    monkeypatch.setattr(report, "this_machine", lambda: cuda(9))
    for refusal in ("refusal_by_source", "v41_refusal_by_source"):
        monkeypatch.setattr(report, refusal, lambda *_: None)
    head, *rows = report.plugin_view()
    assert head == {"part": "vLLM", "action": ADMITTED, "why": pinned.VERSIONS[ADMITTED]}
    assert [(row["part"], row["action"]) for row in rows] == [
        ("attention", "replaced"),
        ("indexer", "kept"),
        ("compressor", "kept"),
        ("mhc", "kept"),
        ("experts", "kept"),
        ("linears", "kept"),
        ("draft model", "replaced"),
        ("DeepSeek-V4.1 attention", "replaced"),
        ("DeepSeek-V4.1 indexer", "kept"),
        ("DeepSeek-V4.1 compressor", "kept"),
        ("DeepSeek-V4.1 mhc", "kept"),
        ("DeepSeek-V4.1 engram", "kept"),
    ]


SHARED = set(report.V41_PARTS)


@machines
def test_of_v41_what_vllm_lacks_is_replaced_and_nothing_else(machine: Machine) -> None:
    found = {part.name for part in report.v41_plan(machine, "auto") if part.replaced}
    if machine.platform == "rocm":
        assert not found
    elif machine.platform != "cuda":
        assert found >= SHARED
        assert (report.METADATA_KERNELS in found) == (machine.platform == "cpu")
    elif machine.capability[0] == 10:
        assert not found
    else:
        converts = {report.ENGRAM} if machine.capability < (8, 9) else set()
        assert found == LACKING[machine] & SHARED | converts
    assert not any(part.replaced for part in report.v41_plan(machine, "off"))


def test_of_v41_nothing_is_taken_for_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in report.V41_PARTS:
        monkeypatch.setitem(report.FASTER, (part, "sm_90", ADMITTED), "a file")
    monkeypatch.setattr(report, "installed_version", lambda: ADMITTED)
    for chosen, wanted in (("auto", set()), ("engram,mhc", {"engram", "mhc"}), ("force", SHARED)):
        found = {part.name for part in report.v41_plan(cuda(9), chosen) if part.replaced}
        assert found == wanted
    for machine, why in ((cuda(10), "no adapter for vLLM's rows"), (GFX942, "gfx942")):
        parts = report.v41_plan(machine, "force")
        assert all(not part.replaced and why in part.why for part in parts)


def test_of_v41_the_log_of_the_worker_has_a_line_for_each_part() -> None:
    machine = cuda(8, 9)
    lines = report.lines(machine, report.v41_plan(machine, "auto"), report.V41)
    assert [line.split(" (")[0] for line in lines] == [
        "anymla on sm_89: DeepSeek-V4.1 attention replaced",
        "anymla on sm_89: DeepSeek-V4.1 indexer replaced",
        "anymla on sm_89: DeepSeek-V4.1 compressor kept",
        "anymla on sm_89: DeepSeek-V4.1 mhc replaced",
        "anymla on sm_89: DeepSeek-V4.1 engram kept",
    ]


def test_the_adapters_compute_nothing() -> None:
    names = set()
    for file in Path(anymla.engines.vllm.__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_text())
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    mathematics = {"matmul", "einsum", "bmm", "mm", "softmax", "exp", "exp2", "rsqrt", "sigmoid"}
    assert not names & mathematics
