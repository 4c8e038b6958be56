"""What a measurement ran on, in words: for the device column and for the record beside a table."""

import platform
import shutil
import subprocess

import torch

from fc_eval.codec.native_extension import native_status
from fc_eval.errors import FcEvalError, unknown
from fc_eval.results.fingerprint import package_versions

DEVICES = ("cpu", "cuda")


def device_of(name: str) -> torch.device:
    """'cpu' or 'cuda', the current GPU.

    Raises:
        FcEvalError: another name, or no GPU here.
    """
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    if name == "cuda":
        if not torch.cuda.is_available():
            raise FcEvalError(
                "device=cuda is not possible: torch sees no CUDA device here; use device=cpu, or a machine with a GPU "
                "and a CUDA build of torch"
            )
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def use_threads(threads: int | None) -> None:
    """Sets torch's number of CPU threads, which the native CPU codec takes over; None leaves it.

    Raises:
        FcEvalError: less than 1.
    """
    if threads is not None:
        if threads < 1:
            raise FcEvalError(f"threads={threads} is not possible: expected 1 or more")
        torch.set_num_threads(threads)


def device_name(device: torch.device) -> str:
    """'NVIDIA H200', or 'cpu (2 threads)'."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({torch.get_num_threads()} threads)"


def provenance(device: torch.device) -> str:
    """Hardware, clocks and versions in a few lines."""
    versions = package_versions(("fc-eval", "torch", "transformers", "numpy"))
    native = ", ".join(f"{part} {'yes' if why is None else f'no ({why})'}" for part, why in native_status().items())
    lines = [
        f"{device_name(device)}; {_cpu_model()}",
        f"python {platform.python_version()}, " + ", ".join(f"{name} {v}" for name, v in versions.items()),
        f"native codecs: {native}",
    ]
    if device.type == "cuda":
        lines.append(f"CUDA {torch.version.cuda}, driver and clocks (SM, memory) just after: {_nvidia_smi(device)}")
    return "\n".join(lines)


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def _nvidia_smi(device: torch.device) -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "nvidia-smi is not there"
    query = [tool, "--query-gpu=driver_version,clocks.sm,clocks.mem", "--format=csv,noheader", f"--id={device.index}"]
    found = subprocess.run(query, capture_output=True, text=True, check=False, timeout=30)
    return found.stdout.strip() if found.returncode == 0 else "nvidia-smi gave none"
