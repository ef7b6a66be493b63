"""One command for a machine with one GPU: what is right, and how fast, section by section.

    python -m benchmarks.gpu --folder gpu-results             # what a first GPU must show, at most 9 minutes
    python -m benchmarks.gpu --folder gpu-results --part 2    # or what else there is: parts 2 and 3

Each section is a process of its own with a time limit, and prints one JSON line as it ends, which is also appended to
`results.jsonl` of the folder. What is `done` there is not repeated: start the same command again after an interruption.
A section that fails or takes too long leaves the figures that it had by then (`result_so_far`).
A machine without a GPU runs to the end too, on small models; `could_not` of each line says what that leaves out.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = "results.jsonl"
PARTIAL = "partial.json"
"""What the section that runs has so far, for the case that it takes too long."""
PARTIAL_VARIABLE = "HPCTRAIN_BENCHMARK_PARTIAL"
"""The path of a file like it, for a process that a section starts."""
STARTER = "HPCTRAIN_BENCHMARK_STARTER"
"""A variable with the words that start a module, in place of `python -m`; the tests have a quicker start."""


def module(name: str) -> list[str]:
    """Return the words that start a module."""
    return [*(shlex.split(os.environ.get(STARTER, "")) or [sys.executable, "-m"]), name]


HPCTRAIN = module("hpctrain")
TRAINING = module("benchmarks.training")
INSIDE = module("benchmarks.gpu_inside")
RANKS = module("benchmarks.gpu_ranks")
LOST = "hpctrain-lost"
"""Before the time at which a rank of `benchmarks.gpu_ranks` was killed."""
PARTS = (1, 2, 3)
NO_GPU = "no GPU that torch sees: run on the CPU, with a small model"
SMALL = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 128, "vocab_size": 512}


class SectionError(Exception):
    """A command of a section failed; the text says which, and its last words."""


class Setting(NamedTuple):
    """What a section runs on."""

    folder: Path
    has_gpu: bool
    short: bool

    def so_far(self, result: dict) -> None:
        """Keep figures of a section that continues."""
        (self.folder / PARTIAL).write_text(json.dumps(result))

    def run_inside(self, *words: str) -> dict:
        """Run a command of `benchmarks.gpu_inside`, which keeps its own figures so far. Raises SectionError."""
        return run_json([*INSIDE, *words], self.folder, **{PARTIAL_VARIABLE: str(self.folder / PARTIAL)})

    @property
    def is_small(self) -> bool:
        return self.short or not self.has_gpu

    @property
    def family(self) -> list[str]:
        """Return the variables of a rank with the GPU; of one that stands for it where there is none."""
        return ["HPCTRAIN_DEVICE=cuda"] if self.has_gpu else ["HPCTRAIN_DEVICE=cpu", "HPCTRAIN_FAMILY=other"]


HOST = ["HPCTRAIN_DEVICE=cpu"]


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.device_count() > 0


def mpirun() -> str | None:
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if beside.exists() else shutil.which("mpirun")


def launch(*parts: tuple[int, Sequence[str], Sequence[str]]) -> list[str]:
    """Return the command line of ranks: of each part their number, their variables, and their command."""
    starter = mpirun()
    if starter is None:
        raise SectionError("no mpirun beside this Python or on the PATH; pip install mpich")
    words: list[str] = [starter]
    for number, variables, command in parts:
        words += [":"] if len(words) > 1 else []
        words += ["-n", str(number), "env", *variables, *command]
    return words


def module_path() -> str:
    """Return where Python looks for modules: in this checkout, then where PYTHONPATH says."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def run(words: Sequence[str], cwd: Path, accepted: Sequence[int] = (0,), **variables: str) -> str:
    """Return what a command printed. Raises SectionError."""
    return _finished(words, cwd, accepted, variables).stdout


def run_json(words: Sequence[str], cwd: Path, accepted: Sequence[int] = (0,), **variables: str) -> dict:
    """Return the last line of JSON that a command printed. Raises SectionError."""
    done = _finished(words, cwd, accepted, variables)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise _failure(words, done)
    return json.loads(lines[-1])


