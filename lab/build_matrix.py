"""Build every Triton kernel for every target without a GPU, and judge what comes out.

Builds of a family are derived from its launches (``lab.launches``), those of kernels
that families share from the launches of all; what decode layers launch besides is built too. Each
is compiled in its own process with a time limit, because a combination that the compiler does not
like may abort it. A build passes if it compiles (or fails, where that is expected), its shared
memory fits the target, it spills no more than it declares, matrix-multiply instructions are in the
code where they are meant to be and run several at a time where the device can, and shared memory is
synchronised as ``ptx_synchronisation`` asks.
What passes here fits and builds; only a run on the device shows that it computes right, and how
fast.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import importlib
import itertools
import multiprocessing
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from anymla.bench.layer_setup import LayerSetup
from anymla.bench.xpu_code import missing
from anymla.child_process import same_modules, working_directory_shut_out
from anymla.ops.device import TARGETS, Target, has_gluon
from crossrun.targets import backend_problem
from lab import xpu_code
from lab.build import Build, Judgement
from lab.compiled import compiled
from lab.kernel_digest import kernel_digest
from lab.kernel_files import SHARED, kernel_modules
from lab.launches import (
    derived_builds,
    judged,
    recorded_launches,
    shared_builds,
)
from lab.ptx_synchronisation import idle_barriers, unfenced_reads, unmet_arrivals

TIME_LIMIT_S = 240
# Registers that any kernel may spill on Arc A, whose registers are half as large; on Intel's other
# GPUs, none.
_ARC_A_SPILLS = 64
# Numbers of tokens that decode layers are called with, on both sides of choices that depend on
# them.
LAYER_TOKENS = (1, 32, 64, 128, 256, 257, 8192, 8193)
_CUDA_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)")
_HIP_INSTRUCTION = re.compile(r"^\t([a-z]\w+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Job:
    """One compilation of the build matrix.

    Attributes:
        module: dotted name of the kernel's file.
        target: name of the architecture to build for.
        number: index among the module's builds for the target.
        label: name of the build in reports.
        digest: hash of everything that the compiled code and its judgement depend on, including the
            kernel's statements.
        build: specialisation to compile.
    """

    module: str
    target: str
    number: int
    label: str
    digest: str
    build: Build = dataclasses.field(repr=False)

    @property
    def key(self) -> tuple[str, str, str]:
        """Key by which a recorded row belongs to this compilation."""
        return self.module, self.target, self.digest

    @property
    def row(self) -> dict[str, Any]:
        """Fields of a recorded row that identify it."""
        names = ("module", "target", "number", "label", "digest")
        return {name: getattr(self, name) for name in names}


def problem_of(target: Target) -> str:
    """Return why this machine cannot build for the target; "" if it can."""
    problem = backend_problem(target.backend)
    return problem or (missing() if target.backend == "xpu" else "")


def builds_of(family: str, target: Target) -> dict[str, list[Build]]:
    """List a family's builds for a target, or those of SHARED, by the files of their kernels.

    They are the launches of the family's own calls, and further launches of V4's decode layers.
    """
    modules = kernel_modules()[family]
    found = shared_builds(target) if family == SHARED else derived_builds(family, target)
    known = {build.key for build in found}
    more = [
        build
        for build in _launched_by_layers(target)
        if build.module in modules and build.key not in known
    ]
    found += more if family == SHARED else judged(family, more, target)
    derived: dict[str, list[Build]] = {name: [] for name in modules}
    for build in found:
        derived[build.module].append(build)
    return derived


@functools.cache
def _launched_by_layers(target: Target) -> list[Build]:
    """List builds of V4-Flash's and V4-Pro's decode layers, on both sides of each threshold."""
    with recorded_launches(target) as launches:
        for model, ratio in itertools.product(("flash", "pro"), (0, 4, 128)):
            setup = LayerSetup(model, ratio, torch.device("meta"), experts=8, copies=1)
            for tokens in LAYER_TOKENS:
                name = {"flash": "V4-Flash", "pro": "V4-Pro"}[model]
                launches.label = f"{name}, layer of ratio {ratio}, {tokens} tokens"
                setup.batch(tokens, 4096).run(setup.layers[0])
    return list(launches.builds.values())


def jobs(
    targets: list[str], *, first_of: str = "", modules: Sequence[str] = ("",)
) -> Iterator[Job]:
    """Yield all builds of all kernels.

    Args:
        targets: architectures to build for.
        first_of: "kernel" or "file" for only the first build of each, for each target.
        modules: parts of dotted names, of which a kernel's file must contain one.
    """
    importlib.import_module("triton")  # raise its own error if it is missing
    for family, names in kernel_modules().items():
        chosen = [name for name in names if any(part in name for part in modules)]
        if not chosen:
            continue
        builds = {target: builds_of(family, TARGETS[target]) for target in targets}
        for module in chosen:
            for target in targets:
                seen = set()
                for number, build in enumerate(builds[target].get(module, [])):
                    sort = module if first_of == "file" else build.name
                    if first_of and sort in seen:
                        continue
                    seen.add(sort)
                    label = f"{build.name} {build.label}".strip()
                    yield Job(module, target, number, label, _digest(build), build)


def _digest(build: Build) -> str:
    fields = {**vars(build), "kernel": kernel_digest(build.kernel.fn)}
    fields |= {name: sorted(fields[name].items()) for name in ("types", "constants")}
    del fields["label"]
    if not build.near:  # as on all targets but AMD's, whose digests did not have the field
        del fields["near"]
    return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()[:16]


def recorded(rows: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Select the recorded rows of this Triton that passed, by their jobs' ``key``."""
    import triton

    return {
        (row["module"], row["target"], row["digest"]): row
        for row in rows
        if row.get("ok") and row.get("triton") == triton.__version__ and "digest" in row
    }


