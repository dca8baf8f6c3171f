"""The store of weights: what is read from its files, what is refused, what it does without room or with a bad disk.

Why this matters: an engine serves what it reads here beside engines that got it from the trainer, and no fault of a
file system may reach an update. Real are senders, groups, files and receivers' framing; not exercised: an engine's
live parameters (`test_rejoin`), file systems between hosts.
"""

import asyncio
import fcntl
import os
import tempfile
import termios
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine.engine_recipes import recipe_for
from transfers import Held, digest_of, equal, joined, plan_of, reader, stepped, tensors, update
from waiting import wait_until

from megatron_scalerl.controller import weight_store as module
from megatron_scalerl.controller.preflight import _check_store
from megatron_scalerl.controller.weight_store import _new_folder, weight_store
from megatron_scalerl.controller.weight_sync import WeightSync
from megatron_scalerl.distributed.rendezvous import FolderRendezvous
from megatron_scalerl.weights.plan import Connection
from megatron_scalerl.weights.transport import STORE_BACKEND, store
from megatron_scalerl.weights.transport.store import StoredGroup, is_stored, make_writer, stored_anchor

MIB = 1 << 20
WHOLE = 2_200_080 + 3 * 8 + 40
"""Bytes of an anchor of `tensors`: buckets, their digests and a header."""


@pytest.mark.parametrize(
    ("path", "mode", "found"),
    [
        ("none", None, "can be written to, found"),
        ("open", 0o777, "found mode 0777"),
        ("group", 0o770, "mode 0770"),
        ("another's", 0o1777, "found mode 1777 of user 65534"),
        ("another's", 0o755, "found mode 0755 of user 65534"),
    ],
)
@pytest.mark.parametrize("below", [False, True])
def test_a_parent_that_does_not_serve_is_refused_before_the_run(tmp_path, path, mode, found, below):
    place = tmp_path / path
    if mode is not None:
        place.mkdir()
        place.chmod(mode)
        if path == "another's":
            if os.geteuid() != 0:
                pytest.skip("a folder of another user: needs root")
            os.chown(place, 65534, 65534)
        if below:  # a link to a folder of this user's in it
            (place / "mine").mkdir(mode=0o700)
            (tmp_path / "link").symlink_to(place / "mine")
            place = tmp_path / "link"
    with pytest.raises(ValueError, match=rf"^weights\.store: .*{found}"):
        _check_store(str(place))


def test_a_parent_that_serves(tmp_path):
    (tmp_path / "sticky").mkdir()
    (tmp_path / "sticky").chmod(0o1777)
    for place in ("", str(tmp_path / "sticky"), tempfile.mkdtemp(dir=tmp_path)):
        _check_store(place)
    with pytest.raises(ValueError, match="absolute path"):
        _check_store("relative")


@pytest.fixture
def folder(tmp_path):
    return tempfile.mkdtemp(dir=tmp_path)


def stored(connection, folder, **changes):
    return replace(connection, store=folder, store_bytes=64 * MIB, timeout_s=120, **changes)


def versions_of(count):
    """Weights of which one element in a hundred changes with each version."""
    found = [tensors()]
    for number in range(count - 1):
        found.append(stepped(found[-1], number))
    return found


def run(connection, versions, *, start=0):
    """Send the versions to a receiver; (the sender, the receiver, what it holds)."""
    senders, receivers = joined(connection)
    held = [Held(versions[0])]
    for number, weights in enumerate(versions, start):
        results = update(senders, receivers, held, weights, number)
        assert results[0] == results[1], results
    return senders[0], receivers[0], held[0]


def settle(sender):
    sender._store._settle()


def read(connection, folder, versions, *, anchor=0, group=StoredGroup):
    """What a receiver holds that reads the store up to the last of the versions."""
    late = replace(
        connection,
        backend=STORE_BACKEND,
        rendezvous=FolderRendezvous(folder=folder),
        group=f"{anchor}-{connection.group}",
    )
    held, groups = Held(versions[0]), {0: group(late, 1)}
    for number, weights in enumerate(versions, anchor):
        held.take(groups, plan_of(weights), number)
    return held


