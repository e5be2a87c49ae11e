"""Executing as an older NVIDIA target: the facts that programs see, and the PTX that is run."""

import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest

from anymla.ops import device
from crossrun import ptx
from crossrun.ptx.import_hook import after_import

H200 = types.SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, total_memory=1 << 37
)
SM_80 = ptx.TARGETS["sm_80"]


def python(code, **environment):
    """Run code in a Python of its own, in which torch seems to see an H200; return its output."""
    start = """
        import types
        import torch
        torch.cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
        torch.cuda.is_available = lambda: True
        from crossrun import ptx
        """
    script = textwrap.dedent(start) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_facts_are_those_of_anymla():
    for name, target in ptx.TARGETS.items():
        ours = device.TARGETS[name]
        assert (target.shared_bytes, target.sm_count) == (ours.shared_bytes, ours.sm_count)


def test_torch_reports_the_target():
    seen = python(
        """
        ptx.install("sm_86")
        properties = torch.cuda.get_device_properties(0)
        print(properties.name, properties.major, properties.minor)
        print(properties.multi_processor_count, properties.shared_memory_per_block_optin)
        print(properties.max_threads_per_multi_processor, ptx.installed().name)
        from anymla.ops.device import target_of
        print(target_of(torch.device("cuda", 0)))
        """
    )
    lines = seen.splitlines()
    assert lines[0] == "NVIDIA H200 as sm_86 8 6"
    assert lines[1] == f"84 {99 << 10}"
    assert lines[2] == "1536 sm_86"
    assert lines[3] == str(device.TARGETS["sm_86"])


