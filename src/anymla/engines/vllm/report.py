"""Which of vLLM's parts the plugin replaces on which machine, and why."""

from __future__ import annotations

import dataclasses
import importlib.util
import os

from anymla.engines.vllm.pinned import SEAMS, TESTED, installed_version

VARIABLE = "ANYMLA_VLLM"
MODES = ("auto", "force", "off")
ATTENTION, INDEXER, DRAFT_MODEL = "attention", "indexer", "draft model (MTP)"
HYPER_CONNECTIONS, METADATA_KERNELS = "hyper-connections (mHC)", "metadata kernels"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What vLLM runs on: its name of the platform, (major, minor) of CUDA, FlashInfer there."""

    platform: str
    capability: tuple[int, int] | None = None
    flashinfer: bool = False

    @property
    def name(self) -> str:
        """As the log names it: "CPU", "XPU", "sm_80"."""
        return "sm_{}{}".format(*self.capability) if self.capability else self.platform.upper()


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of vLLM's DeepSeek-V4, whether it is replaced, and the reason either way."""

    name: str
    replaced: bool
    why: str


def mode() -> str:
    """The user's choice; ValueError if the environment variable holds something else."""
    chosen = os.environ.get(VARIABLE, "auto")
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} must be auto, force or off, got {chosen!r}")
    return chosen


def this_machine() -> Machine:
    """The machine as vLLM sees it; nothing is initialised on the device."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    return Machine(
        "rocm" if current_platform.is_rocm() else current_platform.device_name or "unknown",
        None if capability is None else (capability.major, capability.minor),
        importlib.util.find_spec("flashinfer") is not None,
    )


def refusal(version: str | None) -> str | None:
    """Why nothing at all may be replaced in this vLLM; None if it is one of the tested."""
    if version in TESTED:
        return None
    return f"vLLM {version} is not among the tested versions ({', '.join(TESTED)})"


def plan(machine: Machine, chosen: str) -> list[Part]:
    """The parts of a tested vLLM; ``chosen`` is one of MODES."""
    wanted, why = _attention(machine, chosen)
    parts = [Part(ATTENTION, wanted, why), Part(INDEXER, wanted, why)]
    if not wanted:
        return [*parts, Part(HYPER_CONNECTIONS, False, why), Part(DRAFT_MODEL, False, why)]
    parts.append(_hyper_connections(machine, chosen))
    if machine.platform == "cpu":
        parts.append(Part(METADATA_KERNELS, True, "Triton has no compiler for CPUs"))
    drafts = SEAMS[machine.platform].drafts
    return [*parts, Part(DRAFT_MODEL, drafts, why if drafts else "vLLM has none for it")]


def _attention(machine: Machine, chosen: str) -> tuple[bool, str]:
    if chosen == "off":
        return False, f"{VARIABLE}=off"
    if machine.platform not in SEAMS:
        return False, f"the plugin has no adapter for {machine.name}"
    if chosen == "force":
        return True, f"{VARIABLE}=force"
    if machine.platform == "cpu":
        return True, "vLLM's own stops without a Triton compiler for CPUs"
    major = machine.capability[0] if machine.capability else 0
    if major in (9, 10):
        return False, f"FlashMLA and DeepGEMM run on it; {VARIABLE}=force replaces them"
    if major == 12 and machine.flashinfer:
        return False, f"FlashInfer runs on it; {VARIABLE}=force replaces it"
    return True, f"FlashMLA and DeepGEMM do not run on {machine.name}"


def _hyper_connections(machine: Machine, chosen: str) -> Part:
    if chosen == "force":
        return Part(HYPER_CONNECTIONS, True, f"{VARIABLE}=force")
    if machine.capability and machine.capability[0] == 8:
        return Part(HYPER_CONNECTIONS, True, "vLLM's need DeepGEMM, which does not run on it")
    return Part(HYPER_CONNECTIONS, False, f"vLLM has its own; {VARIABLE}=force replaces them")


def summary(machine: Machine, parts: list[Part]) -> str:
    """One line: what is replaced on this machine, and why."""
    replaced = [part for part in parts if part.replaced]
    names = ", ".join(part.name for part in replaced)
    reasons = "; ".join(dict.fromkeys(part.why for part in replaced))
    return f"anymla on {machine.name} replaces vLLM's {names} of DeepSeek-V4 ({reasons})"


def plugin_view() -> list[dict[str, str]]:
    """What ``vllm serve`` would replace here, without starting a server.

    vLLM is imported only if it is installed in a tested version.

    Returns:
        Rows of short texts under "part", "action" ("replaced" or "kept"; for the part "vLLM" its
        version or "not installed") and "why".
    """
    version = installed_version()
    if version is None:
        return [{"part": "vLLM", "action": "not installed", "why": "pip install '.[vllm]'"}]
    refused = refusal(version)
    rows = [{"part": "vLLM", "action": version, "why": refused or "a tested version"}]
    for part in [] if refused else plan(this_machine(), mode()):
        action = "replaced" if part.replaced else "kept"
        rows.append({"part": part.name, "action": action, "why": part.why})
    return rows