def names(folder):
    return sorted(name.rsplit("-", 1)[0] for name in os.listdir(folder))


def unread(pipe):
    """Bytes that wait in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), "little")


def size_of(folder):
    return sum(entry.stat().st_size for entry in os.scandir(folder))


@pytest.mark.parametrize("deltas", ["absolute", "ulp"])
def test_a_whole_update_and_its_changes_are_read_bit_for_bit(spec, folder, deltas):
    connection, versions = stored(spec(), folder, deltas=deltas), versions_of(4)
    sender, _, live = run(connection, versions)
    settle(sender)
    assert stored_anchor(folder, connection.group, 1, 3) == 0
    late = read(connection, folder, versions)
    assert late.kinds and set(late.kinds) == {"Changes"}
    assert digest_of(late.weights) == digest_of(live.weights) == digest_of(versions[-1])
    assert equal(late, versions[-1])
    assert WHOLE < size_of(folder) < 1.2 * WHOLE
    assert {entry.stat().st_mode & 0o777 for entry in os.scandir(folder)} == {0o600}


def test_one_whole_update_replaces_the_one_before(spec, folder):
    connection, versions = stored(spec(), folder), versions_of(3)
    sender, _, _ = run(connection, versions)
    settle(sender)
    assert names(folder) == ["0-0-2", "0-newest-2"] and size_of(folder) == WHOLE + 1
    assert stored_anchor(folder, connection.group, 1, 2) == 2
    assert stored_anchor(folder, connection.group, 1, 1) is None
    assert stored_anchor(folder, connection.group, 2, 2) is None  # another sender's is missing
    assert digest_of(read(connection, folder, versions[2:], anchor=2).weights) == digest_of(versions[2])


def test_an_anchor_of_another_connection_is_kept_until_the_new_one_is_complete(spec, folder):
    connection, versions = stored(spec(), folder), versions_of(2)
    sender, _, _ = run(connection, versions[:1])
    settle(sender)
    sender.close()
    again = replace(connection, group=connection.group[::-1])
    senders, receivers = joined(again)
    seen = []
    ship = senders[0]._ship

    def looked(shard, packed):
        seen.append(stored_anchor(folder, connection.group, 1, 0))
        return ship(shard, packed)

    senders[0]._ship = looked
    update(senders, receivers, [Held(versions[0])], versions[1], 1)
    settle(senders[0])
    assert set(seen) == {0}
    assert stored_anchor(folder, connection.group, 1, 0) is None and names(folder) == ["0-0-1", "0-newest-1"]
    assert digest_of(read(again, folder, versions[1:], anchor=1).weights) == digest_of(versions[1])


@pytest.mark.parametrize(
    "way", ["a bit", "the end is missing", "another version", "nothing is there", "an open folder"]
)
def test_what_a_receiver_refuses(spec, folder, way):
    connection, versions = stored(spec(), folder), versions_of(1)
    sender, _, _ = run(connection, versions)
    settle(sender)
    [path] = [entry.path for entry in os.scandir(folder) if "newest" not in entry.name]
    expected, anchor = "digest", 0
    if way == "a bit":
        with open(path, "r+b") as file:
            file.seek(1_000_000)
            byte = file.read(1)[0]
            file.seek(1_000_000)
            file.write(bytes([byte ^ 1]))
    elif way == "the end is missing":
        os.truncate(path, WHOLE - 5)
        expected = "more bytes, found"
    elif way == "another version":
        os.rename(path, path.replace("/0-0-0-", "/0-0-1-"))
        expected, anchor = "header", 1
    elif way == "nothing is there":
        os.unlink(path)
        expected = "No such file"
    else:
        os.chmod(folder, 0o755)
        expected = "mode 0700"
    with pytest.raises(RuntimeError, match=expected):
        read(connection, folder, versions, anchor=anchor)


def test_changes_beyond_the_budget_are_dropped_until_the_next_whole_update(spec, folder):
    versions = versions_of(6)
    connection = replace(stored(spec(), folder, deltas="absolute", anchor_every=3), store_bytes=WHOLE + 60_000)
    senders, receivers = joined(connection)
    held, found = [Held(versions[0])], []
    for number, weights in enumerate(versions):
        update(senders, receivers, held, weights, number)
        settle(senders[0])
        assert size_of(folder) <= connection.store_bytes
        found.append(stored_anchor(folder, connection.group, 1, number))
    assert digest_of(held[0].weights) == digest_of(versions[-1])
    assert found == [0, 0, 0, None, 4, 4]
    assert digest_of(read(connection, folder, versions[4:], anchor=4).weights) == digest_of(versions[-1])


def test_without_room_for_two_the_one_before_goes_first_and_without_room_for_one_there_is_none(spec, folder, caplog):
    versions = versions_of(2)
    one = replace(stored(spec(), folder), store_bytes=WHOLE + 100)
    sender, _, _ = run(one, versions)
    settle(sender)
    assert stored_anchor(folder, one.group, 1, 1) == 1 and size_of(folder) <= one.store_bytes
    none = replace(stored(spec(), folder), store_bytes=WHOLE - 1)
    sender, _, live = run(none, versions)
    settle(sender)
    assert not os.listdir(folder) and not is_stored(folder, none.group, 1)
    assert digest_of(live.weights) == digest_of(versions[1])
    assert f"weights.store_gib: expected at least {WHOLE} bytes for this sender, found {WHOLE - 1}" in caplog.text


def test_an_update_that_fails_is_not_stored(spec, folder):
    connection, versions = stored(spec(), folder, deltas="absolute"), versions_of(2)
    senders, receivers = joined(connection)
    held = [Held(versions[0])]
    update(senders, receivers, held, versions[0], 0)
    settle(senders[0])
    for group in receivers[0].values():
        group.close()
    with pytest.raises(RuntimeError), ThreadPoolExecutor(1) as pool:
        pool.submit(senders[0].send, plan_of(versions[1]), reader(versions[1], plan_of(versions[1])), 1).result()
    # the version before is still whole, whatever follows it in the file
    assert (
        stored_anchor(folder, connection.group, 1, 0) == 0 and stored_anchor(folder, connection.group, 1, 1) is None
    )
    assert digest_of(read(connection, folder, versions[:1]).weights) == digest_of(versions[0])


@pytest.mark.parametrize("fault", ["a link", "a full disk", "no folder", "a disk that hangs"])
def test_a_fault_of_the_disk_costs_the_store_alone(spec, folder, tmp_path, caplog, fault):
    versions = versions_of(2)
    connection = replace(stored(spec(), folder), timeout_s=3600)
    first = f"{folder}/0-0-0-{connection.group}"
    if fault == "a link":
        (tmp_path / "victim").write_text("precious")
        os.symlink(tmp_path / "victim", first)
    elif fault == "no folder":
        connection = replace(connection, store=f"{folder}/none")
    senders, receivers = joined(connection)
    pipe = os.pipe()  # nobody reads it
    if fault == "a full disk":
        senders[0]._store._open[0] = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    elif fault == "a disk that hangs":
        senders[0]._store._open[0] = open(pipe[1], "ab", buffering=0)  # noqa: SIM115
        senders[0]._store._patience_s = 1.5
    held = [Held(versions[0])]
    for number, weights in enumerate(versions):
        sent, got = update(senders, receivers, held, weights, number)
        assert sent == got
    settle(senders[0])
    senders[0].close()
    assert digest_of(held[0].weights) == digest_of(versions[-1])
    if fault == "a link":
        assert (tmp_path / "victim").read_text() == "precious"
        assert stored_anchor(connection.store, connection.group, 1, 1) == 1  # the link was deleted
    else:
        expected = "not written within 1.5 s" if fault == "a disk that hangs" else "off until engines join or leave"
        assert "weights.store: " in caplog.text and expected in caplog.text
        assert (make_writer(connection, 0) is None) == (fault == "a disk that hangs")  # it would hang again
        assert stored_anchor(connection.store, connection.group, 1, 1) is None
    os.close(pipe[0])  # the thread ends


def test_what_hangs_is_forgotten_and_a_closed_writer_deletes_nothing(spec, folder, monkeypatch):
    """A thread that hangs keeps no memory of an update, and the files may be those of the next connection."""
    monkeypatch.setattr(store, "_HUNG", set())
    versions, connection = versions_of(1), stored(spec(), folder)
    senders, receivers = joined(connection)
    pipe = os.pipe()
    writer = senders[0]._store
    writer._open[0] = open(pipe[1], "ab", buffering=0)  # noqa: SIM115
    update(senders, receivers, [Held(versions[0])], versions[0], 0)
    wait_until(lambda: unread(pipe[0]) > 1000)  # beyond the header: it writes more than a pipe holds
    assert writer._jobs.qsize() > 1
    senders[0].close()
    assert writer._jobs.qsize() == 1  # the end
    path = os.path.join(folder, "0-newest-5-another")
    with open(path, "w"):
        pass
    os.close(pipe[0])  # the write fails
    writer._thread.join(240)
    assert not writer._thread.is_alive() and os.path.exists(path)


@pytest.mark.parametrize("free", [0, 3 * MIB, 100 * MIB])
def test_a_reserve_of_the_file_system_is_left(spec, folder, monkeypatch, caplog, free):
    """In /dev/shm others' memory would be missing, which ends them with SIGBUS."""
    found = SimpleNamespace(f_blocks=1000, f_frsize=MIB, f_bavail=100 + free // MIB)
    monkeypatch.setattr(store.os, "statvfs", lambda path: found)
    connection, versions = stored(spec(), folder), versions_of(2)
    sender, _, live = run(connection, versions)
    settle(sender)
    assert digest_of(live.weights) == digest_of(versions[1])
    kept = stored_anchor(folder, connection.group, 1, 1)
    assert kept == (1 if free else None) and bool(os.listdir(folder)) == bool(free)
    assert ("a reserve for others, found 0" in caplog.text) == (not free)


def recipe_in(tmp_path, store):
    """A run in the test's folder."""
    recipe = recipe_for(tmp_path, weights={"store": str(store)})
    return recipe.model_copy(update={"output_dir": str(tmp_path / "runs")})


def opened(recipe, **more):
    """What is in the store's folder while it is open, and whether it was."""

    async def scenario():
        async with weight_store(recipe, **more) as store:
            return store and (store.folder, os.stat(store.folder).st_mode & 0o777)

    return asyncio.run(scenario())


def test_a_start_deletes_what_a_kill_left_of_its_own_run(tmp_path):
    mine, other = (recipe_in(tmp_path, tmp_path) for _ in range(2))
    other = other.model_copy(update={"name": "other"})
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    for each in (mine, other):
        os.makedirs(each.run_dir)
    left = [_new_folder(str(tmp_path), each.run_dir) for each in (mine, other)]
    folder, mode = opened(mine)
    assert mode == 0o700 and folder not in [path for path, _ in left]
    assert [os.path.exists(path) for path in (*(path for path, _ in left), folder)] == [False, True, False]
    for _, held in left:
        os.close(held)  # a kill does
    opened(mine)
    assert not os.path.exists(left[1][0])  # of another run, on this host
    assert not os.path.exists(f"{mine.run_dir}/weight_store")


@pytest.mark.parametrize("store", ["", "elsewhere"])
def test_a_start_with_another_parent_or_none_deletes_what_a_kill_left(tmp_path, store):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    before = recipe_in(tmp_path, tmp_path)
    os.makedirs(before.run_dir)
    left, held = _new_folder(str(tmp_path), before.run_dir)
    os.close(held)
    opened(recipe_in(tmp_path, store and tmp_path / store))
    assert not os.path.exists(left) and not os.path.exists(f"{before.run_dir}/weight_store")


def test_a_noted_folder_that_is_not_the_runs_stays(tmp_path):
    recipe = recipe_in(tmp_path, "")
    os.makedirs(recipe.run_dir)
    (tmp_path / "precious").mkdir()
    for text in (str(tmp_path / "precious"), "precious", "\0"):
        with open(f"{recipe.run_dir}/weight_store", "w") as file:
            file.write(text)
        assert opened(recipe) is None
    assert (tmp_path / "precious").is_dir()


def test_without_a_folder_a_first_start_ends_and_a_later_one_goes_on(tmp_path, caplog):
    recipe = recipe_for(tmp_path, weights={"store": str(tmp_path / "none")})
    with pytest.raises(RuntimeError, match=r"^weights\.store: .*/none: expected a folder for files: "):
        opened(recipe)
    assert opened(recipe, first=False) is None
    assert "the run goes on without it" in caplog.text
    assert opened(recipe_for(tmp_path)) is None


def test_an_engine_that_hangs_while_it_reads_is_evicted_and_no_other_one_asked(tmp_path):
    """A stand-in for an engine whose host has lost the file system."""
    recipe = recipe_for(tmp_path, weights={"store": str(tmp_path), "timeout_s": 600, "transport": "gloo"})

    asked = []

    class Hanging(Named):
        async def post(self, path, body):
            asked.append(self)
            if len(asked) == 2:  # now the limit passes
                loop = asyncio.get_running_loop()
                now = loop.time
                loop.time = lambda: now() + 600
            await asyncio.Event().wait()

    class Engines:
        stale, evicted = [Hanging("engine-3"), Hanging("engine-4")], []

        def evict(self, engine, reason):
            self.evicted.append((engine.name, reason))
            self.stale = [each for each in self.stale if each is not engine]

    async def scenario():
        store = module.WeightStore(recipe, str(tmp_path))
        connection = Connection(
            backend="gloo",
            rendezvous=FolderRendezvous(folder=str(tmp_path)),
            group="g",
            world_sizes=(2,),
            bucket_mib=1,
            timeout_s=1,
            connect_timeout_s=1,
        )
        store.connected(module.Formed(connection=connection, manifest=(), shards=("all",), plans=("",), senders=1))
        store.published(7, "of version 7")
        sync = WeightSync(None, Engines(), recipe, store)

        async def needs(*_):
            return ["all"]

        sync._needs = needs
        for name, text in (("0-newest-7-g", "7"), ("0-0-7-g", "")):
            (tmp_path / name).write_text(text)
        await sync.catch_up_from_store(7)
        return sync.stored_for(), sync._engines.evicted

    stored_for, evicted = asyncio.run(scenario())
    assert stored_for == [] and [name for name, _ in evicted] == ["engine-3", "engine-4"]
    assert evicted[0][1] == "engine-3: weights.store: not read within 600 s"


class Named:
    """All of an engine's client that a look into the folder needs."""

    def __init__(self, name):
        self.name = name


@pytest.mark.slow
@pytest.mark.parametrize("fault", [OSError(116, "Stale file handle"), "hangs"])
def test_a_fault_of_a_look_into_the_folder_leaves_the_engine_to_the_trainer(tmp_path, monkeypatch, caplog, fault):
    """A stand-in for a file system that fails or hangs where the controller looks."""
    recipe = recipe_for(tmp_path, weights={"store": str(tmp_path), "timeout_s": 1 if fault == "hangs" else 600})
    engine, end, looked = Named("engine-3"), threading.Event(), []

    def look(*arguments):
        if fault == "hangs":
            end.wait(300)
            looked.append(arguments)
            return None
        raise fault

    monkeypatch.setattr(module, "stored_anchor", look)

    async def needs(engine, manifest):
        return ["all"]

    async def scenario():
        store = module.WeightStore(recipe, str(tmp_path))
        connection = SimpleNamespace(group="g")
        store.connected(module.Formed(connection=connection, manifest=(), shards=("all",), plans=("",), senders=1))
        store.published(7, None)
        store._report = "of version 7"
        found = await store.catch_up(engine, needs, 7)
        return found, store.may_serve(engine), store.may_serve(Named("engine-4"))

    assert asyncio.run(scenario()) == ("left", False, fault != "hangs")
    assert not looked, "the end of the loop waits for no thread, either"
    end.set()
    assert "weights.store: the trainer sends version 7 instead: " in caplog.text
