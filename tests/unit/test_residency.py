"""Residency, one rule at a time: states, room, loans, failures, limits, counters."""

from itertools import pairwise, product

import pytest

from disco_client.blobs import LEGAL_MOVES, Blob, IllegalMove, Members
from disco_client.errors import (
    ArenaFull,
    BlobCorrupted,
    BlobModified,
    BlobTooLarge,
    HandleReleased,
    ScratchError,
    ScratchFull,
)
from disco_client.residency import (
    Cancel,
    Group,
    Promote,
    Residency,
    StartRead,
    StartWrite,
    State,
    WriteFailure,
)
from discod.wire import PAGE_BYTES
from discod.wire.messages import Failure
from tests.helpers.simulation import Simulation

FULL = WriteFailure(Failure.DISK_FULL, "quota of 1 GiB is used up")


@pytest.fixture
def group() -> Group:
    """A group without limits."""
    return Group()


def on_disk(simulation: Simulation, group: Group, count: int, pages: int = 1) -> list[int]:
    """``count`` blobs on disk only: others fill the arena, and are then freed."""
    blobs = [simulation.save(pages, group) for _ in range(count)]
    others = [simulation.save(1, group) for _ in simulation.arena]
    simulation.complete_all()
    assert {simulation.residency.state(blob) for blob in blobs} == {State.DISK}
    for blob in others:
        simulation.free(blob)
    simulation.reads.clear()
    simulation.written.clear()
    return blobs


def writes(simulation: Simulation) -> list[int]:
    """Blobs whose write is in flight."""
    return [blob for blob, op in simulation.ops.items() if isinstance(op.start, StartWrite)]


def reads(simulation: Simulation) -> list[int]:
    """Blobs whose read is in flight."""
    return [blob for blob, op in simulation.ops.items() if isinstance(op.start, StartRead)]


# States


@pytest.mark.parametrize(("start", "to"), list(product(State, State)))
def test_only_legal_moves_are_made(start: State, to: State, group: Group) -> None:
    """Else a fault in the accounts goes on as wrong data instead of an error with its history."""
    blob = Blob(id=17, size_bytes=PAGE_BYTES, members=Members(group), index=0, slot=0)
    blob.state, blob.history = start, [State.FILLING, start]
    if (start, to) in LEGAL_MOVES:
        blob.move(to)
        assert blob.state is to
        assert blob.history[-1] is to
    else:
        with pytest.raises(IllegalMove) as raised:
            blob.move(to)
        assert blob.state is start
        assert "blob 17" in str(raised.value)
        assert f"from {start} to {to}" in str(raised.value)
        assert f"filling → {start}" in str(raised.value)


def test_the_table_has_the_moves_of_the_design() -> None:
    """Else a move was added or dropped without a thought of what it means."""
    chain = ["filling", "dirty", "writing", "clean", "disk", "reading", "clean"]
    moves = {(State(a), State(b)) for a, b in pairwise(chain)}
    moves |= {(State.WRITING, State.DIRTY), (State.READING, State.DISK)}
    moves |= {(State.DIRTY, State.LOST), (State.CLEAN, State.LOST)}
    moves |= {(state, State.FREED) for state in State if state is not State.FREED}
    assert LEGAL_MOVES.keys() == moves


def test_history_does_not_grow_for_ever(group: Group) -> None:
    """Else a blob that is loaded again and again takes more and more memory."""
    blob = Blob(id=1, size_bytes=PAGE_BYTES, members=Members(group), index=0, slot=0)
    for state in (State.DIRTY, State.WRITING, State.CLEAN):
        blob.move(state)
    for state in (State.DISK, State.READING, State.CLEAN) * 100:
        blob.move(state)
    assert len(blob.history) == 32


def test_completions_without_a_request_are_refused(group: Group) -> None:
    """Else one answer too many frees a slot that is in use."""
    residency = Residency(4 * PAGE_BYTES, 1)
    blob, _ = residency.try_place(PAGE_BYTES, group)
    assert blob is not None
    for call in (residency.write_done, residency.read_done, residency.unpin):
        with pytest.raises(ValueError, match=f"blob {blob} has no"):
            call(blob)
    residency.filled(blob)
    for call in (residency.filled, residency.abandon):
        with pytest.raises(ValueError, match="not being filled"):
            call(blob)
    residency.free(blob)
    for call in (residency.free, residency.load, residency.saved, residency.save_error):
        with pytest.raises(HandleReleased):
            call(blob)
    for call in (residency.slot, residency.size):
        with pytest.raises(HandleReleased):
            call(blob)
    assert residency.state(blob) is State.FREED