def _finished(words: Sequence[str], cwd: Path, accepted: Sequence[int], variables: dict) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": module_path()} | variables
    done = subprocess.run(list(words), cwd=cwd, capture_output=True, text=True, env=environment)
    if done.returncode not in accepted or not done.stdout.strip():
        raise _failure(words, done)
    return done


def _failure(words: Sequence[str], done: subprocess.CompletedProcess) -> SectionError:
    last = "; ".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-3:])
    return SectionError(f"{' '.join(words[-8:])}: exit code {done.returncode}: {last[-600:]}")


def write_job(setting: Setting, name: str, preset: str = "llama-1b", **train: object) -> Path:
    """Write a job of a preset, or a small one, with generated tokens; return its file. Of llama-8b it has four blocks
    and the vocabulary of llama-1b, so that blocks are what takes the time."""
    from hpctrain.jobs.common import generate_tokens

    tokens = setting.folder / ("small.bin" if setting.is_small or name == "parity" else "tokens.bin")
    small = setting.is_small or name == "parity"
    if not tokens.exists():
        generate_tokens(tokens, 512 if small else 32000, 60_000 if small else 2_000_000)
    model = "\n".join(f"{key} = {value}" for key, value in SMALL.items()) if small else f'preset = "{preset}"'
    model += "\nnum_layers = 4" if not small and preset == "llama-8b" else ""
    model += '\narchitecture = "llama"' if small else ""
    length = 64 if small else 8192 if preset == "llama-8b" else 2048
    settings = {"steps": 6, "global_batch": 8, "learning_rate": 1e-3, "warmup_steps": 2} | train
    keys = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    path = setting.folder / f"{name}.toml"
    path.write_text(f"""[model]
{model}
[data]
tokens = "{tokens}"
validation_fraction = 0.0
sequence_length = {length}
[train]
{keys}
""")
    return path


def versions(setting: Setting) -> dict:
    doctor = run_json([*HPCTRAIN, "doctor", "--json", "--folder", str(setting.folder)], setting.folder, range(256))
    result = {"doctor": {key: doctor.get(key) for key in ("versions", "mpi", "ranks", "exit_code")}}
    result["findings"] = [each for each in doctor["findings"] if each["verdict"] != "ok"]
    if setting.has_gpu and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
        result["nvidia_smi"] = run(query, setting.folder).strip()
    return result


def operators(setting: Setting) -> dict:
    """Every operator against float64, forward and backward, twice."""
    job = write_job(setting, "operators")
    few = ["--tokens", "32"] if setting.short else []
    layers = [] if setting.is_small else ["--set", "model.num_layers=1"]
    result: dict = {"aligned": True, "worst": {}, "beyond": [], "not_the_same_bits_twice": []}
    for dtype in ("fp32", "bf16", "fp16"):
        words = [*HPCTRAIN, "align", str(job), "--dtype", dtype, *few, *layers, "--json"]
        summary = run_json(words, setting.folder, (0, 1))
        result["aligned"] = result["aligned"] and summary["aligned"]
        for entry in summary["operators"]:
            share = entry["error"] / entry["bound"] if entry["error"] is not None and entry["bound"] else 0.0
            if share >= result["worst"].get(dtype, {"share_of_bound": -1.0})["share_of_bound"]:
                worst = {"share_of_bound": share} | {key: entry[key] for key in ("operator", "result", "error")}
                result["worst"][dtype] = worst
            result["beyond"] += [entry] if entry["beyond"] else []
            if not entry["repeats"]:
                result["not_the_same_bits_twice"].append(f"{entry['operator']} {entry['result']} {dtype}")
        setting.so_far(result)
    return result


def routes(setting: Setting) -> dict:
    """What two ranks that share the device get by each route."""
    result: dict = {}
    asked: dict[str, list[str]] = {
        "auto": [],
        "copies": ["HPCTRAIN_DIRECT=0"],
        "staged": ["HPCTRAIN_DIRECT=0", "HPCTRAIN_PEER=0"],
        "direct": ["HPCTRAIN_DIRECT=1"],
    }
    for name, variables in asked.items():
        shared = ["HPCTRAIN_SHARE_DEVICES=1", *(["HPCTRAIN_DEVICE=cuda"] if setting.has_gpu else HOST), *variables]
        words = launch((2, shared, [*HPCTRAIN, "doctor", "--json", "--folder", str(setting.folder)]))
        try:
            doctor = run_json(["timeout", "--foreground", "-k", "5", "25", *words], setting.folder, range(124))
            result[name] = {key: doctor.get(key) for key in ("routes", "links", "exit_code")}
        except SectionError as error:
            result[name] = {"failed": str(error)}
        setting.so_far(result)
        if not setting.has_gpu:
            break  # all are the same without devices
    return result


