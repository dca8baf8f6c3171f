"""The job script and the site file, without a cluster."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
from command_line import refusal
from programs import ended, printed
from refusals import refused
from slurm_runs import write_recipe

from megatron_scalerl.__main__ import main
from megatron_scalerl.checkpoints.jsonl import rewrite
from megatron_scalerl.cluster import cluster
from megatron_scalerl.cluster.allocation import Allocation, Request
from megatron_scalerl.cluster.job import JobPlan, render
from megatron_scalerl.cluster.site import Site, read_site
from megatron_scalerl.cluster.slurm_status import last_error
from megatron_scalerl.cluster.submission import SAVE_S, STARTUP_S, array_name, times_of
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.recipe.other_names import unknown_key

REQUEST = Request(
    **dict.fromkeys(field.name for field in fields(Request))
    | {"partition": "gpu", "time": "1:00:00", "check_seconds": 300.0, "max_requeues": 3, "max_failures": 2}
)
WHOLE = Allocation(nodes=1, gpus=8, slots=None, cpus=None)
PLAN = JobPlan(
    name="r",
    script=Path("/runs/my run/slurm/job.sbatch"),
    runs=(Path("/runs/my run"),),
    cwd=Path("/home/it's"),
    request=REQUEST,
    nodes=WHOLE,
    lead_s=90,
    startup_s=0,
    site=Site(),
)


def changed(plan, **changes):
    """The plan with changes of its own fields, else of its nodes', else of its request's."""
    own = {key: changes.pop(key) for key in list(changes) if hasattr(plan, key)}
    nodes = {key: changes.pop(key) for key in list(changes) if hasattr(plan.nodes, key)}
    return replace(plan, **own, nodes=replace(plan.nodes, **nodes), request=replace(plan.request, **changes))


def checked(plan, tmp_path):
    """The text of a script that bash can parse."""
    script = tmp_path / "job.sbatch"
    script.write_text(render(plan))
    cluster.check_syntax(script)
    assert all(line.startswith("#SBATCH -") for line in script.read_text().splitlines() if "SBATCH" in line)
    return script.read_text()


def test_a_whole_node_is_taken_whole(tmp_path):
    text = checked(PLAN, tmp_path)
    for line in ("--gpus-per-node=8", "--exclusive", "--mem=0", "--signal=B:USR1@90", "--open-mode=append",
                 "--requeue", '--output="/runs/my run/slurm/%j.out"'):  # fmt: skip
        assert f"#SBATCH {line}\n" in text
    assert "run='/runs/my run'\n" in text and f"cd {shlex.quote(str(PLAN.cwd))} " in text


FOUR = replace(WHOLE, nodes=4, slots=8)
SEVERAL = replace(PLAN, nodes=FOUR)


def test_several_nodes_are_checked_before_the_controller_starts_on_the_first(tmp_path):
    text = checked(SEVERAL, tmp_path)
    for line in ("--nodes=4", "--ntasks-per-node=1", "--no-kill", "--gpus-per-node=8", "--exclusive"):
        assert f"#SBATCH {line}\n" in text
    check = 'doctor --hosts slurm --gpus 8 --within 300 "$run/slurm/recipe.yaml" --reports "$logs/nodes"'
    train = 'train --supervise --max-failures 2 --hosts slurm --slots 8 "$run/slurm/recipe.yaml"'
    program = f"{shlex.quote(sys.executable)} -m megatron_scalerl"
    first, second = f"role preflight {program} {check}\n", f"role controller {program} {train}\n"
    assert text.index(first) < text.index(second)
    one = checked(PLAN, tmp_path)
    assert not any(word in one for word in ("--no-kill", "--hosts", "doctor", "ExcNodeList", "preflight"))


def test_several_nodes_of_a_chain_or_of_an_array(tmp_path):
    assert array_name("recipes/ablations/", "my/small.yaml") == "ablations_small"
    text = checked(changed(SEVERAL, chain=True), tmp_path)
    assert 'requeue "$SLURM' not in text and "ExcNodeList" not in text and "role preflight" in text
    text = checked(changed(SEVERAL, cpus=10, gpus=0, runs=(Path("/r/a"), Path("/r/b")), throttle=2), tmp_path)
    assert "#SBATCH --array=0-1%2\n" in text and "#SBATCH --cpus-per-task=10\n" in text
    assert "export SRUN_CPUS_PER_TASK=10 " in text and "--gpus-per-node" not in text


@pytest.mark.parametrize(
    "sbatch, has, lacks",
    [
        ({"gres": "nvme:1,gpu:h100"}, ["--gres=nvme:1,gpu:h100:8"], ["--gpus-per-node"]),
        ({"gpus-per-node": "h100"}, ["--gpus-per-node=h100:8"], []),
        ({"mem-per-gpu": "64G"}, ["--mem-per-gpu=64G", "--exclusive"], ["--mem=0"]),
        ({"oversubscribe": False}, [], ["--exclusive", "--oversubscribe"]),
        ({"cpus-per-gpu": "12"}, ["--cpus-per-gpu=12"], ["--cpus-per-task"]),
        ({"export": "MY_PROXY"}, ["TMPDIR,", "NO_PROXY,MY_PROXY\n"], []),
        ({"comment": "two words", "mail-type": "FAIL,END"}, ['--comment="two words"', "--mail-type=FAIL,END"], []),
    ],
)
def test_options_of_the_site_take_the_place_of_the_jobs_own(tmp_path, sbatch, has, lacks):
    text = checked(changed(PLAN, site=Site(sbatch=sbatch)), tmp_path)
    options = text.split("\n#\n")[0] + "\n"
    assert all(each in options for each in has) and not any(each in options for each in lacks), options
    names = re.findall("#SBATCH --([a-z-]+)", options)
    assert len(names) == len(set(names))


def test_fewer_gpus_than_the_run_takes_are_refused_and_a_run_on_cpus_asks_for_none():
    site = Site(sbatch={"gres": "gpu:h100:4", "mem-per-gpu": "64G", "account": "lab"})
    with refused("sbatch: gpu:h100:4 requests fewer GPUs of a node than the run takes, 8"):
        render(changed(PLAN, site=site))
    text = render(changed(PLAN, site=site, gpus=0, cpus=4))
    assert "--account=lab" in text and "gres" not in text and "mem-per-gpu" not in text


def test_a_template_of_ones_own_extends_the_jobs_and_stays(tmp_path):
    (tmp_path / "my.sbatch").write_text(
        '{% extends "job.sbatch" %}\n{% block options %}\n#SBATCH --comment=ours\n{% endblock %}\n'
        "{% block setup %}ulimit -l unlimited{% endblock %}\n"
    )
    (tmp_path / "site.yaml").write_text("template: my.sbatch\n")
    site = read_site(tmp_path / "site.yaml")
    text = checked(changed(PLAN, site=site), tmp_path)
    assert "#SBATCH --comment=ours\n" in text and "\nulimit -l unlimited\n" in text
    assert len(text.splitlines()) == len(render(PLAN).splitlines()) + 1
    (tmp_path / "my.sbatch").write_text("#!/bin/bash\n{% for x %}\n")
    with refused(r"my\.sbatch, line 2: "):
        render(changed(PLAN, site=site))


@pytest.mark.parametrize(
    "site, words",
    [
        (
            Site(container="pyxis", image="/i.sqsh", mounts=("/data:/data",)),
            ["--container-image=/i.sqsh", "--container-mounts=/home/it's:/home/it's,/data:/data,/r r:/r r,/l:/l"],
        ),
        (
            Site(container="apptainer", image="/i.sif", mounts=("/data:/data",)),
            ["apptainer", "exec", "--nv", "--bind", "/data:/data", "/r r:/r r", "/l:/l", "/i.sif"],
        ),
        (Site(container=("podman", "-v={run}:{run}", "-w={cwd}")), ["podman", "-v=/r r:/r r", "-w=/home/it's"]),
    ],
    ids=["pyxis", "apptainer", "another"],
)
def test_a_container_sees_the_runs_folder(tmp_path, site, words):
    text = checked(changed(SEVERAL, site=site), tmp_path)
    [line] = [line for line in text.splitlines() if line.startswith("container=(")]
    show = f"run='/r r' MSRL_LOCAL=/l/7\n{line}\nprintf '%s\\n' \"${{container[@]}}\""
    found = printed("bash", "-c", show).splitlines()
    assert [word for word in words if word not in found] == []
    [controller] = [line for line in text.splitlines() if "train --supervise" in line]
    assert controller.strip().startswith('role controller "${inside[@]}" megatron-scalerl train ')


def test_only_an_exclusive_node_is_whole():
    shared = ({"exclusive": "user"}, {"exclusive": False}, {"oversubscribe": True})
    assert Site().exclusive and not any(Site(sbatch=options).exclusive for options in shared)


PYXIS = "--container-image=/i --no-container-mount-home --container-workdir=/c --container-mounts=/c:/c,r:r,/l:/l"


@pytest.mark.parametrize(
    "container, words", [({"container": ("env",)}, "env"), ({"container": "pyxis", "image": "/i"}, PYXIS)]
)
def test_steps_of_a_container_get_its_words_and_what_the_job_has_exported(tmp_path, container, words):
    """As a site file's NCCL_IB_HCA."""
    site = Site(environment={"NCCL_IB_HCA": "=mlx5_0:1"}, **container)
    text = checked(changed(SEVERAL, site=site, cwd=Path("/c")), tmp_path)
    [variable] = [line for line in text.splitlines() if line.startswith("export NCCL_IB_HCA=")]
    assert text.index(variable) < text.index("\nrelay=$!") < text.index("role controller")
    relay = text[text.index("container=(") : text.index("role() {")]
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$NCCL_IB_HCA: $*"\n')
    (tmp_path / "srun").chmod(0o755)
    step = "$outside/srun --nodes=1 env true; kill $relay"
    script = f"logs={tmp_path} run=r MSRL_LOCAL=/l/7\n{variable}\n{relay}\n{step}"
    done = ended("bash", "-c", script, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout == f"=mlx5_0:1: --nodes=1 {words} env true\n", done.stderr


SECRETS = (
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0123456789_abcdefghij",
    "sk-abcdefghijklmnopqrstuvwxyz0123456789",
    "sk-proj-abc_DEF-0123456789",
    "sk-ant-api03-abcdefghij",
    "xoxb-1234567890-abcdef",
    "AKIAIOSFODNN7EXAMPLE",
    "https://account.blob.core.windows.net/data?sv=2024-01-01&sig=abcDEF%3D",
    "https://hooks.slack.com/services/T000/B000/XXXX",
    "https://discord.com/api/webhooks/123/abc",
)
"""Values that are secrets, whatever their names."""
NO_SECRETS = (
    "/scratch/hf_models_of_the_group_2026",
    "/opt/sk-learn/lib",
    "task-0123456789abcdefghij",
    "max_split_size_mb:512,garbage_collection_threshold:0.8",
    "http://proxy.cluster.org:3128",
    "https://huggingface.co/datasets?sort=trending",
    "mlx5_0:1,mlx5_1:1",
    "/usr/share/git-hooks",
)


@pytest.mark.parametrize("value", NO_SECRETS)
def test_a_value_that_is_no_secret_stands_in_a_site_file(tmp_path, value):
    path = tmp_path / "site.yaml"
    path.write_text(f"environment: {{A: '{value}'}}\n")
    assert read_site(path).environment == {"A": value}


KEYS = list(Site.model_fields)
KEY = "a key of a site file (options of sbatch go under sbatch: {account: ...})"


@pytest.mark.parametrize(
    "text, said",
    [
        ("acount: lab", unknown_key("acount", KEYS, expected=KEY)),
        ("modules: cuda", "modules: 'cuda': Input should be a valid tuple"),
        ("container: docker", "'docker': Input should be 'none', 'pyxis' or 'apptainer'"),
        ("container: pyxis", "image is required with container pyxis or apptainer"),
        *(
            (f"environment: {{{name}: abc}}", f"environment: {name} looks like a secret")
            for name in ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "GITHUB_PAT", "DB_PASS", "API_KEY_2", "AZURE_CLIENT_SECRET")
        ),
        ('environment: {HF_TOKEN: "hf_a\\tb", acount: 1}', "environment: HF_TOKEN looks like a secret"),
        ("environment: {A: [1]}", "environment.A: [1]: Input should be a valid string"),
        ("sbatch: ['constraint=h100']", "sbatch: ['constraint=h100']: Input should be a valid dictionary"),
        ('sbatch: {comment: "a\\nrm -rf /"}', "'a\\nrm -rf /': String should match pattern"),
        ('modules: ["a\\nb"]', "modules.0: 'a\\nb': String should match pattern"),
        ("sbatch: {nodes: 3}", "sbatch: nodes is set by the option --nodes of submit"),
        ("environment: {https_proxy: 'http://me:pass@proxy:80'}", "environment: https_proxy looks like a secret"),
        *((f"environment: {{A: '{value}'}}", "environment: A looks like a secret") for value in SECRETS),
        (f"modules: [cuda, '{SECRETS[0]}']", "modules holds what looks like a secret"),
        (f"sbatch: {{comment: '{SECRETS[-1]}'}}", "sbatch holds what looks like a secret"),
        ("local: $(id)/x", "local: '$(id)/x': String should match pattern"),
        ("template: my.sbatch", "my.sbatch is not a file"),
        ("sbatch: {time-min: 5}", "sbatch: time-min is set by the job itself"),
        ("sbatch: {gpus-per-node: false}", "sbatch.gpus-per-node: False is not"),
        ("sbatch: {export: 'A,ALL'}", "sbatch.export: A,ALL is not"),
        ("sbatch: {export: A=b}", "sbatch.export: A=b is not"),
    ],
)
def test_a_wrong_site_file_is_refused(tmp_path, text, said):
    (tmp_path / "site.yaml").write_text(text)
    with pytest.raises(ValueError) as refused:
        read_site(tmp_path / "site.yaml")
    assert str(refused.value).startswith(f"{tmp_path / 'site.yaml'}: ") and said in str(refused.value)


