"""The decision which of vLLM's parts the plugin replaces on a machine, and the reasons."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from typing import Any

from anymla.engines.vllm.pinned import PLATFORMS, VERSIONS, installed_version
from anymla.engines.vllm.seams import (
    missing_seams,
    missing_v41_seams,
    source_of_vllm,
)

VARIABLE = "ANYMLA_VLLM"
MODES = ("auto", "force", "off")
PARTS = ("attention", "indexer", "compressor", "mhc", "experts", "linears")
ATTENTION, INDEXER, COMPRESSOR, MHC, EXPERTS, LINEARS = PARTS
# Parts of DeepSeek-V4.1: n-grams in addition, but neither experts nor linear layers.
ENGRAM = "engram"
V41_PARTS = (ATTENTION, INDEXER, COMPRESSOR, MHC, ENGRAM)
AUDIT = "audit"
DRAFT_MODEL, METADATA_KERNELS = "draft model", "metadata kernels"
V41 = "DeepSeek-V4.1"

# Requirements of vLLM's own parts: a library, and the major compute capabilities that the library
# has kernels for.
_LIBRARIES = {
    ATTENTION: ("FlashMLA", (9, 10)),
    INDEXER: ("DeepGEMM", (9, 10, 12)),
    MHC: ("DeepGEMM", (9, 10, 12)),
}
# First compute capability with the instruction by which vLLM's compressor converts to FP8.
_CONVERTS_TO_FP8 = (8, 9)

# Parts measured within vLLM to be slower than vLLM's own in no kind of step and faster in most, by
# part, ``Machine.name`` and vLLM's version; the value says where. A part that is slower in some
# steps is replaced only on request.
_HOPPER = "H200, benchmarks/results/vllm_h200.jsonl"
FASTER: dict[tuple[str, str, str], str] = {
    (part, "sm_90", "0.32.0"): _HOPPER for part in (ATTENTION, INDEXER, COMPRESSOR, MHC, EXPERTS)
}
# Measurements of all parts together, where single parts were not measured in every kind of step:
# all of them are replaced, or none.
FASTER_TOGETHER = {("sm_90", "0.33.0"): _HOPPER}
# Numbers of GPUs, other than one, on which all parts together were measured, by vLLM's version:
# tensor parallel, experts split in the same way; benchmarks/results/vllm_h100.jsonl.
FASTER_ON = {"0.33.0": (2,)}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Machine of vLLM.

    Attributes:
        platform: name of the platform in vLLM.
        capability: compute capability (major, minor) on CUDA, else None.
        flashinfer: True if FlashInfer is installed.
        architecture: name of an AMD GPU's architecture such as "gfx942", else "".
    """

    platform: str
    capability: tuple[int, int] | None = None
    flashinfer: bool = False
    architecture: str = ""

    @property
    def name(self) -> str:
        """Name in the log: "CPU", "XPU", "sm_80", "gfx942"."""
        if self.capability:
            return "sm_{}{}".format(*self.capability)
        return self.architecture or self.platform.upper()

    @property
    def fnuz(self) -> bool:
        """True if vLLM's FP8 codes are e4m3fnuz there and not OCP e4m3."""
        return self.architecture.startswith("gfx94")


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of vLLM's DeepSeek-V4, the decision to replace it, and the reason.

    Attributes:
        for_speed: True if speed is the only reason: vLLM's own part would run, and no user chose.
    """

    name: str
    replaced: bool
    why: str
    for_speed: bool = False

    @property
    def action(self) -> str:
        """The decision in one word: "replaced" or "kept"."""
        return "replaced" if self.replaced else "kept"


def mode() -> str:
    """Return the value of ANYMLA_VLLM: one of MODES, a list of parts, or AUDIT (replaces none).

    "audit" in a list with other values is removed; see ``audited``.

    Raises:
        ValueError: the environment variable holds another value.
    """
    chosen = os.environ.get(VARIABLE, "auto")
    names = [name.strip() for name in chosen.split(",")]
    if AUDIT in names:
        chosen = ",".join(name for name in names if name != AUDIT) or AUDIT
    asked(chosen)
    return chosen


def audited() -> bool:
    """True if the model is to be audited."""
    return AUDIT in (name.strip() for name in os.environ.get(VARIABLE, "").split(","))


def asked(chosen: str) -> frozenset[str]:
    """Return the parts of a comma-separated list; none for one of MODES or AUDIT.

    Raises:
        ValueError: the value is neither, or names an unknown part.
    """
    if chosen in (*MODES, AUDIT):
        return frozenset()
    every = (*PARTS, ENGRAM)
    names, parts = [name.strip() for name in chosen.split(",")], ", ".join(every)
    if not set(names) <= set(every):
        modes = ", ".join((*MODES, AUDIT))
        raise ValueError(f"{VARIABLE} must be one of {modes}, or parts of {parts}, got {chosen!r}")
    return frozenset(names)


def this_machine() -> Machine:
    """Return the machine as vLLM sees it, without initialising the device."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return Machine(
        "rocm" if current_platform.is_rocm() else current_platform.device_name or "unknown",
        None if capability is None else (capability.major, capability.minor),
        importlib.util.find_spec("flashinfer") is not None,
        _architecture() if current_platform.is_rocm() else "",
    )


