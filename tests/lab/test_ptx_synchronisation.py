"""What a kernel's PTX says of how it hands shared memory over, by right and by wrong texts."""

import os
import subprocess
import sys

import pytest

from anymla.ops.device import has_triton
from lab.ptx_synchronisation import idle_barriers, unfenced_reads, unmet_arrivals

ARRIVAL = "\t@%p7 mbarrier.arrive.shared::cta.b64 _, [%r1];\n"
MEETING = "\tbar.sync \t2, 128;\n"


@pytest.mark.parametrize(
    "access",
    ["\tst.shared.b32 \t[%r2+16], %r3;", "\tld.shared.v4.b32 \t{%r1, %r2, %r3, %r4}, [%r5];",
     "\tstmatrix.sync.aligned.m8n8.x4.shared.b16 [%r1], {%r2, %r3, %r4, %r5};",
     "\twgmma.wait_group.sync.aligned 0;", "$L__BB0_36:"],
)  # fmt: skip
def test_warps_meet_between_what_they_do_and_an_arrival_for_them(access):
    assert not unmet_arrivals(f"{access}\n{MEETING}\tadd.s32 %r1, %r2, 1;\n{ARRIVAL}{ARRIVAL}")
    assert unmet_arrivals(f"{MEETING}{access}\n{ARRIVAL}") == [ARRIVAL.strip()]
    announced = "\t@%p7 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8;"
    assert not unmet_arrivals(f"{access}\n{announced}")
    assert not unmet_arrivals(f"{MEETING}$L__tmp67:\n{ARRIVAL}")


# A buffer at 0, which is copied to, and one at 4096, which threads write; a loop that reads both.
KERNEL = """\t.extern .shared .align 16 .b8 global_smem[];
\tmov.b32 \t%r1, global_smem;
\tadd.s32 \t%r2, %r1, %r9;
\t@%p1 bra \t$L__BB0_3;
$L__BB0_1:                              // the producer
\tadd.s32 \t%r3, %r1, %r8;
\t@%p2 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [%r3], [%rd1], [%r4];
\t@%p3 bra \t$L__BB0_1;
\tret;
$L__BB0_3:
\tst.shared.b32 \t[%r2+4096], %r5;
$L__BB0_4:
{}\t@%p4 bra \t$L__BB0_4;
\tret;
"""
READ = "\tld.shared.v4.b32 \t{%r11, %r12, %r13, %r14}, [%r2+1024];\n"
MATRICES = "\tldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r11}, [%r2];\n"
OTHER_READ = "\tld.shared.b32 \t%r11, [%r2+4608];\n"
UNKNOWN = "\tld.shared.b32 \t%r11, [%r77];\n"
FENCE = "\tfence.proxy.async.shared::cta;\n"
AROUND = "\t@%p5 bra \t$L__BB0_5;\n{}$L__BB0_5:\n"
TOLD = ARRIVAL.strip().rstrip(";")


@pytest.mark.parametrize("read", [READ, MATRICES, UNKNOWN, AROUND.format(READ)])
def test_reads_of_a_copied_buffer_are_fenced_before_anybody_is_told(read):
    for loop in (read + FENCE + MEETING + ARRIVAL, ARRIVAL + read + FENCE, read + MEETING):
        assert not unfenced_reads(KERNEL.format(loop))
    # Without one, with one too early, and with one that is not always executed.
    for loop in (
        read + MEETING + ARRIVAL,
        FENCE + read + ARRIVAL,
        ARRIVAL + read,
        read + AROUND.format(FENCE).replace("BB0_5", "BB0_6") + ARRIVAL,
    ):
        assert unfenced_reads(KERNEL.format(loop)) == [TOLD]
    refilled = "\tcp.async.bulk.tensor.2d.shared::cta.global.mbarrier [%r2], [%rd1], [%r4];\n"
    assert len(unfenced_reads(KERNEL.format(read + refilled))) == 1
    assert not unfenced_reads(KERNEL.format(read + FENCE + refilled))
    # Where nothing is copied, threads refill what they read.
    threads = KERNEL.replace("cp.async.bulk.tensor.2d", "cp.async.cg")
    assert not unfenced_reads(threads.format(read + ARRIVAL))


