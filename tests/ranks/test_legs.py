"""A run is a sequence of legs in the same processes: each begins where the one before it ended."""

import gc
import json
import statistics
import threading
import weakref
from pathlib import Path

import pytest

import hpctrain.engine.start.replan as start
from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.config.clusters.cluster_file import parse_cluster, parse_cluster_file
from hpctrain.config.errors import TrainingError
from hpctrain.config.job import Job
from hpctrain.engine.requests import NEXT_PLAN_FILE, RESIZE_FILE
from hpctrain.engine.run import Run
from hpctrain.engine.start.facts import WHY, MachineDescription
from hpctrain.engine.start.resolve import prepare_run
from hpctrain.engine.trainer import Trainer
from hpctrain.plan.file import dump_plan, load_plan
from hpctrain.plan.uniform import resolve_plan
from tests.ranks.small_runs import largest_relative_difference, make_job, rehearsed_world, world_of

STEPS, FIRST_LEG = 6, 3
DEVICES = """
[families.cpu]
kind = "cpu"
memory_bytes = 4e9
memory_bytes_per_second = 1e10
sustained_flops_per_second = {{fp32 = 5e10}}

[[nodes]]
devices = {{cpu = {count}}}
link_latency_seconds = 1e-6
link_bytes_per_second = 1e9
"""


@pytest.fixture
def own(world):
    """A world whose settings and records are not those of other tests."""
    own = world_of(world)
    yield own
    own.close()


def job_of(tokens, plan: dict, steps: int = STEPS) -> Job:
    return make_job(tokens, "llama", plan, shape={"vocab_size": 64}, steps=steps)  # a .bin has a multiple of 64


