"""Tensors to blobs and back: the session keeps the bytes, the devices copy them.

On the CPU a save copies at once, and a load is a view of the arena. From and to a device copies are
started here, outside of sections, and end later (:mod:`disco_client.staging`).
"""

from collections.abc import Callable
from typing import TypeVar

import torch

from disco_client.devices.interface import Arrival, Departure, Device, Lent
from disco_client.devices.known import Devices
from disco_client.interrupts import End
from disco_client.lending import Loan
from disco_client.residency import Group
from disco_client.session import Session
from disco_client.spans import LOAD, SAVE, profiling, record_function
from disco_client.tensors import Layout, TensorSpec, copy_in, flatten, rebuild

_T = TypeVar("_T")

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class Store:
    """Where the tensors of one attachment are.

    Args:
        session: Keeps their bytes.
        devices: Copy them.
    """

    def __init__(self, session: Session, devices: Devices) -> None:
        self.session = session
        self._devices = devices

    def copies_at_once(self, device: torch.device) -> bool:
        """Whether the calling thread itself copies the tensors of ``device``."""
        return self._devices.of(device) is None

    def put(
        self,
        tensor: torch.Tensor,
        spec: TensorSpec,
        group: Group,
        owner: object,
        at_once: bool,
        whole: torch.Tensor | None = None,
    ) -> tuple[int, End]:
        """A blob with the bytes of ``tensor``, above 0: its id and end, as :meth:`Session.save`.

        Args:
            tensor: A supported tensor, described by ``spec``.
            spec: Its descriptor.
            group: The owner that the blob counts for.
            owner: As :meth:`Session.save`.
            at_once: What the calling thread's stream is given next may change the tensor. Else a
                change before the copy has landed is noticed, and the blob is lost.
            whole: The subclass instance that ``tensor`` is a part of, which counts the changes.

        Raises:
            UnsupportedCall: A CUDA graph is being captured.
            RoomError, DaemonLost: As :meth:`Session.save`.
        """
        if profiling():
            with record_function(SAVE):
                return self._put(tensor, spec, group, owner, at_once, whole)
        return self._put(tensor, spec, group, owner, at_once, whole)

    def _put(
        self,
        tensor: torch.Tensor,
        spec: TensorSpec,
        group: Group,
        owner: object,
        at_once: bool,
        whole: torch.Tensor | None,
    ) -> tuple[int, End]:
        device = self._devices.of(spec.device)
        if device is None:

            def copy(slot: int, memory: memoryview) -> None:
                copy_in(tensor, spec, memory)

            return self.session.save(spec.nbytes, copy, group, owner)

        device.check(spec.device)

        def depart(slot: int, memory: memoryview) -> Departure:
            watched = None if whole is None else (whole.detach(), whole._version)
            flat = self._with_memory(lambda: flatten(tensor, spec))
            departure = device.stage_out(flat, slot)
            if watched is not None:
                departure.watch(*watched)
            if at_once:
                try:
                    departure.settle()
                except BaseException:
                    self.session.wait_or_tear(departure.landed)
                    raise
            return departure

        return self.session.save(spec.nbytes, depart, group, owner, spec.device)

    def get(self, blob: int, spec: TensorSpec, target: torch.device) -> torch.Tensor:
        """The tensor ``spec`` from the blob's bytes, on ``target``, without autograd history.

        Raises:
            UnsupportedCall: A CUDA graph is being captured.
            BlobError, RoomError, DaemonLost: As :meth:`Session.load`.
        """
        if profiling():
            with record_function(LOAD):
                return self._get(blob, spec, target)
        return self._get(blob, spec, target)

    def _get(self, blob: int, spec: TensorSpec, target: torch.device) -> torch.Tensor:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(mode=False):
                return self._get(blob, spec, target)
        device = self._devices.of(target)
        if device is not None:
            target = self._devices.unit(target)
            device.check(target)
            return rebuild(self._from_device(device, blob, spec, target), spec, target)
        view, loan = self.session.load(blob, spec.nbytes)
        flat = torch.frombuffer(view, dtype=torch.uint8)
        del view
        if target.type == "cpu" and spec.layout is Layout.SPAN:
            _watch(flat, loan)
        return rebuild(flat, spec, target)

    def _from_device(
        self, device: Device, blob: int, spec: TensorSpec, target: torch.device
    ) -> torch.Tensor:
        """The blob's bytes on ``target``, ready for what the calling thread's stream gets next."""
        found: Arrival | Lent | None = self.session.at_hand(blob, target)
        if found is None:
            view, loan = self.session.load(blob, spec.nbytes)
            found = self._with_memory(lambda: device.stage_in(loan.slot, spec.nbytes, target))
            self.session.arrive(found, view)
        found.join()
        self._look_ahead()
        return found.flat

    def _look_ahead(self) -> None:
        """Start the copies to devices that loads will ask for next, as many as may be."""
        while (wanted := self.session.lend_ahead()) is not None:
            view, loan, target, nbytes = wanted
            try:
                arrival = self._devices.at(target).stage_in(loan.slot, nbytes, target)
            except torch.OutOfMemoryError:
                self.session.give_up_ahead(loan.blob)
            except BaseException:
                self.session.give_up_ahead(loan.blob)
                raise
            else:
                self.session.bring_ahead(loan.blob, arrival, view)

    def _with_memory(self, make: Callable[[], _T]) -> _T:
        """``make()``, once more with what can be freed of the device's memory if it runs short."""
        try:
            return make()
        except torch.OutOfMemoryError:
            self.session.give_up_ahead()
            self.session.wait_for_copies()
            return make()


def _watch(flat: torch.Tensor, loan: Loan) -> None:
    """Let ``loan`` know of in-place changes through any view of ``flat``.

    All views share the version counter. ``witness`` shares it too, but not the storage, so that
    it can outlive the loan without keeping the slot.
    """
    witness = flat.detach()
    witness.data = _NOTHING
    version = witness._version
    loan.changed = lambda: witness._version != version