def test_the_lead_is_the_slowest_step_and_checkpoint_of_the_run_and_a_margin(tmp_path):
    assert times_of(tmp_path, startup_s=None, save_s=None).lead_s == SAVE_S + 60
    assert times_of(tmp_path, startup_s=None, save_s=None).startup_s == STARTUP_S
    (tmp_path / "checkpoints.jsonl").write_text('{"step": 1, "seconds": 7.5}\n{"step": 2, "seconds": 3.0}\n')
    (tmp_path / "ledger.jsonl").write_text(
        '{"unit": "gpu_hours"}\n{"phase": "startup", "seconds": 40.0}\n{"phase": "train", "seconds": 90.0}\n'
    )
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train_seconds": 3.0, "publish_seconds": 2.0, "pinned_seconds": 10.0}\n{"step": 1}\n'
    )
    found = times_of(tmp_path, startup_s=None, save_s=None)
    assert (found.lead_s, found.startup_s) == (83, 40.0)
    assert times_of(tmp_path, startup_s=1.0, save_s=2.0).lead_s == 62


def test_no_sbatch_on_the_path_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = "megatron-scalerl: sbatch is not on the path; submit from a login node, or add --dry-run"
    assert refusal(["submit", "r.yaml", "--partition", "gpu", "--time", "60"], capsys) == said


