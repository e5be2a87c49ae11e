"""One build of a Triton kernel, compiled without a device."""

from __future__ import annotations

from typing import Any

from anymla.ops.device import Target, has_gluon
from crossrun.targets import triton_target
from lab.build import Build


def compiled(build: Build, target: Target) -> Any:
    """Compile a build with Triton, in a process that does not interpret kernels."""
    import triton

    names = build.kernel.arg_names
    signature = {name: build.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in build.constants.items()}
    hints = {
        (place,): [["tt.divisibility", 16]] + [["tt.pointer_range", 32]] * (name in build.near)
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in build.divisible
    }
    source = _source_kind(build.kernel)(build.kernel, signature, constants, hints)
    with triton_target(target) as device:
        return triton.compile(source, target=device, options=_options(build))


def _source_kind(kernel: Any) -> Any:
    from triton.compiler import ASTSource

    if not has_gluon():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    return GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource


def _options(build: Build) -> dict[str, Any]:
    options = {"num_warps": build.num_warps, "enable_fp_fusion": build.fp_fusion}
    if build.num_stages is not None:
        options["num_stages"] = build.num_stages
    if build.registers:
        options["maxnreg"] = build.registers
    return options