def _architecture() -> str:
    """Return the name of the AMD GPU's architecture, which vLLM has looked up at its import."""
    found = getattr(importlib.import_module("vllm.platforms.rocm"), "_GCN_ARCH", "")
    return str(found).partition(":")[0]


def refusal(version: str | None) -> str | None:
    """Return the reason why nothing may be replaced in this vLLM; None if it is admitted."""
    if version in VERSIONS:
        return None
    return f"vLLM {version} is not among those that the plugin admits ({', '.join(VERSIONS)})"


def refusal_by_source(machine: Machine, parts: list[Part]) -> str | None:
    """Return why nothing may be replaced in the installed vLLM: seams that its source lacks.

    None if it has all that replacing these parts, and an audit or a watch over compilation if
    requested, rely on.
    """
    names = [part.name for part in parts if part.replaced] + [AUDIT] * audited()
    names += ["watch"] if names and watched() else []
    return _refusal(missing_seams(source_of_vllm(), machine.platform, names) if names else [])


def v41_refusal_by_source(machine: Machine, parts: list[Part]) -> str | None:
    """Return the same reason for DeepSeek-V4.1, which is not audited."""
    names = [part.name for part in parts if part.replaced]
    names += ["watch"] if names and watched() else []
    root = source_of_vllm()
    return _refusal(missing_v41_seams(root, machine.platform, names) if names else [])


def watched() -> bool:
    """True if the environment asks for a watch over kernels that are compiled in service."""
    from anymla.ops.compile_watch import mode  # imports torch

    return mode() != "off"


def _refusal(missing: list[str]) -> str | None:
    more = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"in vLLM {installed_version()} {missing[0]}{more}" if missing else None


def plan(machine: Machine, chosen: str) -> list[Part]:
    """Decide the parts of an admitted vLLM; ``chosen`` is the result of ``mode``.

    A part that does not run on the machine is replaced whatever was chosen, because no model runs
    without it. Parts that depend on a replaced part are replaced with it.
    """
    parts = {name: _decided(name, machine, chosen) for name in PARTS}
    for name, others in _brings(machine).items():
        for other in others if parts[name].replaced else ():
            if not parts[other].replaced:
                why = f"with the {name}: vLLM 0.33 has another format of index keys here"
                parts[other] = Part(other, True, why)
    return [*parts.values(), *_companions(machine, parts[ATTENTION])]


def _decided(name: str, machine: Machine, chosen: str) -> Part:
    """Decide one part by itself."""
    if chosen == "off":
        return Part(name, False, f"{VARIABLE}=off")
    if machine.platform not in PLATFORMS:
        return Part(name, False, f"the plugin has no adapter for {machine.name}")
    if name in (EXPERTS, LINEARS) and machine.capability != (9, 0):
        return Part(name, False, f"anymla's were not tried beside vLLM's on {machine.name}")
    if chosen == "force":
        return Part(name, True, f"{VARIABLE}=force")
    if name in asked(chosen):
        return Part(name, True, f"{VARIABLE} asks for it")
    if lacking := _lacking(name, machine):
        return Part(name, True, lacking)
    if chosen != "auto":
        return Part(name, False, f"{VARIABLE} does not ask for it")
    version = installed_version() or ""
    if measured := FASTER.get((name, machine.name, version)):
        return Part(name, True, f"measured faster: {measured}", for_speed=True)
    if measured := FASTER_TOGETHER.get((machine.name, version)):
        why = f"measured faster with all parts: {measured}"
        return Part(name, True, why, for_speed=True)
    return Part(name, False, f"vLLM's own runs on {machine.name}; {VARIABLE}={name} replaces it")