@pytest.fixture
def without_slurm(tmp_path, monkeypatch):
    """The programs of a machine without Slurm."""
    (tmp_path / "programs").mkdir()
    for name in ("bash", "df", "env", "sh"):
        (tmp_path / "programs" / name).symlink_to(shutil.which(name))
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))


@pytest.mark.parametrize("policy", ["there", "missing"])
def test_a_dry_run_without_slurm_renders_the_job_and_says_what_was_not_checked(
    tmp_path, tiny, without_slurm, capsys, policy
):
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path)
    (tmp_path / "site.yaml").write_text('sbatch: {gres: "gpu:h100:4", account: lab}\n')
    words = f"submit {tmp_path}/r.yaml engine.count=6 --nodes 2 --partition a,b --time 1-0".split()
    words += ["--site", str(tmp_path / "site.yaml"), *(["policy.path=/none"] if policy == "missing" else [])]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert "not checked, since this machine has no Slurm: whether partition a,b has nodes of 4 GPUs" in said
    assert ("not finished on this machine: policy.path: /none" in said) is (policy == "missing")
    script = run / "slurm/job.sbatch"
    cluster.check_syntax(script)
    assert "#SBATCH --partition=a,b\n" in script.read_text() and "#SBATCH --gres=gpu:h100:4\n" in script.read_text()
    assert main(["submit", "--status", str(run)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sbatch is not on the path: the job's state is unknown, and the next lines are from the run's folder",
        "not started yet",
    ]
    assert main(words) == 2, "nothing is submitted"
    (run / "slurm/jobs.jsonl").write_text('{"jobs": ["7"]}\n')
    before = script.with_name("recipe.yaml").read_bytes()
    assert main([*words, "--dry-run", "steps=5"]) == 2
    assert script.with_name("recipe.yaml").read_bytes() == before, "of a job that may be queued"


def test_a_dry_run_goes_on_where_slurm_does_not_answer(tmp_path, tiny, without_slurm, capsys):
    """Its programs are installed, and find no controller."""
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path)
    why = "sinfo: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host"
    for name in ("sbatch", "sinfo", "squeue", "scontrol"):
        (tmp_path / "programs" / name).write_text(f'#!/bin/sh\necho "{why}" >&2; exit 1\n')
        (tmp_path / "programs" / name).chmod(0o755)
    words = f"submit {tmp_path}/r.yaml --partition a --time 1-0 --gpus 0".split()
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"not checked, since sinfo failed: {why}: whether partition a has" in said
    cluster.check_syntax(run / "slurm/job.sbatch")
    assert main(words) == 1 and why in capsys.readouterr().err, "nothing is submitted"


