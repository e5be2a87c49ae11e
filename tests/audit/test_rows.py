"""Rows of tensors that are recorded, as a graph's replay records them too."""

import pytest
import torch
from torch import Tensor

from anymla.audit.packet import Packed, Packet
from anymla.audit.rows import RowRecorder
from anymla.runtime.devices import default_device
from anymla.testing.pytest_plugin import inference_rules  # noqa: F401

CPU = torch.device("cpu")


def recorder(device: torch.device = CPU, rows: int = 2) -> RowRecorder:
    return RowRecorder(device, rows, ["a", "b"], 4096)


def tensors(device: torch.device, tokens: int = 6) -> dict[str, Tensor]:
    wide = torch.randn(tokens, 3, 40, device=device).bfloat16()
    return {
        "q": wide[:, :2],  # rows apart by more than their length
        "codes": torch.randint(0, 255, (tokens, 64), dtype=torch.uint8, device=device),
        "gate": torch.randn(tokens, 4, 1, device=device),
        "ids": torch.arange(tokens, device=device, dtype=torch.int32).unsqueeze(1),
    }


def noted(kept: RowRecorder, section: str, of: dict[str, Tensor]) -> None:
    for name, tensor in of.items():
        kept.note(section, name, tensor)
    kept.flush()


def read(kept: RowRecorder, section: str, step: int) -> dict[str, Tensor | None]:
    """What a judge is given of a section; None for what that step did not record."""
    packet = Packet()
    held = kept.hold(packet, section)
    marks = kept.hold_marks(packet)
    for name, each in held.items():
        packet.plan(name, section, [], [], {"x": each})
    packed = Packed(packet.planned, packet.block(CPU).cpu(), step, marks)
    return {
        planned.method: None if case is None else case.tensors["x"]
        for planned, case in zip(packed.planned, packed.cases(), strict=True)
    }


def same(found: dict[str, Tensor | None], of: dict[str, Tensor], rows: list[int]) -> bool:
    return all(
        found[name] is not None and torch.equal(found[name], tensor[rows].cpu())  # type: ignore[arg-type]
        for name, tensor in of.items()
    )


def test_the_rows_asked_for_are_kept() -> None:
    kept, of = recorder(), tensors(CPU)
    kept.choose(7, [1, 4], ["a"])
    assert kept.wants("a")
    assert not kept.wants("b")
    assert not kept.wants("c")
    noted(kept, "a", of)
    assert same(read(kept, "a", 7), of, [1, 4])
    last = kept.last("a", "gate")
    assert last is not None
    assert torch.equal(last, of["gate"][[1, 4]])
    assert kept.last("a", "none") is None
    kept.release()
    assert not kept.wants("a")


def test_fewer_rows_are_filled_up_with_the_last() -> None:
    kept, of = recorder(rows=3), tensors(CPU)
    kept.choose(1, [5], ["b"])
    noted(kept, "b", of)
    assert same(read(kept, "b", 1), of, [5, 5, 5])


def test_what_another_step_recorded_is_no_case() -> None:
    kept, of = recorder(), tensors(CPU)
    kept.choose(1, [0], ["a"])
    noted(kept, "a", of)
    kept.choose(2, [1], ["a"])
    noted(kept, "a", {"q": of["q"]})
    found = read(kept, "a", 2)
    assert found["q"] is not None
    assert [name for name, each in found.items() if each is None] == ["codes", "gate", "ids"]


def test_tensors_shorter_than_the_step_are_passed_over() -> None:
    kept = recorder()
    kept.tokens = 6
    kept.choose(1, [5], ["a"])
    noted(kept, "a", {"short": torch.zeros(5, 4), "long": torch.zeros(7, 4)})
    assert set(read(kept, "a", 1)) == {"long"}


def test_another_shape_takes_another_place() -> None:
    kept = recorder()
    kept.choose(1, [0, 1], ["a"])
    noted(kept, "a", {"x": torch.zeros(2, 4)})
    noted(kept, "a", {"x": torch.ones(2, 8)})
    assert same(read(kept, "a", 1), {"x": torch.ones(2, 8)}, [0, 1])