@pytest.mark.parametrize("size", [0, -PAGE_BYTES, PAGE_BYTES + 1])
def test_sizes_are_whole_pages(size: int, group: Group) -> None:
    """Else the slot's tail is written over by its neighbour."""
    with pytest.raises(ValueError, match="multiple"):
        Residency(4 * PAGE_BYTES, 1).try_place(size, group)


@pytest.mark.parametrize("limits", [{"max_prefetch": -1}, {"max_writes": 0}])
def test_limits_that_make_no_sense_are_refused(limits: dict[str, int]) -> None:
    """Else a manager with max_writes=0 waits for ever for its first write."""
    with pytest.raises(ValueError, match="at least"):
        Group(**limits)


def test_a_slot_is_known_only_in_ram(group: Group) -> None:
    """Else a caller copies from a slot that is another blob's by now."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    assert simulation.residency.size(blob) == PAGE_BYTES
    with pytest.raises(ValueError, match="no slot; it is disk"):
        simulation.residency.slot(blob)


# Room


def test_a_blob_larger_than_the_arena_names_both_sizes_and_the_setting(group: Group) -> None:
    """Else the user cannot tell what to change, or the save waits for ever."""
    with pytest.raises(BlobTooLarge) as raised:
        Residency(4 * PAGE_BYTES, 1).try_place(5 * PAGE_BYTES, group)
    for words in ("20.0 KiB", "16.0 KiB", "DISCOD_ARENA", "connect(arena=)"):
        assert words in str(raised.value)


def test_a_full_arena_writes_the_oldest_and_no_more_than_needed(group: Group) -> None:
    """Else each retry of one save writes blobs that would have stayed in RAM."""
    simulation = Simulation(8)
    blobs = [simulation.save(1, group) for _ in range(8)]
    assert writes(simulation) == blobs[:1], "the watermark is one page here"
    for _ in range(3):
        assert simulation.try_place(3, group) is None
    assert writes(simulation) == blobs[:3]
    for blob in (1, 0):
        simulation.complete(blobs[blob])
        assert simulation.try_place(3, group) is None
    assert simulation.written == blobs[:3]
    simulation.complete(blobs[2])
    placed = simulation.try_place(3, group)
    assert placed is not None
    assert simulation.residency.slot(placed) == 0


def test_what_is_clean_goes_at_once_farthest_first(group: Group) -> None:
    """Else a save waits for a write although there is something to evict."""
    simulation = Simulation(4)
    blobs = [simulation.save(1, group) for _ in range(4)]
    simulation.complete_all()
    assert simulation.residency.state(blobs[0]) is State.CLEAN
    assert simulation.try_place(1, group) is not None
    assert simulation.residency.state(blobs[0]) is State.DISK
    assert [simulation.residency.state(blob) for blob in blobs[1:]] == [State.DIRTY] * 3


def test_free_pieces_are_joined_until_only_loans_are_left(group: Group) -> None:
    """Else a fragmented arena hangs, or fails with half of it free to take."""
    simulation = Simulation(8)
    blobs = [simulation.save(1, group) for _ in range(8)]
    loans = [simulation.load(blob) for blob in blobs[1::2]]
    with pytest.raises(ArenaFull):
        simulation.save(2, group)
    assert {simulation.residency.state(blob) for blob in blobs[::2]} == {State.DISK}
    simulation.unpin(loans[0])
    simulation.save(2, group)


def test_an_arena_full_of_loans_is_an_error(group: Group) -> None:
    """Else a save waits for tensors that its own caller holds."""
    simulation = Simulation(4)
    blobs = [simulation.save(1, group) for _ in range(4)]
    loans = [simulation.load(blob) for blob in blobs]
    simulation.complete_all()
    with pytest.raises(ArenaFull) as raised:
        simulation.try_place(1, group)
    for words in ("4.0 KiB", "16.0 KiB", "still alive", "DISCOD_ARENA"):
        assert words in str(raised.value)
    simulation.unpin(loans[0])
    simulation.save(1, group)


def test_what_is_being_filled_is_waited_for(group: Group) -> None:
    """Else two threads that save at once get an error that one of them alone would not."""
    simulation = Simulation(2)
    placed = [simulation.try_place(1, group) for _ in range(2)]
    assert simulation.try_place(1, group) is None
    assert placed[0] is not None
    simulation.fill(placed[0])
    simulation.save(1, group)
    assert simulation.residency.state(placed[0]) is State.DISK


def test_a_load_takes_room_from_what_was_never_written(group: Group) -> None:
    """Else backward deadlocks on an arena full of newer blobs."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    newer = [simulation.save(1, group) for _ in range(4)]
    simulation.complete_all()
    loan = simulation.load(blob)
    assert simulation.residency.state(newer[0]) is State.DISK
    assert simulation.residency.prefetch_misses == 1
    simulation.unpin(loan)


