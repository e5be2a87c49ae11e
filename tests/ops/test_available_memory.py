import pytest
import torch

from anymla.ops.memory import NotEnoughMemory, available_bytes, host_bytes, ran_out, require_memory
from anymla.ops.registry import BackendUnavailable

MIB = 1 << 20


def write(root, **files):
    """Files below a directory, by path with "__" for "/"."""
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def proc(tmp_path):
    info = f"MemTotal: 99999 kB\nMemFree: 5 kB\nMemAvailable:   {8 * 1024} kB\n"
    return write(tmp_path / "proc", meminfo=info, self__cgroup="0::/a/b\n")


def group(path, limit, used, cached):
    path.mkdir(parents=True, exist_ok=True)
    (path / "memory.max").write_text(f"{limit}\n")
    (path / "memory.current").write_text(f"{used}\n")
    (path / "memory.stat").write_text(f"anon 3\ninactive_file {cached}\nactive_file 9\n")


def test_what_linux_calls_available(proc, tmp_path):
    assert host_bytes(proc, tmp_path / "none") == 8 * MIB


def test_a_group_that_leaves_less(proc, tmp_path):
    groups = tmp_path / "cgroup"
    group(groups / "a" / "b", "max", 77, 0)
    assert host_bytes(proc, groups) == 8 * MIB
    group(groups / "a", 6 * MIB, 3 * MIB, 1 * MIB)
    assert host_bytes(proc, groups) == 4 * MIB
    group(groups / "a" / "b", 2 * MIB, 5 * MIB, 0)
    assert host_bytes(proc, groups) == 0


def test_the_group_of_a_container_is_its_root(proc, tmp_path):
    # What /proc says is the path outside of it.
    groups = tmp_path / "cgroup"
    group(groups, 3 * MIB, 1 * MIB, 0)
    assert host_bytes(proc, groups) == 2 * MIB


def test_groups_of_version_1(proc, tmp_path):
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n")
    groups = write(
        tmp_path / "cgroup",
        memory__job__memory_limit=f"{5 * MIB}",
        memory__memory_limit=f"{2**63 - 4096}",
    )
    for place in (groups / "memory", groups / "memory" / "job"):
        (place / "memory_limit").rename(place / "memory.limit_in_bytes")
        (place / "memory.usage_in_bytes").write_text(f"{MIB}")
        (place / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100\n")
    assert host_bytes(proc, groups) == 4 * MIB + 100


def test_a_system_that_does_not_say(tmp_path, monkeypatch):
    sizes = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr("os.sysconf", sizes.__getitem__)
    assert host_bytes(tmp_path, tmp_path) == 40960
    monkeypatch.delattr("os.sysconf")
    assert host_bytes(tmp_path, tmp_path) is None


def test_this_machine_has_some():
    have = available_bytes("cpu")
    assert have is None or 0 < have < 1 << 60


def test_more_than_there_is(monkeypatch):
    monkeypatch.setattr("anymla.ops.memory.host_bytes", lambda: 5_000_000)
    require_memory("x", {"a": 2_000_000, "b": 3_000_000})
    with pytest.raises(NotEnoughMemory) as caught:
        require_memory("x", {"a": 2_000_000, "b": 3 * 10**18}, torch.device("cpu"))
    assert str(caught.value) == ("x needs 3 EB of memory (b: 3 EB), has 5.0 MB")
    assert isinstance(caught.value, BackendUnavailable)
    monkeypatch.setattr("anymla.ops.memory.host_bytes", lambda: None)
    require_memory("x", {"a": 10**18})


def test_a_gpu_is_asked_what_it_has(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1000, 9999))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 700)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 300)
    assert available_bytes("cuda:0") == 1400
    with pytest.raises(NotEnoughMemory, match=r"x needs 1\.4 kB of memory on cuda:0 \(a: 1\.4 kB"):
        require_memory("x", {"a": 1401}, "cuda:0")


def test_what_is_known_too_late():
    for error in (MemoryError(), torch.OutOfMemoryError("x")):
        assert ran_out(error)
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2**60, dtype=torch.uint8)
    assert ran_out(caught.value)
    assert not ran_out(RuntimeError("ours"))
