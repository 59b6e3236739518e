"""One device's copies by themselves: which streams they run on, and what each end of them means."""

from typing import Any

import pytest
import torch

from disco_client.arena import Arena
from disco_client.devices.known import Devices
from disco_client.devices.streamed import STAGING_BYTES, Streamed
from disco_client.errors import HandleReleased
from tests.helpers.simulated_gpu import CPU, MODES, Machine, Memory, SimulatedGpu

every_mode = pytest.mark.parametrize("mode", MODES)


def simulated(mode: str = "late") -> SimulatedGpu:
    """A device with kernels, and an arena."""
    machine = Machine(mode=mode, lazy=True)
    return SimulatedGpu(Arena(1 << 21), machine, Memory(machine))


def value(gpu: SimulatedGpu, byte: int) -> torch.Tensor:
    """A page that a kernel fills."""
    assert gpu.memory is not None
    tensor = gpu.memory.empty(4096)
    gpu.memory.write(tensor, byte)
    return tensor


def seen(gpu: SimulatedGpu, tensor: torch.Tensor) -> list[bytes]:
    """What a kernel reads."""
    assert gpu.memory is not None
    found: list[bytes] = []
    gpu.memory.read(tensor, found)
    return found


@every_mode
def test_there_and_back(mode: str) -> None:
    """Every byte, in whatever order the streams go on."""
    gpu = simulated(mode)
    departures = [gpu.stage_out(value(gpu, i + 1), i * 4096) for i in range(5)]
    for departure in departures:
        departure._ticket.wait()
    departures.clear()
    arrivals = [gpu.stage_in(i * 4096, 4096, CPU) for i in range(5)]
    looks = []
    for arrival in arrivals:
        arrival.join()
        looks.append(seen(gpu, arrival.flat))
    gpu.machine.finish()
    assert looks == [[bytes([i + 1]) * 4096] for i in range(5)]
    assert gpu.machine.violations == []


def test_copies_do_not_run_on_the_computations_stream() -> None:
    """Else the computation waits for each of them."""
    gpu = simulated()
    stream = gpu.machine.current_stream(CPU)
    tensor = value(gpu, 1)
    given = stream.given
    departure = gpu.stage_out(tensor, 0)
    arrival = gpu.stage_in(4096, 4096, CPU)
    assert stream.given == given + 1, "the new memory's first kernel alone"
    assert len(gpu.machine._streams) == 3
    stream.synchronize()
    assert not departure.landed()
    assert not arrival.landed()
    gpu.close()
    assert departure.landed()
    assert arrival.landed()


def test_each_unit_has_a_pair_of_streams() -> None:
    """Else the copies of one GPU wait for those of another, or run on the wrong one."""
    gpu = simulated()
    one, two = torch.device("cuda", 0), torch.device("cuda", 1)
    streams = {gpu._side_stream(unit, way) for unit in (one, two) for way in ("in", "out")}
    assert len(streams) == 4
    assert gpu._side_stream(one, "in") in streams
    assert gpu._side_stream(two, "out").device == two


def test_a_copy_that_is_dropped_is_waited_for() -> None:
    """Its memory is somebody else's afterwards; a copy that has landed costs no wait."""
    gpu = simulated()
    departure: Any = gpu.stage_out(value(gpu, 1), 0)
    waits = gpu.machine.waits
    del departure
    assert gpu.machine.waits == waits + 1
    departure = gpu.stage_out(value(gpu, 1), 0)
    gpu.machine.finish()
    assert departure.landed()
    waits = gpu.machine.waits
    del departure
    assert gpu.machine.waits == waits
    departure = gpu.stage_out(value(gpu, 1), 0)
    departure.abandon()
    del departure
    assert gpu.machine.waits == waits


def test_a_change_is_noticed_until_it_does_no_harm() -> None:
    """In place, through a view, or of the storage; not once the stream waits for the copy."""
    gpu = simulated()
    changes = {
        "in place": lambda t: t.add_(1),
        "through a view": lambda t: t[:3].zero_(),
        "of the storage": lambda t: t.untyped_storage().resize_(0),
    }
    for change in changes.values():
        tensor = torch.zeros(4096, dtype=torch.uint8)
        departure = gpu.stage_out(tensor, 0)
        assert not departure.changed
        change(tensor)
        assert departure.changed
        assert departure.spoilt
        departure.settle()
        departure.abandon()
    tensor = torch.zeros(4096, dtype=torch.uint8)
    departure = gpu.stage_out(tensor, 0)
    departure.settle()
    tensor.add_(1)
    assert departure.changed
    assert not departure.spoilt
    departure.abandon()


def test_a_closed_device_starts_nothing() -> None:
    """The arena is gone: the error says why, and not that a buffer is empty."""
    gpu = simulated()
    gpu.close()
    gpu._arena.close()
    with pytest.raises(HandleReleased, match="detached"):
        gpu.stage_out(torch.zeros(16, dtype=torch.uint8), 0)
    with pytest.raises(HandleReleased, match="detached"):
        gpu.stage_in(0, 16, CPU)


def test_what_any_accelerator_says() -> None:
    """A plug-in's device, of which nothing is known but its streams."""
    arena = Arena(1 << 21)
    device = Streamed(arena, Machine())
    device.check(CPU)
    assert device.staging_bytes(CPU) == STAGING_BYTES
    assert device.shortages(CPU) == 0
    flat = device._allocate(16, CPU)
    assert (flat.dtype, flat.shape) == (torch.uint8, (16,))
    machine = Machine()
    device._copy(machine.Stream(CPU), flat, torch.full((16,), 7, dtype=torch.uint8))
    assert flat.tolist() == [7] * 16
    ticket = device._ticket(machine.Stream(CPU), lent=True)
    ticket.join(flat)
    device.close()


def test_the_device_for_a_tensor() -> None:
    """Made once, asked for its bound once, and closed with the attachment."""
    gpu = simulated()
    made = []
    devices = Devices(gpu._arena, makers={"cpu": lambda unit: made.append(1) or gpu})
    assert devices.of(CPU) is devices.at(CPU) is gpu
    assert made == [1]
    gpu.limit_bytes = 5
    assert devices.limit_bytes(CPU) == 5
    gpu.limit_bytes = 6
    assert devices.limit_bytes(CPU) == 5
    gpu.shortages_so_far = 3
    assert devices.shortages(CPU) == 3
    assert devices.unit(CPU) == CPU
    assert devices.unit(torch.device("cuda", 1)) == torch.device("cuda", 1)
    departure = gpu.stage_out(value(gpu, 1), 0)
    devices.close()
    assert departure.landed()
    plain = Devices(gpu._arena, staging_bytes=9)
    assert plain.of(CPU) is None
    assert plain.limit_bytes(torch.device("cuda", 0)) == 9
    with pytest.raises(ValueError, match="copied by the calling thread"):
        plain.at(CPU)
    plain.close()