def test_reads_of_what_threads_wrote_need_no_fence():
    assert not unfenced_reads(KERNEL.format(OTHER_READ + MEETING + ARRIVAL))
    captured = "\tld.shared.b32 \t%r12, [global_smem+2048];\n"
    assert unfenced_reads(KERNEL.format(captured + ARRIVAL))
    written = "\tst.shared.b32 \t[global_smem+2048], %r9;\n"
    assert not unfenced_reads(KERNEL.format(captured + ARRIVAL + written))
    # Nobody is told by an announcement of bytes.
    announced = "\t@%p7 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8;\n"
    assert not unfenced_reads(KERNEL.format(READ + announced))


BARRIERS = """\
    %free = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared2, #smem, mutable> loc(#loc1)
    %idle = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared2, #smem, mutable> loc(#loc2)
    %rows = ttg.local_alloc : () -> !ttg.memdesc<64x128xi32, #shared, #smem, mutable> loc(#loc3)
    %0 = ttg.memdesc_index %free[%c0_i32] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64> loc(#loc4)
    ttng.init_barrier %0, 2 : !ttg.memdesc<1xi64, #shared2, #smem, mutable> loc(#loc4)
    ttng.init_barrier %idle, 1 : !ttg.memdesc<1xi64, #shared2, #smem, mutable> loc(#loc5)
"""


@pytest.mark.parametrize(
    "use",
    ["    ttg.warp_specialize(%length, %free) attributes {requestedRegisters = array<i32: 72>}",
     "    ttng.wait_barrier %0, %c0_i32 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>",
     "    %9 = ttg.memdesc_index %free[%c1_i32] : !ttg.memdesc<2x1xi64> -> !ttg.memdesc<1xi64>\n"
     "    ttng.arrive_barrier %9, 1 : !ttg.memdesc<1xi64, #shared2, #smem, mutable>"],
)  # fmt: skip
def test_barriers_that_nobody_uses_are_found(use):
    assert idle_barriers(BARRIERS) == ["%free", "%idle"]
    assert idle_barriers(BARRIERS + use) == ["%idle"]
    assert not idle_barriers(BARRIERS + use + "\n    ttng.wait_barrier %idle, %phase : !ttg")


# Compiled as it is and with its text changed.
COMPILED = """
import dataclasses, importlib, importlib.util, pathlib, sys
from lab.build_matrix import builds_of
from lab.compiled import compiled
from lab.ptx_synchronisation import idle_barriers, unfenced_reads
from anymla.ops.device import TARGETS
folder, kernel, old, new = sys.argv[1:]
module, name = kernel.rsplit(".", 1)
family = module.split(".")[2]
text = pathlib.Path(importlib.import_module(module).__file__).read_text()
assert old in text
path = pathlib.Path(folder, "changed.py")
path.write_text(text.replace(old, new))
spec = importlib.util.spec_from_file_location("changed", path)
changed = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changed)
target = TARGETS["sm_90"]
builds = [build for found in builds_of(family, target).values() for build in found]
build = next(build for build in builds if build.name == name)
for kernel in (build.kernel, getattr(changed, name)):
    code = compiled(dataclasses.replace(build, kernel=kernel), target)
    print(len(unfenced_reads(code.asm["ptx"])), len(idle_barriers(code.asm["ttgir"])), end=" ")
"""
LINEAR, ATTENTION = "anymla.ops.linear.gluon_sm90_", "anymla.ops.attention.gluon_sm90_"
LAST = "    mbarrier.init(q_ready, count=1)\n"
IDLE = "gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())"


@pytest.mark.skipif(not has_triton(), reason="triton is not installed")
@pytest.mark.parametrize(
    ("kernel", "old", "new", "found"),
    [
        (f"{LINEAR}gemm.warp_split_k_kernel",
         "fence_async_shared()\n", "pass\n", "1 0"),
        (f"{ATTENTION}decode_m64.decode_m64_kernel", LAST,
         f"{LAST}    idle = {IDLE}\n    mbarrier.init(idle, count=1)\n", "0 1"),
    ],
    ids=["a fence is missing", "a barrier is not used"],
)  # fmt: skip
def test_a_kernel_whose_text_is_wrong_is_found(tmp_path, kernel, old, new, found):
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILED, str(tmp_path), kernel, old, new]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"0 0 {found} ", done.stderr