def _lacking(name: str, machine: Machine) -> str | None:
    """Return the reason why vLLM's own part fails on the machine; None if it runs correctly."""
    if name in (EXPERTS, LINEARS):
        return None
    if machine.platform == "cpu":
        stops = name in (ATTENTION, INDEXER)
        return "vLLM's own stops without a Triton compiler for CPUs" if stops else None
    if machine.platform == "xpu":
        return "vLLM's own leaves the sink out of prefills" if name == ATTENTION else None
    if machine.platform == "rocm":
        wrong = name == INDEXER and machine.fnuz
        return "vLLM's own reads index keys, stored as OCP e4m3, as e4m3fnuz" if wrong else None
    capability = machine.capability or (0, 0)
    if name == COMPRESSOR:
        runs = capability >= _CONVERTS_TO_FP8
        return None if runs else f"vLLM's own needs instructions that {machine.name} lacks"
    if name == ATTENTION and capability[0] == 12:
        return None if machine.flashinfer else "vLLM's own needs FlashInfer, which is not installed"
    library, majors = _LIBRARIES[name]
    runs = capability[0] in majors
    return None if runs else f"vLLM's own needs {library}, which does not run on {machine.name}"


def _brings(machine: Machine) -> dict[str, tuple[str, ...]]:
    """Return the parts that must be replaced with a part, by its name.

    The compressor writes the index keys that the indexer reads. From 0.33 on, vLLM stores their
    scales on sm_100 as four equal exponent bytes, elsewhere, like anymla, as a float32. With AITER
    on gfx950 keys are MXFP4 in pages of AITER's, of which only vLLM's attention there knows.
    """
    pair: dict[str, tuple[str, ...]] = {INDEXER: (COMPRESSOR,), COMPRESSOR: (INDEXER,)}
    if machine.architecture == "gfx950":
        return {ATTENTION: (INDEXER, COMPRESSOR)} | pair
    return pair if machine.capability and machine.capability[0] == 10 else {}


def _companions(machine: Machine, attention: Part) -> list[Part]:
    """Return the parts that nobody selects by name, because they go with attention."""
    if machine.platform not in PLATFORMS:
        return []
    drafts = PLATFORMS[machine.platform].drafts
    why = attention.why if drafts else "vLLM has none for it"
    rows = [Part(DRAFT_MODEL, attention.replaced and drafts, why, attention.for_speed)]
    if machine.platform == "cpu" and attention.replaced:
        rows.append(Part(METADATA_KERNELS, True, "Triton has no compiler for CPUs"))
    return rows


def within(parts: list[Part], vllm_config: Any) -> list[Part]:
    """Restrict the parts to those that suit one of vLLM's configurations.

    Nothing is replaced beside a vision tower, see ``has_vision_tower``. A part that is replaced for
    speed alone stays vLLM's in setups without a measurement of a whole model: with drafts, and on
    several GPUs other than ``FASTER_ON``. Hyper-connections are the same everywhere, a token at a
    time. Beside LoRA experts and linear layers stay vLLM's, because adapters are added within them.
    """
    if has_vision_tower(vllm_config):
        kept = "a vision tower: tokens of an image see each other, anymla's windows are causal"
        return [Part(part.name, False, kept) for part in parts]
    if getattr(vllm_config, "lora_config", None) is not None:
        kept = "LoRA: adapters are added within vLLM's own layers"
        parts = [
            Part(part.name, False, kept) if part.name in (EXPERTS, LINEARS) else part
            for part in parts
        ]
    parallel = vllm_config.parallel_config
    gpus = parallel.world_size_across_dp
    why = ""
    if vllm_config.speculative_config is not None:
        why = "with drafts"
    elif gpus > 1:
        if parallel.enable_expert_parallel:
            why = "with expert parallelism"
        elif gpus != parallel.tensor_parallel_size:
            why = f"on {gpus} GPUs that are not one tensor parallel group"
        elif gpus not in FASTER_ON.get(installed_version() or "", ()):
            why = f"on {gpus} GPUs"
    if not why:
        return parts
    kept = f"taken for speed where a whole model was measured; {VARIABLE}=force takes it {why}"
    return [
        Part(part.name, False, kept) if part.for_speed and part.name != MHC else part
        for part in parts
    ]