def test_room_for_a_waiting_load_is_used_at_once(group: Group) -> None:
    """Else prefetch takes the room that a blocked trainer waits for, or the disk idles."""
    simulation = Simulation(4)
    old = on_disk(simulation, group, 2)
    for _ in range(4):
        simulation.save(1, group)
    assert not simulation.try_load(old[0])
    (writing,) = writes(simulation)
    simulation.complete(writing)
    assert reads(simulation) == [old[0]]
    assert simulation.ops[old[0]].urgent


def test_a_load_without_room_can_be_tried_again(group: Group) -> None:
    """Else a blob that is safe on disk is lost to a moment without room."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    loans = [simulation.load(simulation.save(1, group)) for _ in range(4)]
    simulation.complete_all()
    for _ in range(2):
        with pytest.raises(ArenaFull):
            simulation.try_load(blob)
    simulation.unpin(loans[0])
    simulation.use(blob)
    assert simulation.residency.prefetch_misses <= 1


def test_prefetch_takes_no_room_while_a_load_waits_for_some(group: Group) -> None:
    """Else small blobs that are needed later keep a large one out that is needed now."""
    simulation = Simulation(6)
    (large,) = on_disk(simulation, group, 1, pages=4)
    (small,) = on_disk(simulation, group, 1)
    filling = simulation.try_place(1, group)
    kept = [simulation.save(1, group) for _ in range(2)]
    loans = [simulation.load(blob) for blob in (*kept, kept[0])]
    simulation.complete_all()
    assert simulation.residency.state(small) is State.CLEAN
    assert not simulation.try_load(large)
    assert simulation.residency.state(small) is State.DISK
    simulation.reads.clear()
    simulation.unpin(loans[0])
    assert simulation.reads == []
    assert filling is not None
    simulation.fill(filling)
    simulation.unpin(loans[1])
    simulation.use(large)
    assert simulation.reads[0] == large


def test_a_load_that_is_not_called_again_blocks_nobody(group: Group) -> None:
    """Else an interrupted load keeps its slot for ever."""
    simulation = Simulation(2)
    old, other = on_disk(simulation, group, 2, pages=2)
    assert not simulation.try_load(old)
    simulation.complete_all()
    assert simulation.residency.state(old) is State.CLEAN
    simulation.use(other)
    simulation.save(2, group)


# Loans


def test_what_is_on_loan_is_neither_written_nor_moved(group: Group) -> None:
    """Else a borrower's tensor changes under its hands, or a torn copy is written."""
    simulation = Simulation(4)
    blob = simulation.save(1, group)
    loan = simulation.load(blob)
    for _ in range(8):
        simulation.save(1, group)
    assert blob not in simulation.written
    assert simulation.residency.slot(blob) == loan.slot * PAGE_BYTES
    simulation.unpin(loan)


def test_loading_what_is_being_written_cancels_that_and_does_not_wait(group: Group) -> None:
    """Else backward waits for a write that nobody needs any more."""
    simulation = Simulation(4)
    blobs = [simulation.save(1, group) for _ in range(4)]
    assert writes(simulation) == blobs[:1]
    loan = simulation.load(blobs[0])
    assert simulation.ops[blobs[0]].cancelled
    second = simulation.load(blobs[0])
    simulation.complete(blobs[0])
    assert simulation.residency.state(blobs[0]) is State.DIRTY
    assert simulation.residency.scratch.used_bytes == 0
    simulation.unpin(loan)
    simulation.unpin(second)


def test_loans_are_counted_and_outlive_the_handle(group: Group) -> None:
    """Else a tensor that is still alive is overwritten by the next save."""
    simulation = Simulation(2)
    blob = simulation.save(2, group)
    loans = [simulation.load(blob) for _ in range(2)]
    simulation.free(blob)
    simulation.complete_all()
    for loan in loans:
        with pytest.raises(ArenaFull):
            simulation.try_place(1, group)
        simulation.unpin(loan)
    assert simulation.residency.arena_used_bytes == 0
    with pytest.raises(ValueError, match="no loan"):
        simulation.residency.unpin(blob)


