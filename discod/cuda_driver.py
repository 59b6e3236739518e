"""The few calls of the CUDA driver API that discod makes, typed, through ctypes.

For the driver's own library (``libcuda.so.1``), which every machine with an NVIDIA driver has; no
toolkit and no torch. The trainer's side and the daemon's GPU process share this module. Nothing
is loaded before :func:`load`. Device pointers, events and streams are plain ints; all sizes are in
bytes. Every call that fails raises :class:`CudaError`; all of them let go of the GIL.

Notes:
    Unless its docstring says otherwise, a call needs a current context: make it inside
    :meth:`Driver.on`.
"""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

LIBRARY_VARIABLE = "DISCOD_CUDA_LIBRARY"
DEFAULT_LIBRARY = "libcuda.so.1"

UUID_BYTES = 16
IPC_HANDLE_BYTES = 64

SUCCESS = 0
NOT_READY = 600
ALREADY_REGISTERED = 712
"""What the calls answer, as far as callers decide by it (cuda.h: CUresult)."""

# Flags of cuda.h.
_EVENT_DISABLE_TIMING = 2
_EVENT_INTERPROCESS = 4
_STREAM_NON_BLOCKING = 1
_HOST_REGISTER_PORTABLE = 1
_IPC_LAZY_PEER_ACCESS = 1


class CudaUnavailable(Exception):
    """There is no CUDA here: no library, no device, or a driver that does not start."""


class CudaError(Exception):
    """A call failed.

    Attributes:
        call: The function of the driver API.
        code: Its CUresult.
        name: The code's name, such as ``CUDA_ERROR_INVALID_VALUE``.
    """

    def __init__(self, call: str, code: int, name: str, meaning: str) -> None:
        super().__init__(f"{call} failed: {name} ({code}), {meaning}")
        self.call = call
        self.code = code
        self.name = name


