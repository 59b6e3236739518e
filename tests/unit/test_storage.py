"""Scratch directories and files on a real file system, their growth, quota and trimming."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from discod import storage
from discod.budget import Budget
from discod.exits import Exit, StartupError
from discod.io import Io
from discod.locks import Locked, lock_directory
from discod.scratch_file import GROW_STEP_BYTES, ScratchFile, ScratchFull, Unopened
from discod.storage import Directory, ForeignFile
from discod.syscalls import fallocate
from discod.wire import PAGE_BYTES

MIB = 1 << 20


@pytest.fixture
def make_directory(tmp_path: Path) -> Iterator[Callable[..., Directory]]:
    """``make_directory(io)``; the test fails when anything is left in it."""
    path = tmp_path / "scratch"
    path.mkdir()
    with ExitStack() as ends:

        def make(io: Io | None = None) -> Directory:
            directory = Directory(path, io)
            ends.callback(directory.close)
            return directory

        yield make
    assert os.listdir(path) == []


@pytest.fixture
def directory(make_directory: Callable[..., Directory]) -> Directory:
    return make_directory()


@pytest.fixture
def quota() -> Iterator[Budget]:
    """1 GiB; the test fails when some of it is not given back."""
    quota = Budget(1 << 30)
    yield quota
    assert quota.used_bytes == 0


def grow(file: ScratchFile, end: int) -> None:
    file.begin_write(end)
    file.end_write()


def reserved(file: ScratchFile) -> int:
    return os.fstat(file.fd).st_blocks * 512


class TestBudget:
    def test_never_over_the_limit(self) -> None:
        """Racing clients would get more than --disk or --ram together."""
        budget = Budget(1000)
        with ThreadPoolExecutor(8) as pool:
            granted = sum(pool.map(lambda _: budget.reserve(3), range(2000)))
        assert granted == 333
        assert (budget.used_bytes, budget.free_bytes) == (999, 1)

    def test_what_exists_is_taken_over_the_limit(self) -> None:
        """A resumed file would be refused, or would make the budget wrong."""
        budget = Budget(10)
        budget.reserve_over(15)
        assert budget.free_bytes == 0
        assert not budget.reserve(1)
        budget.release(6)
        assert budget.reserve(1)

    def test_releasing_too_much_is_an_error(self) -> None:
        """A double release would raise the limit in silence."""
        budget = Budget(10)
        budget.reserve(5)
        with pytest.raises(ValueError, match="6 bytes released of 5"):
            budget.release(6)


class TestLock:
    def test_one_that_is_just_ending_is_waited_for(self, tmp_path: Path) -> None:
        """A daemon started right after another was killed would refuse to."""
        held = lock_directory(tmp_path)
        ending = threading.Timer(0.2, os.close, [held])
        ending.start()
        os.close(lock_directory(tmp_path))
        ending.join()

    def test_holder_is_named(self, tmp_path: Path) -> None:
        """Whoever is told that a directory is in use would not know by whom."""
        held = lock_directory(tmp_path)
        with pytest.raises(Locked) as caught:
            lock_directory(tmp_path)
        assert caught.value.pid == os.getpid()
        os.close(held)


class TestGrowth:
    def test_steps(self, directory: Directory, quota: Budget) -> None:
        """Each write would extend the file by itself: slow, and in many extents."""
        file = directory.create(quota)
        grow(file, PAGE_BYTES)
        assert file.allocated_bytes == GROW_STEP_BYTES == quota.used_bytes
        assert reserved(file) >= GROW_STEP_BYTES
        grow(file, GROW_STEP_BYTES)
        assert file.allocated_bytes == GROW_STEP_BYTES
        grow(file, GROW_STEP_BYTES + 1)
        assert file.allocated_bytes == 2 * GROW_STEP_BYTES == quota.used_bytes
        file.close(discard=False)

    def test_a_write_larger_than_a_step(self, directory: Directory, quota: Budget) -> None:
        """The end of a large blob would be beyond what is reserved."""
        file = directory.create(quota)
        grow(file, 3 * GROW_STEP_BYTES + 5)
        assert file.allocated_bytes == 3 * GROW_STEP_BYTES + PAGE_BYTES
        file.close(discard=False)

    def test_short_quota(self, directory: Directory) -> None:
        """The last part of the quota could not be used, or would be exceeded."""
        quota = Budget(10 * MIB)
        one, two = directory.create(quota), directory.create(quota)
        grow(one, 4 * MIB)
        grow(two, 6 * MIB)
        with pytest.raises(ScratchFull) as caught:
            grow(one, 4 * MIB + 1)
        for part in (str(directory.path), "10.0 MiB of the quota of 10.0 MiB", "--disk"):
            assert part in str(caught.value)
        two.close(discard=False)
        grow(one, 10 * MIB)
        one.close(discard=False)

    def test_racing_growth(self, directory: Directory) -> None:
        """Two threads with pieces of one blob would reserve its space twice."""
        quota = Budget(64 * MIB)
        file = directory.create(quota)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: grow(file, 60 * MIB), range(50)))
        assert quota.used_bytes == file.allocated_bytes == 60 * MIB
        file.close(discard=False)

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
    def test_no_room_for_a_step(
        self, make_directory: Callable[..., Directory], quota: Budget, code: int
    ) -> None:
        """On a nearly full disk a small blob would be refused that fits; or be half reserved."""

        def short(fd: int, offset: int, length: int) -> None:
            if offset + length > 8 * MIB:
                os.ftruncate(fd, 12 * MIB)  # what it could do, as file systems leave it
                raise OSError(code, os.strerror(code))
            fallocate(fd, offset, length)

        file = make_directory(Io(fallocate=short)).create(quota)
        grow(file, 8 * MIB)
        with pytest.raises(ScratchFull) as caught:
            grow(file, 9 * MIB)
        assert caught.value.errno == code
        assert os.strerror(code) in str(caught.value)
        assert os.fstat(file.fd).st_size == file.allocated_bytes == 8 * MIB == quota.used_bytes
        file.close(discard=False)

    def test_what_failed_is_freed_before_others_may_have_it(
        self, make_directory: Callable[..., Directory], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """For an instant two files would hold what is one's in the quota."""
        quota = Budget(1 << 30)

        def short(fd: int, offset: int, length: int) -> None:
            os.ftruncate(fd, offset + length // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        file = make_directory(Io(fallocate=short)).create(quota)
        sizes = []
        release = quota.release

        def look(size_bytes: int) -> None:
            sizes.append(os.fstat(file.fd).st_size)
            release(size_bytes)

        monkeypatch.setattr(quota, "release", look)
        with pytest.raises(ScratchFull):
            grow(file, MIB)
        assert sizes == [0, 0], "for the step, and for what is needed"
        monkeypatch.undo()
        file.close(discard=False)

    def test_a_failing_device_is_no_full_one(
        self, make_directory: Callable[..., Directory], quota: Budget
    ) -> None:
        """An I/O error would be reported as a full disk, and its quota be lost."""

        def fail(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.EIO, "injected")

        file = make_directory(Io(fallocate=fail)).create(quota)
        with pytest.raises(OSError, match="injected"):
            grow(file, 1)
        assert quota.used_bytes == 0
        file.close(discard=False)

    def test_without_fallocate(
        self, make_directory: Callable[..., Directory], quota: Budget
    ) -> None:
        """File systems without fallocate could not be used."""

        def fail(fd: int, offset: int, length: int) -> None:
            raise OSError(errno.EOPNOTSUPP, "injected")

        file = make_directory(Io(fallocate=fail)).create(quota)
        grow(file, 5 * MIB)
        assert os.fstat(file.fd).st_size == GROW_STEP_BYTES == quota.used_bytes
        file.close(discard=False)


class TestTrim:
    def test_gives_back(self, directory: Directory, quota: Budget) -> None:
        """An idle job would hold the disk."""
        file = directory.create(quota)
        grow(file, 5 * MIB)
        file.trim(2 * MIB, file.keep())
        assert file.allocated_bytes == 2 * MIB == quota.used_bytes
        assert reserved(file) < 3 * MIB
        file.trim(4 * MIB, file.keep())
        assert file.allocated_bytes == 2 * MIB, "a trim has grown the file"
        grow(file, 3 * MIB)
        file.close(discard=False)

    def test_decided_before_a_write(self, directory: Directory, quota: Budget) -> None:
        """A trim that comes late would cut off what was written since."""
        file = directory.create(quota)
        version = file.keep()
        file.keep()
        grow(file, 5 * MIB)
        file.trim(0, version)
        assert file.allocated_bytes == GROW_STEP_BYTES
        file.close(discard=False)

    def test_during_a_write(self, directory: Directory, quota: Budget) -> None:
        """A trim would cut off what is being written."""
        file = directory.create(quota)
        file.begin_write(5 * MIB)
        file.trim(0, file.keep())
        assert file.allocated_bytes == GROW_STEP_BYTES
        file.end_write()
        file.close(discard=False)

    def test_never_loses_a_write(self, directory: Directory, quota: Budget) -> None:
        """The argument in scratch_file's docstring would not hold."""
        file = directory.create(quota)
        page = bytearray(os.urandom(PAGE_BYTES))
        versions = [file.keep()]
        stop = threading.Event()

        def trim() -> None:
            while not stop.is_set():
                file.trim(0, versions[-1])

        plain = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
        trimmer = threading.Thread(target=trim)
        trimmer.start()
        for i in range(300):
            offset = i % 7 * MIB
            versions.append(file.keep())
            file.keep()
            file.begin_write(offset + PAGE_BYTES)
            os.pwrite(plain, page, offset)
            file.end_write()
            assert os.pread(plain, PAGE_BYTES, offset) == page
            versions.append(file.keep())
        stop.set()
        trimmer.join()
        os.close(plain)
        file.close(discard=False)


class TestDirectory:
    def test_nothing_has_a_name(self, directory: Directory, quota: Budget) -> None:
        """A killed daemon would leave files behind."""
        file = directory.create(quota)
        grow(file, MIB)
        status = os.fstat(file.fd)
        assert status.st_nlink == 0
        assert status.st_mode & 0o777 == 0o600
        assert os.listdir(directory.path) == []
        file.close(discard=False)

    def test_discard_frees_what_others_hold(self, directory: Directory, quota: Budget) -> None:
        """A child that a dead trainer had forked would hold its disk space."""
        file = directory.create(quota)
        other = os.open(f"/proc/self/fd/{file.fd}", os.O_PATH)
        grow(file, MIB)
        file.close(discard=True)
        assert os.fstat(other).st_size == 0
        os.close(other)

    @pytest.mark.parametrize("tmpfile", [True, False])
    def test_resume(
        self, make_directory: Callable[..., Directory], quota: Budget, tmpfile: bool
    ) -> None:
        """After the daemon's death the data of a living client would be lost."""
        directory = make_directory(None if tmpfile else Io(open=without_tmpfile))
        file = directory.create(quota)
        grow(file, MIB)
        plain = os.open(f"/proc/self/fd/{file.fd}", os.O_RDWR)
        os.pwrite(plain, b"kept", 4096)
        os.close(plain)
        path_fd = os.open(f"/proc/self/fd/{file.fd}", os.O_PATH)
        file.close(discard=False)
        assert quota.used_bytes == 0
        again = directory.adopt(path_fd, quota)
        os.close(path_fd)
        assert again.allocated_bytes >= GROW_STEP_BYTES
        assert again.allocated_bytes == quota.used_bytes
        plain = os.open(f"/proc/self/fd/{again.fd}", os.O_RDONLY)
        assert os.pread(plain, 4, 4096) == b"kept"
        os.close(plain)
        again.close(discard=False)

    @pytest.mark.parametrize("readable", [True, False])
    def test_resume_on_a_failing_device(
        self, make_directory: Callable[..., Directory], quota: Budget, readable: bool
    ) -> None:
        """A client would lose all of its blobs with the directory that some of them are in."""

        def fail(path: Path | str, flags: int, mode: int) -> int:
            if str(path).startswith("/proc") and (flags & os.O_RDWR or not readable):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return os.open(path, flags, mode)

        directory = make_directory(Io(open=fail))
        file = directory.create(quota)
        grow(file, MIB)
        path_fd = os.open(f"/proc/self/fd/{file.fd}", os.O_PATH)
        file.close(discard=False)
        again = directory.adopt(path_fd, quota)
        assert again.allocated_bytes == quota.used_bytes >= GROW_STEP_BYTES
        with pytest.raises(Unopened, match="Read-only"):
            grow(again, 1)
        if readable:
            again.check_open(os.O_RDONLY)
        else:
            with pytest.raises(Unopened, match="Read-only"):
                again.check_open(os.O_RDONLY)
        again.trim(0, again.keep())
        again.close(discard=True)
        assert directory.health.last_failure == "", "a client could take it away from all others"
        os.close(path_fd)

    def test_which_directory_made_a_file(
        self, directory: Directory, quota: Budget, tmp_path: Path
    ) -> None:
        """Of two on one device the wrong one would be blamed after a restart."""
        (tmp_path / "other").mkdir()
        other = Directory(tmp_path / "other")
        file = directory.create(quota)
        assert directory.made(file.fd)
        assert not other.made(file.fd)
        file.close(discard=False)
        other.close()

    @pytest.mark.parametrize("direct", [True, False])
    @pytest.mark.parametrize(
        ("call", "code"),
        [("open", errno.EROFS), ("pwritev", errno.EIO), ("preadv", errno.EIO), ("", 0)],
    )
    def test_check(
        self, make_directory: Callable[..., Directory], direct: bool, call: str, code: int
    ) -> None:
        """A directory that still fails would be used again, or one that works again would not."""
        failing = False

        def maybe(name: str, plain: Callable[..., int]) -> Callable[..., int]:
            def wrapped(*args: object) -> int:
                if failing and name == call:
                    raise OSError(code, "injected")
                if not failing and not direct and name == "pwritev":
                    raise OSError(errno.EINVAL, "no O_DIRECT")
                return plain(*args)

            return wrapped

        plain = Io()
        io = Io(
            **{name: maybe(name, getattr(plain, name)) for name in ("open", "pwritev", "preadv")}
        )
        directory = make_directory(io)
        assert directory.direct is direct
        failing = True
        if call:
            with pytest.raises(OSError, match="injected") as caught:
                directory.check()
            assert caught.value.errno == code
        else:
            directory.check()

    def test_check_of_a_full_disk(self, make_directory: Callable[..., Directory]) -> None:
        """A disk that failed and is full by now would never be used again."""

        def fail(*args: object) -> int:
            raise OSError(errno.ENOSPC, "injected")

        make_directory(Io(pwritev=fail)).check()

    def test_another_file_system_in_its_place(self, directory: Directory, quota: Budget) -> None:
        """After an unmount, the disk that the mount point is on would fill up."""
        directory.device += 1
        for make in (lambda: directory.create(quota), directory.check):
            with pytest.raises(OSError, match="another file system") as caught:
                make()
            assert caught.value.errno == errno.ENODEV

    @pytest.mark.parametrize(
        ("kind", "said"),
        [
            ("named", "a file with a name"),
            ("mode", "of mode 644"),
            ("directory", "no regular file"),
            ("memfd", "on another file system"),
            ("owner", "of uid 12345"),
        ],
    )
    def test_resume_of_a_foreign_file(
        self, directory: Directory, quota: Budget, tmp_path: Path, kind: str, said: str
    ) -> None:
        """A client could have the daemon write to any file that the daemon may write to."""
        match kind:
            case "named":
                path = tmp_path / "victim"
                path.touch(0o600)
                fd = os.open(path, os.O_PATH)
            case "directory":
                fd = os.open(tmp_path, os.O_PATH)
            case "memfd":
                fd = os.memfd_create("x")
                os.fchmod(fd, 0o600)
            case _:
                fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
                if kind == "mode":
                    os.fchmod(fd, 0o644)
                elif os.geteuid() == 0:
                    os.fchown(fd, 12345, -1)
                else:
                    pytest.skip("only root can give files away")
        with pytest.raises(ForeignFile, match=said):
            directory.adopt(fd, quota)
        os.close(fd)

    def test_stale_files_are_removed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Space would leak with each kill, or other people's files be removed."""
        (tmp_path / ".discod-stale").write_text("x")
        (tmp_path / ".discod-directory").mkdir()
        (tmp_path / "target").write_text("x")
        (tmp_path / ".discod-link").symlink_to(tmp_path / "target")
        (tmp_path / "discod-other").write_text("x")
        Directory(tmp_path).close()
        kept = {".discod-directory", ".discod-link", "target", "discod-other"}
        assert set(os.listdir(tmp_path)) == kept
        monkeypatch.setattr(storage.os, "geteuid", lambda: 54321)
        (tmp_path / ".discod-of-another").write_text("x")
        Directory(tmp_path).close()
        assert set(os.listdir(tmp_path)) == kept | {".discod-of-another"}

    @pytest.mark.parametrize(
        ("code", "direct"),
        [
            (errno.EINVAL, False),
            # A full disk was taken for one without O_DIRECT.
            (errno.ENOSPC, True),
        ],
    )
    def test_o_direct_is_probed_by_doing_it(
        self, make_directory: Callable[..., Directory], code: int, direct: bool
    ) -> None:
        """A file system that opens with O_DIRECT and then fails could not be used."""

        def fail(*args: object) -> int:
            raise OSError(code, "injected")

        assert make_directory(Io(pwritev=fail)).direct is direct

    @pytest.mark.parametrize(
        ("code", "exit_code"),
        [
            (errno.EROFS, Exit.SCRATCH_READ_ONLY),
            (errno.EACCES, Exit.SCRATCH_READ_ONLY),
            (errno.EIO, Exit.SCRATCH_UNUSABLE),
        ],
    )
    def test_unusable(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, exit_code: Exit
    ) -> None:
        """The daemon would start on a directory that it cannot write to."""

        def fail(*args: object, **kwargs: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(Directory, "_open_new", fail)
        with pytest.raises(StartupError, match=rf"{tmp_path}.*errno {code}") as caught:
            Directory(tmp_path)
        assert caught.value.code == exit_code


def without_tmpfile(path: Path | str, flags: int, mode: int) -> int:
    """As on a file system without O_TMPFILE."""
    if flags & os.O_TMPFILE == os.O_TMPFILE:
        raise OSError(errno.EOPNOTSUPP, "injected")
    return os.open(path, flags, mode)
