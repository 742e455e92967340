"""Set the time slice of programs that share a GPU. NVML has no call for it, so the driver's ``nvidia-smi`` does it.

The numbers are those of ``nvidia-smi compute-policy``, the words those of NVIDIA's DRA driver
(api/nvidia.com/resource/v1beta1/sharing.go).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from typing import Final

from devices.gpu.nvidia.driverfiles import program
from devices.policy import Policy

LIMIT_S: Final = 5.0
_NUMBERS: Final[Mapping[str, str]] = {"Default": "0", "Short": "1", "Medium": "2", "Long": "3"}
_NAME: Final = "nvidia-smi"
_ERROR_CHARS: Final = 200


def set_time_slice(
    policy: Policy, library: str, uuid: str = "", interval: str = "", *, limit_s: float = LIMIT_S
) -> str:
    """Set the time slice of a GPU; return why that failed and what to do, '' if it succeeded. It blocks: call it in a thread.

    Args:
        policy: has the driver's root.
        library: NVML's path if it is in that root, else its name.
        uuid: the GPU's UUID; '' to check only if the program exists.
        interval: Default, Short, Medium or Long.
        limit_s: seconds for the program.
    """
    roots = dict.fromkeys((policy.container_driver_root, policy.driver_root, "/"))
    path = next(filter(None, (program(root, _NAME) for root in roots)), None)
    if path is None:
        return (
            f"{_NAME} is missing below {' and '.join(roots)}. Mount the driver's root at {policy.container_driver_root}"
        )
    if not uuid:
        return ""
    # A program of another root needs NVML's path. The other libraries of that root would not fit our loader.
    more = {"LD_PRELOAD": library} if "/" in library else {}
    command = [path, "compute-policy", "-i", uuid, "--set-timeslice", _NUMBERS[interval]]
    try:
        done = subprocess.run(
            command,
            env=os.environ | more,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"{path} did not end within {limit_s:g} s. Does the driver answer? See dmesg"
    except OSError as error:
        return f"cannot run {path}: {error.strerror}. Correct that"
    if done.returncode == 0:
        return ""
    said = done.stdout.decode(errors="replace").strip()[-_ERROR_CHARS:]
    return f"{path} ended with {done.returncode}: {said or 'it said nothing'}. Run the gateway as root with the capability SYS_ADMIN"