def test_what_does_not_fit_is_refused() -> None:
    kept = recorder()
    kept.choose(1, [0], ["a"])
    with pytest.raises(ValueError, match="no room"):
        kept.note("a", "large", torch.zeros(1, 4096))
    with pytest.raises(ValueError, match="multiple of 4"):
        kept.note("a", "odd", torch.zeros(1, 3, dtype=torch.uint8))


def test_the_kernel_copies_again_with_other_rows_and_values() -> None:
    """A replay is the same launch again: the device says which rows, and whether at all."""
    pytest.importorskip("triton")
    from anymla.audit.triton_rows import copy_rows_kernel

    device = torch.device(default_device())
    source = torch.arange(6 * 40, dtype=torch.int32, device=device).view(6, 40)
    arena = torch.full((256,), -1, dtype=torch.int32, device=device)
    marks = torch.full((4,), -1, dtype=torch.int64, device=device)
    entries = [
        [source.data_ptr(), 40, 40, 16, 2, 0],
        [source.data_ptr() + 16, 40, 8, 128, 0, 0],  # from the fifth column
    ]
    table = torch.tensor(entries, dtype=torch.int64, device=device)
    control = torch.tensor([9, 1, 4, 0, 0], dtype=torch.int64, device=device)

    def replay() -> None:
        copy_rows_kernel[(2, 2)](table, control, arena, marks, 1, ROWS=2, BLOCK=16, PDL=False)

    replay()
    assert (arena == -1).all()
    assert (marks == -1).all()
    control[4] = 1
    replay()
    assert torch.equal(arena[16:96].view(2, 40), source[[1, 4]])
    assert torch.equal(arena[128:144].view(2, 8), source[[1, 4], 4:12])
    assert marks.tolist() == [9, -1, 9, -1]
    assert (arena[:16] == -1).all()
    assert (arena[96:128] == -1).all()
    assert (arena[144:] == -1).all()
    control[0], control[2] = 10, 5
    source += 1000
    replay()
    assert torch.equal(arena[16:96].view(2, 40), source[[1, 5]])
    assert marks.tolist() == [10, -1, 10, -1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")
def test_a_captured_graph_records_what_each_replay_computes() -> None:
    device = torch.device("cuda")
    kept, of = recorder(device), tensors(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert kept.wants("b")
        made = {name: tensor + tensor for name, tensor in of.items()}
        noted(kept, "b", made)
        for tensor in made.values():
            tensor.zero_()  # afterwards
    for step, rows in ((3, [0, 5]), (4, [2, 3])):
        for tensor in of.values():
            tensor += 1
        want = {name: tensor + tensor for name, tensor in of.items()}
        kept.choose(step, rows, ["a"])
        graph.replay()  # not asked for
        kept.choose(step, rows, ["b"])
        graph.replay()
        assert same(read(kept, "b", step), want, rows)


@pytest.mark.gpu
def test_a_graph_copies_between_kernels_that_start_early() -> None:
    """Each copy waits for the kernel that writes its rows, and the next writer for the copy."""
    from anymla.ops.kv_cache import dequant_gather_slots, quantize_and_insert_k_cache

    device, entries, steps = torch.device("cuda"), 64, 8
    many = torch.arange(64 * entries, dtype=torch.int32, device=device)
    cache = torch.zeros(64, entries, 584, dtype=torch.uint8, device=device)
    rows = torch.randn(len(many), 512, device=device).bfloat16()
    quantize_and_insert_k_cache(rows, cache, many.long())
    orders = [many[torch.randperm(len(many), device=device)] for _ in range(steps)]
    kept = RowRecorder(device, 2, ["a"], steps * 2 * 1024)
    x = torch.empty(len(many), 512, dtype=torch.bfloat16, device=device)
    expected = []
    for slots in orders:  # compiles
        dequant_gather_slots(x, cache, slots)
        expected.append(x.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for step, slots in enumerate(orders):
            dequant_gather_slots(x, cache, slots)
            kept.note("a", f"x{step}", x)
            kept.flush()
    for step, chosen in enumerate(([0, len(many) - 1], [17, 2048])):
        kept.choose(step, chosen, ["a"])
        graph.replay()
        for each, want in enumerate(expected):
            got = kept.last("a", f"x{each}")
            assert got is not None
            assert torch.equal(got, want[chosen]), f"step {each}"
