"""`headrace launch`: the sizes of a job, the lines of refusals, and recipes that their programs can read.

`tests/cluster/test_sbatch.py` runs the sbatch script on several hosts, with Ray.
"""

from __future__ import annotations

import re
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import yaml
from recipe_schemas import RAYJOB, SKYPILOT
from typer.testing import CliRunner

from headrace.cli.main import app
from headrace.cluster.recipes.job import Job, Options, make_job, seconds_of
from headrace.cluster.recipes.render import rayjob, sbatch, skypilot
from headrace.config import make_config
from headrace.errors import UserError
from waiting import until

ROOT = Path(__file__).parents[3]
QUICKSTART = str(ROOT / "examples/quickstart/quickstart.toml")
RAW = {"model": {"path": "only/there"}, "task": {"kind": "environment", "factory": "task:Task"}}
SECONDS = 60.0


def job(*settings: str, **options: Any) -> Job:
    return make_job(make_config(RAW, settings), "run.toml", list(settings), Options(**options))


TRUSTED = ("cluster.trusted_network=true", "training.checkpoint_directory=/shared")
SIZES: dict[str, tuple[tuple[str, ...], dict[str, int], tuple[int, int, bool]]] = {
    "numbers on one node": (("engine.gpus=6", "training.gpus=2"), {}, (1, 8, False)),
    "numbers, nodes of 8": (("engine.gpus=12", "training.gpus=4"), {"gpus_per_node": 8}, (2, 8, True)),
    "numbers, four nodes": (("engine.gpus=12", "training.gpus=4"), {"nodes": 4}, (4, 4, True)),
    "a number does not fill the last node": (("engine.gpus=9", "training.gpus=1"), {"gpus_per_node": 8}, (2, 8, True)),
    "indices": (("engine.gpus=0-5", "training.gpus=[6, 7]"), {}, (1, 8, False)),
    "a shared GPU": (("engine.gpus=[0]", "training.gpus=[0]"), {}, (1, 1, False)),
    "hosts": (('engine.gpus="a:0-7,b:0-3"', 'training.gpus="b:4-7"'), {}, (2, 8, True)),
    "automatic": ((), {"nodes": 2, "gpus_per_node": 8}, (2, 8, True)),
    "CPUs by device": (("engine.device=cpu", "training.device=cpu"), {"nodes": 3}, (3, 0, True)),
    "CPUs by number": ((), {"nodes": 3, "gpus_per_node": 0}, (3, 0, True)),
    "Ray on one node": (("pipeline.launcher=ray",), {"gpus_per_node": 2}, (1, 2, True)),
    "servers that run elsewhere": (
        ("engine.kind=vllm", 'engine.urls=["http://there:8000"]', "training.gpus=1"), {}, (1, 1, False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_follow_from_the_configuration(case: str) -> None:
    settings, options, expected = SIZES[case]
    found = job(*settings, **options)
    assert (found.nodes, found.gpus_per_node, found.uses_ray) == expected


def test_named_hosts_are_asked_for() -> None:
    named = job('engine.gpus="a:0-7,b:0-3"', 'training.gpus="b:4-7"')
    assert "#SBATCH --nodelist=a,b\n" in sbatch(named)
    # The run waits for the nodes of the job, unless the configuration says for which.
    assert "cluster.hosts=" in sbatch(named)
    assert "cluster.hosts=[$(" not in sbatch(job('cluster.hosts=["a", "b"]', gpus_per_node=0))
    with pytest.raises(UserError, match="names the node 'a', and Kubernetes names nodes by itself"):
        rayjob(named)


REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    '--gpus-per-node is needed: [training] gpus is "auto" (0 runs on CPUs)': ((), {"nodes": 2}),
    "[training] gpus: the trainer needs 4, and the engines leave 2 of 8 (name a GPU in both sections to share it)": (
        ("engine.gpus=6", "training.gpus=4"), {"nodes": 2, "gpus_per_node": 4},
    ),
    "[engine] gpus = 12, but there are 8 GPUs": (("engine.gpus=12",), {"gpus_per_node": 8, "nodes": 1}),
    "--nodes 1: the configuration names 2 (a, b)": (('engine.gpus="a:0,b:0"', 'training.gpus="b:1"'), {"nodes": 1}),
    '[pipeline] launcher = "local": 2 nodes need "ray" (leave the key out)': (
        ("pipeline.launcher=local",), {"nodes": 2, "gpus_per_node": 1},
    ),
    '[delivery] transport = "shm" stays on one host, and the run has several ("tcp" works)': (
        ("delivery.transport=shm", "engine.count=2"), {"nodes": 2, "gpus_per_node": 0},
    ),
    "--time '2h' is no time (02:30:00, 1-12 and 90, in minutes, are)": ((), {"gpus_per_node": 1, "time": "2h"}),
    "--account 'a\\n#SBATCH': only letters, digits and . , : / @ # + - are possible": (
        (), {"gpus_per_node": 1, "account": "a\n#SBATCH"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_start_is_refused_in_one_line(line: str) -> None:
    settings, options = REFUSED[line]
    with pytest.raises(UserError) as refused:
        job(*settings, **options)
    assert str(refused.value) == line


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("2:30:00", 9000), ("1-12", 129600), ("1-12:30", 131400), ("1-0:0:9", 86409)],
)
def test_times_are_those_of_slurm(time: str, seconds: int) -> None:
    assert seconds_of(time) == seconds


JOBS = {
    "one node": job("engine.gpus=6", "training.gpus=2"),
    "one node with Ray": job("pipeline.launcher=ray", gpus_per_node=1),
    "CPUs": job(nodes=3, gpus_per_node=0),
    "all options": job(
        'run.name="It\'s: a \\"name\\", {1}"',
        "engine.gpus=12",
        "training.gpus=4",
        nodes=2,
        cpus_per_node=64,
        time="1-12",
        partition="gpu",
        account="lab",
        image="registry.example/headrace:1",
    ),
}


@pytest.mark.parametrize("case", JOBS)
def test_rayjobs_are_as_their_schema_says(case: str) -> None:
    made = JOBS[case]
    found = yaml.safe_load(rayjob(made))
    jsonschema.validate(found, RAYJOB)
    spec = found["spec"]["rayClusterSpec"]
    workers = spec.get("workerGroupSpecs", [])
    assert [group["replicas"] for group in workers] == ([made.nodes - 1] if made.nodes > 1 else [])
    for group in (spec["headGroupSpec"], *workers):
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert int(container["resources"]["limits"].get("nvidia.com/gpu", 0)) == made.gpus_per_node
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert ("pipeline.launcher=ray" in found["spec"]["entrypoint"]) == made.uses_ray
    check_command(found["spec"]["entrypoint"].removeprefix("env --chdir=/workspace "), made)


@pytest.mark.parametrize("case", JOBS)
def test_skypilot_tasks_are_as_their_schema_says(case: str, tmp_path: Path) -> None:
    made = JOBS[case]
    found = yaml.safe_load(skypilot(made))
    jsonschema.validate(found, SKYPILOT)
    assert found["num_nodes"] == made.nodes
    assert found["resources"].get("accelerators") == (f"H100:{made.gpus_per_node}" if made.gpus_per_node else None)
    subprocess.run(["bash", "-n"], input=found["run"], text=True, check=True, timeout=SECONDS)
    [command] = [line for line in found["run"].splitlines() if line.startswith("headrace ")]
    check_command(command, made)


def check_command(command: str, made: Job) -> None:
    """The command is one for the shell that trains, or resumes, with the settings as they were given."""
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True, check=True, timeout=SECONDS
    ).stdout.splitlines()
    given = [*made.settings, *(["pipeline.launcher=ray"] if made.uses_ray else [])]
    settings = [word for setting in dict.fromkeys(given) for word in ("--set", setting)]
    assert words[:4] == ["headrace", "train", "run.toml", "--resume"]
    assert words[4 : 4 + len(settings)] == settings


@pytest.mark.parametrize("case", JOBS)
def test_what_is_to_fill_in_is_marked_and_little(case: str) -> None:
    made = JOBS[case]
    image = 0 if made.options.image else 1
    assert rayjob(made).count("Fill in") == 2 + image
    assert skypilot(made).count("Fill in") == image + (1 if made.gpus_per_node else 0)
    assert "Fill in" not in sbatch(made)


@pytest.mark.parametrize("case", JOBS)
def test_sbatch_scripts_are_scripts(case: str) -> None:
    made = JOBS[case]
    script = sbatch(made)
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=SECONDS)
    directives = re.findall(r"^#SBATCH (.+)$", script, re.MULTILINE)
    assert f"--nodes={made.nodes}" in directives
    assert (f"--gpus-per-node={made.gpus_per_node}" in directives) == bool(made.gpus_per_node)
    assert ("ray.scripts" in script) == made.uses_ray
    # Slurm reads no directive after the first command.
    assert "#SBATCH" not in script.partition("set -u")[2]


def test_all_options_of_slurm_are_in_the_script() -> None:
    script = sbatch(JOBS["all options"])
    for directive in ("cpus-per-task=64", "time=1-12", "partition=gpu", "account=lab", "job-name=it-s-a-name-1"):
        assert f"#SBATCH --{directive}\n" in script
    assert "--container-image=registry.example/headrace:1 " in script
    assert "#SBATCH --signal=B:USR1@300\n" in script
    assert "#SBATCH --signal=B:USR1@60\n" in sbatch(job(gpus_per_node=1, time="4"))


def test_the_recipe_is_printed_or_written_and_exit_codes_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(*words: str) -> tuple[int, str, BaseException | None]:
        done = CliRunner().invoke(app, ["launch", QUICKSTART, *words])
        return done.exit_code, done.output, done.exception

    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    size = ("--nodes", "3", "--gpus-per-node", "0")
    code, printed, _ = launch("--slurm", *size, "--dry-run")
    assert (code, printed.splitlines()[0]) == (0, "#!/bin/bash")
    assert launch("--slurm", *size, "--output", str(tmp_path / "run.sh"))[:2] == (0, "")
    assert (tmp_path / "run.sh").read_text() == printed
    assert launch("--slurm", *size, "--node", "3")[0] == 2
    for words, line in {
        ("--slurm",): "there is no program `sbatch` here: run this where Slurm is, or print the script: --dry-run",
        ("--kubernetes",): "--kubernetes: write the file with --output FILE, then submit it: kubectl create -f FILE",
        ("--slurm", "--skypilot"): "headrace launch needs one of --slurm, --kubernetes and --skypilot",
        ("--slurm", "--output", str(tmp_path)): f"--output {tmp_path}: Is a directory",
    }.items():
        refused = launch(*words, *size)[2]
        assert isinstance(refused, UserError) and str(refused) == line


def program(directory: Path, name: str, script: str) -> Path:
    path = directory / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("code", "says"), [(0, "Submitted batch job 7"), (1, "sbatch: error: no such partition")])
