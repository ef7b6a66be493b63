"""Scripts of starts: no text of a user changes what a script runs, and every ready cluster has one."""

import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hpctrain.config.clusters.cluster_file import load_cluster, parse_cluster, ready_clusters
from hpctrain.config.clusters.launch import Launch
from hpctrain.config.errors import LaunchError, TopologyError
from hpctrain.config.job import load_job
from hpctrain.jobs.mpirun import _read_hosts
from hpctrain.launch.components import Component, components_of
from hpctrain.launch.files import launch_files, write_files
from hpctrain.launch.mpi import kind_of
from hpctrain.launch.scripts import (
    ASKED_HOSTS,
    SlurmOptions,
    Start,
    batch_script,
    chain_script,
    host_lines,
    job_name,
    mpirun_script,
)

HOSTILE = st.text(
    st.sampled_from("ab/ '\"$`\\;&|<>()*?[]{}#!~%=\n\t-") | st.characters(codec="utf-8", exclude_characters="\0"),
    min_size=1,
    max_size=12,
)
EVIL = ("$(touch bad)", "`touch bad`", "'; touch bad; '", '"; touch bad; "', "a b", "x\ntouch bad", "-n 9", "%j", "#")
TEXTS = HOSTILE | st.sampled_from(EVIL)
RECORDER = """#!{python}
import json, os, subprocess, sys
with open(os.environ["RECORD"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), os.getcwd(), sys.argv[1:]]) + "\\n")
if os.path.basename(sys.argv[0]) in ("mpirun", "srun") and "SILENT" not in os.environ:
    with open(os.environ["HPCTRAIN_EXIT_FILE"], "w") as file:
        file.write(os.environ.get("CODE", "0"))
sys.exit(int(os.environ.get("CODE", "0")))
"""


class Recorder:
    """Programs in a folder of their own that write their arguments down."""

    def __init__(self, folder: Path):
        self.folder, self.record, self.start = folder, folder / "record", folder / "start"
        self.start.mkdir()
        for name in ("srun", "scontrol", "sbatch", "mpirun", "hpctrain", "module", "apptainer"):
            program = folder / name
            program.write_text(RECORDER.format(python=sys.executable))
            program.chmod(program.stat().st_mode | stat.S_IXUSR)

    def run(self, script: Path, *arguments: str, **variables: str) -> tuple[int, list[tuple[str, str, list[str]]]]:
        """Run a script; return its exit code, and program, folder and arguments of each call. It may write no file."""
        import json

        self.record.write_text("")
        path = {"PATH": f"{self.folder}:/usr/bin:/bin", "RECORD": str(self.record)}
        command = ["bash", str(script), *arguments]
        done = subprocess.run(command, cwd=self.start, env=path | variables, capture_output=True, text=True)
        assert not list(self.start.iterdir()), "what was to be a text was run"
        calls = [tuple(json.loads(line)) for line in self.record.read_text().splitlines()]
        return done.returncode, calls


@pytest.fixture(scope="module")
def recorder(tmp_path_factory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("programs"))


ONE = (Component(2, {"a": 4}, {"a": Launch(partition="fast")}, {"a": "cuda"}),)
TWO = (*ONE, Component(1, {"b": 2}, {"b": Launch(partition="slow", cores_per_rank=3)}))
IN_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}
IN_MIXED = IN_JOB | {
    "SLURM_JOB_NUM_NODES_HET_GROUP_0": "2",
    "SLURM_JOB_NUM_NODES_HET_GROUP_1": "1",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_0": "16(x2)",
    "SLURM_JOB_CPUS_PER_NODE_HET_GROUP_1": "8",
}


def is_path(text: str) -> bool:
    return "/" not in text and text not in (".", "..") and len(text.encode()) < 200