def sharing(setting: Setting) -> list[str]:
    """Return the variables of ranks that share the GPU and talk by NCCL, as if each were on a host of its own."""
    return ["HPCTRAIN_SHARE_DEVICES=1", "HPCTRAIN_NATIVE=1", "HPCTRAIN_DIRECT=0", *setting.family]


def ranks(setting: Setting) -> dict:
    """Collectives of two and four ranks, by the library where there is a GPU."""
    result: dict = {}
    for number in (2, 4):
        words = [*RANKS, "collectives", "--mebibytes", "1" if setting.is_small else "16"]
        partial = {PARTIAL_VARIABLE: str(setting.folder / PARTIAL)}
        result[number] = run_json(launch((number, sharing(setting), words)), setting.folder, **partial)
        setting.so_far(result)
    return result


LAYOUTS = {
    "y 2": ("plan.tensor={x=1, y=2, z=1}",),
    "z 2": ("plan.tensor={x=1, y=1, z=2}",),
    "data 2, ZeRO 2": ("plan.data=2", "plan.zero=2"),
    "data 2, ZeRO 2, no overlap": ("plan.data=2", "plan.zero=2", "overlap.data=false"),
    "pipeline 2, data 2": ("plan.pipeline=2", "plan.data=2"),
}
"""Plans of two ranks, or four, by what the result calls them."""


def shared(setting: Setting) -> dict:
    """Training of ranks that share the GPU, by several plans: how far losses are from those of one rank."""
    job = write_job(setting, "parity", dtype="fp32", steps=4)
    quick = ("kernels.fused=false", "kernels.attention=torch")  # nothing to compile: it is asked who computes what
    command = [*TRAINING, str(job), "--steps", "2", "--json", *(word for key in quick for word in ("--set", key))]
    os.environ["HPCTRAIN_DIRECT"] = "0"
    one = run_json(launch((1, setting.family, command)), setting.folder)
    result: dict = {"loss of one rank": one["loss"], "start_seconds": one["start_seconds"]}
    setting.so_far(result)
    for name, keys in LAYOUTS.items():
        number = 4 if "pipeline" in name else 2
        words = [word for key in keys for word in ("--set", key)]
        try:
            given = launch((number, sharing(setting), [*command, *words]))
            done = run_json(["timeout", "--foreground", "-k", "2", "60", *given], setting.folder)
            apart = abs(done["loss"] / one["loss"] - 1)
            result[name] = {"apart": apart, **{key: done[key] for key in ("step_seconds", "start_seconds")}}
        except SectionError as error:
            result[name] = {"failed": str(error)}
        setting.so_far(result)
    return result


def killed(setting: Setting) -> dict:
    """How long the other rank takes to notice that one was killed in the middle of a sum, and what it says."""
    result: dict = {}
    for cut in ("even", "uneven"):
        words = launch((2, sharing(setting), [*RANKS, "lost", cut]))
        words.insert(1, "-disable-auto-cleanup")  # else the launcher ends the others at once
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": module_path(), "PYTHONUNBUFFERED": "1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(
            ["timeout", "--foreground", "-k", "2", "25", *words], cwd=setting.folder, env=environment, **pipes
        )
        said = [line for line in done.stdout.splitlines() if line.startswith("hpctrain: ")]
        (setting.folder / f"killed-{cut}.txt").write_text(done.stdout)
        killed_at = next((float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith(LOST)), None)
        result[cut] = {
            "exit_code": done.returncode,
            "seconds": time.time() - killed_at if killed_at else None,
            "said": said[:2] or done.stdout[-600:],
        }
        setting.so_far(result)
    return result


def attention(setting: Setting) -> dict:
    """Attention by kernel and order of sums."""
    return setting.run_inside("attention", *(["--small"] if setting.is_small else []))


