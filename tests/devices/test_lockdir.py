# SPDX-License-Identifier: Apache-2.0
"""The directory of leases, and the files in it: what is trusted, and what is refused with which words."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pytest_llenergy.devices.lease import DeviceLock, LockRequest
from pytest_llenergy.devices.lockdir import (
    CANDIDATES,
    detect_container,
    explain_uncoordinated,
    open_lock_directory,
    read_mounts,
    select_mount,
)
from pytest_llenergy.devices.lockfiles import lock_name
from pytest_llenergy.devices.locks import acquire
from pytest_llenergy.errors import DeviceError

from .lockers import USERS, lockers, needs_root, open_directory, tickets, until

REMEDY = "; set LLENERGY_LOCK_DIR to a directory that root or you own, with mode 1777 if others use it too"

#: Prints what a user is told of candidates.
CHOOSE = """
import os, sys
from pytest_llenergy.devices.lockdir import open_lock_directory
from pytest_llenergy.errors import DeviceError
os.setgroups([]), os.setgid(int(sys.argv[1])), os.setuid(int(sys.argv[1]))
try:
    print(open_lock_directory({}, sys.argv[2:]).path)
except DeviceError as error:
    print(error)
"""

#: As on a host whose /srv comes from another and has a blank in a name.
MOUNTINFO = """\
22 1 0:21 / /proc rw - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:40 / /srv rw - nfs4 nas:/export rw
31 30 0:41 / /srv/my\\040disk rw shared:5 - ext4 /dev/vdb rw
32 30 0:42 / /srv/ssh rw - fuse.sshfs alice@nas: rw
"""


def chosen(*candidates: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Path:
    directory = open_lock_directory({}, [str(path) for path in candidates], mountinfo)
    directory.close()
    return directory.path


def named(path: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The refusal of a directory that is named on purpose, without its beginning and what to do."""
    with pytest.raises(DeviceError) as caught:
        open_lock_directory({"LLENERGY_LOCK_DIR": str(path)}, mountinfo=mountinfo)
    message = str(caught.value)
    assert message.startswith(f"LLENERGY_LOCK_DIR='{path}': ")
    assert message.endswith(REMEDY)
    return message.removeprefix(f"LLENERGY_LOCK_DIR='{path}': ").removesuffix(REMEDY)


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with open_directory() as path:
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(path))
        yield path