@settings(deadline=None, max_examples=40)
@given(name=TEXTS, run=TEXTS.filter(is_path), folder=TEXTS.filter(is_path))
def test_no_name_or_path_changes_what_a_batch_script_runs(recorder, tmp_path_factory, name, run, folder):
    base = tmp_path_factory.mktemp("job")
    folder, run = base / f"f{folder}", base / f"r{run}"
    folder.mkdir()
    start = Start(name, run, folder, TWO, ("--cluster", '"$run/launch/cluster.toml"'))
    text = batch_script(start, SlurmOptions())
    write_files(run, {"job.sbatch": text})
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert all(
        set(line) <= set("#SBATCH -=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_./%@:,0123456789")
        for line in head
    )
    code, calls = recorder.run(run / "job.sbatch", **IN_MIXED)
    job = f"{run}/launch/job.toml"
    rest = ["--run", str(run), "--cluster", f"{run}/launch/cluster.toml"]
    first = ["--het-group=0", "--nodes=2", "--ntasks-per-node=4", "--cpus-per-task=4", f"{run}/launch/rank-0.sh"]
    second = ["--het-group=1", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=3", f"{run}/launch/rank-1.sh"]
    common = ["--mpi=pmi2", "--kill-on-bad-exit=1", "--no-kill=off"]
    expected = [*common, *first, "train", job, *rest, ":", *second, "train", job, *rest]
    assert (code, calls) == (0, [("srun", str(folder), expected)])


@settings(deadline=None, max_examples=40)
@given(texts=st.lists(TEXTS, min_size=4, max_size=4), arguments=st.lists(TEXTS, max_size=3))
def test_no_text_of_a_cluster_file_changes_what_a_rank_runs(recorder, tmp_path_factory, texts, arguments):
    family, value, venv, module = texts
    base = tmp_path_factory.mktemp("rank")
    venv = base / f"v{venv.replace('/', '')}"
    (venv / "bin").mkdir(parents=True)
    program = venv / "bin" / "hpctrain"
    program.write_text((recorder.folder / "hpctrain").read_text().replace("sys.argv[1:]", SEEN))
    program.chmod(0o755)
    launch = Launch(environment={"MINE": value}, venv=str(venv), modules=(f"m{module}",))
    component = Component(1, {family: 2}, {family: launch})
    write_files(base, {"rank.sh": launch_files(JOB, None, None, (component,))["launch/rank-0.sh"]})
    code, calls = recorder.run(base / "rank.sh", *arguments)
    assert code == 0
    assert calls[0][0::2] == ("module", ["load", f"m{module}"])
    assert calls[1][2] == [family, value, "1", *arguments]
    assert not list(base.rglob("bad"))


SEEN = '[os.environ[name] for name in ("HPCTRAIN_FAMILY", "MINE", "OMP_NUM_THREADS")] + sys.argv[1:]'
JOB = load_job("tiny")


CONTAINED = Launch(
    container="nvcr.io/some/image:1",
    mounts=("/scratch", "/x:/y"),
    srun=("--cpu-bind=cores",),
    sbatch=("--mail-type=END", "--switches=1"),
    before="export SITE=1\nmkdir -p cache",
)


def test_pyxis_starts_ranks_in_an_image(recorder, tmp_path):
    """`sbatch` and `srun` of the cluster file are behind all others, so that they have the last word."""
    start = Start("n", tmp_path / "run", tmp_path, (Component(1, {"a": 2}, {"a": CONTAINED}, {"a": "cuda"}),))
    text = batch_script(start, SlurmOptions())
    assert [line for line in text.splitlines() if line.startswith("#SBATCH")][-2:] == [
        "#SBATCH --mail-type=END",
        "#SBATCH --switches=1",
    ]
    write_files(start.run, {"job.sbatch": text})
    _, [(_, _, arguments)] = recorder.run(start.run / "job.sbatch", **IN_JOB)
    mounts = ",".join(f"{path}:{path}" for path in (start.run, start.folder, "/scratch"))
    at = arguments.index(f"{start.run}/launch/rank-0.sh")
    assert arguments[at - 4 : at] == [
        "--cpu-bind=cores",
        "--container-image=nvcr.io/some/image:1",
        f"--container-mounts={mounts},/x:/y",
        f"--container-workdir={tmp_path}",
    ]
    with pytest.raises(LaunchError, match="srun starts such images, by pyxis; for mpirun give a file .sif"):
        mpirun_script(start, "mpich", has_hosts=False)
    with pytest.raises(LaunchError, match="pyxis takes no folder with , or :"):
        batch_script(replace(start, run=Path("/a,b")), SlurmOptions())


@pytest.mark.parametrize(("kind", "option"), [("cuda", ["--nv"]), ("rocm", ["--rocm"]), ("cpu", [])])
def test_apptainer_starts_ranks_in_a_file(recorder, tmp_path, kind, option):
    launch = CONTAINED.model_copy(update={"container": "/images/a b.sif", "before": "export OMP_PROC_BIND=true"})
    component = Component(1, {"a": 2}, {"a": launch}, {"a": kind})
    write_files(tmp_path, {"launch/rank-0.sh": launch_files(JOB, None, None, (component,))["launch/rank-0.sh"]})
    assert "--container" not in batch_script(Start("n", tmp_path, tmp_path, (component,)), SlurmOptions())
    code, [(program, folder, arguments)] = recorder.run(tmp_path / "launch/rank-0.sh", "train", "x y")
    binds = ["--pwd", folder, "--bind", str(tmp_path), "--bind", folder, "--bind", "/scratch", "--bind", "/x:/y"]
    assert (code, program) == (0, "apptainer")
    assert arguments == ["exec", *option, *binds, "/images/a b.sif", "hpctrain", "train", "x y"]


def test_what_stands_before_a_rank_is_run_by_its_shell(recorder, tmp_path):
    launch = Launch(before='export MINE="a b"\nexport HPCTRAIN_PROGRAM=x', venv=str(tmp_path))
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "hpctrain"
    program.write_text((recorder.folder / "hpctrain").read_text().replace("sys.argv[1:]", '[os.environ["MINE"]]'))
    program.chmod(0o755)
    component = Component(1, {"a": 2}, {"a": launch})
    write_files(tmp_path, {"launch/rank-0.sh": launch_files(JOB, None, None, (component,))["launch/rank-0.sh"]})
    assert recorder.run(tmp_path / "launch/rank-0.sh")[1] == [("hpctrain", str(recorder.start), ["a b"])]


@pytest.mark.parametrize("key", ["sbatch", "srun"])
@pytest.mark.parametrize("text", ["--mail-type END", "mail-type=END", "--a=b\n#SBATCH --c"])
def test_an_option_that_slurm_would_split_is_refused(key, text):
    with pytest.raises(ValidationError, match="no option of Slurm|cannot be in a batch script"):
        Launch(**{key: [text]})


@pytest.mark.parametrize("text", ["a b", "a\nb", "$(x)", "a'b", "", "a#b", 'a"b', "a;b"])
def test_words_for_slurm_that_it_would_split_are_refused(text):
    with pytest.raises(ValueError, match="partition"):
        Launch(partition=text)
    assert job_name(text) == job_name(job_name(text))


@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [
        (0, 0, False),
        (75, 9, True),
        (76, 0, True),
        (76, 3, False),
        (84, 0, True),
        (137, 2, True),
        (137, 3, False),
        (81, 0, False),
        (1, 0, False),
    ],
)
def test_a_job_is_requeued_where_another_start_can_help(recorder, tmp_path, code, restarts, requeued):
    write_files(tmp_path, {"job.sbatch": batch_script(Start("n", tmp_path, tmp_path, ONE), SlurmOptions(retries=3))})
    variables = IN_JOB | {"CODE": str(code), "SLURM_RESTART_COUNT": str(restarts), "HPCTRAIN_RESTARTS": "0"}
    result, calls = recorder.run(tmp_path / "job.sbatch", **variables)
    assert result == code
    assert [call[2] for call in calls if call[0] == "scontrol"] == ([["requeue", "7"]] if requeued else [])