def losses_of(run: Run) -> list[float]:
    return [json.loads(line)["loss"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", [{"data": 2}, {"tensor": {"y": 2}}], ids=str)
def test_a_second_leg_continues_the_first_by_the_same_plan_or_another(own, tokens, folder, plan):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    whole = Run(own, job_of(tokens, {"data": 2}), folder / "whole", described)
    whole.train()

    run = Run(own, job_of(tokens, {"data": 2}), folder / "legs", described)
    _, ended = run.leg.train(FIRST_LEG)
    run.leg.close()
    assert ended is None and run.checkpoint is not None and run.checkpoint.name == f"step-{FIRST_LEG:08}"
    run.begin_leg(own, prepare_run(own, job_of(tokens, plan), run.checkpoint, described))
    summary, ended = run.train()
    assert ended is None and run.checkpoint.name == f"step-{STEPS:08}"

    with own.all_or_none():
        if own.rank == 0:
            assert summary["step"] == STEPS and summary["checkpoint"] == str(run.checkpoint)
            result, expected = losses_of(run), losses_of(whole)
            assert len(result) == STEPS
            if plan == {"data": 2}:
                assert result == expected
            assert largest_relative_difference(result, expected) < 1e-5
            events = [json.loads(line)["event"] for line in (run.path / "events.jsonl").read_text().splitlines()]
            assert events.count("start") == 2 and events.count("checkpoint") == 2 and events[-1] == "end"


def train_with_requests(run: Run, requests: dict[int, tuple[str, str]], ended: bool = False) -> dict:
    """Train to the end; rank 0 writes a file with a text into the run folder after some steps."""
    step = run.console.step

    def step_is_done(metrics, *more) -> None:
        step(metrics, *more)
        if run.lock and metrics["step"] in requests:
            name, text = requests[metrics["step"]]
            (run.path / name).write_text(text)

    run.console.step = step_is_done
    summary, early = run.train()
    assert (early is not None) == ended
    return summary


def legs_of(run: Run) -> list[dict]:
    lines = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "leg"]


@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("plan", [None, {"tensor": {"y": 2}, "data": 2}], ids=["searched", "given"])
def test_a_run_gives_ranks_back_and_takes_them_again(own, tokens, folder, plan):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    job = make_job(tokens, "llama", plan, shape={"vocab_size": 64}, steps=9, global_batch=12)
    whole = Run(own, job, folder / "whole", described)
    whole.train()

    run = Run(own, job, folder / "legs", described)
    threads = threading.active_count()
    requests = {2: (RESIZE_FILE, "3\n"), 4: (RESIZE_FILE, "three"), 6: (RESIZE_FILE, "4")}
    train_with_requests(run, requests)
    assert threading.active_count() <= threads
    with own.all_or_none():
        if own.rank == 0:
            result, expected = losses_of(run), losses_of(whole)
            assert result[:3] == expected[:3], "the request is noticed in the step after it"
            assert len(result) == 9 and largest_relative_difference(result, expected) < 1e-5
            legs = legs_of(run)
            assert [(leg["number"], leg["step"], leg["ranks"]) for leg in legs] == [(2, 3, 3), (3, 7, 4)]
            assert set(legs[0]["seconds"]) == {"searched", "moved", "made", "first_step"}
            assert legs[0]["reason"] == "resize asks for 3 ranks"
            plans = [load_plan(run.path / "legs" / f"00{number}" / "plan.toml") for number in (1, 2, 3)]
            assert plans[1].unused == (3,) and plans[2] == plans[0] == load_plan(run.path / "plan.toml")
            assert not (run.path / RESIZE_FILE).exists()
            assert [path.name for path in (run.path / "checkpoints").iterdir() if path.is_dir()] == ["step-00000009"]


@pytest.mark.ranks(8)
@pytest.mark.timeout(300)
def test_eight_ranks_become_five_and_eight_again(own, tokens, folder):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    job = make_job(tokens, "llama", None, shape={"vocab_size": 64}, steps=12, global_batch=40)
    whole = Run(own, job, folder / "whole", described)
    whole.train()
    run = Run(own, job, folder / "legs", described)
    train_with_requests(run, {3: (RESIZE_FILE, "5"), 7: (RESIZE_FILE, "8")})
    with own.all_or_none():
        if own.rank == 0:
            result, expected = losses_of(run), losses_of(whole)
            assert [leg["ranks"] for leg in legs_of(run)] == [5, 8] and len(result) == 12
            difference = largest_relative_difference(result, expected)
            stalls = [
                (leg["predicted_stall_seconds"], sum(map(leg["seconds"].get, ("moved", "made"))))
                for leg in legs_of(run)
            ]
            print(f"8, 5, 8 ranks: losses differ by {difference:.1e}; stalls, predicted and measured: {stalls}")
            assert difference < 1e-5
            assert stalls[1][0] == stalls[0][1], "the second change is predicted by the first"
            assert all(predicted > 0 for predicted, _ in stalls)


def resident_bytes(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) << 10


@pytest.mark.ranks(2)
@pytest.mark.timeout(240)
def test_a_move_needs_host_memory_for_one_shard_group_more_than_the_larger_leg(own, tokens, folder, monkeypatch):
    """A leg has a snapshot's memory too. On processors weights are host memory: those of the last leg would be seen."""
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    shape = {"vocab_size": 64, "hidden_size": 512, "ffn_size": 2048}
    sizes = dict(shape=shape, steps=4, global_batch=4)
    run = Run(own, make_job(tokens, "llama", {"data": 2}, **sizes), folder / "legs", described)
    other = dump_plan(resolve_plan(make_job(tokens, "llama", {"pipeline": 2}, **sizes), 2).plan)
    go_on, seen = run._go_on, {}

    def measured(change) -> None:
        seen["before"] = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        go_on(change)
        seen["peak"] = resident_bytes("VmHWM")
        shards = run.leg._trainer.optimizer.shards
        seen["group"] = max(4 * shard.group.stored.size for shard in shards)

    monkeypatch.setattr(run, "_go_on", measured)
    train_with_requests(run, {2: (NEXT_PLAN_FILE, other)})
    more = seen["peak"] - max(seen["before"], resident_bytes("VmRSS"))
    print({name: round(value / 2**20, 1) for name, value in seen.items()}, "more", round(more / 2**20, 1))
    own.agree(None if more <= seen["group"] + (8 << 20) else TrainingError(f"{more} bytes more: {seen}"))


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_the_same_plan_keeps_every_bit_and_one_that_cannot_run_is_refused(own, tokens, folder):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    whole = Run(own, job_of(tokens, {"data": 2}, steps=10), folder / "whole", described)
    whole.train()

    run = Run(own, job_of(tokens, {"data": 2}, steps=10), folder / "legs", described)
    other = dump_plan(resolve_plan(job_of(tokens, {"pipeline": 2}), 2).plan)
    same = dump_plan(resolve_plan(job_of(tokens, {"data": 2}), 2).plan)
    wrong = other.replace("ranks = [0]", "ranks = [7]")
    foreign = other.replace('"cpu"', '"v100"', 1)
    requests = {
        1: (NEXT_PLAN_FILE, same),
        3: (NEXT_PLAN_FILE, foreign),
        5: (NEXT_PLAN_FILE, wrong),
        7: (NEXT_PLAN_FILE, other),
    }
    said = []
    run.console.say = said.append
    train_with_requests(run, requests)
    with own.all_or_none():
        if own.rank == 0:
            result, expected = losses_of(run), losses_of(whole)
            assert result[:8] == expected[:8]
            assert largest_relative_difference(result, expected) < 1e-5
            assert [leg["step"] for leg in legs_of(run)] == [2, 8]
            assert (run.path / "next-plan.refused.toml").read_text() == wrong
            refusal = f"{NEXT_PLAN_FILE}: tile 0 is for family 'v100', but its ranks [0] are of 'cpu'"
            assert sum(refusal in text for text in said) == 1
            assert load_plan(run.path / "plan.toml") == load_plan(Path(run.path / "legs" / "003" / "plan.toml"))


REHEARSED = """
[families.a]
kind = "cpu"
memory_bytes = 4e9
memory_bytes_per_second = 4e9
sustained_flops_per_second = {fp32 = 2e9}

[[nodes]]
devices = {a = 4}
link_latency_seconds = 1e-5
link_bytes_per_second = 2e8

[truth]
time_scale = 12.0

[truth.devices.a]
memory_bytes = 4e9
memory_bytes_per_second = 4e9
flops_per_second = {fp32 = 2e9}
"""
SLOW_FROM, SLOW_RANK, SLOWER = 8, 2, 1.4


def rehearse_events(world, tokens, folder, events: str, last: int, cluster: str = REHEARSED):
    """Rehearse to step `last` of many; return metrics and events. All ranks must call."""
    file = parse_cluster_file(cluster + events, "a test")
    described = MachineDescription(file.cluster, "a test", is_rehearsed=True, truth=file.truth)
    with rehearsed_world(world, file.cluster, file.truth) as own:
        job = make_job(tokens, "llama", shape={"vocab_size": 64}, steps=3000, global_batch=60)
        run = Run(own, job, folder, described)
        train_with_requests(run, {last - 1: ("stop", "")}, ended=True)
        own.agree(None)
    lines = [(folder / name).read_text().splitlines() for name in ("metrics.jsonl", "events.jsonl")]
    return tuple([json.loads(line) for line in of] for of in lines)


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(240)
def test_a_device_that_becomes_slow_is_named_and_gets_less_to_do(world, tokens, folder):
    slow = f"\n[[truth.events]]\nstep = {SLOW_FROM}\nrank = {SLOW_RANK}\nslower = {SLOWER}\n"
    metrics, events = rehearse_events(world, tokens, folder, slow, last=20)
    seconds = {line["step"]: line["step_seconds"] for line in metrics}
    named = next(event for event in events if event["event"] == "straggler")
    assert named["rank"] == SLOW_RANK and named["step"] < SLOW_FROM + 5
    assert named["text"] == "rank 2 computes 1.40 times as long as predicted, on a device of a of host node0"
    (leg,) = [event for event in events if event["event"] == "leg"]
    assert leg["step"] < SLOW_FROM + 7 and leg["reason"].startswith(named["text"])
    before, after = seconds[leg["step"]], statistics.median(seconds[step] for step in range(leg["step"] + 2, 21))
    assert after < 0.85 * before, "four devices with 1.4 times the time of one of them on the others"
    assert abs(leg["predicted_seconds"] / after - 1) < 0.1


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_signal_during_a_change_of_plans_saves_after_the_next_step(own, tokens, folder):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    run = Run(own, job_of(tokens, {"data": 2}), folder / "legs", described)
    go_on = run._go_on

    def interrupted(change) -> None:
        go_on(change)
        if own.rank == 1:
            run.signals.received = "SIGTERM"

    run._go_on = interrupted
    other = dump_plan(resolve_plan(job_of(tokens, {"pipeline": 2}), 2).plan)
    train_with_requests(run, {1: (NEXT_PLAN_FILE, other)}, ended=True)
    with own.all_or_none():
        if own.rank == 0:
            assert [leg["step"] for leg in legs_of(run)] == [2] and len(losses_of(run)) == 3
            assert run.checkpoint.name == "step-00000003"
            end = json.loads((run.path / "events.jsonl").read_text().splitlines()[-1])
            assert end["event"] == "end" and end["stopped_by"] == "SIGTERM on rank 1"


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_the_weights_of_a_leg_are_freed_before_the_next_ones_are_made(own, tokens, folder, monkeypatch):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    run = Run(own, job_of(tokens, {"data": 2}), folder / "legs", described)
    store = weakref.ref(run.leg._trainer.layout.store)
    freed = []
    monkeypatch.setattr(CpuAccelerator, "release", lambda self: freed.append(store() is None))
    monkeypatch.setattr(CpuAccelerator, "forget_peak", lambda self: freed.append("and the peak"))
    other = dump_plan(resolve_plan(job_of(tokens, {"pipeline": 2}), 2).plan)
    gc.disable()
    try:
        train_with_requests(run, {1: (NEXT_PLAN_FILE, other)})
    finally:
        gc.enable()
    assert freed == [True, "and the peak"]


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_plan_that_a_file_asked_for_stays_after_a_new_start(own, tokens, folder):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    job = job_of(tokens, None)
    run = Run(own, job, folder / "legs", described)
    other = dump_plan(resolve_plan(job_of(tokens, {"pipeline": 2}), 2).plan)
    train_with_requests(run, {1: (NEXT_PLAN_FILE, other), 3: ("stop", "")}, ended=True)
    for _ in range(2):  # and after another one
        again = Run(own, job, folder / "legs", described)
        assert again.leg._prepared.plan == load_plan(run.path / "plan.toml")
        assert again.leg._prepared.speeds is None and "next-plan.toml asks" in again.leg._prepared.reasons[WHY]
        again.train(again.leg._trainer.steps_done + 1)
        assert again.leg.change is None


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_a_next_leg_that_cannot_be_made_leaves_no_groups(own, tokens, folder, monkeypatch):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    run = Run(own, job_of(tokens, {"data": 2}), folder / "legs", described)
    num_before = run.leg._num_before

    def fail(*_):
        raise TrainingError("the state does not fit")

    monkeypatch.setattr(Trainer, "take", fail)
    other = dump_plan(resolve_plan(job_of(tokens, {"pipeline": 2}), 2).plan)
    with pytest.raises(TrainingError, match="does not fit"):
        train_with_requests(run, {1: (NEXT_PLAN_FILE, other)})
    assert own.num_made == num_before


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
def test_only_the_request_that_was_read_is_removed_and_maxima_outlive_a_leg(own, tokens, folder, monkeypatch):
    described = MachineDescription(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
    run = Run(own, job_of(tokens, {"data": 2}), folder / "legs", described)
    other = dump_plan(resolve_plan(job_of(tokens, {"pipeline": 2}), 2).plan)
    resized = start.resized_plan

    def while_it_searches(run_now, requested, text, where):
        (where.parent / NEXT_PLAN_FILE).write_text(other)
        return resized(run_now, requested, text, where)

    monkeypatch.setattr(start, "resized_plan", while_it_searches)
    run.requests.longest_save = 1234.0
    train_with_requests(run, {1: (RESIZE_FILE, "2")})
    assert run.requests.longest_save == 1234.0
    with own.all_or_none():
        if own.rank == 0:
            asked = [leg["reason"] for leg in legs_of(run)]
            assert asked == ["resize asks for 2 ranks", "next-plan.toml asks for it"]