def run(chosen: list[Job], workers: int) -> Iterator[dict[str, Any]]:
    """Compile and yield one row per job, in order; ``judge`` describes a row's fields."""
    with ThreadPoolExecutor(workers) as pool:
        yield from pool.map(lambda job: apart(job, _build), chosen)


def apart(job: Job, work: Callable[[Job], dict[str, Any]]) -> dict[str, Any]:
    """Return ``work``'s row of a job, run in a process of its own with a time limit."""
    # Forked from a process that has imported the compiler, which takes longer than most builds.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lab.compilers"])
    _send_kernels_by_name()
    receive, send = context.Pipe(duplex=False)
    row: dict[str, Any] = {**job.row, "ok": False}
    # Made here, because the process may not live to remove it.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:
        process = context.Process(target=_child, args=(job, work, cache, send))
        with working_directory_shut_out(), mock.patch.dict(os.environ, same_modules()):
            process.start()
        send.close()
        try:
            if receive.poll(TIME_LIMIT_S):
                row = receive.recv()
            else:
                row["problem"] = f"not built within {TIME_LIMIT_S} s"
        except EOFError:
            row["problem"] = "the compiler ended the process"
        finally:
            process.kill()
            process.join()
    return row


def _send_kernels_by_name() -> None:
    """Let builds be sent to processes: a kernel is what its module has under its name."""
    from triton.runtime.jit import JITFunction

    kinds = [JITFunction]
    if has_gluon():
        from triton.experimental.gluon._runtime import GluonJITFunction

        kinds.append(GluonJITFunction)
    for kind in kinds:
        ForkingPickler.register(
            kind, lambda kernel: (_kernel, (kernel.__module__, kernel.__name__))
        )


def _kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _child(job: Job, work: Callable[[Job], dict[str, Any]], cache: str, send: Any) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    os.environ["TRITON_CACHE_DIR"] = cache
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    send.send(work(job))


def _build(job: Job) -> dict[str, Any]:
    import triton

    target, build = TARGETS[job.target], job.build
    row: dict[str, Any] = {**job.row, "triton": triton.__version__}
    started = time.perf_counter()
    try:
        code = compiled(build, target)
    except Exception as error:
        row |= {"built": False, "error": _message(error)}
    else:
        row |= {"built": True, "shared_bytes": code.metadata.shared, **_code(code, target)}
    row["seconds"] = round(time.perf_counter() - started, 2)
    return judge(row, build, target)


def _message(error: BaseException) -> str:
    """Return the end of a compiler's message, and of its deepest one inside a kernel's helpers."""
    texts = []
    cause: BaseException | None = error
    while cause is not None:
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        texts.append(f"{type(cause).__name__}: {' | '.join(lines[-3:])[-200:]}")
        cause = cause.__cause__
    return " <- ".join([texts[0], *texts[1:][-1:]])


def judge(row: dict[str, Any], build: Build, target: Target) -> dict[str, Any]:
    """Add "ok" to a row, and "problem" if the build did not pass."""
    problem, must = "", build.judgement
    if must.fails:
        if row["built"] or must.fails not in row["error"]:
            problem = f"expected to fail: {must.fails}"
    elif not row["built"]:
        problem = row["error"]
    elif row["shared_bytes"] > target.shared_bytes:
        problem = f"{row['shared_bytes']} bytes of shared memory, {target.shared_bytes} fit"
    elif row["instructions"] == 0:
        problem = "no instruction could be read from the code"
    elif row["spills"] > (accepted := _accepted_spills(must, target)):
        problem = f"{row['spills']} spills, {accepted} accepted"
    elif row.get("unmet_arrivals"):
        problem = f"{row['unmet_arrivals']} arrivals at barriers for warps that have not met"
    elif row.get("unfenced_reads"):
        problem = f"memory released to TMA {row['unfenced_reads']} times while it is read"
    elif row.get("idle_barriers"):
        problem = f"{row['idle_barriers']} barriers whose memory the compiler gives to others"
    elif _serialized(row):
        problem = f"each of {row['products']} products is waited for before the next, unasked"
    elif must.matrix and not target.arc_a and not _multiplies(row["matrix"], must.matrix):
        operands = "" if must.matrix is True else f" of {must.matrix}"
        problem = f"no matrix-multiply instruction{operands}"
    return {**row, "ok": not problem, **({"problem": problem} if problem else {})}