SITE = """#!/bin/sh
case "$1" in hostnames | show) [ "$3" = nodes ] && printf 'n1\\nn2\\n'; exit ;; esac
echo "$*" >> "$RECORD"
case "$*" in *true) case "$*" in *n2*) exit 1 ;; esac; exit 0 ;; esac
exit 137
"""


def test_a_job_starts_its_ranks_again_on_the_nodes_that_answer(tmp_path):
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(SITE)
        (tmp_path / name).chmod(0o755)
    write_files(tmp_path, {"job.sbatch": batch_script(Start("n", tmp_path, tmp_path, ONE), SlurmOptions(retries=0))})
    variables = IN_JOB | {"SLURM_JOB_NODELIST": "nodes", "HPCTRAIN_RESTARTS": "1", "RECORD": str(tmp_path / "record")}
    environment = os.environ | variables | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", tmp_path / "job.sbatch"], env=environment, capture_output=True, text=True)
    assert done.returncode == 137 and "n2 does not answer: its ranks are left out" in done.stderr
    first, *asked, last = (tmp_path / "record").read_text().splitlines()
    assert len(asked) == 2 and all(line.endswith(" true") for line in asked)
    assert "--nodes=2 --ntasks-per-node=4" in first and "--nodes=1 --nodelist=n1 --ntasks-per-node=4" in last