def test_a_changed_loan_of_a_written_blob_is_read_again(group: Group) -> None:
    """Else the next load gives the changed bytes: wrong gradients."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    loan = simulation.load(blob)
    simulation.modify(loan)
    simulation.unpin(loan)
    assert simulation.residency.state(blob) is State.DISK
    simulation.unpin(simulation.load(blob))


def test_changed_bytes_are_not_lent_again_while_another_loan_lives(group: Group) -> None:
    """Else the second borrower gets the bytes that the first has changed."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    first, second = simulation.load(blob), simulation.load(blob)
    simulation.modify(first)
    simulation.unpin(first)
    with pytest.raises(BlobModified, match="still alive"):
        simulation.try_load(blob)
    simulation.unpin(second)
    simulation.unpin(simulation.load(blob))


def test_a_changed_only_copy_is_lost_and_takes_no_room(group: Group) -> None:
    """Else wrong bytes are loaded, written, or kept for nothing."""
    simulation = Simulation(4)
    blob, _ = on_disk(simulation, group, 2)
    other = simulation.save(1, group)
    loan = simulation.load(other)
    simulation.modify(loan)
    simulation.unpin(loan)
    assert simulation.residency.state(other) is State.LOST
    assert simulation.residency.saved(other)
    with pytest.raises(ValueError, match="no slot; it is lost"):
        simulation.residency.slot(other)
    with pytest.raises(BlobModified, match="gone"):
        simulation.try_load(other)
    simulation.unpin(simulation.load(blob))
    simulation.finish()


@pytest.mark.parametrize("begun", [False, True])
def test_a_blob_changed_while_it_was_written_is_lost(begun: bool, group: Group) -> None:
    """Else its disk copy, half of it changed, is taken for good."""
    simulation = Simulation(2)
    blob = simulation.save(2, group)
    simulation.ops[blob].begun = begun
    loan = simulation.load(blob)
    simulation.modify(loan)
    simulation.unpin(loan)
    assert simulation.residency.state(blob) is State.WRITING
    simulation.complete(blob)
    assert simulation.residency.state(blob) is State.LOST
    assert simulation.residency.scratch.used_bytes == 0


# The end of a blob


@pytest.mark.parametrize("begun", [False, True])
def test_freeing_cancels_a_write_and_keeps_its_places_until_it_is_over(
    begun: bool, group: Group
) -> None:
    """Else the daemon still writes from a slot, or to an extent, that is another blob's."""
    simulation = Simulation(2)
    residency = simulation.residency
    blob = simulation.save(2, group)
    simulation.ops[blob].begun = begun
    simulation.free(blob)
    with pytest.raises(HandleReleased):
        simulation.residency.free(blob)
    assert simulation.ops[blob].cancelled
    assert simulation.try_place(1, group) is None
    simulation.complete(blob)
    assert residency.arena_used_bytes == residency.scratch.used_bytes == 0
    assert residency.elided_bytes == (0 if begun else 2 * PAGE_BYTES)
    assert residency.written_bytes == (2 * PAGE_BYTES if begun else 0)


def test_freeing_cancels_a_read_and_keeps_its_slot_until_it_is_over(group: Group) -> None:
    """Else a late read overwrites the slot's next blob."""
    simulation = Simulation(2)
    (blob,) = on_disk(simulation, group, 1, pages=2)
    assert not simulation.try_load(blob)
    simulation.free(blob)
    assert simulation.try_place(1, group) is None
    simulation.complete(blob)
    assert simulation.residency.arena_used_bytes == 0


@pytest.mark.parametrize("lands", [False, True])
def test_freeing_what_is_being_filled_keeps_its_slot(lands: bool, group: Group) -> None:
    """Else a GPU's late copy overwrites the slot's next blob."""
    simulation = Simulation(2)
    blob = simulation.try_place(2, group)
    assert blob is not None
    simulation.free(blob)
    assert simulation.try_place(1, group) is None
    if lands:
        simulation.fill(blob)
    else:
        simulation.abandon(blob)
    assert simulation.residency.arena_used_bytes == 0
    assert simulation.residency.elided_bytes == 2 * PAGE_BYTES