class _Uuid(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * UUID_BYTES),)


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle, which are passed by value to be opened."""

    _fields_ = (("reserved", ctypes.c_ubyte * IPC_HANDLE_BYTES),)


_POINTER = ctypes.c_uint64  # CUdeviceptr
_OPAQUE = ctypes.c_void_p  # CUcontext, CUstream, CUevent
_SIZE = ctypes.c_size_t
_INT = ctypes.c_int  # CUdevice
_FLAGS = ctypes.c_uint
_out = ctypes.POINTER

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (_FLAGS,),
    "cuGetErrorName": (_INT, _out(ctypes.c_char_p)),
    "cuGetErrorString": (_INT, _out(ctypes.c_char_p)),
    "cuDeviceGetCount": (_out(_INT),),
    "cuDeviceGet": (_out(_INT), _INT),
    "cuDevicePrimaryCtxRetain": (_out(_OPAQUE), _INT),
    "cuCtxPushCurrent_v2": (_OPAQUE,),
    "cuCtxPopCurrent_v2": (_out(_OPAQUE),),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (_out(_SIZE), _out(_SIZE)),
    "cuMemAlloc_v2": (_out(_POINTER), _SIZE),
    "cuMemFree_v2": (_POINTER,),
    "cuMemGetAddressRange_v2": (_out(_POINTER), _out(_SIZE), _POINTER),
    "cuMemHostRegister_v2": (_OPAQUE, _SIZE, _FLAGS),
    "cuMemHostUnregister": (_OPAQUE,),
    "cuMemcpyAsync": (_POINTER, _POINTER, _SIZE, _OPAQUE),
    "cuIpcGetMemHandle": (_out(_IpcHandle), _POINTER),
    "cuIpcOpenMemHandle_v2": (_out(_POINTER), _IpcHandle, _FLAGS),
    "cuIpcCloseMemHandle": (_POINTER,),
    "cuIpcGetEventHandle": (_out(_IpcHandle), _OPAQUE),
    "cuIpcOpenEventHandle": (_out(_OPAQUE), _IpcHandle),
    "cuEventCreate": (_out(_OPAQUE), _FLAGS),
    "cuEventRecord": (_OPAQUE, _OPAQUE),
    "cuEventQuery": (_OPAQUE,),
    "cuEventSynchronize": (_OPAQUE,),
    "cuEventDestroy_v2": (_OPAQUE,),
    "cuStreamCreate": (_out(_OPAQUE), _FLAGS),
    "cuStreamWaitEvent": (_OPAQUE, _OPAQUE, _FLAGS),
    "cuStreamDestroy_v2": (_OPAQUE,),
}
_UUID_CALLS = ("cuDeviceGetUuid_v2", "cuDeviceGetUuid")
"""The first that the library has: the second, older one does not tell MIG instances apart."""


class Driver:
    """The loaded library, started.

    Args:
        path: The library, as dlopen takes it.

    Raises:
        CudaUnavailable: The text has fact and remedy.
    """

    def __init__(self, path: str) -> None:
        try:
            self._library = ctypes.CDLL(path)
            for name, arguments in _SIGNATURES.items():
                self._declare(name, arguments)
            self._uuid_call = next(name for name in _UUID_CALLS if hasattr(self._library, name))
            self._declare(self._uuid_call, (_out(_Uuid), _INT))
        except (OSError, AttributeError, StopIteration) as error:
            raise CudaUnavailable(
                f"CUDA is not available: {path} cannot be loaded ({error}); install the NVIDIA "
                "driver, or give the container its GPUs and the driver's libraries"
            ) from error
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()
        try:
            self._call("cuInit", 0)
            count = self.device_count()
        except CudaError as error:
            raise CudaUnavailable(
                f"CUDA is not available: {error}; see whether 'nvidia-smi' runs here"
            ) from error
        if not count:
            raise CudaUnavailable(
                "CUDA is not available: the driver sees no GPU; see CUDA_VISIBLE_DEVICES, or give "
                "the container its GPUs"
            )

    def device_count(self) -> int:
        """How many GPUs this process sees. Needs no context."""
        count = _INT()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def device_uuid(self, ordinal: int) -> bytes:
        """The 16 bytes that name the GPU, or MIG instance, to every process. Needs no context."""
        uuid = _Uuid()
        self._call(self._uuid_call, ctypes.byref(uuid), self._device(ordinal))
        return bytes(uuid.bytes)

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Have the GPU's primary context, which torch uses too, current in this thread.

        It is kept until the process ends. From any thread, and nested.
        """
        self._call("cuCtxPushCurrent_v2", self._context(ordinal))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(_OPAQUE()))

    def context_synchronize(self) -> None:
        """Wait for all work of the current context."""
        self._call("cuCtxSynchronize")

    def mem_get_info(self) -> tuple[int, int]:
        """The GPU's free and total bytes."""
        free, total = _SIZE(), _SIZE()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def mem_alloc(self, size: int) -> int:
        """Allocate device memory."""
        pointer = _POINTER()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), size)
        return pointer.value

    def mem_free(self, pointer: int) -> None:
        """Free it. No process may have it open, and nothing may be in flight on it."""
        self._call("cuMemFree_v2", pointer)

    def address_range(self, pointer: int) -> tuple[int, int]:
        """Start and size of the allocation around ``pointer``, one's own or an opened one."""
        base, size = _POINTER(), _SIZE()
        arguments = ctypes.byref(base), ctypes.byref(size), pointer
        self._call("cuMemGetAddressRange_v2", *arguments)
        return base.value, size.value

    def host_register(self, address: int, size: int) -> None:
        """Pin host memory, for all contexts. Its pages are touched, and stay in RAM."""
        self._call("cuMemHostRegister_v2", address, size, _HOST_REGISTER_PORTABLE)

    def host_unregister(self, address: int) -> None:
        """Undo :meth:`host_register`, by the address given there. May wait for the GPU."""
        self._call("cuMemHostUnregister", address)

    def copy_async(self, dst: int, src: int, size: int, stream: int) -> None:
        """Copy between any two addresses, in the stream's order.

        With host memory that is not registered the call may wait for the stream.
        """
        self._call("cuMemcpyAsync", dst, src, size, stream)

    def ipc_mem_handle(self, pointer: int) -> bytes:
        """The handle by which another process opens an allocation."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
        return bytes(handle.reserved)

    def ipc_open_mem(self, handle: bytes) -> int:
        """Map another process's allocation; close it as often as it was opened."""
        pointer = _POINTER()
        flags = _IPC_LAZY_PEER_ACCESS
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), _handle(handle), flags)
        return pointer.value

    def ipc_close_mem(self, pointer: int) -> None:
        """Undo :meth:`ipc_open_mem`. May wait for the GPU."""
        self._call("cuIpcCloseMemHandle", pointer)

    def event_create(self, *, interprocess: bool) -> int:
        """Make an event, without timing; ``interprocess``: to be exported."""
        event = _OPAQUE()
        flags = _EVENT_DISABLE_TIMING | (_EVENT_INTERPROCESS if interprocess else 0)
        self._call("cuEventCreate", ctypes.byref(event), flags)
        return event.value or 0

    def ipc_event_handle(self, event: int) -> bytes:
        """The handle by which another process opens an event."""
        handle = _IpcHandle()
        self._call("cuIpcGetEventHandle", ctypes.byref(handle), event)
        return bytes(handle.reserved)

    def ipc_open_event(self, handle: bytes) -> int:
        """Open another process's event; undone by :meth:`event_destroy`."""
        event = _OPAQUE()
        self._call("cuIpcOpenEventHandle", ctypes.byref(event), _handle(handle))
        return event.value or 0

    def event_record(self, event: int, stream: int) -> None:
        """Have the event stand for all that is in the stream by now."""
        self._call("cuEventRecord", event, stream)

    def event_query(self, event: int) -> bool:
        """Whether what was last recorded is done; True when nothing ever was."""
        code = self._library.cuEventQuery(event)
        if code not in (SUCCESS, NOT_READY):
            raise self._error("cuEventQuery", code)
        return bool(code == SUCCESS)

    def event_synchronize(self, event: int) -> None:
        """Wait until what was last recorded is done."""
        self._call("cuEventSynchronize", event)

    def event_destroy(self, event: int) -> None:
        """Let go of the event; what waits for it goes on waiting."""
        self._call("cuEventDestroy_v2", event)

    def stream_create(self) -> int:
        """Make a stream that is not ordered with the default stream."""
        stream = _OPAQUE()
        self._call("cuStreamCreate", ctypes.byref(stream), _STREAM_NON_BLOCKING)
        return stream.value or 0

    def stream_wait_event(self, stream: int, event: int) -> None:
        """Have what comes later in the stream wait for what the event was last recorded for."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def stream_destroy(self, stream: int) -> None:
        """Let go of the stream, once its work is done."""
        self._call("cuStreamDestroy_v2", stream)

    def _declare(self, name: str, arguments: tuple[type, ...]) -> None:
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != SUCCESS:
            raise self._error(name, code)

    def _error(self, call: str, code: int) -> CudaError:
        name, meaning = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(meaning))
        texts = [text.value.decode() if text.value else "unknown" for text in (name, meaning)]
        return CudaError(call, code, *texts)

    def _device(self, ordinal: int) -> int:
        device = _INT()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device.value

    def _context(self, ordinal: int) -> int:
        with self._lock:
            if ordinal not in self._contexts:
                context = _OPAQUE()
                device = self._device(ordinal)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
                self._contexts[ordinal] = context.value or 0
            return self._contexts[ordinal]


_drivers: dict[str, Driver] = {}
_drivers_lock = threading.Lock()


def load(path: str | None = None) -> Driver:
    """The driver, loaded and started once for each path.

    Args:
        path: The library; by default ``$DISCOD_CUDA_LIBRARY``, else ``libcuda.so.1``.

    Raises:
        CudaUnavailable: It is not there, does not start, or sees no GPU.
    """
    path = path or os.environ.get(LIBRARY_VARIABLE) or DEFAULT_LIBRARY
    with _drivers_lock:
        if path not in _drivers:
            _drivers[path] = Driver(path)
        return _drivers[path]


def _handle(handle: bytes) -> _IpcHandle:
    if len(handle) != IPC_HANDLE_BYTES:
        raise ValueError(f"an IPC handle of {len(handle)} bytes, not {IPC_HANDLE_BYTES}")
    return _IpcHandle.from_buffer_copy(handle)
