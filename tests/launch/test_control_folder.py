"""RUN/control: what a start of the controller leaves there and deletes, and how another host's program reads it."""

import pytest

from megatron_scalerl.distributed.sockets import Purpose, RefusedError, controller_key
from megatron_scalerl.launch import control_folder
from megatron_scalerl.launch.control_folder import read_controller, secret_file, withdraw, write_controller
from megatron_scalerl.processes.secret_file import read_secret, write_secret

KEY = controller_key("this start", Purpose.TRAINER)


def announced(run, secret):
    write_secret(secret_file(run), secret)
    write_controller(run, dict.fromkeys(control_folder.CONTROLLER_VARIABLES, secret))


def test_a_controller_deletes_its_own_files_and_not_those_of_a_later_start(tmp_path):
    announced(tmp_path, "mine")
    announced(tmp_path, "another's")
    withdraw(tmp_path, "mine")
    assert read_secret(secret_file(tmp_path)) == read_controller(tmp_path)["MSRL_CONTROLLER_KEY"] == "another's"
    withdraw(tmp_path, "another's")
    assert list((tmp_path / "control").iterdir()) == []
    withdraw(tmp_path, "another's")  # of a run on one host: there are none


def test_the_controllers_file_is_private_and_anything_else_in_it_is_refused(tmp_path):
    announced(tmp_path, "mine")
    path = tmp_path / "control/controller.json"
    assert [each.stat().st_mode & 0o777 for each in (path.parent, path)] == [0o700, 0o600]
    for other in (b"", b"{}", b"[1]", b"\xff", b'{"engines": "tcp://192.0.2.1:1"}', path.read_bytes()[:20]):
        path.write_bytes(other)
        with pytest.raises(ValueError, match=r"controller\.json: this file does not hold the address"):
            read_controller(tmp_path)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(control_folder, "_READ_AGAIN_S", 0.02)


def find(folder):
    environment = {"MSRL_SECRET_FILE": str(folder / "secret"), "MSRL_CONTROLLER_KEY": KEY}
    return control_folder.find_secret(environment, Purpose.TRAINER)


@pytest.mark.parametrize("earlier", [None, "an earlier start"])
def test_the_secret_of_this_start_is_waited_for(tmp_path, monkeypatch, earlier):
    """A shared file system may show the file of an earlier start, or none, for a while."""
    if earlier:
        write_secret(tmp_path / "secret", earlier)
    looks = []

    def look(path):
        looks.append(path)
        if len(looks) == 3:
            write_secret(tmp_path / "secret", "this start")
        return read_secret(path)

    monkeypatch.setattr(control_folder, "read_secret", look)
    assert find(tmp_path) == "this start" and len(looks) == 3


@pytest.mark.parametrize(
    "secret, error",
    [(None, "No such file"), ("another", "this is not the secret of the controller that started")],
)
def test_a_secret_that_never_appears_is_named(tmp_path, monkeypatch, secret, error):
    monkeypatch.setattr(control_folder, "SECRET_S", 0.1)
    if secret:
        write_secret(tmp_path / "secret", secret)
    with pytest.raises(RefusedError, match=error):
        find(tmp_path)