def test_the_status_of_a_folder_without_slurm(tmp_path, tiny, without_slurm, capsys):
    run = write_recipe(tmp_path / "r.yaml", tiny, output_dir=tmp_path)
    attempt = written(run, "true").parent / "7.1"
    attempt.mkdir()
    (attempt / "controller.exit").write_text("3\n")
    (attempt / "controller.log").write_text("megatron-scalerl: no room\n")
    (attempt / "started").touch()
    (run / "recipe.yaml").write_text((tmp_path / "r.yaml").read_text())
    (run / "metrics.jsonl").write_text('{"step": 4, "pass_rate": 0.25}\n')
    assert main(["submit", "--status", str(run)]) == 0
    said = capsys.readouterr().out
    for line in ("step 4 of 6, pass rate 0.25", "last error: controller: exit code 3: no room"):  # fmt: skip
        assert line in said, said


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "give exactly one of RECIPE, --array FOLDER and --status RUN"),
        ("r.yaml --array f", "give exactly one of RECIPE"),
        ("r.yaml --time 60", "--partition is missing"),
        ("r.yaml --partition p", "--time is missing"),
        ("r.yaml --partition p --time 60 --throttle 2", "--throttle requires --array"),
        ("--array f --partition p --time 60 --throttle 0", "--throttle is 0; it has to be at least 1"),
        ("--seconds-left f", "--seconds-left requires --gpu-hours"),
        ("r.yaml --partition p --time 60 --gpu-hours 0", "--gpu-hours is 0; it has to be more than 0"),
        ("r.yaml --partition p --time 60 --nodes 0", "--nodes is 0; it has to be at least 1"),
    ],
)
def test_options_that_contradict_each_other_are_one_line(words, said, capsys):
    assert said in refusal(["submit", *words.split()], capsys)