def test_a_copy_that_failed_leaves_nothing(group: Group) -> None:
    """Else every failed copy takes its slot with it."""
    simulation = Simulation(2)
    blob = simulation.try_place(2, group)
    assert blob is not None
    simulation.abandon(blob)
    assert simulation.residency.live_blobs == 0
    assert simulation.residency.arena_used_bytes == 0
    assert simulation.residency.saved_bytes == 0


# Failed writes and reads


def fail_writes(simulation: Simulation, kind: Failure) -> int:
    """Let every write in flight fail, and those that this starts; their number."""
    count = 0
    while writing := writes(simulation):
        simulation.complete(writing[0], kind)
        count += 1
        assert count < 50, "a failing disk is tried again and again"
    return count


def test_a_full_disk_is_an_error_after_one_more_try(group: Group) -> None:
    """Else a full disk hangs the trainer, spins, or goes unnoticed when there is room again."""
    simulation = Simulation(4)
    blobs = [simulation.save(1, group) for _ in range(4)]
    for _ in range(2):
        fail_writes(simulation, Failure.DISK_FULL)
        assert simulation.try_place(1, group) is None
        assert fail_writes(simulation, Failure.DISK_FULL) == 1
        with pytest.raises(ScratchFull) as raised:
            simulation.try_place(1, group)
        assert "disk-full for blob" in str(raised.value)
        assert "DISCOD_ARENA" in str(raised.value)
    for blob in blobs:
        assert simulation.residency.state(blob) is State.DIRTY
        assert simulation.residency.saved(blob)
        simulation.unpin(simulation.load(blob))
    simulation.save(1, group)


def test_room_on_a_full_disk_is_used_when_extents_are_freed(group: Group) -> None:
    """Else one full moment keeps the rest of a long step out of the scratch, or it is tried again
    when nothing has changed."""
    simulation = Simulation(16)
    (old,) = on_disk(simulation, group, 1)
    blobs = [simulation.save(2, group) for _ in range(7)]
    simulation.save(1, group)
    assert writes(simulation) == blobs[:1], "over the watermark of two pages"
    fail_writes(simulation, Failure.DISK_FULL)
    simulation.free(simulation.save(1, group))
    assert not simulation.ops
    simulation.free(old)
    simulation.save(1, group)
    assert writes(simulation) == blobs[:1]


def test_extents_that_were_never_written_are_no_room_on_a_full_disk(group: Group) -> None:
    """Else each write that a full disk refuses lets another one try."""
    simulation = Simulation(16)
    blobs = [simulation.save(2, group) for _ in range(8)]
    assert writes(simulation) == blobs[:1]
    assert simulation.try_place(4, group) is None
    assert writes(simulation) == blobs[:2]
    simulation.complete(blobs[0], Failure.DISK_FULL)
    simulation.free(blobs[1])
    simulation.complete(blobs[1])
    simulation.save(1, group)
    assert not simulation.ops


def test_retry_disk_and_a_new_cycle_try_again(group: Group) -> None:
    """Else a disk that was full once is never written again."""
    simulation = Simulation(4)
    for again in ("retry_disk", "cycle"):
        blobs = [simulation.save(1, group) for _ in range(4)]
        assert fail_writes(simulation, Failure.DISK_FULL) == 1
        if again == "retry_disk":
            simulation.residency.retry_disk()
            assert simulation.try_place(1, group) is None
            assert writes(simulation)
            simulation.complete_all()
        for blob in blobs:
            simulation.free(blob)


def test_a_full_file_leaves_the_others(group: Group) -> None:
    """Else one full disk of two is the end of both."""
    simulation = Simulation(4, files=2)
    blobs = [simulation.save(1, group) for _ in range(4)]
    first = simulation.ops[blobs[0]].start.pieces[0].file
    simulation.complete(blobs[0], Failure.DISK_FULL, first)
    (piece,) = simulation.ops[blobs[0]].start.pieces
    assert piece.file == 1 - first
    simulation.complete_all()
    for _ in range(3):
        simulation.save(1, group)
    assert all(p.file != first for op in simulation.ops.values() for p in op.start.pieces)


def test_a_failing_device_is_left_for_another(group: Group) -> None:
    """Else a blob that could be saved is not."""
    simulation = Simulation(4, files=3)
    blob, *_ = [simulation.save(1, group) for _ in range(4)]
    tried = set()
    for _ in range(2):
        (piece,) = simulation.ops[blob].start.pieces
        tried.add(piece.file)
        simulation.complete(blob, Failure.IO, piece.file)
        assert not simulation.residency.saved(blob)
    (piece,) = simulation.ops[blob].start.pieces
    assert piece.file not in tried
    simulation.complete(blob)
    assert simulation.residency.saved(blob)
    assert simulation.residency.save_error(blob) is None


