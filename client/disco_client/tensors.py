"""Tensors to bytes and back, exactly: every dtype, every strided layout.

A :class:`TensorSpec` is the descriptor of a saved tensor; its bytes stand elsewhere. What cannot
be described (sparse, quantized, meta, subclasses) raises :class:`UnsupportedTensor`; nothing is
ever turned silently into a plain tensor.
"""

import ctypes
from enum import Enum
from typing import NamedTuple

import torch
import xxhash

from disco_client.errors import UnsupportedTensor

# One integer dtype per item size, so that a copy never interprets or converts a value.
_CARRIERS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


class Layout(Enum):
    """How a tensor's elements stand in its bytes."""

    SPAN = "span"
    """The storage from the first element to the last; the strides apply as they are."""
    PACKED = "packed"
    """The elements alone, in row-major order: the storage between them is somebody else's."""


class TensorSpec(NamedTuple):
    """All of a strided tensor but its bytes.

    Attributes:
        shape, stride: In elements, as the tensor has them; a load gives the same strides.
        nbytes: Bytes to keep; dimensions expanded by stride 0 are kept once.
        items: Elements to keep.
        conjugated, negated: The lazy bits of ``torch.conj`` and of ``x.imag.neg()`` views.
    """

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layout: Layout
    items: int
    nbytes: int
    conjugated: bool
    negated: bool
    requires_grad: bool


def is_supported(tensor: torch.Tensor) -> bool:
    """Whether :func:`describe` takes it: a plain strided tensor or parameter with memory."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.device.type != "meta"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def describe(tensor: torch.Tensor) -> TensorSpec:
    """The descriptor of ``tensor``.

    Raises:
        UnsupportedTensor: Its kind cannot be kept as bytes; the text names the kind.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedTensor(f"a {type(tensor).__qualname__} is no tensor; nothing was saved")
    if not is_supported(tensor):
        raise UnsupportedTensor(
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} with layout {tensor.layout} "
            f"on {tensor.device} cannot be kept as bytes, so it is not offloaded; pass a plain "
            "strided tensor"
        )
    shape, stride = tensor.shape, tensor.stride()
    if tensor.is_contiguous():  # nearly all are, and this is asked in each save
        layout, items = Layout.SPAN, tensor.numel()
    else:
        layout, items = _extent(shape, stride)
    return TensorSpec(
        tensor.dtype,
        tensor.device,
        shape,
        stride,
        layout,
        items,
        items * tensor.element_size(),
        tensor.is_conj(),
        tensor.is_neg(),
        tensor.requires_grad,
    )


def copy_in(tensor: torch.Tensor, spec: TensorSpec, memory: memoryview) -> None:
    """Copy the bytes of ``tensor`` into ``memory`` of ``spec.nbytes``, with the GIL released."""
    # What is detached records no history, so that no_grad(), which costs as much, is not needed.
    source = _physical(tensor.detach(), spec)
    source = source.view(_CARRIERS[source.element_size()])
    target = torch.frombuffer(memory, dtype=source.dtype)
    if spec.layout is Layout.SPAN:
        target.copy_(source.as_strided((spec.items,), (1,)))
    else:
        core = _core_shape(spec)
        target.view(core).copy_(source.as_strided(core, spec.stride))


def flatten(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The bytes that :func:`copy_in` copies, on the tensor's device: uint8, 1-D, contiguous.

    A view of the tensor, which shares its version counter, or a packed copy where it has gaps.
    """
    with torch.no_grad():
        source = _physical(tensor.detach(), spec)
        source = source.view(_CARRIERS[source.element_size()])
        if spec.layout is Layout.SPAN:
            return source.as_strided((spec.items,), (1,)).view(torch.uint8)
        core = _core_shape(spec)
        packed = torch.empty(core, dtype=source.dtype, device=source.device)
        packed.copy_(source.as_strided(core, spec.stride))
        return packed.view(-1).view(torch.uint8)


def digest(tensor: torch.Tensor, spec: TensorSpec | None = None) -> bytes:
    """128 bits of what :func:`copy_in` copies: equal bytes have equal ones, and no others do.

    Args:
        tensor: A supported tensor on the CPU.
        spec: The tensor's, where the caller has it.
    """
    spec = spec or describe(tensor)
    if spec.layout is Layout.SPAN and spec.nbytes:
        memory = (ctypes.c_char * spec.nbytes).from_address(tensor.data_ptr())
        return xxhash.xxh3_128_digest(memory)
    packed = bytearray(spec.nbytes)
    copy_in(tensor, spec, memoryview(packed))
    return xxhash.xxh3_128_digest(packed)


def rebuild(flat: torch.Tensor, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """The tensor that ``spec`` describes, from its bytes ``flat``, which have no history.

    On ``flat``'s own device it shares memory with ``flat`` unless the layout is packed.
    """
    if flat.device != device:
        flat = flat.to(device)
    if spec.items == 0:
        result = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
    elif spec.layout is Layout.SPAN:
        result = flat.view(spec.dtype).as_strided(spec.shape, spec.stride)
    else:
        result = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
        carrier, core = _CARRIERS[result.element_size()], _core_shape(spec)
        target = result.view(carrier).as_strided(core, spec.stride)
        target.copy_(flat.view(carrier).view(core))
    if spec.conjugated:
        result = result.conj()
    if spec.negated:
        result = torch._neg_view(result)
    return result


def _physical(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """``tensor`` with its lazy bits taken off, so that its memory is what is seen."""
    if spec.negated:
        tensor = torch._neg_view(tensor)
    return tensor.conj() if spec.conjugated else tensor


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[Layout, int]:
    """The layout to keep a tensor in, and how many elements that are."""
    if 0 in shape:
        return Layout.SPAN, 0
    steps = sorted((st, size) for st, size in zip(stride, shape, strict=True) if size > 1 and st)
    span, items, overlapping = 1, 1, False
    for step, size in steps:
        overlapping = overlapping or step < span
        span += step * (size - 1)
        items *= size
    if overlapping or span == items:
        return Layout.SPAN, span
    return Layout.PACKED, items


def _core_shape(spec: TensorSpec) -> tuple[int, ...]:
    """The shape with the dimensions that stride 0 repeats taken once."""
    return tuple(size if step else 1 for size, step in zip(spec.shape, spec.stride, strict=True))