def parity(setting: Setting) -> dict:
    """One job on the CPU, on the GPU, and on both in a pipeline; the last one again, and interrupted."""
    job = write_job(setting, "parity", dtype="fp32", steps=6)
    train = [*HPCTRAIN, "train", str(job), "--set", "checkpoint.every=3"]
    both = ["--set", "plan.pipeline=2"]

    def started(name: str, *more: str, mixed: bool = True) -> list[str]:
        command = [*train, "--run", str(setting.folder / name), *more]
        if not mixed:
            return command
        return launch((1, HOST, [*command, *both]), (1, setting.family, [*command, *both]))

    def compared(one: str, other: str, *how: str) -> dict:
        words = [*HPCTRAIN, "compare", str(setting.folder / one), str(setting.folder / other), *how, "--json"]
        return run_json(words, setting.folder, (0, 1))

    os.environ["HPCTRAIN_DIRECT"] = "0"  # which saves the probe at each start
    for name in ("cpu", "gpu", "mixed", "again", "resumed"):
        shutil.rmtree(setting.folder / name, ignore_errors=True)
    result: dict = {}

    def note(name: str, *of: str) -> None:
        result[name] = compared(*of)
        setting.so_far(result)

    run(["env", *HOST, *started("cpu", mixed=False)], setting.folder)
    run(["env", *setting.family, *started("gpu", mixed=False)], setting.folder)
    note("gpu_to_cpu", "cpu", "gpu")
    run(started("mixed"), setting.folder)
    note("mixed_to_cpu", "cpu", "mixed")
    run(started("again"), setting.folder)
    note("repeated", "mixed", "again", "--exact")
    run(started("resumed", "--stop-after", "3"), setting.folder)
    run(started("resumed"), setting.folder)
    note("resumed", "mixed", "resumed", "--exact")
    return result


CHOICES = {
    "hpctrain": (),
    "torch's attention": ("kernels.attention=torch",),
    "any order": ("kernels.deterministic=false",),
    "plain": None,
}
"""Keys of a job, by what the result calls them; plain is plain PyTorch, which adds in any order."""


def llama_1b(setting: Setting) -> dict:
    """Tokens/s of llama-1b, and the share of the measured peak and of the data sheet; plain PyTorch in the same run."""
    return _compared(setting, "llama-1b", 8)


def llama_8b(setting: Setting) -> dict:
    """The same of 4 blocks of llama-8b with rows of 8,192 positions."""
    return _compared(setting, "llama-8b", 2)


def rows(setting: Setting) -> dict:
    """Tokens/s of llama-1b by microbatch."""
    sizes = [1, 2] if setting.is_small else [4, 16, 32]
    by_rows = {size: _compared(setting, "llama-1b", size, ("hpctrain",))["hpctrain"] for size in sizes}
    return {"tokens_per_second": {size: each["tokens_per_second"] for size, each in by_rows.items()}}


KEPT = ("tokens_per_second", "kernels", "losses", "start_seconds", "first_step_seconds")


def _compared(setting: Setting, preset: str, size: int, sides: Sequence[str] = tuple(CHOICES)) -> dict:
    """Time training steps of two microbatches by `CHOICES`."""
    size = min(size, 2) if setting.is_small else size
    steps, dtype = "1" if setting.short else "4", "bf16" if setting.has_gpu else "fp32"
    job = write_job(setting, preset, preset=preset, global_batch=2 * size, dtype=dtype)
    result: dict = run_json([*INSIDE, "peak", str(job)], setting.folder)
    for side in sides:
        keys = CHOICES[side]
        if keys is None:
            command = [*INSIDE, "plain", str(job), "--microbatch", str(size), "--steps", steps]
        else:
            sets = [word for key in (f"plan.microbatch={size}", *keys) for word in ("--set", key)]
            command = [*TRAINING, str(job), *sets, "--steps", steps, "--json"]
        try:
            done = run_json(command, setting.folder)
            entry = {key: done[key] for key in KEPT if key in done}
            for peak, name in (("peak", "of_measured_peak"), ("data_sheet", "of_data_sheet")):
                if speed := result.get(f"{peak}_flops_per_second"):
                    entry[name] = entry["tokens_per_second"] * result["flops_per_token"] / speed
        except SectionError as error:
            entry = {"failed": str(error)}
        result[side] = entry
        setting.so_far(result)
    return result