def test_a_file_out_of_use_is_avoided_by_all_blobs(group: Group) -> None:
    """Else each blob asks for itself whether the device works again; or none ever does."""
    simulation = Simulation(4, files=2)
    blobs = [simulation.save(1, group) for _ in range(4)]
    out = simulation.ops[blobs[0]].start.pieces[0].file
    simulation.complete(blobs[0], Failure.OUT_OF_USE, out)
    for _ in range(6):
        assert all(p.file != out for op in simulation.ops.values() for p in op.start.pieces)
        simulation.complete_all()
        blobs.append(simulation.save(1, group))
    simulation.complete_all()
    for blob in reversed(blobs):
        assert simulation.residency.save_error(blob) is None
        simulation.use(blob)
    again = set()
    for _ in range(6):
        simulation.save(1, group)
        again |= {p.file for op in simulation.ops.values() for p in op.start.pieces}
        simulation.complete_all()
    assert out in again, "the next cycle does not try"
    simulation.finish()


@pytest.mark.parametrize("refused", [Failure.OUT_OF_USE, Failure.IO])
def test_a_file_out_of_use_and_another_that_fails(group: Group, refused: Failure) -> None:
    """Else a save that no file takes is waited for in vain, or said to be done."""
    simulation = Simulation(4, files=2)
    blob, *_ = [simulation.save(1, group) for _ in range(4)]
    (piece,) = simulation.ops[blob].start.pieces
    simulation.complete(blob, refused, piece.file)
    other = Failure.IO if refused is Failure.OUT_OF_USE else Failure.OUT_OF_USE
    simulation.complete(blob, other, 1 - piece.file)
    assert simulation.residency.saved(blob)
    assert isinstance(simulation.residency.save_error(blob), ScratchError)
    simulation.unpin(simulation.load(blob))
    simulation.finish()


def test_a_full_file_and_one_out_of_use(group: Group) -> None:
    """Else the message of a full disk does not say that the other one fails."""
    simulation = Simulation(4, files=2)
    for _ in range(4):
        simulation.save(1, group)

    def refuse_all() -> None:
        while simulation.ops:
            blob = next(iter(simulation.ops))
            (piece,) = simulation.ops[blob].start.pieces
            kind = Failure.OUT_OF_USE if piece.file else Failure.DISK_FULL
            simulation.complete(blob, kind, piece.file)

    refuse_all()
    assert simulation.try_place(1, group) is None, "both are tried once more"
    refuse_all()
    with pytest.raises(ScratchFull, match=r"disk-full for blob \d.*out-of-use for blob"):
        simulation.try_place(1, group)
    simulation.finish()


def test_without_another_device_the_error_is_kept_and_the_blob_too(group: Group) -> None:
    """Else an I/O error loses the blob, or is tried for ever."""
    simulation = Simulation(4)
    blobs = [simulation.save(1, group) for _ in range(4)]
    assert fail_writes(simulation, Failure.IO) == 1
    error = simulation.residency.save_error(blobs[0])
    assert isinstance(error, ScratchError)
    assert f"io for blob {blobs[0]}" in str(error)
    assert simulation.residency.saved(blobs[0])
    assert simulation.residency.save_error(blobs[1]) is None
    simulation.unpin(simulation.load(blobs[0]))
    assert simulation.try_place(1, group) is None
    assert fail_writes(simulation, Failure.IO) == 1
    for _ in range(2):
        assert simulation.try_place(1, group) is None
        fail_writes(simulation, Failure.IO)
    with pytest.raises(ScratchError, match="refuses writes: io for blob"):
        simulation.try_place(1, group)
    simulation.finish()


def test_a_failed_read_raises_what_it_was_reported_with_once(group: Group) -> None:
    """Else corruption goes unseen, or one failed read makes a blob unreadable for good."""
    simulation = Simulation(4)
    blob, other = on_disk(simulation, group, 2)
    assert not simulation.try_load(blob)
    error = BlobCorrupted("blob 0 is not what was written")
    del simulation.ops[blob]
    simulation.execute(simulation.residency.read_done(blob, error))
    assert simulation.residency.state(blob) is State.DISK
    with pytest.raises(BlobCorrupted) as raised:
        simulation.try_load(blob)
    assert type(raised.value) is type(error)
    assert raised.value.args == error.args
    simulation.use(other)
    simulation.use(blob)


