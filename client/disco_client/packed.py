"""What stands in the graph for a saved tensor: itself, its bytes elsewhere, or its parts."""

from typing import Any, Protocol

import torch

from disco_client.inplace import refuse_stale, version_of
from disco_client.sharing import SharedTensor
from disco_client.tensors import TensorSpec, digest, is_supported


class Packed(Protocol):
    """What stands in the graph for a saved tensor."""

    def load(self) -> torch.Tensor:
        """The tensor as it was saved."""


class Kept:
    """A tensor that stays in memory: too small, alive anyway, or of a kind without plain bytes.

    Holds a leaf as it is, as autograd does, so that ZeRO may exchange a parameter's data under it.
    Anything else is held detached: keeping the tensor itself would tie its graph into a cycle.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = version_of(tensor)

    def load(self) -> torch.Tensor:
        """The tensor. Raises ``RuntimeError`` as autograd does when it was changed in place."""
        refuse_stale(self._tensor, self._version)
        return self._tensor


class Recast:
    """A parameter in another dtype, as autocast makes it, or a view of that: cast again to load.

    The parameter is alive anyway, and casting it is cheaper than storing the result. Both may be
    changed through ``.data``, which no version tells, so what is loaded is what has the same
    digest as what was saved.
    """

    __slots__ = ("_digest", "_dtype", "_geometry", "_offset", "_parameter", "_shape", "_stride")

    def __init__(self, tensor: torch.Tensor, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._geometry = parameter.shape, parameter.stride()
        self._dtype = tensor.dtype
        self._shape, self._stride = tensor.shape, tensor.stride()
        self._offset = tensor.storage_offset()
        self._digest = digest(tensor)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Recast | None":
        """What stands for ``tensor``, if a cast of a parameter gives it now."""
        parameter = _parameter_behind(tensor)
        if parameter is None:
            return None
        recast = cls(tensor, parameter)
        return recast if digest(recast._cast()) == recast._digest else None

    def load(self) -> torch.Tensor:
        """The tensor. Raises ``RuntimeError`` when the parameter has another value by now."""
        parameter = self._parameter
        if (parameter.shape, parameter.stride()) == self._geometry:
            cast = self._cast()
            if digest(cast) == self._digest:
                return cast
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a parameter of shape {tuple(self._geometry[0])}, whose cast to "
            f"{self._dtype} was saved (by autocast?), has another value than in the forward"
        )

    def _cast(self) -> torch.Tensor:
        with torch.no_grad():
            cast = self._parameter.to(self._dtype)
            return cast.as_strided(self._shape, self._stride, self._offset)


def _parameter_behind(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter that ``tensor`` may be a plain cast of, or a view of a cast of.

    None off the CPU, where digests cost as much as storing.
    """
    cast = tensor if tensor._base is None else tensor._base
    if cast.grad_fn is None or cast.grad_fn.name() != "ToCopyBackward0":
        return None
    ((node, _),) = cast.grad_fn.next_functions
    parameter = getattr(node, "variable", None)
    if (
        isinstance(parameter, torch.nn.Parameter)
        and type(parameter.data) is torch.Tensor
        and is_supported(tensor)
        and not (tensor.is_conj() or tensor.is_neg())
        and tensor.dtype == cast.dtype
        and tensor.device.type == parameter.device.type == "cpu"
        and parameter.stride() == cast.stride()
        and cast.storage_offset() == 0
    ):
        return parameter
    return None


class Constant:
    """A part of a subclass that is no tensor: the device mesh of a DTensor."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def load(self) -> Any:
        """The part itself."""
        return self._value


class Offloaded:
    """A tensor whose bytes the session has, perhaps shared with other saves of them."""

    __slots__ = ("_spec", "_stored")

    def __init__(self, stored: SharedTensor, spec: TensorSpec) -> None:
        self._stored = stored
        self._spec = spec

    def load(self) -> torch.Tensor:
        """The tensor, with the shape and strides of this save."""
        return self._stored.load(spec=self._spec)


class Wrapped:
    """A tensor subclass around plain tensors (DTensor, quantized weights), each packed for itself.

    Source of the protocol: ``torch.utils._python_dispatch.TraceableWrapperSubclass``.
    """

    def __init__(self, tensor: Any, inner: dict[str, Packed], context: object) -> None:
        self._type = type(tensor)
        self._inner = inner
        self._context = context
        self._shape, self._stride = tensor.size(), tensor.stride()

    def load(self) -> torch.Tensor:
        """An equal instance of the subclass, without history."""
        inner = {name: packed.load() for name, packed in self._inner.items()}
        tensor: torch.Tensor = self._type.__tensor_unflatten__(
            inner, self._context, self._shape, self._stride
        )
        return tensor.detach()
