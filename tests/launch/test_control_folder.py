"""RUN/control: what a start of the controller leaves there, and what it deletes."""

from megatron_scalerl.launch.control_folder import (
    ControllerFile,
    read_controller,
    secret_file,
    withdraw,
    write_controller,
)
from megatron_scalerl.processes.secret_file import read_secret, write_secret


def announced(run, secret):
    write_secret(secret_file(run), secret)
    write_controller(
        run, ControllerFile(engines="tcp://10.0.0.1:1", run_id="r", incarnation="local.0", recipe_file="/r.yaml")
    )


def test_a_controller_deletes_its_own_files_and_not_those_of_a_later_start(tmp_path):
    announced(tmp_path, "mine")
    announced(tmp_path, "another's")
    withdraw(tmp_path, "mine")
    assert read_secret(secret_file(tmp_path)) == "another's" and read_controller(tmp_path).run_id == "r"
    withdraw(tmp_path, "another's")
    assert list((tmp_path / "control").iterdir()) == []
    withdraw(tmp_path, "another's")  # of a run on one host: there are none