def test_a_failed_prefetch_is_not_tried_again_and_again(group: Group) -> None:
    """Else prefetch reads a broken extent in a loop."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    simulation.execute(simulation.residency.prefetch(None))
    simulation.complete(blob, Failure.IO)
    simulation.execute(simulation.residency.prefetch(None))
    assert not simulation.ops
    with pytest.raises(BlobCorrupted):
        simulation.try_load(blob)
    simulation.use(blob)


def test_a_cancelled_read_that_is_waited_for_starts_again(group: Group) -> None:
    """Else a load waits for a read that nobody makes."""
    simulation = Simulation(4)
    (blob,) = on_disk(simulation, group, 1)
    assert not simulation.try_load(blob)
    simulation.complete(blob, Failure.CANCELLED)
    assert reads(simulation) == [blob]
    simulation.use(blob)


# Limits of a group


def test_wanted_writes_wait_for_the_limit_farthest_first() -> None:
    """Else max_writes is exceeded, or writes that waited are never made."""
    group = Group(max_writes=1)
    simulation = Simulation(6)
    blobs = [simulation.save(1, group) for _ in range(6)]
    assert simulation.try_place(3, group) is None
    assert writes(simulation) == blobs[:1]
    assert [simulation.residency.saved(blob) for blob in blobs] == [False] * 3 + [True] * 3
    loan = simulation.load(blobs[1])
    assert simulation.residency.saved(blobs[1])
    simulation.complete(blobs[0])
    assert writes(simulation) == [blobs[2]]
    simulation.unpin(loan)


def test_freeing_a_blob_whose_write_waits_elides_it() -> None:
    """Else it is written after its end."""
    group = Group(max_writes=1)
    simulation = Simulation(6)
    blobs = [simulation.save(1, group) for _ in range(6)]
    assert simulation.try_place(3, group) is None
    simulation.free(blobs[1])
    simulation.complete_all()
    assert blobs[1] not in simulation.written
    assert simulation.residency.elided_bytes == PAGE_BYTES


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_no_more_is_prefetched_than_the_limit(limit: int) -> None:
    """Else prefetch_size means nothing: the arena fills with what is not needed yet."""
    group = Group(max_prefetch=limit)
    simulation = Simulation(8)
    blobs = on_disk(simulation, group, 6)
    simulation.execute(simulation.residency.prefetch(None))
    assert reads(simulation) == blobs[::-1][:limit]
    simulation.complete_all()
    simulation.use(blobs[-1])
    assert simulation.residency._held.groups[group].prefetched == limit


def test_a_group_at_its_limit_does_not_hold_up_another() -> None:
    """Else the manager with the newest blobs stops the prefetch of all others."""
    limited, free = Group(max_prefetch=1), Group()
    simulation = Simulation(8)
    others = [simulation.save(1, free) for _ in range(2)]
    on_disk(simulation, limited, 3)
    simulation.execute(simulation.residency.prefetch(None))
    assert set(others) <= set(reads(simulation))
    assert len(reads(simulation)) == 3


# Prefetch and the watermark


def test_writes_for_the_watermark_end_with_the_first_load(group: Group) -> None:
    """Else backward writes what it is about to use."""
    simulation = Simulation(8)
    blobs = [simulation.save(1, group) for _ in range(7)]
    placed = simulation.try_place(1, group)
    assert placed is not None
    simulation.unpin(simulation.load(blobs[-1]))
    simulation.fill(placed)
    assert not simulation.ops


def test_prefetch_begins_when_all_planned_saves_are_made(group: Group) -> None:
    """Else the first load of backward waits although the disk was idle before it."""
    simulation = Simulation(4)
    for cycle in range(2):
        blobs = [simulation.save(1, group) for _ in range(6)]
        simulation.complete_all()
        for blob in blobs[4:]:
            simulation.free(blob)
        assert reads(simulation) == ([] if cycle == 0 else [blobs[0]])
        for blob in blobs[3::-1]:
            simulation.use(blob)


def test_prefetch_goes_on_by_itself_after_a_load_and_pauses_while_saving(group: Group) -> None:
    """Else backward reads one blob at a time, or forward loses its room to prefetch."""
    simulation = Simulation(4)
    blobs = on_disk(simulation, group, 4)
    simulation.free(simulation.save(1, group))
    assert not simulation.ops
    assert not simulation.try_load(blobs[3])
    simulation.complete(blobs[3])
    assert sorted(reads(simulation)) == blobs[:3]
    simulation.complete_all()
    for blob in reversed(blobs):
        simulation.use(blob)
    assert simulation.residency.prefetch_hits == 3
    assert simulation.residency.prefetch_misses == 1


def test_prefetch_takes_as_many_as_asked(group: Group) -> None:
    """Else prefetch(n) reads what its caller did not ask for."""
    simulation = Simulation(8)
    blobs = on_disk(simulation, group, 6)
    simulation.execute(simulation.residency.prefetch(2))
    assert reads(simulation) == [blobs[5], blobs[4]]


def test_prefetch_does_not_evict_what_is_needed_sooner(group: Group) -> None:
    """Else prefetch undoes its own work, round and round."""
    simulation = Simulation(3)
    blobs = on_disk(simulation, group, 6)
    simulation.execute(simulation.residency.prefetch(None))
    simulation.complete_all()
    simulation.execute(simulation.residency.prefetch(None))
    assert simulation.reads == [blobs[5], blobs[4], blobs[3]]


def test_a_prefetch_that_is_waited_for_is_promoted_once(group: Group) -> None:
    """Else a blocked trainer's read waits behind prefetch, or requests pile up."""
    simulation = Simulation(8)
    (blob,) = on_disk(simulation, group, 1)
    simulation.execute(simulation.residency.prefetch(None))
    _, instructions = simulation.residency.load(blob)
    assert instructions == [Promote(blob)]
    _, instructions = simulation.residency.load(blob)
    assert instructions == []
    simulation.complete(blob)
    simulation.use(blob)
    assert simulation.residency.prefetch_hits == 0
    assert simulation.residency.prefetch_misses == 1