@pytest.mark.parametrize("limit", ["", "1:2:3:4", "1-"])
def test_a_time_limit_is_written_as_slurm_does(limit):
    with refused(f"--time: {limit!r} is not a time limit"):
        cluster.seconds_of(limit)


def written(folder, program, modules=(), container="none", **changes):
    """A job script in `folder`, with `program` in place of megatron-scalerl: a command of bash, or words."""
    script = folder / "slurm/job.sbatch"
    script.parent.mkdir(parents=True)
    words = ("bash", "-c", program) if isinstance(program, str) else program
    site = Site(program=words, modules=modules, container=container, local=f"{folder}/local")
    script.write_text(render(changed(PLAN, script=script, runs=(folder,), cwd=folder, site=site, **changes)))
    return script


def alone(folder, program, *, env=None, **changes):
    """What a job script did without Slurm, and without waiting."""
    script = written(folder, program, **changes)
    (folder / "bin").mkdir()
    (folder / "bin/sleep").symlink_to("/bin/true")
    (folder / "ledger.jsonl").touch()
    (folder / "bin/scontrol").write_text(f'#!/bin/sh\necho "$@" >>{folder}/requeued\n')
    (folder / "bin/scontrol").chmod(0o755)
    env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | (env or {})
    return subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=240)


