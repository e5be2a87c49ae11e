"""One build of a Triton kernel, compiled without a device."""

from __future__ import annotations

from typing import Any

from anymla.ops._build import Build
from anymla.ops.device import Target


def compiled(build: Build, target: Target) -> Any:
    """What Triton makes of a build, in a process that does not interpret kernels."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    names = build.kernel.arg_names
    signature = {name: build.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    hints = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in build.divisible
    }
    architecture: Any = target.name if target.backend == "hip" else int(target.name[3:])
    source = GluonASTSource if isinstance(build.kernel, GluonJITFunction) else ASTSource
    return triton.compile(
        source(build.kernel, signature, constants, hints),
        target=GPUTarget(target.backend, architecture, target.warp_size),
        options=_options(build),
    )


def _options(build: Build) -> dict[str, Any]:
    options = {"num_warps": build.num_warps, "enable_fp_fusion": build.fp_fusion}
    if build.num_stages is not None:
        options["num_stages"] = build.num_stages
    if build.registers:
        options["maxnreg"] = build.registers
    return options