def test_a_chain_ends_with_the_job_that_ended_for_good(recorder, tmp_path):
    text = batch_script(Start("n", tmp_path, tmp_path, ONE), SlurmOptions(requeues=False))
    script = tmp_path / "job.sbatch"
    files = {"job.sbatch": text, "chain.sh": chain_script(script, tmp_path, 3)}
    write_files(tmp_path, files)
    assert "#SBATCH --no-requeue" in files["job.sbatch"]
    code, calls = recorder.run(script, **IN_JOB, CODE="75")
    assert code == 75 and [name for name, *_ in calls] == ["srun"]
    code, calls = recorder.run(script, **IN_JOB, CODE="81")
    assert code == 81 and [name for name, *_ in calls] == ["srun"]
    code, calls = recorder.run(script, **IN_JOB)
    assert (code, calls) == (0, [])
    code, calls = recorder.run(tmp_path / "chain.sh")
    assert code == 0 and [name for name, *_ in calls] == ["sbatch"] * 3
    assert "--kill-on-invalid-dep=yes" in calls[1][2]
    code, calls = recorder.run(script, **IN_JOB)
    assert [name for name, *_ in calls] == ["srun"]


@pytest.mark.parametrize("name", ready_clusters())
def test_every_ready_cluster_has_a_script(name):
    components = components_of(load_cluster(ready_clusters()[name]), name)
    text = batch_script(Start(name, Path("/run"), Path("/"), components), SlurmOptions())
    assert text.count("hetjob") == len(components) - 1
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    for script in launch_files(JOB, None, None, components).values():
        if script.startswith("#!"):
            assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).returncode == 0


CLUSTER = """
[families.a]
kind = "cuda"
model = "A100-80"
launch = {partition = "x", min_nodes = 1, environment = {KEY = "va lue"}}
[families.b]
kind = "cuda"
model = "V100-32"
launch = {partition = "x", min_nodes = 1, gres = "gpu:v100"}
[fabrics.ib]
network = "HDR"
[[nodes]]
devices = {a = 2, b = 1}
count = 2
origin = "assumed"
link_latency_seconds = 1e-6
link_bytes_per_second = 1e10
nics = [{fabric = "ib", send_bytes_per_second = 1e10, receive_bytes_per_second = 1e10, origin = "assumed"}]
[[nodes]]
devices = {a = 2, b = 1}
origin = "assumed"
link_latency_seconds = 2e-6
link_bytes_per_second = 1e10
nics = [{fabric = "ib", send_bytes_per_second = 1e9, receive_bytes_per_second = 1e9, origin = "assumed"}]
"""


def test_families_that_share_a_node_share_its_component(recorder, tmp_path):
    (component,) = components_of(parse_cluster(CLUSTER, "c.toml"), "c.toml")
    assert (component.num_nodes, component.min_nodes, component.ranks_per_node) == (3, 1, 3)
    assert component.gres == {"gpu": 2, "gpu:v100": 1}
    text = batch_script(Start("n", tmp_path, tmp_path, (component,)), SlurmOptions())
    assert "#SBATCH --nodes=1-3" in text and "#SBATCH --gres=gpu:2,gpu:v100:1" in text
    script = launch_files(JOB, None, None, (component,))["launch/rank-0.sh"]
    script = script.replace('exec "$HPCTRAIN_PROGRAM"', f"exec {shlex.quote(str(recorder.folder / 'hpctrain'))}")
    (recorder.folder / "hpctrain").write_text(
        (recorder.folder / "hpctrain")
        .read_text()
        .replace("sys.argv[1:]]", '[os.environ[name] for name in ("HPCTRAIN_FAMILY", "HPCTRAIN_DEVICE")]]')
    )
    write_files(tmp_path, {"rank.sh": script})
    seen = [recorder.run(tmp_path / "rank.sh", SLURM_LOCALID=str(rank)) for rank in range(4)]
    assert [calls[0][2] for code, calls in seen[:3]] == [["a", "cuda"], ["a", "cuda"], ["b", "cuda"]]
    assert seen[3] == (82, [])
    number = {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}  # of mpirun in a job's script
    assert recorder.run(tmp_path / "rank.sh", **number)[1][0][2] == ["b", "cuda"]