def _serialized(row: dict[str, Any]) -> bool:
    """Return True if the assembler serialises products although the code does not ask for it."""
    products = row.get("products", 0)
    return row.get("product_waits", 0) >= products > max(1, row.get("asked_waits", 0))


def _accepted_spills(must: Judgement, target: Target) -> int:
    """Return the accepted spills; families declare them for other vendors than Intel."""
    if target.intel:
        return _ARC_A_SPILLS if target.arc_a else 0
    return must.spills


# How the vendors' instructions name the types of their operands. UTC instructions have them in a
# descriptor instead.
_OPERANDS = {
    "bf16": r"HG?MMA.*\.BF16|UTCHMMA|_bf16|dpas.*:bf$",
    "fp16": r"HG?MMA(?!.*BF16)|UTCHMMA|_f16$|x\d+_f16|dpas.*:hf$",
    "e4m3": r"QG?MMA|UTCQMMA|fp8|f8f6f4",
}


def _multiplies(instructions: list[str], operands: bool | str) -> bool:
    if operands is True:
        return bool(instructions)
    return any(re.search(_OPERANDS[str(operands)], name) for name in instructions)


def _code(code: Any, target: Target) -> dict[str, Any]:
    if target.backend == "xpu":
        return _xpu_code(code, target)
    return _hip_code(code) if target.backend == "hip" else _cuda_code(code)


def _cuda_code(code: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(code.asm["cubin"])
        cubin.flush()
        listing, usage = (
            subprocess.run(
                [_cuobjdump(), option, cubin.name], capture_output=True, text=True, check=False
            ).stdout
            for option in ("-sass", "-res-usage")
        )
    found = _CUDA_INSTRUCTION.findall(listing)
    kinds = collections.Counter(name.split(".")[0] for name in found)
    registers = re.search(r"REG:(\d+)", usage)
    return {
        "instructions": len(found),
        "spills": kinds["STL"] + kinds["LDL"],
        "matrix": sorted({name for name in found if "MMA" in name.split(".")[0]}),
        # Instructions of warpgroups alone.
        "products": kinds["HGMMA"] + kinds["QGMMA"],
        "product_waits": sum(name.startswith("WARPGROUP.DEPBAR") for name in found),
        "asked_waits": code.asm["ptx"].count("wgmma.wait_group"),
        "registers": int(registers[1]) if registers else None,
        "unmet_arrivals": len(unmet_arrivals(code.asm["ptx"])),
        "unfenced_reads": len(unfenced_reads(code.asm["ptx"])),
        "idle_barriers": len(idle_barriers(code.asm["ttgir"])),
    }


def _cuobjdump() -> str:
    """Return a disassembler for all targets: the CUDA toolkit's if there is one, else Triton's."""
    import triton

    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump") or "cuobjdump"


def _hip_code(code: Any) -> dict[str, Any]:
    text = code.asm["amdgcn"]
    found = _HIP_INSTRUCTION.findall(text)
    spills = re.search(r"\.vgpr_spill_count:\s+(\d+)", text)
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    matrix = {name for name in found if "mfma" in name or "wmma" in name}
    return {
        "instructions": sum(name[:2] in ("v_", "s_", "ds", "gl", "bu") for name in found),
        "spills": int(spills[1]) if spills else 0,
        "matrix": sorted(matrix),
        "registers": int(registers[1]) if registers else None,
    }


def _xpu_code(code: Any, target: Target) -> dict[str, Any]:
    found = xpu_code.machine_code(code.asm["spv"], target)
    matrix = [name for name in found.instructions if name.startswith("dpas")]
    return {
        "instructions": len(found.instructions),
        "spills": found.spills,
        "matrix": sorted(set(matrix)),
        "products": len(matrix),
        "registers": found.registers,
        "lanes": found.lanes,
        "spill_bytes": found.spill_bytes,
        "private_bytes": found.private_bytes,
        "code_bytes": found.code_bytes,
        "loop_instructions": found.loop_instructions,
        "ocloc": xpu_code.compiler_version(),
    }
