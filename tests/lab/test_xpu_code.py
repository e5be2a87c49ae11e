"""What is read from the files of Intel's offline compiler, and how often it is called."""

import dataclasses
import os
import struct
import sys

import pytest

from anymla.bench.xpu_code import missing
from anymla.ops.device import TARGETS
from lab import xpu_code

LISTING = """
L0:
(W)     mov (8|M0)               r255.0<1>:f   0x0:f
(W&f0.0) dpas.8x8 (16|M0)        r10:f         r10:f             r20:bf           r30.0:bf
        sync.nop                             null
L64:
        send.ugm (16|M0)         r12      r14  null:0  0x0  0x02100580
(f1.0)  goto (32|M0)                         L96                  L96
(W&f0.0) jmpi                                L64
L96:
        dpas.8x8 (16|M0)         r10:f         r10:f             r20:bf           r30.0:bf {Atomic}
"""


def elf(sections):
    """A file of the 64-bit ELF format that has sections of these names and sizes."""
    titles = b"\0" + b"".join(name + b"\0" for name, _ in sections) + b".shstrtab\0"
    places = [titles.index(name + b"\0") for name, _ in (*sections, (b".shstrtab", 0))]
    sizes = [*(size for _, size in sections), len(titles)]
    table = b"".join(
        struct.pack("<2I4Q2I2Q", place, 1, 0, 0, 64, size, 0, 0, 0, 0)
        for place, size in zip(places, sizes, strict=True)
    )
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, 64 + len(titles))
    struct.pack_into("<3H", head, 0x3A, 64, len(places), len(places) - 1)
    return bytes(head) + titles + table


# Writes what ocloc writes: spills with 128 registers, none with 256.
OCLOC = """#!{python}
import pathlib, sys
words = sys.argv[1:]
given = dict(zip(words, words[1:]))
pathlib.Path({calls!r}).open("a").write(" ".join(words) + "\\n")
if words == ["--version"]:
    print("26.27.1 of a test")
elif words[0] == "compile":
    if given["-device"] == "dg2":
        sys.exit("error: no such device")
    if "128-GRF" in given["-options"]:
        print("warning: kernel k compiled SIMD16 allocated 128 regs and spilled around 77")
    folder = pathlib.Path(given["-out_dir"])
    folder.joinpath("kernel.bin").write_bytes(pathlib.Path({binary!r}).read_bytes())
    folder.joinpath("spills").write_text("64" if "128-GRF" in given["-options"] else "0")
else:
    parts = pathlib.Path(given["-dump"])
    parts.mkdir()
    spills = parts.parent.joinpath("spills").read_text()
    (parts / ".ze_info").write_text(
        f"kernels:\\n  - execution_env:\\n      simd_size: 16\\n      spill_size: {{spills}}\\n"
        "      private_size: 32\\n")
    (parts / ".text.k.asm").write_text({listing!r})
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """A compiler that says what a test wants; the file of its calls."""
    binary, calls = tmp_path / "binary", tmp_path / "calls"
    binary.write_bytes(elf([(b".text.k", 640), (b".data", 5), (b".text.other", 64)]))
    program = tmp_path / "ocloc"
    program.write_text(
        OCLOC.format(python=sys.executable, calls=str(calls), binary=str(binary), listing=LISTING)
    )
    program.chmod(0o755)
    monkeypatch.setenv("ANYMLA_OCLOC", str(program))
    return calls


def test_what_spills_with_few_registers_is_compiled_for_all(calls):
    found = xpu_code.machine_code(b"spirv", TARGETS["xpu_pvc"])
    assert dataclasses.asdict(found) == {
        "registers": 256, "lanes": 16, "spills": 0, "spill_bytes": 0, "private_bytes": 32,
        "code_bytes": 704,
        "instructions": ["mov", "dpas.8x8:bf", "send.ugm", "goto", "dpas.8x8:bf"],
        "loop_instructions": 2,
    }  # fmt: skip
    compiled = [line for line in calls.read_text().splitlines() if line.startswith("compile")]
    assert [line.split("-cl-intel-")[1].split("-")[0] for line in compiled] == ["128", "256"]
    assert all("-device pvc" in line for line in compiled)


def test_what_the_compiler_refuses_is_an_error_with_its_words(calls):
    with pytest.raises(RuntimeError, match="ocloc compile: error: no such device"):
        xpu_code.machine_code(b"spirv", TARGETS["xpu_dg2"])


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.delenv("ANYMLA_OCLOC", raising=False)
    monkeypatch.setenv("PATH", os.devnull)
    assert "ANYMLA_OCLOC" in missing()
