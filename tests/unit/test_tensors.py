"""Tensors to bytes and back: every dtype, every layout, bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from disco_client.errors import UnsupportedTensor
from disco_client.tensors import copy_in, describe, rebuild

CPU = torch.device("cpu")


def round_trip(tensor: torch.Tensor) -> torch.Tensor:
    """Through memory that is exactly as large as the spec asks for."""
    spec = describe(tensor)
    if not spec.nbytes:
        return rebuild(torch.empty(0, dtype=torch.uint8), spec, CPU)
    memory = memoryview(bytearray(spec.nbytes))
    copy_in(tensor, spec, memory)
    return rebuild(torch.frombuffer(memory, dtype=torch.uint8), spec, CPU)


def raw(tensor: torch.Tensor) -> bytes:
    """The elements' bytes in row-major order, lazy bits resolved."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return bytes(plain.flatten().view(torch.uint8).tolist())


def all_dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    skipped = ("quint", "qint", "bits", "uint1", "uint2", "uint3", "uint4", "uint5", "uint6")
    skipped += ("uint7", "int1", "int2", "int3", "int4", "int5", "int6", "int7")
    names = {str(d).removeprefix("torch."): d for d in found}
    kept = {
        n: d
        for n, d in names.items()
        if n in ("uint16", "uint32", "uint64", "int16", "int32", "int64")
    }
    kept |= {n: d for n, d in names.items() if not n.startswith(skipped)}
    return [kept[name] for name in sorted(kept)]


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    """NaN payloads, negative zeros and padding patterns survive; nothing is converted."""
    pattern = torch.arange(4096, dtype=torch.int64).mul_(2654435761).view(torch.uint8)
    if dtype is torch.bool:
        pattern = pattern & 1
    tensor = pattern.clone().view(dtype).reshape(2, -1)
    loaded = round_trip(tensor)
    assert loaded.dtype is dtype
    assert loaded.shape == tensor.shape
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def layouts() -> dict[str, torch.Tensor]:
    base = torch.randn(6, 8, 10)
    complex_base = torch.randn(5, 7, dtype=torch.complex64)
    return {
        "contiguous": base,
        "offset view": base[2:],
        "transposed": base.permute(2, 0, 1),
        "column slice": base[:, ::2],
        "gaps in the last dimension": base[..., 3:7],
        "diagonal": torch.diagonal(base, dim1=0, dim2=1),
        "expanded": torch.randn(1, 64).expand(512, 64),
        "expanded column": torch.randn(64, 1).expand(64, 512),
        "expanded with gaps": base[:, :1, ::3].expand(6, 9, 4),
        "scalar expanded": torch.tensor(3.0).expand(4, 4),
        "overlapping windows": torch.arange(100.0).unfold(0, 10, 3),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "0-dim": torch.tensor(1.5),
        "one element of a large storage": base[1, 2, 3],
        "empty": torch.empty(0),
        "empty with shape": torch.empty(2, 0, 3),
        "size-1 dimensions": base[:1, :, :1],
        "conjugated": complex_base.conj(),
        "conjugated and transposed": complex_base.t().conj(),
        "negated": complex_base.conj().imag,
        "negated with gaps": complex_base.conj().imag[:, ::2],
        "a parameter": torch.nn.Parameter(torch.randn(3, 4)),
    }


@pytest.mark.parametrize("name", layouts())
def test_every_layout_keeps_values_strides_and_lazy_bits(name: str) -> None:
    """A recomputation must see the very strides of the forward, or kernels may differ by a bit."""
    tensor = layouts()[name]
    loaded = round_trip(tensor)
    assert torch.equal(loaded, tensor)
    assert loaded.shape == tensor.shape
    assert loaded.stride() == tensor.stride()
    assert loaded.is_conj() == tensor.is_conj()
    assert loaded.is_neg() == tensor.is_neg()
    assert loaded.grad_fn is None
    assert not loaded.requires_grad


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_random_views(data: st.DataObject) -> None:
    """Any chain of view operations comes back equal, with equal strides."""
    tensor = torch.arange(5 * 6 * 7 * 2, dtype=torch.int32).reshape(5, 6, 7, 2)
    for _ in range(data.draw(st.integers(0, 4))):
        dim = data.draw(st.integers(0, tensor.dim() - 1))
        size = tensor.shape[dim]
        match data.draw(st.sampled_from(["slice", "swap", "expand", "step"])):
            case "slice" if size:
                start = data.draw(st.integers(0, size - 1))
                tensor = tensor.narrow(dim, start, data.draw(st.integers(0, size - start)))
            case "swap":
                tensor = tensor.transpose(dim, data.draw(st.integers(0, tensor.dim() - 1)))
            case "expand":
                tensor = tensor.unsqueeze(dim).expand(
                    *tensor.shape[:dim], data.draw(st.integers(1, 3)), *tensor.shape[dim:]
                )
            case "step" if size:
                step = data.draw(st.integers(1, 3))
                tensor = tensor[(slice(None),) * dim + (slice(None, None, step),)]
    loaded = round_trip(tensor)
    assert torch.equal(loaded, tensor)
    assert loaded.stride() == tensor.stride()


def test_expanded_dimensions_are_kept_once() -> None:
    """A broadcast mask would otherwise be written at its full logical size."""
    assert describe(torch.randn(1, 1024).expand(4096, 1024)).nbytes == 4096


def test_gaps_are_not_kept() -> None:
    """A slice of a large buffer must neither cost the buffer's size nor leak its bytes."""
    assert describe(torch.zeros(1000, 1000)[:, :10]).nbytes == 1000 * 10 * 4


class Wrapped(torch.Tensor):
    """A subclass: its plain bytes are not all of it."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.empty(3, device="meta"),
        torch.randn(3).as_subclass(Wrapped),
    ],
    ids=["sparse", "meta", "subclass"],
)
def test_what_has_no_plain_bytes_is_refused_by_name(tensor: torch.Tensor) -> None:
    """It must never come back silently as a plain tensor."""
    with pytest.raises(UnsupportedTensor, match=type(tensor).__qualname__):
        describe(tensor)