class TestDirectory:
    @needs_root
    def test_the_first_directory_that_suits_all_users_is_used(self, tmp_path: Path) -> None:
        missing, private, shared, later = (tmp_path / name for name in ("missing", "private", "a", "b"))
        private.mkdir(mode=0o755)
        for path in (shared, later):
            path.mkdir()
            path.chmod(0o1777)
        assert chosen(missing, private, shared, later) == shared

    @needs_root
    def test_the_error_names_the_fault_of_each_candidate(self, tmp_path: Path) -> None:
        private, foreign = tmp_path / "private", tmp_path / "foreign"
        private.mkdir(mode=0o755)
        foreign.mkdir()
        foreign.chmod(0o1777)
        os.chown(foreign, USERS[0], -1)
        with pytest.raises(DeviceError) as caught:
            chosen(private, foreign)
        assert str(caught.value) == (
            f"no usable lock directory: {private}: only root may write to it (mode 0755); {foreign}: it "
            f"belongs to uid {USERS[0]}, not to root; ask an administrator to create {private} (owner root, "
            "mode 1777), or set LLENERGY_LOCK_DIR"
        )

    def test_tmpdir_is_ignored(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Users with different ones would not meet."""
        monkeypatch.delenv("LLENERGY_LOCK_DIR")
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        directory = open_lock_directory()
        directory.close()
        assert directory.path in map(Path, ("/run/lock/llenergy", "/run/lock", "/tmp"))

    @pytest.mark.parametrize("given", ["locks", "./locks", "~/locks"])
    def test_a_relative_directory_is_refused(self, given: str) -> None:
        with pytest.raises(DeviceError) as caught:
            open_lock_directory({"LLENERGY_LOCK_DIR": given})
        assert str(caught.value) == (f"LLENERGY_LOCK_DIR={given!r} is not an absolute path")

    def test_unprintable_characters_are_refused_in_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "two\nlines"
        path.mkdir()
        with pytest.raises(DeviceError) as caught:
            open_lock_directory({"LLENERGY_LOCK_DIR": str(path)})
        assert str(caught.value) == (f"LLENERGY_LOCK_DIR={str(path)!r} contains unprintable characters")

    def test_a_missing_directory_is_refused(self, tmp_path: Path) -> None:
        assert named(tmp_path / "missing") == "No such file or directory"

    def test_a_file_in_place_of_the_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert named(tmp_path / "file") == "Not a directory"

    def test_a_symbolic_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path)
        assert named(tmp_path / "link") == "is a symbolic link"

    def test_a_directory_in_which_others_may_remove_files_is_refused(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        assert named(tmp_path) == "others may remove files in it (mode 0777, not sticky)"

    @needs_root
    def test_a_directory_of_another_user_is_refused(self, tmp_path: Path) -> None:
        os.chown(tmp_path, USERS[0], -1)
        assert named(tmp_path) == f"it belongs to uid {USERS[0]}, not to root or you"

    @needs_root
    def test_a_directory_without_write_permission_is_an_error(self, locks: Path) -> None:
        locks.chmod(0o755)
        with lockers() as make:
            assert (
                make(USERS[0]).refused("a")
                == f"LLENERGY_LOCK_DIR='{locks}': you have no permission to write to it{REMEDY}"
            )

    @needs_root
    def test_a_candidate_without_write_permission_is_an_error_if_others_may_write_in_it(
        self, tmp_path: Path
    ) -> None:
        """They have met there already."""
        with open_directory() as group, open_directory() as everybody:
            group.chmod(0o1775)
            done = subprocess.run(
                [sys.executable, "-c", CHOOSE, str(USERS[0]), str(group), str(everybody)],
                capture_output=True,
                text=True,
                check=True,
            )
        assert done.stdout == (
            f"{group}: you have no permission to write to it; ask its administrator, or set "
            "LLENERGY_LOCK_DIR\n"
        )

    @needs_root
    @pytest.mark.parametrize(
        ("mode", "told"),
        [
            (
                0o1770,
                "{}: you have no permission to open it; ask its administrator, or set LLENERGY_LOCK_DIR",
            ),
            (0o700, "{}"),
        ],
    )
    def test_a_candidate_that_only_a_group_may_open_is_an_error(self, mode: int, told: str) -> None:
        """But one that is closed to all but root is."""
        with open_directory() as group, open_directory() as everybody:
            group.chmod(mode)
            done = subprocess.run(
                [sys.executable, "-c", CHOOSE, str(USERS[0]), str(group), str(everybody)],
                capture_output=True,
                text=True,
                check=True,
            )
        assert done.stdout == told.format(group if mode == 0o1770 else everybody) + "\n"

    def test_a_directory_that_is_cleaned_at_logout_is_no_candidate(self) -> None:
        assert "/dev/shm" not in CANDIDATES

    def test_a_directory_that_is_removed_during_a_wait_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "locks"
        path.mkdir()
        monkeypatch.setenv("LLENERGY_LOCK_DIR", str(path))
        with lockers() as make:
            make().take("a")
            waiting = make()
            waiting.ask("a")
            until(lambda: bool(tickets(path, "waiting")))
            shutil.rmtree(path)
            assert waiting.answer() == {
                "error": f"lock directory {path} was removed; create it again, or set LLENERGY_LOCK_DIR to "
                "another directory"
            }

    def test_a_network_file_system_is_refused(self, tmp_path: Path) -> None:
        told = tmp_path / "mountinfo"
        told.write_text(f"{MOUNTINFO}33 27 0:43 / {tmp_path} rw - nfs4 nas:/locks rw\n")
        assert named(tmp_path, told) == ("it is on a network file system (nfs4), where locks are unreliable")

    @pytest.mark.parametrize(
        ("path", "kind"),
        [("/tmp/x", "ext4"), ("/srv/locks", "nfs4"), ("/srv/my disk/x", "ext4"), ("/srv/ssh", "fuse.sshfs")],
    )
    def test_the_mount_of_a_path_has_the_longest_matching_prefix(
        self, tmp_path: Path, path: str, kind: str
    ) -> None:
        (tmp_path / "mountinfo").write_text(MOUNTINFO)
        found = select_mount(Path(path), read_mounts(tmp_path / "mountinfo"))
        assert found is not None
        assert found.kind == kind


class TestFiles:
    """Whatever somebody may have put in the place of a lock."""

    def expected(self, locks: Path, owner: str, fault: str) -> str:
        return (
            f"lock file {locks / lock_name('a')} of {owner}: {fault}; its owner or an administrator must "
            "remove it, or set LLENERGY_LOCK_DIR to another directory"
        )

    def take(self) -> None:
        acquire(LockRequest((DeviceLock("a"),)), 0.0).release()

    @pytest.mark.parametrize("kind", ["symbolic link", "pipe", "socket", "directory"])
    def test_what_is_not_a_file_is_moved_away_by_the_owner_of_the_directory(
        self, locks: Path, tmp_path: Path, kind: str
    ) -> None:
        place = locks / lock_name("a")
        if kind == "symbolic link":
            place.symlink_to(tmp_path / "victim")
        elif kind == "pipe":
            os.mkfifo(place, 0o644)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as listening:
                listening.bind(str(place))
        else:
            place.mkdir()
            (place / "kept").touch()
        self.take()
        assert stat.S_ISREG(place.lstat().st_mode)
        (moved,) = locks.glob(f"{place.name}.unusable.*")
        assert not (tmp_path / "victim").exists()
        assert kind != "directory" or (moved / "kept").exists()
        assert tickets(locks) == []

    @needs_root
    @pytest.mark.parametrize(
        ("kind", "fault"),
        [
            ("os.symlink('/nowhere', path)", "it is a symbolic link"),
            ("os.mkfifo(path, 0o644)", "it is not a regular file"),
            ("os.mkdir(path)", "it is not a regular file"),
            ("os.close(os.open(path, os.O_CREAT, 0))", "you have no permission to open it"),
            ("socket.socket(socket.AF_UNIX).bind(path)", "No such device or address"),
        ],
    )
    def test_what_another_user_put_in_the_place_of_a_lock_costs_one_device(
        self, locks: Path, kind: str, fault: str
    ) -> None:
        """The kernel lets nobody else remove it. The message names who can."""
        script = f"import os, socket\nos.setuid({USERS[1]})\npath = {str(locks / lock_name('a'))!r}\n{kind}"
        subprocess.run([sys.executable, "-c", script], check=True)
        with lockers() as make:
            locker = make(USERS[0])
            assert locker.take(n=1, of=["a", "b"], wait_s=0.0) == ["b"]
            locker.release()
            expected = self.expected(locks, f"uid {USERS[1]}", fault)
            assert locker.refused("a", wait_s=60.0) == expected
            assert locker.refused(n=2, of=["a", "b"], wait_s=60.0) == expected
        assert tickets(locks) == []

    def test_a_lock_file_with_a_second_name_can_be_locked(self, locks: Path) -> None:
        """A user who linked it elsewhere must not stop the others. Its mode is left alone."""
        (locks / "other").touch(0o600)
        (locks / lock_name("a")).hardlink_to(locks / "other")
        self.take()
        assert (locks / "other").stat().st_mode & 0o777 == 0o600

    def test_a_lock_file_that_others_may_write_can_be_locked(self, locks: Path) -> None:
        """Nothing is ever read from it."""
        (locks / lock_name("a")).write_bytes(b"x" * 10_000)
        (locks / lock_name("a")).chmod(0o666)
        self.take()

    def test_a_full_disk_is_reported_and_leaves_nothing_locked(self, locks: Path) -> None:
        script = (
            "import resource\nfrom pytest_llenergy.devices.lease import DeviceLock, LockRequest\n"
            "from pytest_llenergy.devices.locks import acquire\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
            "try: acquire(LockRequest((DeviceLock('a'),)), 0.0)\nexcept Exception as error: print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == (
            f"gpus: no lease can be taken in {locks}: File too large; set LLENERGY_LOCK_DIR to another "
            "directory\n"
        )
        assert list(locks.iterdir()) == []

    def test_the_mode_of_our_own_file_is_repaired(self, locks: Path) -> None:
        (locks / lock_name("a")).touch()
        (locks / lock_name("a")).chmod(0o600)
        acquire(LockRequest((DeviceLock("a"),)), 0.0).release()
        assert (locks / lock_name("a")).stat().st_mode & 0o7777 == 0o644

    def test_a_death_before_a_file_has_its_mode_leaves_no_file_of_the_device(self, locks: Path) -> None:
        script = (
            "import os, sys\nfrom pathlib import Path\nfrom pytest_llenergy.devices.lease import DeviceLock\n"
            "from pytest_llenergy.devices.lockdir import open_lock_directory\n"
            "from pytest_llenergy.devices.lockfiles import try_lock\n"
            "os.umask(0o077)\nos.fchmod = lambda *_: os._exit(7)\n"
            "try_lock(open_lock_directory(), DeviceLock('a'))"
        )
        done = subprocess.run([sys.executable, "-c", script], timeout=60, check=False)
        assert done.returncode == 7
        (left,) = locks.iterdir()
        assert left.name.startswith("llenergy-new-")
        acquire(LockRequest((DeviceLock("a"),)), 0.0).release()

    @needs_root
    def test_lock_files_are_readable_by_all_and_writable_by_the_owner_whatever_the_umask(
        self, locks: Path
    ) -> None:
        before = os.umask(0o077)
        try:
            with lockers() as make:
                make(USERS[0]).take("a")
                assert {path.stat().st_mode & 0o7777 for path in locks.iterdir()} == {0o644}
                assert "held by process" in make(USERS[1]).refused("a")
        finally:
            os.umask(before)


class TestContainer:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        """A root of a file system as in a container of Docker's."""
        (tmp_path / "proc/self/ns").mkdir(parents=True)
        (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532999]")
        (tmp_path / "proc/self/mountinfo").write_text(
            "1 0 0:60 / / rw - overlay overlay rw\n2 1 0:61 / /dev/shm rw - tmpfs shm rw,size=65536k\n"
            "3 1 254:0 /run/lock/llenergy /run/lock/llenergy rw - tmpfs tmpfs rw\n"
        )
        (tmp_path / ".dockerenv").touch()
        return tmp_path

    def test_leases_in_a_private_directory_are_uncoordinated(self, root: Path) -> None:
        assert explain_uncoordinated(Path("/tmp"), root) == (
            "GPU leases are not coordinated with the host: this is a container (/.dockerenv) that does not "
            "share /tmp with the host; mount a directory of the host, such as "
            "-v /run/lock/llenergy:/run/lock/llenergy, and set LLENERGY_LOCK_DIR to it"
        )
        assert explain_uncoordinated(Path("/dev/shm"), root) is not None

    def test_a_directory_of_the_host_is_coordinated(self, root: Path) -> None:
        assert explain_uncoordinated(Path("/run/lock/llenergy"), root) is None

    def test_shared_memory_of_the_host_is_coordinated(self, root: Path) -> None:
        told = root / "proc/self/mountinfo"
        told.write_text(told.read_text().replace("tmpfs shm", "tmpfs tmpfs"))
        assert explain_uncoordinated(Path("/dev/shm"), root) is None

    def test_a_container_is_recognised_by_its_files_or_its_namespace(self, root: Path) -> None:
        (root / ".dockerenv").unlink()
        assert detect_container(root) == "a separate pid namespace"
        (root / "run").mkdir()
        (root / "run/.containerenv").touch()
        assert detect_container(root) == "/run/.containerenv"

    def test_a_host_is_not_a_container(self, root: Path) -> None:
        (root / ".dockerenv").unlink()
        (root / "proc/self/ns/pid").unlink()
        (root / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
        assert detect_container(root) is None
        assert explain_uncoordinated(Path("/tmp"), root) is None