def kernels(setting: Setting) -> dict:
    rows = 2 if setting.is_small else 8
    job = write_job(setting, "kernels", global_batch=2 * rows, dtype="bf16" if setting.has_gpu else "fp32")
    result = setting.run_inside("kernels", str(job), "--microbatch", str(rows))
    setting.so_far(result)
    return result | {"graph": setting.run_inside("graph", str(job))}


def fused(setting: Setting) -> dict:
    job = write_job(setting, "fused", dtype="bf16" if setting.has_gpu else "fp32")
    return setting.run_inside("fused", str(job))


def settings(setting: Setting) -> dict:
    job = write_job(setting, "settings", global_batch=8, dtype="bf16" if setting.has_gpu else "fp32")
    return setting.run_inside("settings", str(job))


def prediction(setting: Setting) -> dict:
    """A probe of this machine, a profile of the job, and its predicted step beside a measured one."""
    job = write_job(setting, "predicted", global_batch=8, dtype="bf16" if setting.has_gpu else "fp32")
    cluster, plan = setting.folder / "cluster.toml", setting.folder / "plan.toml"
    seconds = ("2", "4") if setting.short else ("15", "40")
    run([*HPCTRAIN, "probe", "--out", str(cluster), "--force", "--seconds", seconds[0]], setting.folder)
    profile = [*HPCTRAIN, "probe", "--job", str(job), "--cluster", str(cluster), "--refresh", "--seconds", seconds[1]]
    run(profile, setting.folder)
    run([*HPCTRAIN, "plan", "search", str(job), "--cluster", str(cluster), "--out", str(plan)], setting.folder)
    words = [*HPCTRAIN, "predict", str(job), "--cluster", str(cluster), "--plan", str(plan), "--json"]
    predicted = run_json(words, setting.folder)
    setting.so_far({"predicted_seconds": predicted["step_seconds"]})
    words = [*TRAINING, str(job), "--set", f"plan.file={plan}", "--json"]
    measured = sorted(run_json(words, setting.folder)["step_seconds"])
    middle = measured[len(measured) // 2]
    return {
        "predicted_seconds": predicted["step_seconds"],
        "interval_seconds": predicted["interval_seconds"],
        "measured_seconds": measured,
        "predicted_to_measured": predicted["step_seconds"] / middle,
        "assumed_inputs": predicted["assumed_inputs"],
    }


def families(setting: Setting) -> dict:
    """CPU ranks and a GPU rank as two families, and each alone: the fraction of the sum."""
    job = write_job(setting, "parity", dtype="fp32", steps=6, global_batch=16)
    command = [*TRAINING, str(job), "--steps", "2" if setting.short else "5", "--json"]
    hosts = (1, HOST, command)
    os.environ["HPCTRAIN_DIRECT"] = "0"
    speeds = {
        "cpu": run_json(launch(hosts), setting.folder)["tokens_per_second"],
        "gpu": run_json(launch((1, setting.family, command)), setting.folder)["tokens_per_second"],
    }
    setting.so_far(speeds)
    both = run_json(launch(hosts, (1, setting.family, command)), setting.folder)
    return speeds | {
        "both": both["tokens_per_second"],
        "plan": both["plan"],
        "fraction_of_the_sum": both["tokens_per_second"] / sum(speeds.values()),
    }


def experts(setting: Setting) -> dict:
    """One layer's experts of Qwen 3 30B-A3B, for 16,384 tokens, against torch's grouped products alone."""
    return setting.run_inside("experts", *(["--small"] if setting.is_small else []))


def checkpoints(setting: Setting) -> dict:
    job = write_job(setting, "checkpoints", global_batch=2, dtype="bf16" if setting.has_gpu else "fp32")
    return setting.run_inside("checkpoints", str(job))


class Section(NamedTuple):
    """A part of the benchmark with a time limit."""

    part: int
    limit_seconds: int
    work: Callable[[Setting], dict]
    without_gpu: str
    """What a machine without a GPU cannot do of it."""


SECTIONS = {
    "versions": Section(1, 25, versions, "driver, CuPy and NCCL are not looked at"),
    "ranks": Section(1, 50, ranks, "no library of collectives: ranks share memory of the host"),
    "shared": Section(1, 95, shared, "no library of collectives: ranks share memory of the host"),
    "killed": Section(1, 50, killed, "the rank is missed by messages of the host"),
    "attention": Section(1, 65, attention, "few positions, and the kernels of a CPU"),
    "llama_1b": Section(1, 120, llama_1b, "no llama-1b in bf16; the peak is that of one core"),
    "llama_8b": Section(1, 95, llama_8b, "no llama-8b in bf16; the peak is that of one core"),
    "kernels": Section(1, 40, kernels, "operations of the host instead of kernels; a host is always busy"),
    "operators": Section(2, 170, operators, "the operators are those of the CPU"),
    "routes": Section(2, 150, routes, "no direct or staged route: ranks have host memory"),
    "parity": Section(2, 180, parity, "both families are CPUs"),
    "prediction": Section(2, 170, prediction, "the prediction is of a CPU"),
    "rows": Section(3, 90, rows, "a small model"),
    "fused": Section(3, 140, fused, "no kernels of Triton or cuDNN; operations of the host are counted"),
    "settings": Section(3, 90, settings, "a host offloads to itself"),
    "families": Section(3, 130, families, "both families are CPUs"),
    "experts": Section(3, 40, experts, "few experts in fp32, by the kernels of a CPU"),
    "checkpoints": Section(3, 100, checkpoints, "a small model, from host memory"),
}


def is_done(folder: Path, name: str) -> bool:
    path = folder / RESULTS
    lines = path.read_text().splitlines() if path.exists() else []
    return any(each["section"] == name and each["status"] == "done" for each in map(json.loads, lines))


def run_section(name: str, options: argparse.Namespace, gpu: bool) -> dict:
    """Run a section in a process of its own; return its line. What it started ends with it."""
    section = SECTIONS[name]
    words = [*module("benchmarks.gpu"), "--folder", str(options.folder), "--inside", name]
    words += ["--short"] if options.short else []
    environment = os.environ | {"PYTHONPATH": module_path()}
    limit, start = options.limit or section.limit_seconds, time.monotonic()
    partial = options.folder / PARTIAL
    partial.unlink(missing_ok=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True, **pipes) as child:
        try:
            out, errors = child.communicate(timeout=limit)
            status = "done" if child.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            out, errors = child.communicate()
            status = "timeout"
    line = {"section": name, "part": section.part, "status": status, "seconds": round(time.monotonic() - start, 1)}
    line["could_not"] = [] if gpu else [NO_GPU, section.without_gpu]
    if status == "done":
        return line | {"result": json.loads(out.splitlines()[-1])}
    why = f"was not done after {limit} s" if status == "timeout" else " ".join(errors.strip().splitlines()[-1:])
    line["could_not"].append(why[-800:])
    return line | ({"result_so_far": json.loads(partial.read_text())} if partial.exists() else {})


def main() -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("gpu-results"), help="for results and runs")
    parser.add_argument("--part", type=int, choices=PARTS, default=1, help="one of three parts")
    parser.add_argument("--section", action="append", choices=list(SECTIONS), help="may be repeated")
    parser.add_argument("--short", action="store_true", help="small models and few steps, also on a GPU")
    parser.add_argument("--limit", type=float, help="seconds of a section, instead of its own limit")
    parser.add_argument("--inside", choices=list(SECTIONS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True, exist_ok=True)
    gpu = has_gpu()
    if options.inside:
        try:
            print(json.dumps(SECTIONS[options.inside].work(Setting(options.folder, gpu, options.short))))
        except SectionError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    statuses = []
    for name, section in SECTIONS.items():
        wanted = name in options.section if options.section else section.part == options.part
        if wanted and not is_done(options.folder, name):
            line = run_section(name, options, gpu)
            statuses.append(line["status"])
            with open(options.folder / RESULTS, "a") as results:
                results.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    return 0 if all(status == "done" for status in statuses) else 1


if __name__ == "__main__":
    sys.exit(main())