def has_vision_tower(vllm_config: Any) -> bool:
    """True for a DeepSeek-V4 that reads images, whose windows are not causal inside an image.

    Its router has a second bias for image tokens as well. DeepSeek-V4.1's windows are causal.
    """
    return bool(getattr(vllm_config.model_config.hf_config, "vision_n_layers", 0))


def v41_plan(machine: Machine, chosen: str) -> list[Part]:
    """Decide the parts of DeepSeek-V4.1, as ``plan`` does for DeepSeek-V4.

    vLLM has a model for CUDA and one for ROCm. On other devices the CUDA model is built, and every
    part of it replaced. No part is replaced for speed, because none was measured.
    """
    parts = [_v41_part(name, machine, chosen) for name in V41_PARTS]
    if machine.platform == "cpu" and parts[0].replaced:
        parts.append(Part(METADATA_KERNELS, True, "Triton has no compiler for CPUs"))
    return parts


def _v41_part(name: str, machine: Machine, chosen: str) -> Part:
    """Decide one part of DeepSeek-V4.1 by itself."""
    if chosen == "off":
        return Part(name, False, f"{VARIABLE}=off")
    if machine.platform not in PLATFORMS or machine.platform == "rocm":
        return Part(name, False, f"the plugin has no adapter for {machine.name}")
    capability = machine.capability or (0, 0)
    if capability[0] == 10:
        return Part(name, False, f"the plugin has no adapter for vLLM's rows on {machine.name}")
    if machine.platform != "cuda":
        return Part(name, True, "vLLM has its own for CUDA and ROCm")
    # Both convert FP8 in Triton.
    if lacking := _lacking(COMPRESSOR if name == ENGRAM else name, machine):
        return Part(name, True, lacking)
    if chosen == "force":
        return Part(name, True, f"{VARIABLE}=force")
    if name in asked(chosen):
        return Part(name, True, f"{VARIABLE} asks for it")
    if chosen != "auto":
        return Part(name, False, f"{VARIABLE} does not ask for it")
    return Part(name, False, f"vLLM's own runs on {machine.name}; {VARIABLE}={name} replaces it")


def lines(machine: Machine, parts: list[Part], model: str = "") -> list[str]:
    """Return one line a part for the log: replaced or kept on this machine, and why.

    Args:
        machine: machine that vLLM runs on.
        parts: parts of a model.
        model: name of the model, if it is not DeepSeek-V4.
    """
    where = f"anymla on {machine.name}: {model} ".rstrip() + " "
    return [f"{where}{part.name} {part.action} ({part.why})" for part in parts]


def plugin_view() -> list[dict[str, str]]:
    """List the parts that ``vllm serve`` would replace here, without starting a server.

    vLLM is imported only if it is installed in a version that is admitted.

    Returns:
        Rows of short texts under "part", "action" ("replaced" or "kept"; for the part "vLLM" its
        version or "not installed") and "why".

    Raises:
        ValueError: if the environment variable ANYMLA_VLLM holds an unknown value.
    """
    chosen, version = mode(), installed_version()
    if version is None:
        return [{"part": "vLLM", "action": "not installed", "why": "pip install '.[vllm]'"}]
    refused, parts = refusal(version), []
    if not refused:
        machine = this_machine()
        parts = plan(machine, chosen)
        refused = refusal_by_source(machine, parts)
    rows = [{"part": "vLLM", "action": version, "why": refused or VERSIONS[version]}]
    rows += [] if refused else [_row(part.name, part) for part in parts]
    if version in VERSIONS:
        v41_parts = v41_plan(machine, chosen)
        if left := v41_refusal_by_source(machine, v41_parts):
            v41_parts = [Part(part.name, False, left) for part in v41_parts]
        rows += [_row(f"{V41} {part.name}", part) for part in v41_parts]
    return rows


def _row(name: str, part: Part) -> dict[str, str]:
    return {"part": name, "action": part.action, "why": part.why}