@pytest.mark.parametrize("has_variables", [True, False])
def test_files_that_may_have_variables_are_for_the_owner_alone(tmp_path, has_variables):
    cluster = parse_cluster(CLUSTER, "c.toml")
    if not has_variables:
        cluster = cluster.without_environment()
        assert cluster.families["a"].launch == Launch(partition="x", min_nodes=1)
    components = components_of(cluster, "c.toml")
    for _ in range(2):  # written again over files of an older version too
        write_files(tmp_path, launch_files(JOB, None, cluster, components))
        for name in ("rank-0.sh", "cluster.toml", "job.toml"):
            path = tmp_path / "launch" / name
            may_have_variables = name != "job.toml"
            assert ("va lue" in path.read_text()) == (has_variables and may_have_variables)
            assert bool(path.stat().st_mode & 0o077) != may_have_variables
            path.chmod(0o755)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('gres = "gpu:v100"', "", None),
        ('{partition = "x", min_nodes = 1, gres', '{partition = "y", min_nodes = 1, gres', "launch.partition is 'x'"),
        ("min_nodes = 1", "min_nodes = 9", "launch.min_nodes 9 is more than the 3 nodes"),
    ],
)
def test_what_no_batch_system_could_start_is_refused(old, new, message):
    cluster = parse_cluster(CLUSTER.replace(old, new).replace("min_nodes = 1, }", "min_nodes = 1}"), "c.toml")
    if message is None:
        components_of(cluster, "c.toml")
        return
    with pytest.raises(LaunchError, match=message):
        components_of(cluster, "c.toml")


def test_mistakes_in_launch_are_named():
    with pytest.raises(TopologyError, match=r"families.a.launch.partition: 'a b' cannot be in a batch script"):
        parse_cluster(CLUSTER.replace('partition = "x", min_nodes = 1, env', 'partition = "a b", env'), "c.toml")
    with pytest.raises(TopologyError, match="families.a.launch.partitio: unknown key; did you mean 'partition'"):
        parse_cluster(CLUSTER.replace('partition = "x", min_nodes = 1, env', 'partitio = "x", env'), "c.toml")
    with pytest.raises(TopologyError, match="'K-' is no name of an environment variable"):
        parse_cluster(CLUSTER.replace("KEY", '"K-"'), "c.toml")


@settings(deadline=None, max_examples=20)
@given(run=TEXTS.filter(is_path), extra=st.lists(TEXTS, max_size=2))
def test_no_path_changes_what_a_start_with_mpirun_runs(recorder, tmp_path_factory, run, extra):
    base = tmp_path_factory.mktemp("mpi")
    run = base / f"r{run}"
    text = mpirun_script(Start("n", run, base, TWO, ("--cluster", '"$run/c.toml"')), "openmpi", True)
    own = Path(sys.executable).with_name("mpirun")
    text = text.replace(f"  {shlex.quote(str(own))} ", "  mpirun ")
    write_files(run, {"start.sh": text, "launch/hosts": ""})
    code, calls = recorder.run(run / "start.sh", *extra)
    job = [f"{run}/launch/job.toml", "--run", str(run), "--cluster", f"{run}/c.toml", *extra]
    first = ["-n", "8", f"{run}/launch/rank-0.sh", "train", *job]
    second = ["-n", "2", f"{run}/launch/rank-1.sh", "train", *job]
    expected = ["--hostfile", f"{run}/launch/hosts", *first, ":", *second]
    assert (code, calls) == (0, [("mpirun", str(base), expected)])


@pytest.mark.parametrize(("code", "starts"), [(0, 1), (75, 1), (81, 1), (84, 3), (76, 3)])
def test_a_start_with_mpirun_starts_again_where_another_start_can_help(recorder, tmp_path, code, starts):
    result, calls = recorder.run(write_start(tmp_path, "mpirun"), CODE=str(code), HPCTRAIN_RESTARTS="2")
    assert (result, len(calls)) == (code, starts)


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (81, 1), (82, 1), (126, 1), (127, 1), (137, 3), (9, 3)])
def test_a_start_without_a_word_of_its_ranks_is_tried_again_where_they_may_have_been_killed(
    recorder, tmp_path, code, starts
):
    script = write_start(tmp_path, "mpirun")
    result, calls = recorder.run(script, CODE=str(code), HPCTRAIN_RESTARTS="2", SILENT="1")
    assert (result, len(calls)) == (code, starts)