def test_a_controller_of_an_earlier_attempt_is_waited_for(tmp_path):
    """76 says that another controller has the run."""
    exit_file = tmp_path / "slurm/7.0/controller.exit"
    program = f'ls {exit_file}; echo >>{tmp_path}/starts; [ "$(wc -l <{tmp_path}/starts)" -gt 2 ] || exit 76'
    done = alone(tmp_path, program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "slurm/attempt").read_text() == "7.0\n"
    said = exit_file.with_name("controller.log").read_text()
    assert said.count("No such file") == 3, "a status in between would show an error"
    assert done.stdout.count(f"another controller has {tmp_path}") == 2
    assert (tmp_path / "slurm/7.0/controller.exit").read_text() == "0\n"


@pytest.mark.parametrize("gave_up, code", [(True, 1), (False, 0)])
def test_the_next_job_of_a_chain_ends_as_the_run_did(tmp_path, gave_up, code):
    program = f"touch {tmp_path}/started"
    script = written(tmp_path, program, chain=True)
    rewrite(tmp_path / "end.json", [{"reason": "why", "gave_up": gave_up}])
    os.utime(script, (0, 0))
    done = ended("bash", script, SLURM_JOB_ID="7")
    assert done.returncode == code and 'the run has ended: {"reason":"why"' in done.stdout
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("beat_s_ago, hangs", [(90, True), (5, False)])
def test_a_controller_that_hangs_at_the_time_limit_is_queued_again(tmp_path, beat_s_ago, hangs):
    """It does not answer; the ledger's last heartbeat says whether it hangs, or still saves."""
    ledger, asked = tmp_path / "ledger.jsonl", tmp_path / "asked"
    wait_for = "for _ in {1..%d}; do [ -e %s ] || read -t 0.05 <> <(:); done"
    program = f"trap 'touch {asked}' USR1; touch -d '-{beat_s_ago} seconds' {ledger}; kill -USR1 $PPID; "
    requeued = tmp_path / "requeued"
    program += f"{wait_for % (2000, asked)}; {wait_for % (2000 if hangs else 100, requeued)}; exit 1"
    done = alone(tmp_path, program)
    assert done.returncode == 1 and ("the controller hangs; queued again" in done.stdout) is hangs, done.stdout
    assert requeued.exists() is hangs


def test_a_program_that_is_missing_has_the_shells_exit_code(tmp_path):
    """143 would say that somebody stopped the job."""
    done = alone(tmp_path, (f"{tmp_path}/venv/bin/python", "-m", "megatron_scalerl"))
    assert done.returncode == 127, done.stdout + done.stderr
    assert (tmp_path / "slurm/7.0/controller.exit").read_text() == "127\n"
    assert "venv/bin/python: No such file or directory" in last_error(tmp_path)


