from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvkeep.errors import (
    Damaged,
    NotAStore,
    StoreClosed,
    StoreFull,
    StoreReadOnly,
    StoreUnusable,
)
from kvkeep.persistence.environment import LARGE, PAGES_BESIDE, Environment, free_bytes
from kvkeep.persistence.lmdb_errors import translate

MIB = 1 << 20


def open_env(folder: Path, size: int = 64 * MIB, **kwargs: object) -> Environment:
    options = {"map_size": size, "databases": ["meta", "chunks"], **kwargs}
    return Environment(folder, **options)  # type: ignore[arg-type]


def script(body: str, *args: object) -> str:
    """What a fresh process with ``env`` open on the first argument prints."""
    head = (
        "import os, sys, signal, threading\n"
        "from kvkeep.persistence.environment import LARGE, PAGES_BESIDE, Environment\n"
        "from kvkeep.errors import *\n"
        "def opened(**k):\n"
        f"    return Environment(sys.argv[1], map_size={64 * MIB}, "
        "databases=['meta', 'chunks'], **k)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + body, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    assert done.stderr == ""
    return done.stdout.strip()


def test_what_is_committed_is_there_after_a_reopen(tmp_path: Path) -> None:
    with open_env(tmp_path / "a" / "store") as env:
        with env.begin(write=True) as txn:
            txn.put("meta", b"k", b"v" * 100_000)
            txn.put("meta", b"k", b"w")
            txn.put("chunks", b"k", bytearray(b"other"))
        env.sync()
    with open_env(tmp_path / "a" / "store") as env, env.begin() as txn:
        assert bytes(txn.get("meta", b"k") or b"") == b"w"
        assert bytes(txn.get("chunks", memoryview(b"k")) or b"") == b"other"
        assert txn.get("meta", b"none") is None


def test_a_block_that_raises_leaves_nothing(tmp_path: Path) -> None:
    with open_env(tmp_path / "store") as env:

        def fail() -> None:
            with env.begin(write=True) as txn:
                txn.put("meta", b"k", b"v")
                raise FileNotFoundError("the caller's own")

        with pytest.raises(FileNotFoundError):
            fail()
        with env.begin() as txn:
            assert txn.get("meta", b"k") is None
            assert txn.count("meta") == 0


def test_keys_and_items_are_sorted_and_bounded(tmp_path: Path) -> None:
    with open_env(tmp_path / "store") as env:
        with env.begin(write=True) as txn:
            for key in (b"b2", b"a", b"b1", b"c", b"b3"):
                txn.put("meta", key, b"=" + key)
            values = txn.items("meta")
            kept = [(key, value) for key, value in values]
            txn.put("meta", b"a", b"changed")
            # Copies in a write transaction: they do not change under the caller.
            assert bytes(kept[0][1]) == b"=a"
            assert txn.delete("meta", b"a")
            assert not txn.delete("meta", b"a")
        with env.begin() as txn:
            assert list(txn.keys("meta")) == [b"b1", b"b2", b"b3", b"c"]
            assert list(txn.keys("meta", prefix=b"b")) == [b"b1", b"b2", b"b3"]
            assert list(txn.keys("meta", prefix=b"b", start=b"b2")) == [b"b2", b"b3"]
            assert list(txn.keys("meta", prefix=b"b", start=b"a")) == [b"b1", b"b2", b"b3"]
            assert list(txn.keys("meta", start=b"bz")) == [b"c"]
            assert list(txn.keys("meta", prefix=b"x")) == []
            assert list(txn.keys("chunks")) == []
            assert {k: bytes(v) for k, v in txn.items("meta", prefix=b"b3")} == {b"b3": b"=b3"}
            assert txn.count("meta") == 4


def test_appending_out_of_order_still_stores(tmp_path: Path) -> None:
    with open_env(tmp_path / "store") as env:
        with env.begin(write=True) as txn:
            for key in (b"1", b"3", b"2", b"3"):
                txn.put("chunks", key, b"v" + key, append=True)
        with env.begin() as txn:
            assert [(k, bytes(v)) for k, v in txn.items("chunks")] == [
                (b"1", b"v1"), (b"2", b"v2"), (b"3", b"v3"),
            ]  # fmt: skip


def test_values_are_views_of_the_map(tmp_path: Path) -> None:
    with open_env(tmp_path / "store") as env:
        with env.begin(write=True) as txn:
            txn.put("chunks", b"k", bytes(MIB))
        with env.begin() as txn:
            value = txn.get("chunks", b"k")
            assert isinstance(value, memoryview)
            assert value.readonly
            assert value.nbytes == MIB


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    old = os.umask(0)
    try:
        open_env(folder).close()
    finally:
        os.umask(old)

    def modes() -> list[int]:
        paths = (folder, folder / "data.mdb", folder / "lock.mdb")
        return [stat.S_IMODE(path.stat().st_mode) for path in paths]

    assert modes() == [0o700, 0o600, 0o600]
    for path in (folder, folder / "data.mdb", folder / "lock.mdb"):
        path.chmod(0o777)
    open_env(folder).close()
    assert modes() == [0o700, 0o700, 0o700]
    for path in (folder / "data.mdb", folder / "lock.mdb"):
        path.chmod(0o664)
    open_env(folder, read_only=True).close()
    assert modes() == [0o700, 0o664, 0o664], "reading only changes nothing"
    open_env(folder).close()
    assert modes() == [0o700, 0o600, 0o600]


def test_two_handles_share_one_environment(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    first = open_env(folder)
    (tmp_path / "link").symlink_to(folder)
    second = open_env(tmp_path / "link", 128 * MIB, databases=["meta", "more"])
    assert second.map_size == first.map_size == 64 * MIB
    with first.begin(write=True) as txn:
        txn.put("meta", b"k", b"v")
    first.close()
    first.close()
    assert not first.usable
    with second.begin() as txn:
        assert bytes(txn.get("meta", b"k") or b"") == b"v"
        assert txn.count("more") == 0
    second.close()
    with pytest.raises(StoreClosed):
        second.sync()
    with open_env(folder, 128 * MIB) as again:
        assert again.map_size == 128 * MIB


def test_a_closed_handle_refuses(tmp_path: Path) -> None:
    env = open_env(tmp_path / "store")
    other = open_env(tmp_path / "store")
    env.close()
    for write in (False, True):
        with pytest.raises(StoreClosed), env.begin(write=write):
            pass
    with other.begin() as txn:
        late = txn
    with pytest.raises(StoreClosed):
        late.get("meta", b"k")
    other.close()


def test_closing_waits_for_other_threads_and_refuses_within(tmp_path: Path) -> None:
    env = open_env(tmp_path / "store")
    with env.begin(write=True) as txn:
        txn.put("chunks", b"k", b"x" * MIB)
        with pytest.raises(RuntimeError, match="inside a transaction"):
            env.close()
    inside, leave, closed = threading.Event(), threading.Event(), threading.Event()
    found: list[int] = []

    def read() -> None:
        with env.begin() as txn:
            inside.set()
            leave.wait(30)
            found.append(bytes(txn.get("chunks", b"k") or b"").count(b"x"))

    def close() -> None:
        env.close()
        closed.set()

    reader, closer = threading.Thread(target=read), threading.Thread(target=close)
    reader.start()
    assert inside.wait(30)
    closer.start()
    assert not closed.wait(0.1)
    leave.set()
    reader.join()
    closer.join()
    assert closed.is_set()
    assert found == [MIB]
    with pytest.raises(StoreClosed), env.begin():
        pass


def test_one_thread_writes_at_a_time_and_no_thread_twice(tmp_path: Path) -> None:
    env = open_env(tmp_path / "store")
    with env.begin(write=True) as txn:
        txn.put("meta", b"n", (0).to_bytes(8, "big"))
        with pytest.raises(RuntimeError, match="write transaction already"), env.begin(write=True):
            pass
        with env.begin() as reading:
            assert reading.get("meta", b"n") is None

    def add() -> None:
        for _ in range(20):
            with env.begin(write=True) as txn:
                now = int.from_bytes(txn.get("meta", b"n") or b"", "big")
                txn.put("meta", b"n", (now + 1).to_bytes(8, "big"))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with env.begin() as txn:
        assert int.from_bytes(txn.get("meta", b"n") or b"", "big") == 80
    env.close()


def test_threads_read_one_transaction(tmp_path: Path) -> None:
    env = open_env(tmp_path / "store")
    with env.begin(write=True) as txn:
        for i in range(16):
            txn.put("chunks", bytes([i]), bytes([i]) * 100_000, append=True)
    env.close()
    env = open_env(tmp_path / "store")  # so that the first read opens the database's root
    right: list[bool] = []
    with env.begin() as txn:

        def read(i: int) -> None:
            right.append(bytes(txn.get("chunks", bytes([i])) or b"") == bytes([i]) * 100_000)

        threads = [threading.Thread(target=read, args=(i,)) for i in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    env.close()
    assert right == [True] * 16


def test_blocks_that_are_reserved_are_those_of_one_large_value(tmp_path: Path) -> None:
    value, file = bytes(2 * LARGE), tmp_path / "store" / "data.mdb"
    with open_env(tmp_path / "store") as env:
        for number in range(12):
            with env.begin(write=True) as txn:
                txn.put("chunks", bytes([number % 3]), value)
                txn.put("chunks", bytes([number % 3, 0]), value[: LARGE - 1])
            with env.begin() as txn:
                assert txn.get("chunks", bytes([number % 3])) == value
            beyond = file.stat().st_blocks * 512 - file.stat().st_size
            assert beyond <= len(value) + PAGES_BESIDE + 4096
        # Freed pages are used again, as if nothing had been reserved.
        assert file.stat().st_size < 6 * 3 * LARGE


def test_a_full_map_is_full_and_stays_intact(tmp_path: Path) -> None:
    with open_env(tmp_path / "store", 4 * MIB) as env:
        with env.begin(write=True) as txn:
            txn.put("meta", b"k", b"kept")

        def fill() -> None:
            with env.begin(write=True) as txn:
                txn.put("meta", b"k", b"lost")
                txn.put("chunks", b"large", bytes(8 * MIB))

        with pytest.raises(StoreFull):
            fill()
        with env.begin(write=True) as txn:
            assert bytes(txn.get("meta", b"k") or b"") == b"kept"
            txn.put("chunks", b"small", b"fits")
        assert env.file_bytes() < 4 * MIB


def test_a_full_disk_is_full_and_no_damage(tmp_path: Path) -> None:
    told = script(
        "import resource\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "env = opened()\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({8 * MIB},) * 2)\n"
        "try:\n"
        "    with env.begin(write=True) as txn:\n"
        f"        txn.put('chunks', b'k', bytes({16 * MIB}))\n"
        "except StoreFull as error:\n"
        "    print('full')\n"
        "with env.begin() as txn:\n"
        "    print(txn.count('chunks'))\n",
        tmp_path / "store",
    )
    assert told.split() == ["full", "0"]


@pytest.mark.parametrize("content", [b"garbage" * 2000, b"x", b"{}\n"])
def test_another_file_is_no_store_and_is_left_alone(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "store"
    folder.mkdir(mode=0o755)
    (folder / "data.mdb").write_bytes(content)
    for read_only in (False, True):
        with pytest.raises(NotAStore):
            open_env(folder, read_only=read_only)
    assert (folder / "data.mdb").read_bytes() == content
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_file_in_place_of_the_folder_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        for read_only in (False, True):
            with pytest.raises(NotAStore):
                open_env(path, read_only=read_only)
    with pytest.raises(NotAStore, match="no store"):
        open_env(tmp_path / "none", read_only=True)
    assert not (tmp_path / "none").exists()


def test_reading_only(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with open_env(folder) as env, env.begin(write=True) as txn:
        txn.put("meta", b"k", b"v")
    with open_env(folder, read_only=True, databases=["meta", "added later"]) as env:
        with env.begin() as txn:
            assert bytes(txn.get("meta", b"k") or b"") == b"v"
            assert txn.get("added later", b"k") is None
            assert txn.count("added later") == 0
            assert list(txn.keys("added later")) == []
        with pytest.raises(StoreReadOnly), env.begin(write=True):
            pass
        with pytest.raises(StoreUnusable, match="reading only in this process"):
            open_env(folder)
    with open_env(folder) as env:
        # Beside a writing handle, the reading one still refuses to write.
        with open_env(folder, read_only=True) as reading:
            with pytest.raises(StoreReadOnly), reading.begin(write=True):
                pass
            with reading.begin() as txn:
                assert txn.count("meta") == 1
        assert env.usable


def test_a_store_that_may_not_be_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    with open_env(folder) as env, env.begin(write=True) as txn:
        txn.put("meta", b"k", b"v")
    (folder / "lock.mdb").unlink()
    (folder / "data.mdb").chmod(0o444)
    folder.chmod(0o555)
    for parent in folder.parents:
        if parent == Path("/tmp") or parent == parent.parent:
            break
        if parent.stat().st_uid == os.geteuid():
            parent.chmod(parent.stat().st_mode | 0o011)
    try:
        told = script(
            "import kvkeep.persistence.pages  # which the other user may not be able to read\n"
            "if os.geteuid() == 0:\n"
            "    os.setuid(65534)\n"
            "for read_only in (True, False):\n"
            "    try:\n"
            "        with opened(read_only=read_only) as env, env.begin() as txn:\n"
            "            print(bytes(txn.get('meta', b'k')).decode())\n"
            "    except StoreReadOnly:\n"
            "        print('may not be written')\n",
            folder,
        )
    finally:
        folder.chmod(0o700)
    assert told.splitlines() == ["v", "may not be written"]
    assert not (folder / "lock.mdb").exists()


def test_a_fork_must_open_the_store_again(tmp_path: Path) -> None:
    told = script(
        "env = opened()\n"
        "with env.begin(write=True) as txn:\n"
        "    txn.put('meta', b'k', b'parent')\n"
        "with env.begin() as held:\n"
        "    before = held.get('meta', b'k').tobytes()\n"
        "sys.stdout.flush()\n"
        "if os.fork() == 0:\n"
        "    for write in (False, True):\n"
        "        try:\n"
        "            with env.begin(write=write):\n"
        "                print('used')\n"
        "        except StoreClosed:\n"
        "            print('refused', env.usable)\n"
        "    env.close()\n"
        "    with opened() as mine:\n"
        "        with mine.begin(write=True) as txn:\n"
        "            txn.put('meta', b'k', txn.get('meta', b'k').tobytes() + b' child')\n"
        "    print('wrote', flush=True)\n"
        "    os._exit(0)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "with env.begin(write=True) as txn:\n"
        "    print(txn.get('meta', b'k').tobytes().decode())\n"
        "    txn.put('meta', b'k', b'parent again')\n"
        "env.close()\n"
        "print(env.usable)\n",
        tmp_path / "store",
    )
    assert told.splitlines() == [
        "refused False", "refused False", "wrote", "0", "parent child", "False",
    ]  # fmt: skip


def test_a_fork_inside_a_transaction_leaves_the_parents_alone(tmp_path: Path) -> None:
    told = script(
        "env = opened()\n"
        "class Left(Exception): pass\n"
        "child = False\n"
        "try:\n"
        "    with env.begin(write=True) as txn:\n"
        "        txn.put('meta', b'k', b'parent')\n"
        "        if os.fork() == 0:\n"
        "            child = True\n"
        "            raise Left\n"
        "        os.wait()\n"
        "except Left:\n"
        "    os._exit(0)\n"
        "with env.begin() as txn:\n"
        "    print(txn.get('meta', b'k').tobytes().decode())\n",
        tmp_path / "store",
    )
    assert told == "parent"


def test_a_killed_writer_leaves_nothing_and_no_lock(tmp_path: Path) -> None:
    told = script(
        "env = opened()\n"
        "with env.begin(write=True) as txn:\n"
        "    txn.put('meta', b'first', b'v')\n"
        "with env.begin() as reading, env.begin(write=True) as txn:\n"
        f"    txn.put('chunks', b'k', bytes({MIB}))\n"
        "    print('writing', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        tmp_path / "store",
    )
    assert told == "writing"
    with open_env(tmp_path / "store") as env, env.begin(write=True) as txn:
        assert txn.count("chunks") == 0
        assert txn.count("meta") == 1
        txn.put("meta", b"next", b"v")


def test_processes_see_each_others_commits(tmp_path: Path) -> None:
    with open_env(tmp_path / "store") as env:
        with env.begin() as txn:
            assert txn.get("meta", b"k") is None
            script(
                "with opened() as e, e.begin(write=True) as t: t.put('meta', b'k', b'v')",
                env.folder,
            )
            assert txn.get("meta", b"k") is None, "a transaction sees one state"
        with env.begin() as txn:
            assert bytes(txn.get("meta", b"k") or b"") == b"v"


def test_the_disk_is_measured_where_the_store_will_be(tmp_path: Path) -> None:
    assert free_bytes(tmp_path / "not" / "yet") > 0
    with open_env(tmp_path / "store") as env:
        assert env.free_bytes() > 0
        assert env.file_bytes() > 0
    with pytest.raises(FileNotFoundError):
        (tmp_path / "not").stat()


def test_troubles_keep_their_names(tmp_path: Path) -> None:
    import errno

    import lmdb

    cases = [
        (OSError(errno.ENOSPC, "full"), StoreFull),
        (OSError(errno.EDQUOT, "quota"), StoreFull),
        (lmdb.DiskError("put", errno.ENOSPC), StoreFull),
        (OSError(errno.EROFS, "read-only"), StoreReadOnly),
        (PermissionError(errno.EACCES, "no"), StoreReadOnly),
        (lmdb.ReadonlyError("put", errno.EACCES), StoreReadOnly),
        (lmdb.CorruptedError("get", -30796), Damaged),
        (lmdb.MapResizedError("begin", -30785), StoreUnusable),
        (lmdb.ReadersFullError("begin", -30790), StoreUnusable),
        (lmdb.MemoryError("begin", errno.ENOMEM), StoreUnusable),
        (lmdb.LockError("begin", errno.EAGAIN), StoreUnusable),
    ]
    for raised, ours in cases:
        error = translate(raised, tmp_path)
        assert type(error) is ours
        assert str(tmp_path) in error.problem
        assert error.remedy