@pytest.mark.parametrize("text", ["many", "-1", "2.5", "1234567890"])
def test_restarts_that_are_no_number_are_refused_before_a_rank_starts(recorder, tmp_path, text):
    result, calls = recorder.run(write_start(tmp_path, "mpirun"), CODE="84", HPCTRAIN_RESTARTS=text)
    assert (result, calls) == (82, [])


COUNTING = """import os, signal, sys, time
count = 0
def note(*_):
    global count
    count += 1
signal.signal(signal.SIGINT, note)
print("ready", flush=True)
until = time.monotonic() + 20
while not count and time.monotonic() < until:
    time.sleep(0.01)
time.sleep(0.5)
print(count, flush=True)
sys.exit(130)
"""


def test_ctrl_c_reaches_the_launcher_once_and_nothing_is_started_again(tmp_path):
    """A terminal sends it to all processes of its foreground. MPICH's launcher kills the ranks at the second one."""
    (tmp_path / "counting.py").write_text(COUNTING)
    script = write_start(tmp_path, f"{sys.executable} {tmp_path / 'counting.py'}")
    given = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    # The tests may have been started in the background, which ignores it.
    given["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(["bash", script], **given) as started:
        assert started.stdout and started.stdout.readline() == "ready\n"
        os.killpg(started.pid, signal.SIGINT)
        assert started.stdout.read() == "1\n"
    assert started.returncode == 130


ANSWERING = """#!/bin/sh
echo "$*" >> "$RECORD"
if [ "$5" = true ]; then ! grep -q "$GONE" "$2"; exit; fi
cat "$2" >> "$RECORD"
exit 137
"""


@pytest.mark.parametrize(
    ("gone", "left", "ranks"),
    [
        ("n2", "n1:4 n3:2", ["-n 4 RUN/launch/rank-0.sh", "-n 2 RUN/launch/rank-1.sh"]),
        ("n3", "n1:4 n2:4", ["-n 8 RUN/launch/rank-0.sh"]),
        ("n", "", []),
    ],
)
def test_ranks_of_hosts_that_do_not_answer_are_left_out(tmp_path, gone, left, ranks):
    launcher, record, start = tmp_path / "mpirun", tmp_path / "record", Start("n", tmp_path, tmp_path, TWO)
    launcher.write_text(ANSWERING)
    launcher.chmod(0o755)
    write_start(tmp_path, str(launcher), start, ["n1", "n2", "n3"])
    environment = os.environ | {"RECORD": str(record), "GONE": gone, "HPCTRAIN_RESTARTS": "1"}
    done = subprocess.run(["bash", tmp_path / "start.sh"], env=environment, capture_output=True, text=True)
    name = gone if gone != "n" else "n1"
    assert done.returncode == 137 and f"hpctrain: {name} does not answer: its ranks are left out" in done.stderr
    lines = record.read_text().splitlines()
    assert sum(line.endswith("-n 1 true") for line in lines) == 3
    starts = [line for line in lines if line.startswith(f"-f {tmp_path}/launch/hosts-left")]
    assert len(starts) == bool(ranks)
    for start_line in starts:
        words = [part.partition(" train")[0] for part in start_line.partition("hosts-left ")[2].split(" : ")]
        assert words == [rank.replace("RUN", str(tmp_path)) for rank in ranks]
        assert lines[lines.index(start_line) + 1 :] == left.split()


LATE = """#!/bin/sh
set -C
if mkdir "$0-first" 2> /dev/null; then (sleep 0.3; echo 84 > "$HPCTRAIN_EXIT_FILE") & exit 137; fi
sleep 0.6
echo 0 > "$HPCTRAIN_EXIT_FILE"
"""


def test_the_code_of_a_start_is_not_that_of_ranks_of_the_start_before(tmp_path):
    (tmp_path / "launcher").write_text(LATE)
    script = write_start(tmp_path, f"sh {tmp_path / 'launcher'}")
    done = subprocess.run(["bash", script], env=os.environ | {"HPCTRAIN_RESTARTS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_watches_a_launcher_ends_with_a_script_that_is_killed(tmp_path):
    script = write_start(tmp_path, "sh -c 'echo ready; sleep 0.5'")
    with subprocess.Popen(["bash", script], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout and started.stdout.readline() == "ready\n"
        started.kill()
        started.wait()
        assert started.communicate(timeout=10) == ("", None)  # all that could write have ended


ASKED = """#!/bin/sh
case " $* " in *" true ") ls "${2%/*}" | grep -c host- >> "$0-asked"; sleep 0.5; exit ;; esac
exit 137
"""


def test_of_many_hosts_a_few_are_asked_at_once(tmp_path):
    start = Start("n", tmp_path, tmp_path, (Component(40, {"a": 1}, {"a": Launch()}),))
    launcher = tmp_path / "mpirun"
    launcher.write_text(ASKED)
    launcher.chmod(0o755)
    script = write_start(tmp_path, str(launcher), start, [f"n{i}" for i in range(40)])
    done = subprocess.run(["bash", script], env=os.environ | {"HPCTRAIN_RESTARTS": "1"}, capture_output=True, text=True)
    assert done.returncode == 137 and "does not answer" not in done.stderr, done.stderr
    asked = [int(line) for line in (tmp_path / "mpirun-asked").read_text().split()]
    assert len(asked) == 40 and max(asked) <= ASKED_HOSTS + 1  # and the file of those that are left
    assert (tmp_path / "launch/hosts-left").read_text() == (tmp_path / "launch/hosts").read_text()


def write_start(folder: Path, launcher: str, start: Start | None = None, hosts: Sequence[str] = ()) -> Path:
    start = start or Start("n", folder, folder, ONE)
    text = mpirun_script(start, "mpich", bool(hosts))
    text = text.replace(f" {shlex.quote(str(Path(sys.executable).with_name('mpirun')))} ", f" {launcher} ")
    write_files(folder, {"start.sh": text, "launch/hosts": host_lines(start, hosts, "mpich") if hosts else ""})
    return folder / "start.sh"


def test_success_is_what_the_run_wrote_and_not_the_code_of_the_launcher(recorder, tmp_path):
    """A launcher may return 0 where a host was lost."""
    assert recorder.run(write_start(tmp_path, "true"), HPCTRAIN_RESTARTS="1")[0] == 84


def test_hosts_are_listed_with_their_ranks():
    start = Start("n", Path("/run"), Path("/"), TWO)
    assert host_lines(start, ["n1", "n2", "n3"], "mpich") == "n1:4\nn2:4\nn3:2\n"
    assert host_lines(start, ["n1", "n2", "n3"], "openmpi") == "n1 slots=4\nn2 slots=4\nn3 slots=2\n"
    with pytest.raises(LaunchError, match="2 hosts for 3 nodes"):
        host_lines(start, ["n1", "n2"], "mpich")
    with pytest.raises(LaunchError, match="'n1 -x' is no name of a host"):
        host_lines(start, ["n1 -x", "n2", "n3"], "mpich")
    addresses = ["2001:db8::1", "10.0.0.2", "n3"]
    assert host_lines(start, addresses, "openmpi").startswith("2001:db8::1 slots=4\n10.0.0.2 slots=4\n")
    for implementation in ("mpich", "intel"):
        with pytest.raises(LaunchError, match=f"2001:db8::1 is an IPv6 address, and mpirun of {implementation}"):
            host_lines(start, addresses, implementation)


def test_a_file_of_hosts_may_have_comments_and_empty_lines(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# my nodes\nn1\n\n  n2  # the second\r\n")
    assert _read_hosts(path) == ["n1", "n2"]


def test_libraries_are_known_by_what_they_say():
    assert kind_of("MPICH Version:      5.0.2") == "mpich"
    assert kind_of("Open MPI v5.0.11, package: Open MPI") == "openmpi"
    assert kind_of("Intel(R) MPI Library 2021.13 for Linux* OS") == "intel"
    assert kind_of("MPI VERSION    : CRAY MPICH version 8.1.29") == "cray"


def test_a_script_can_be_written_where_its_texts_are_no_utf8(tmp_path):
    run = tmp_path / os.fsdecode(b"r\xff")
    write_files(run, {"job.sbatch": batch_script(Start("n", run, tmp_path, ONE), SlurmOptions())})
    assert os.fsencode(run) in (run / "job.sbatch").read_bytes()