def test_every_module_that_is_imported_later_is_patched_too():
    assert "(8, 9)" in python(
        """
        ptx.install("sm_89")
        import sys
        assert "triton" not in sys.modules
        import triton.backends.nvidia.compiler, triton.compiler.compiler
        import triton.backends.nvidia.driver as driver
        for patched in (
            triton.backends.nvidia.compiler.CUDABackend.make_cubin,
            triton.compiler.compiler.CompiledKernel._init_handles,
            driver.CudaUtils.__init__,
        ):
            assert "crossrun" in patched.__code__.co_filename, patched
        found = torch.cuda.get_device_properties()
        print((found.major, found.minor))
        """
    )


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at).to(tl.bfloat16).to(tl.float32) + 1)
"""


def compiled(tmp_path, architecture):
    """Return code that compiles ``add`` for an architecture, and prints what ptxas was given."""
    (tmp_path / "add_kernel.py").write_text(KERNEL)
    return f"""
        import subprocess, sys
        sys.path.insert(0, {str(tmp_path)!r})
        ptx.install("sm_80")
        real = subprocess.run
        def run(command, **settings):
            for word in command:
                if word.startswith("--gpu-name"):
                    print(word)
            return real(command, **settings)
        subprocess.run = run
        import triton
        from triton.backends.compiler import GPUTarget
        from add_kernel import add
        source = triton.compiler.ASTSource(
            add, {{"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}}, {{"BLOCK": 128}})
        try:
            kernel = triton.compile(source, target=GPUTarget("cuda", {architecture}, 32))
        except ptx.WrongTarget as error:
            print(error)
        else:
            print(ptx.ptx_target(kernel.asm["ptx"]))
            # e_flags of the ELF header hold the architecture, since CUDA 13 in the second byte.
            flags = int.from_bytes(kernel.asm["cubin"][48:52], "little")
            held = flags & 0xFF, flags >> 8 & 0xFF
            print(90 in held, 80 in held)
        """


@pytest.mark.skipif(not device.has_triton(), reason="triton is an extra")
def test_ptx_of_the_older_target_is_assembled_for_the_gpu(tmp_path):
    seen = python(compiled(tmp_path, 80), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert seen.splitlines() == ["--gpu-name=sm_90a", "sm_80", "True False"]
    # The folder of kernels is the target's own.
    assert (tmp_path / "cache-as-sm_80").is_dir()
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(not device.has_triton(), reason="triton is an extra")
def test_a_kernel_compiled_for_the_gpu_itself_is_refused(tmp_path):
    seen = python(compiled(tmp_path, 90), TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert "compiled for sm_90, and this process executes as sm_80" in seen


@pytest.mark.parametrize("capability", [(8, 0), (7, 5)])
def test_a_gpu_that_is_not_newer_is_refused(capability):
    cuda = types.SimpleNamespace()
    cuda.get_device_properties = lambda device=None: types.SimpleNamespace(
        name="NVIDIA A100", major=capability[0], minor=capability[1]
    )
    ptx._patch_torch(SM_80, cuda)
    with pytest.raises(ptx.WrongTarget, match=r"NVIDIA A100 is sm_.*executed on a newer GPU only"):
        cuda.get_device_properties()


def test_properties_keep_what_the_target_does_not_say():
    cuda = types.SimpleNamespace(get_device_properties=lambda device=None: H200)
    ptx._patch_torch(SM_80, cuda)
    assert cuda.get_device_properties().total_memory == 1 << 37
    with pytest.raises(AttributeError):
        _ = cuda.get_device_properties().no_such_property


def test_shared_memory_is_the_targets(monkeypatch):
    class CudaUtils:
        def __init__(self):
            self.get_device_properties = lambda device: {
                "max_shared_mem": 227 << 10, "multiprocessor_count": 132, "max_num_regs": 1 << 16,
            }  # fmt: skip

    CudaUtils.instance = CudaUtils()
    driver = types.SimpleNamespace(CudaUtils=CudaUtils)
    ptx._patch_driver(SM_80, driver)
    wanted = {"max_shared_mem": 163 << 10, "multiprocessor_count": 108, "max_num_regs": 1 << 16}
    assert CudaUtils.instance.get_device_properties(0) == wanted
    assert CudaUtils().get_device_properties(0) == wanted


def test_a_kernel_is_checked_before_it_is_loaded():
    class CompiledKernel:
        def __init__(self, target):
            self.module, self.name = None, "add"
            self.asm = {"ptx": f"//\n.version 8.7\n.target {target}\n"}

        def _init_handles(self):
            self.module = "loaded"

    compiler = types.SimpleNamespace(CompiledKernel=CompiledKernel, max_shared_mem=None)
    ptx._patch_kernels(SM_80, compiler)
    right, wrong = CompiledKernel("sm_80"), CompiledKernel("sm_90a")
    right._init_handles()
    assert right.module == "loaded"
    with pytest.raises(ptx.WrongTarget, match=r"kernel add is of sm_90a.*executes as sm_80"):
        wrong._init_handles()
    assert wrong.module is None


def test_nvml_reports_the_target():
    nvml = types.SimpleNamespace(nvmlDeviceGetCudaComputeCapability=lambda handle: (9, 0))
    ptx._patch_nvml(SM_80, nvml)
    assert nvml.nvmlDeviceGetCudaComputeCapability(object()) == (8, 0)


def test_children_execute_as_the_target_beside_a_hidden_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.hidden_one = True\n")
    seen = python(
        """
        import subprocess, sys
        ptx.install("sm_80")
        child = "import sys; from crossrun import ptx; print(ptx.installed().name, sys.hidden_one)"
        print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
        """,
        PYTHONPATH=os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
    )
    assert seen.strip() == "sm_80 True"


def test_a_child_without_the_package_finds_it(tmp_path):
    environment = {**os.environ, **ptx.environment("sm_80")}
    code = (
        "import sys; print('crossrun.ptx' in sys.modules, any('crossrun' in p for p in sys.path))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sitecustomize, sys; {code}"],
        capture_output=True, text=True, env=environment, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.strip() == "True True"


@pytest.mark.parametrize(("options", "sms"), [([], 108), (["--all-sms"], 132)])
def test_the_command_line_runs_a_command(options, sms):
    words = [sys.executable, "-m", "crossrun.ptx", *options, "sm_80", sys.executable, "-c"]
    code = (
        "from crossrun import ptx; print(ptx.installed().name, ptx._sm_count(132, ptx.installed()))"
    )
    done = subprocess.run([*words, code], capture_output=True, text=True, check=True)
    assert done.stdout == f"sm_80 {sms}\n"


@pytest.mark.parametrize("words", [[], ["sm_80"], ["sm_75", "true"]])
def test_wrong_words_are_refused(words):
    done = subprocess.run(
        [sys.executable, "-m", "crossrun.ptx", *words], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m crossrun.ptx")


def test_environment_is_not_changed_twice(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    once = ptx.environment("sm_80")
    for name, value in once.items():
        monkeypatch.setenv(name, value)
    assert ptx.environment("sm_80") == once
    assert once["TRITON_CACHE_DIR"] == f"{tmp_path}-as-sm_80"


def test_another_target_is_refused(monkeypatch):
    monkeypatch.setenv(ptx.VARIABLE, "sm_80")
    with pytest.raises(ptx.WrongTarget, match="executes as sm_80 already"):
        ptx.install("sm_89")
    with pytest.raises(ValueError, match=r"must be one of sm_80, .*got 'sm_75'"):
        ptx.install("sm_75")


def test_a_module_is_patched_once_it_is_executed(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    finders = list(sys.meta_path)
    after_import("imported_later", lambda module: seen.append(module.value))
    assert not seen
    import importlib.util

    assert importlib.util.find_spec("imported_later") is not None
    assert not seen
    import imported_later

    assert seen == [1]
    assert sys.meta_path == finders
    after_import("imported_later", lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]
    assert imported_later.value == 1


def test_flags_need_a_newer_gpu(monkeypatch):
    from click.testing import CliRunner

    from anymla.cli import doctor

    monkeypatch.delenv(ptx.VARIABLE, raising=False)
    monkeypatch.setattr(ptx, "install", lambda target: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = CliRunner().invoke(doctor.command, ["--ptx-target", "sm_80"])
    assert done.exit_code
    assert "needs an NVIDIA GPU" in (done.output + str(done.exception))


@pytest.mark.gpu
def test_a_kernel_runs_as_every_older_target(tmp_path):
    (tmp_path / "add_kernel.py").write_text(KERNEL)
    code = """
        import torch, triton
        from crossrun import ptx
        from add_kernel import add
        x, y = torch.arange(128.0, device="cuda"), torch.empty(128, device="cuda")
        kernel = add[(1,)](x, y, BLOCK=128)
        assert torch.equal(y, x + 1)
        print(ptx.ptx_target(kernel.asm["ptx"]), torch.cuda.get_device_capability())
        print(triton.runtime.driver.active.utils.get_device_properties(0)["max_shared_mem"])
        """
    import torch

    real = getattr(torch.cuda.get_device_properties, "real", torch.cuda.get_device_properties)()
    older = [t for t in ptx.TARGETS.values() if t.capability < (real.major, real.minor)]
    if not older:
        pytest.skip("no older target is known")
    for target in older:
        environment = {**os.environ, ptx.VARIABLE: "", "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "crossrun.ptx", target.name, sys.executable, "-c",
             textwrap.dedent(code)],
            capture_output=True, text=True, env=environment,
            cwd=Path(ptx.__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.split("\n")[:2] == [
            f"{target.name} {target.capability}", str(target.shared_bytes),
        ]  # fmt: skip
