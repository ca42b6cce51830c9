"""The devices that EGL renders on, and which GPU of CUDA each is. Run as a program: a driver may crash its process."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from muster.pool.environment import search_path
from muster.pool.launcher import python_command

_TIMEOUT_S = 20.0
_MOST = 64
_EXTENSIONS, _CUDA_DEVICE_NV = 0x3055, 0x323A


@dataclass(frozen=True)
class EglDevice:
    """A device of EGL. index: for ``MUJOCO_EGL_DEVICE_ID``.  cuda: CUDA's index of it, None where it has none."""

    index: int
    cuda: int | None
    in_software: bool

    def __str__(self) -> str:
        kind = "in software" if self.in_software else "no GPU of CUDA" if self.cuda is None else f"GPU {self.cuda}"
        return f"device {self.index}: {kind}"


def egl_devices() -> list[EglDevice] | str:
    """The devices, looked for in a process of their own; or why they are not known, in words."""
    command = python_command(search_path(), f"{__name__}:main")
    # The driver counts among those that are visible.
    every = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=every)
    except subprocess.TimeoutExpired:
        return f"the query hung for {_TIMEOUT_S:g} s"
    if ran.returncode:
        return ran.stderr.strip().rpartition("\n")[2] or f"the query ended with {ran.returncode}"
    return [EglDevice(*one) for one in json.loads(ran.stdout)]


def main() -> None:
    """Prints the devices as JSON."""
    egl = ctypes.CDLL("libEGL.so.1")
    egl.eglGetProcAddress.restype = ctypes.c_void_p
    query, describe, attribute = (
        ctypes.CFUNCTYPE(result, *arguments)(egl.eglGetProcAddress(name) or sys.exit(f"EGL has no {name.decode()}"))
        for name, result, arguments in (
            (b"eglQueryDevicesEXT", ctypes.c_uint, (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)),
            (b"eglQueryDeviceStringEXT", ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_int)),
            (b"eglQueryDeviceAttribEXT", ctypes.c_uint, (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)),
        )
    )
    devices, count, cuda = (ctypes.c_void_p * _MOST)(), ctypes.c_int(), ctypes.c_ssize_t()
    if not query(_MOST, ctypes.byref(devices), ctypes.byref(count)):
        sys.exit("eglQueryDevicesEXT failed")
    found = []
    for i, device in enumerate(devices[: count.value]):
        has_cuda = attribute(device, _CUDA_DEVICE_NV, ctypes.byref(cuda))
        software = b"EGL_MESA_device_software" in (describe(device, _EXTENSIONS) or b"")
        found.append((i, cuda.value if has_cuda else None, software))
    json.dump(found, sys.stdout)