def test_modules_may_read_variables_that_are_not_set(tmp_path):
    module = {"BASH_FUNC_module%%": "() { LOADED=$LOADED:$2; export LOADED; }"}
    done = alone(tmp_path, f"echo $LOADED >{tmp_path}/loaded", env=module, modules=("a", "c d"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "loaded").read_text() == ":a:c d\n"


def test_a_module_that_cannot_be_loaded_is_named(tmp_path):
    done = alone(tmp_path, "true", env={"BASH_FUNC_module%%": "() { false; }"}, modules=("it's",))
    assert done.returncode == 1 and "the module it's could not be loaded" in done.stdout
    assert "the module it's could not be loaded" in last_error(tmp_path)


def test_an_attempt_that_never_had_the_run_leaves_it_to_the_controller_that_has(tmp_path):
    done = alone(tmp_path, f"echo >>{tmp_path}/starts; exit 76")
    assert done.returncode == 76 and not (tmp_path / "slurm/attempt").exists()
    assert len((tmp_path / "starts").read_text()) == 41 and not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("code", [1, 75, 76])
def test_what_is_left_of_an_earlier_attempt_queues_nothing_again(tmp_path, code):
    """Its requeue would end the later attempt, which is the same job."""
    done = alone(tmp_path, f"echo >>{tmp_path}/starts; echo 7.1 >{tmp_path}/slurm/attempt; exit {code}")
    assert done.returncode == code, done.stdout + done.stderr
    assert f"attempt 7.0 ends with exit code {code}: a later one has begun" in done.stdout
    assert (tmp_path / "starts").read_text() == "\n" and not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("first, requeued, code", [("echo 100", True, 75), ("exit 2", False, 1)])
def test_a_ledger_that_cannot_be_read_ends_a_job_at_its_start_only(tmp_path, first, requeued, code):
    """After the save the budget is unknown: the next attempt reads the ledger again."""
    asked = f"[ ! -e {tmp_path}/asked ] || exit 2; touch {tmp_path}/asked; {first}"
    program = f"case $0 in train) exit 75 ;; submit) {asked} ;; esac"
    done = alone(tmp_path, program, gpu_hours=1.0, startup_s=40)
    assert done.returncode == code, done.stdout + done.stderr
    assert (tmp_path / "requeued").exists() is requeued
    assert ("the ledger could not be read" in done.stdout) is not requeued


@pytest.mark.parametrize("code, stays", [(0, False), (75, True)])
def test_what_is_compiled_on_a_node_stays_for_a_job_that_is_queued_again(tmp_path, code, stays):
    done = alone(tmp_path, f'mkdir -p "$MSRL_LOCAL"; exit {code}')
    assert done.returncode == code and bool([*tmp_path.glob("local/*/7")]) is stays


def test_a_folder_behind_a_link_is_not_that_of_the_user(tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / f"local/megatron-scalerl-{os.getuid()}").symlink_to("elsewhere")
    (tmp_path / "local/elsewhere").mkdir()
    done = alone(tmp_path, "true", container=("env",))
    assert done.returncode == 1 and "has to be a folder of this user: l" in last_error(tmp_path)


@pytest.mark.parametrize("name", ["a\n#SBATCH", "..", "", "a/b", "$(id)", "-a", "a" * 101])
def test_a_name_that_is_no_word_is_refused_where_the_recipe_is_read(name, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"{{name: {json.dumps(name)}, steps: 1, policy: {{path: p}}, prompts: {{path: q}}}}")
    with refused(r"name: .* is not allowed; take at most 100 letters, digits"):
        load_recipe(recipe)


@pytest.mark.parametrize("folder", ["a$(touch hacked)b", "a`touch hacked`", "50%j s&"])
def test_no_folder_is_executed_or_changed(folder, tmp_path):
    run = tmp_path / folder / "r"
    script = run / "slurm/job.sbatch"
    plan = changed(PLAN, script=script, runs=(run,), cwd=tmp_path / folder)
    text = render(plan)
    output = next(line for line in text.splitlines() if line.startswith("#SBATCH --output="))
    assert shlex.split(output.split("=", 1)[1].replace("%%", "%")) == [f"{script.parent}/%j.out"]
    says = [line for line in text.splitlines() if "go on with: sbatch" in line]
    assert says and all(folder not in line for line in says)
    begin = text.split("max_requeues=")[0].split("#\n", 1)[1]
    assert printed("bash", "-c", f'{begin}\necho "$run"', cwd=tmp_path) == f"{run}\n"
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize("folder", ["a\nb", 'a"b', "a\\b"])
def test_a_folder_that_a_script_cannot_name_is_refused(folder):
    with refused(r"^submit: "):
        render(changed(PLAN, script=Path("/runs") / folder / "job.sbatch"))
