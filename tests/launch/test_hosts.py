"""The hosts of a run as the user names them, and the command lines for programs on other hosts."""

import os
import shlex
import socket
import subprocess

import pytest
from recipe_files import small_recipe
from refusals import refused

from megatron_scalerl.launch.hosts import ONE_HOST, Host, Hosts, HostsLeft, hosts_of
from megatron_scalerl.launch.placement import Placement
from megatron_scalerl.recipe.process_sections import WeightsSection


def named(names="a,b", **options):
    defaults = {"slots": 8, "run_on": None, "address": "10.1.2.3"}
    return hosts_of(names, **defaults | options)


def test_without_names_a_run_is_on_this_host():
    assert hosts_of(None, slots=None, run_on=None, address=None) is ONE_HOST


def test_this_host_is_recognized_and_needs_no_address_alone(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a.cluster")
    hosts = named("a,b")
    assert hosts.hosts == (Host(name="a", here=True), Host(name="b"))
    assert hosts.address == "10.1.2.3"
    assert [host.here for host in named("me@a.cluster,a.other,ab,10.0.0.1").hosts] == [True, True, False, False]
    alone = hosts_of("a", slots=None, run_on=None, address=None)
    assert alone.address is None and alone.slots is None


def test_the_address_is_the_one_on_the_route_to_the_first_other_host():
    assert named("localhost,127.0.0.2", address=None).address == "127.0.0.1"


def test_a_command_reaches_a_shell_of_the_host_with_its_words_intact(tmp_path, monkeypatch):
    folder = tmp_path / "a folder's name"
    folder.mkdir()
    monkeypatch.chdir(folder)
    hosts = named(run_on="env REACHED={host} sh -c")
    command = hosts.command(Host(name="b"), ["sh", "-c", 'echo "$REACHED|$MORE|$0|$(pwd)"', "it's"], {"MORE": "x y"})
    assert subprocess.check_output(command, text=True) == f"b|x y|it's|{folder}\n"


def test_variables_of_the_user_travel_and_secrets_do_not(monkeypatch):
    for name in ("NCCL_DEBUG", "MSRL_LOG_LEVEL", "HF_TOKEN", "MSRL_SECRET", "CUDA_VISIBLE_DEVICES", "EDITOR"):
        monkeypatch.setenv(name, "value-of-it")
    monkeypatch.setenv("HF_NAME", "hf_abcdefghijklmnopqrstuvwxyz")  # a secret by its value
    command = named().command(Host(name="b"), ["true"], {"NCCL_DEBUG": "INFO"})
    assert command[:2] == ["ssh", "b"] and len(command) == 3
    sent = [word for word in shlex.split(command[2]) if "=" in word]
    assert "NCCL_DEBUG=INFO" in sent and "MSRL_LOG_LEVEL=value-of-it" in sent
    assert "NCCL_DEBUG=value-of-it" not in sent
    for name in ("HF_TOKEN", "HF_NAME", "MSRL_SECRET", "CUDA_VISIBLE_DEVICES", "EDITOR"):
        assert not any(word.startswith(f"{name}=") for word in sent)


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """Makes Slurm's program for a job on three nodes."""

    def make(script):
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\n{script}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-3]")

    return make


def test_in_an_allocation_hosts_and_gpus_are_slurms(scontrol, monkeypatch):
    scontrol('[ "$*" = "show hostnames gpu[1-3]" ] && printf "gpu1\\ngpu2\\ngpu3\\n"\n')
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    monkeypatch.setenv("SLURM_JOB_CPUS_PER_NODE", "128,96(x2)")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu1")
    hosts = named("slurm", slots=None)
    assert [host.name for host in hosts.hosts] == ["gpu1", "gpu2", "gpu3"]
    assert [host.here for host in hosts.hosts] == [True, False, False] and hosts.slots == 4
    command = hosts.command(Host(name="gpu2"), ["program", "it's"], {"A": "b c"})
    assert command[0] == "srun" and "--nodelist=gpu2" in command and "--cpus-per-task=96" in command
    assert command[-4:] == ["env", "A=b c", "program", "it's"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "another")
    with refused("--hosts slurm: scontrol does not list the hosts of another: "):
        named("slurm")


