"""One checkpointed call: its tensors laid out for torch to save, and put back for running it."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from disco_client.hooks import Packer, recomputed_region
from disco_client.inplace import InputGuard, refuse_stale, version_of
from disco_client.tensors import is_supported


class Prepared:
    """``function(*args, **kwargs)`` as a callable of flat inputs, which torch's checkpoint saves.

    Tensors in lists, tuples and dicts are laid out too, so that they can be offloaded. The first
    run, in forward, gets the very objects that were given. A recomputation gets containers that
    are built anew around the loaded tensors, unless the first run changed the given ones: those
    it gets as they are, as it would from torch. What was one object is one again: attention layers
    ask whether query and key are the same tensor, and compute something else when not.

    Args:
        function, args, kwargs: The call.
        packer: Decides what is offloaded.

    Attributes:
        inputs: What torch is to save and hand back.
        worthwhile: Whether anything of it would be offloaded.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        packer: Packer,
    ) -> None:
        self.inputs: list[Any] = []
        self.worthwhile = False
        self._function = function
        self._packer = packer
        self._positional = len(args)
        self._names = tuple(kwargs)
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._arguments: list[_Argument] = []
        self._containers: list[_Container] = []
        self._guard = InputGuard([*args, *kwargs.values()])
        known: dict[int, Any] = {}
        for value in (*args, *kwargs.values()):
            self._lay_out(value, known)
        self._show_devices()

    def _lay_out(self, value: Any, known: dict[int, Any]) -> None:
        """Add ``value`` to the inputs. ``known``: what each object became, by its id."""
        leaves, spec = tree_flatten(value, is_leaf=_is_leaf)
        goes = [self._offloads(leaf) for leaf in leaves]
        if not any(goes) and not spec.is_leaf():
            leaves, spec, goes = [value], _LEAF, [False]
        if not spec.is_leaf() and id(value) in known:
            self._arguments.append(known[id(value)])
            return
        self.worthwhile = self.worthwhile or any(goes)
        places = []
        for leaf, offloaded in zip(leaves, goes, strict=True):
            is_tensor = isinstance(leaf, torch.Tensor)
            place = known.get(id(leaf)) if is_tensor else None
            if place is None:
                place = len(self.inputs)
                by_reference = is_tensor and not offloaded
                self.inputs.append(_Referenced(leaf, spec.is_leaf()) if by_reference else leaf)
            if is_tensor:
                known[id(leaf)] = place
            places.append(place)
        argument = _Argument(spec, places)
        self._arguments.append(argument)
        if not spec.is_leaf():
            known[id(value)] = argument
            self._containers.append(_Container(argument, value, leaves))

    def _offloads(self, leaf: Any) -> bool:
        """Not with attributes: the function may ask for them, and a load does not bring them."""
        attributes = isinstance(leaf, torch.Tensor) and is_supported(leaf) and leaf.__dict__
        return not attributes and self._packer.offloads(leaf)

    def _show_devices(self) -> None:
        """Let torch see the devices of what is passed by reference: it keeps their random state."""
        seen = {value.device for value in self.inputs if isinstance(value, torch.Tensor)}
        hidden = {value.device for value in self.inputs if isinstance(value, _Referenced)}
        self.inputs += [torch.empty(0, device=device) for device in hidden - seen]

    def __call__(self, *inputs: Any) -> Any:
        """Run it: the first time as it was given, then from ``inputs`` as torch hands them back."""
        if self._given is not None:
            (args, kwargs), self._given = self._given, None
        else:
            args, kwargs = self._put_back(inputs)
        with recomputed_region():
            return self._function(*args, **kwargs)

    def run_by_torch(self) -> None:
        """The first run is torch's own, of the function itself: all calls here are later ones."""
        self._given = None

    def finish(self) -> None:
        """The first run is over: let go of what was given, and look at what it did to it.

        Raises:
            UnsupportedCall: It changed an offloaded argument in place.
        """
        self._guard.refuse_changes(self._packer.offloads, self._function)
        held: dict[int, Any] = {}
        for container in self._containers:
            if container.changed():
                container.argument.held = container.value
                held.update(zip(container.argument.places, container.leaves, strict=True))
        for argument in self._arguments:  # what stays alive in there is one object everywhere
            argument.leaves = {place: held[place] for place in argument.places if place in held}
        del self._guard, self._containers, self.inputs

    def _put_back(self, inputs: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        built = {id(argument): argument.put_back(inputs) for argument in self._arguments}
        values = [built[id(argument)] for argument in self._arguments]
        keywords = dict(zip(self._names, values[self._positional :], strict=True))
        return tuple(values[: self._positional]), keywords


class _Argument:
    """One argument of the call: which of the inputs it is made of, and how.

    Attributes:
        held: The container that was given, when the first run changed it.
        leaves: What is alive in such containers, by its place among the inputs.
    """

    def __init__(self, spec: TreeSpec, places: list[int]) -> None:
        self._spec = spec
        self.places = places
        self.held: Any = None
        self.leaves: dict[int, Any] = {}

    def put_back(self, inputs: tuple[Any, ...]) -> Any:
        """The argument for a recomputation, from what torch hands back."""
        if self.held is not None:
            return self.held
        leaves = [self.leaves.get(place, inputs[place]) for place in self.places]
        leaves = [leaf.get() if isinstance(leaf, _Referenced) else leaf for leaf in leaves]
        return tree_unflatten(leaves, self._spec)


class _Container:
    """A list, tuple or dict that was given, as it was before the first run."""

    def __init__(self, argument: _Argument, value: Any, leaves: list[Any]) -> None:
        self.argument = argument
        self.value = value
        self.leaves = leaves
        self._versions = [version_of(leaf) for leaf in leaves]
        self._spec = tree_flatten(value, is_leaf=_is_leaf)[1]

    def changed(self) -> bool:
        """Whether anything in it was replaced, added, taken away or changed in place."""
        now, spec = tree_flatten(self.value, is_leaf=_is_leaf)
        if spec != self._spec or not all(map(_is, now, self.leaves)):
            return True
        return [version_of(leaf) for leaf in now] != self._versions


class _Referenced:
    """A tensor that stays in memory, passed around the hooks as the very object it is.

    The hooks would take its Python type or attributes away. Changes in place are checked here, as
    autograd would check them: of arguments, but not of what is in a container.
    """

    def __init__(self, tensor: torch.Tensor, checked: bool) -> None:
        self._tensor = tensor
        self._version = version_of(tensor) if checked else None

    @property
    def device(self) -> torch.device:
        return self._tensor.device

    def get(self) -> torch.Tensor:
        if self._version is not None:
            refuse_stale(self._tensor, self._version)
        return self._tensor


def _is(one: object, other: object) -> bool:
    return one is other


def _is_leaf(value: object) -> bool:
    """Everything but the plain containers, which are the same whoever builds them."""
    return type(value) not in (list, tuple, dict)


_, _LEAF = tree_flatten(None, is_leaf=_is_leaf)