def test_a_script_is_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    output = f"echo '{says}'" if code == 0 else f"echo '{says.removeprefix('sbatch: ')}' >&2"
    program(tmp_path, "sbatch", f"cat > {tmp_path}/script; {output}; exit {code}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    done = CliRunner().invoke(app, ["launch", QUICKSTART, "--slurm", "--gpus-per-node", "0"])
    assert (tmp_path / "script").read_text().startswith("#!/bin/bash\n")
    assert (done.output.strip() if code == 0 else str(done.exception)) == says


ONE_NODE = job("engine.gpus=1", "training.gpus=1")
SLURM = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2"}


class SmallJob:
    """The script of a job, under stand-ins for Slurm and for the Python that has Headrace and Ray."""

    def __init__(self, directory: Path, python: str, made: Job = ONE_NODE) -> None:
        """Start the script. `python` is what stands for Python."""
        told = f'echo "$@" >> {directory}/scontrol.txt'
        program(directory, "scontrol", f'if [ "$1" = show ]; then printf "%s\\n" node1 node2; else {told}; fi')
        # Options of srun end where its command begins.
        program(directory, "srun", 'while [[ $1 == -* ]]; do shift; done; exec "$@"')
        program(directory, "getent", "echo 127.0.1.1; echo 192.0.2.1")
        path = program(directory, "python", f'echo "$@" > {directory}/started; {python}')
        script = directory / "script.sh"
        script.write_text(sbatch(msgspec.structs.replace(made, python=str(path))))
        self.directory = directory
        self.process = subprocess.Popen(
            ["bash", str(script)],
            cwd=directory,
            env={"PATH": f"{directory}:/bin:/usr/bin", **SLURM},
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Wait until the script has ended. Return its exit code and what it said."""
        _, errors = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, errors

    @property
    def requeued(self) -> bool:
        return (self.directory / "scontrol.txt").is_file()

    async def signal(self, number: int) -> None:
        await until(lambda: (self.directory / "ready").exists())
        self.process.send_signal(number)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_run_that_ends_by_itself_ends_the_job_with_its_code(tmp_path: Path, code: int) -> None:
    small = SmallJob(tmp_path, f"exit {code}")
    assert small.end() == (code, "")
    settings = "--set engine.gpus=1 --set training.gpus=1"
    assert (tmp_path / "started").read_text() == f"-m headrace train run.toml --resume {settings}\n"
    assert not small.requeued


def test_a_ray_that_ends_at_once_ends_the_job(tmp_path: Path) -> None:
    small = SmallJob(tmp_path, "exit 1", JOBS["CPUs"])
    assert small.end() == (1, "headrace launch: Ray has ended on node1\n")
    assert "start --block --node-ip-address=192.0.2.1 " in (tmp_path / "started").read_text()
    assert list(tmp_path.glob(".ray-token-*")) == []


INTERRUPTIBLE = "trap 'sleep 0.2; exit {code}' TERM; touch ready; while true; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("number", "code", "requeued"),
    [(signal.SIGTERM, 130, False), (signal.SIGUSR1, 130, True), (signal.SIGUSR1, 0, False), (signal.SIGUSR1, 1, False)],
)
async def test_a_signal_ends_the_run_and_the_time_limit_requeues_it(
    tmp_path: Path, number: int, code: int, requeued: bool
) -> None:
    """A run that was done already, or has failed, is not started again."""
    small = SmallJob(tmp_path, INTERRUPTIBLE.format(code=code))
    await small.signal(number)
    assert small.end()[0] == code
    assert small.requeued == requeued
    assert not requeued or (tmp_path / "scontrol.txt").read_text() == "requeue 7\n"


def test_the_image_has_what_its_file_names() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    assert [line.split()[0] for line in lines] == ["FROM", "RUN", "COPY", "COPY", "RUN", "WORKDIR", "CMD"]
    copied: dict[str, str] = {}
    for line in lines:
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            copied |= dict.fromkeys(sources, target)
    assert all((ROOT / source).exists() for source in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # What the build of the package reads must be there.
    assert {"pyproject.toml", "src", project["readme"], *project["license-files"]} <= copied.keys()
    [installed] = re.findall(r'"/opt/headrace\[([\w,-]+)\]"', text)
    assert set(installed.split(",")) <= project["optional-dependencies"].keys()
    assert "ray" in installed.split(",")