THREE_NODES = {"trainer": {"world_size": 16}, "engine": {"count": 4}, "weights": {"transport": "gloo"}}


def test_a_run_that_lost_hosts_says_what_they_had(monkeypatch):
    hosts, left = named("a,b,c"), {"c"}
    monkeypatch.setattr(Hosts, "have_left", lambda _: left)
    placement = Placement.of(small_recipe(**THREE_NODES), hosts)
    assert {place.host.name for place in placement.engines} == {"c"}
    placement.check_present(hosts)
    with pytest.raises(HostsLeft, match="c: Slurm removed this node, which had engines, from the job"):
        placement.check_present(hosts, engines=1)
    taught = {"name": "distilled", "teachers": {"t": {"path": "p"}}}
    with_teacher = Placement.of(small_recipe(**THREE_NODES | {"engine": {"count": 3}}, algorithm=taught), hosts)
    assert len(with_teacher.engines) == 3 and [place.host.name for place in with_teacher.teachers] == ["c"]
    with pytest.raises(HostsLeft, match="c: Slurm removed this node, which had a teacher, from the job"):
        with_teacher.check_present(hosts)
    left.add("b")
    with pytest.raises(HostsLeft, match="b: Slurm removed this node, which had trainer ranks, from the job"):
        placement.check_present(hosts)
    weights = WeightsSection(transport="shm")
    with refused(r"^weights\.transport: shm works on one host, but the run has 3 hosts$"):
        Placement.of(small_recipe(**THREE_NODES).model_copy(update={"weights": weights}), hosts)


def test_a_heterogeneous_job_is_refused(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu[1-2]")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with refused(r"--hosts slurm: heterogeneous jobs .*; use one job of one kind of node"):
        named("slurm")


def test_a_host_that_slurm_has_taken_out_of_the_job_has_left(scontrol, tmp_path, monkeypatch):
    """`scontrol` as it answers for a job; nothing is known where it fails."""
    scontrol(
        '[ "$2" = job ] && { [ "$4" = 5_2 ] && cat "$(dirname "$0")/job"; exit; }\n'
        'case "$3" in "gpu[1-3]") printf "gpu1\\ngpu2\\ngpu3\\n";; "gpu[1,3]") printf "gpu1\\ngpu3\\n";; esac\n'
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "5")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    hosts = named("slurm", slots=4)
    found = []
    for nodes in ("gpu[1-3]", "gpu[1,3]", "(null)"):
        (tmp_path / "job").write_text(f"JobId=7 ReqNodeList=gpu9 ExcNodeList=(null) NodeList={nodes} Batch\n")
        found.append(hosts.have_left())
    (tmp_path / "job").unlink()
    assert [*found, hosts.have_left()] == [set(), {"gpu2"}, set(), set()]
    assert named("gpu1,gpu2").have_left() == set()


@pytest.mark.parametrize(
    "names, options, message",
    [
        (None, {}, "--slots requires --hosts"),
        ("a,-oProxyCommand=x", {}, "--hosts: 'a,-oProxyCommand=x' is no list of host names"),
        ("a,b,a", {}, "--hosts: 'a,b,a' names a host twice"),
        ("a,b", {"slots": None}, "--slots is missing"),
        ("a,b", {"run_on": "ssh host"}, "--run-on: 'ssh host' has no {host}"),
        ("slurm", {"run_on": "ssh {host}"}, "--run-on: 'ssh {host}' is not used with --hosts slurm"),
        ("slurm", {}, "--hosts slurm: this process is in no allocation"),
        ("no-such-host.invalid,b", {"address": None}, "--address: this host has no route to no-such-host.invalid"),
    ],
)
def test_what_is_refused(monkeypatch, names, options, message):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    with pytest.raises(ValueError) as raised:
        named(names, **options)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
