"""GPU memory that another process can map. It is allocated outside torch's allocator and used as a tensor of bytes.

Each region is a separate allocation, so a handle names exactly this region, whatever the settings of torch's allocator.
A region is freed with the last tensor that views it, and at the latest when the process ends.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from headrace.errors import DeliveryError

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_OUT_OF_MEMORY = 2


class _Handle(ctypes.Structure):
    """The driver's CUipcMemHandle, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


_Pointer = ctypes.c_uint64
_SIGNATURES: dict[str, list[Any]] = {
    "cuDeviceGet": [ctypes.POINTER(ctypes.c_int), ctypes.c_int],
    "cuDevicePrimaryCtxRetain": [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int],
    "cuCtxPushCurrent_v2": [ctypes.c_void_p],
    "cuCtxPopCurrent_v2": [ctypes.POINTER(ctypes.c_void_p)],
    "cuMemAlloc_v2": [ctypes.POINTER(_Pointer), ctypes.c_size_t],
    "cuMemFree_v2": [_Pointer],
    "cuIpcGetMemHandle": [ctypes.POINTER(_Handle), _Pointer],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(_Pointer), _Handle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [_Pointer],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class DriverError(DeliveryError):
    """A call of the CUDA driver failed."""

    def __init__(self, what: str, code: int) -> None:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        super().__init__(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {code})")
        self.code = code


def allocate(nbytes: int, device: torch.device) -> tuple[torch.Tensor, bytes]:
    """Allocate bytes on this GPU; return them with the handle by which another process maps them."""
    with _context(device):
        pointer = _Pointer()
        try:
            _call("cuMemAlloc_v2", f"{nbytes / 2**20:.0f} MiB on {device}", ctypes.byref(pointer), nbytes)
        except DriverError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            # Free the memory that torch caches, then try again.
            torch.cuda.empty_cache()
            _call("cuMemAlloc_v2", f"{nbytes / 2**20:.0f} MiB on {device}", ctypes.byref(pointer), nbytes)
        memory = _tensor(pointer.value, nbytes, device, "cuMemFree_v2")
        handle = _Handle()
        _call("cuIpcGetMemHandle", "sharing GPU memory", ctypes.byref(handle), pointer)
        return memory, bytes(handle)


def open_handle(handle: bytes, nbytes: int, device: torch.device) -> torch.Tensor:
    """Map another process's bytes on this GPU. Raises `DeliveryError` if that process is gone."""
    if len(handle) != HANDLE_BYTES:
        raise DeliveryError(f"a handle of GPU memory has {HANDLE_BYTES} bytes, not {len(handle)}")
    with _context(device):
        pointer = _Pointer()
        passed = _Handle.from_buffer_copy(handle)
        _call("cuIpcOpenMemHandle_v2", "opening shared GPU memory", ctypes.byref(pointer), passed, _LAZY_PEER_ACCESS)
        return _tensor(pointer.value, nbytes, device, "cuIpcCloseMemHandle")


class _Region:
    """A range of GPU addresses in the form from which torch makes a tensor."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def _tensor(pointer: int, nbytes: int, device: torch.device, end: str) -> torch.Tensor:
    region = _Region(pointer, nbytes)
    weakref.finalize(region, _end, end, pointer, device).atexit = False
    memory = torch.as_tensor(region, device=device)
    if memory.data_ptr() != pointer:
        raise DeliveryError(f"torch copied shared memory of {device} instead of looking at it")
    return memory


def _end(function: str, pointer: int, device: torch.device) -> None:
    with suppress(DriverError), _context(device):  # a driver that is shutting down has freed it already
        _call(function, "ending shared GPU memory", pointer)


@contextmanager
def _context(device: torch.device) -> Iterator[None]:
    """Make the CUDA context that torch uses on this GPU current in this thread."""
    _call("cuCtxPushCurrent_v2", f"using {device}", _primary(device.index))
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _primary(index: int) -> int:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    ordinal, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", f"GPU {index}", ctypes.byref(ordinal), index)
    _call("cuDevicePrimaryCtxRetain", f"GPU {index}", ctypes.byref(context), ordinal.value)
    assert context.value is not None
    return context.value


def _call(function: str, what: str, *arguments: Any) -> None:
    if code := getattr(_driver(), function)(*arguments):
        raise DriverError(what, code)


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeliveryError("there is no CUDA driver on this machine") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(driver, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    return driver
