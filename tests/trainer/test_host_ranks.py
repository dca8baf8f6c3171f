"""The program that starts the trainer's ranks on another host: which secret it takes."""

import asyncio

import pytest
from waiting import until

from megatron_scalerl.distributed.sockets import Purpose, controller_key
from megatron_scalerl.launch import host_ranks
from megatron_scalerl.processes.secret_file import read_secret, write_secret

KEY = controller_key("this start", Purpose.TRAINER)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(host_ranks, "_READ_AGAIN_S", 0.02)


@pytest.mark.parametrize("earlier", [None, "an earlier start"])
def test_the_secret_of_this_start_is_waited_for(tmp_path, monkeypatch, earlier):
    """A shared file system may show the file of an earlier start, or none, for a while."""
    if earlier:
        write_secret(tmp_path / "secret", earlier)

    looks = []
    monkeypatch.setattr(host_ranks, "read_secret", lambda path: looks.append(path) or read_secret(path))

    async def scenario():
        reading = asyncio.create_task(host_ranks._secret(tmp_path / "secret", KEY))
        await until(lambda: len(looks) >= 3)
        assert not reading.done()
        write_secret(tmp_path / "secret", "this start")
        return await reading

    assert asyncio.run(scenario()) == "this start"


@pytest.mark.parametrize(
    ("secret", "error"), [(None, "No such file"), ("another", "expected the secret of the controller that started")]
)
def test_a_secret_that_never_appears_is_named(tmp_path, monkeypatch, secret, error):
    monkeypatch.setattr(host_ranks, "SECRET_S", 0.1)
    if secret:
        write_secret(tmp_path / "secret", secret)
    with pytest.raises((ValueError, OSError), match=error):
        asyncio.run(host_ranks._secret(tmp_path / "secret", KEY))


def test_the_key_tells_starts_and_purposes_apart_and_has_no_part_of_the_secret():
    keys = {controller_key(secret, purpose) for secret in ("a", "b") for purpose in Purpose}
    assert len(keys) == 4 and all(len(bytes.fromhex(key)) == 32 for key in keys)