# Counters


def test_counters_of_a_cycle(group: Group) -> None:
    """Else the statistics lie about what was written, read and waited for."""
    simulation = Simulation(4)
    residency = simulation.residency
    blobs = [simulation.save(1, group) for _ in range(6)]
    simulation.complete_all()
    for blob in reversed(blobs):
        assert residency.live_blobs > 0
        simulation.use(blob)
    cycle = residency.last_cycle
    assert cycle == residency.totals
    assert cycle.saved_bytes == 6 * PAGE_BYTES
    assert cycle.written_bytes + cycle.elided_bytes == cycle.saved_bytes
    assert cycle.written_bytes == len(simulation.written) * PAGE_BYTES
    assert cycle.read_bytes == len(simulation.reads) * PAGE_BYTES
    assert cycle.prefetch_hits + cycle.prefetch_misses == len(simulation.reads)
    simulation.use(simulation.save(2, group))
    simulation.complete_all()
    assert residency.last_cycle.saved_bytes == 2 * PAGE_BYTES
    assert residency.totals.saved_bytes == 8 * PAGE_BYTES


def test_instructions_say_all_that_the_link_needs(group: Group) -> None:
    """Else the session would have to ask back for places and sizes that may have changed."""
    residency = Residency(2 * PAGE_BYTES, 1)
    blob, _ = residency.try_place(2 * PAGE_BYTES, group)
    assert blob is not None
    (write,) = residency.filled(blob)
    assert isinstance(write, StartWrite)
    assert (write.blob, write.slot, write.size_bytes) == (blob, 0, 2 * PAGE_BYTES)
    residency.write_done(blob)
    other, _ = residency.try_place(PAGE_BYTES, group)
    assert other is not None
    residency.abandon(other)
    _, (read,) = residency.load(blob)
    assert read == StartRead(blob, 0, 2 * PAGE_BYTES, write.pieces, urgent=True)
    assert residency.free(blob) == [Cancel(blob)]


def test_looking_at_a_blob_is_no_use_of_it() -> None:
    """Comparing contents must not change what is learned, nor read anything from the disk."""
    simulation = Simulation(pages=4)
    blobs = [simulation.save(1, Group()) for _ in range(6)]
    simulation.complete_all()
    assert not simulation.peek(blobs[0])
    assert simulation.reads == []
    assert simulation.peek(blobs[-1])
    loan = simulation.loans[-1]
    for _ in range(3):  # its slot is not given away meanwhile
        simulation.save(1, Group())
        simulation.complete_all()
    simulation.unpin(loan)
    assert simulation.residency.prefetch_hits == simulation.residency.prefetch_misses == 0
    simulation.finish()
