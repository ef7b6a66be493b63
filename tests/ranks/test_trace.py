"""Traces of runs on ranks: all that was done is there, on one clock, and what was hidden adds up."""

import itertools
import json
import time
from collections import defaultdict

import pytest

from hpctrain.comm.accelerators.cpu import CpuAccelerator
from hpctrain.comm.probe.clocks import clock_offset
from hpctrain.comm.progress.instruments import UNTRACED
from hpctrain.config.clusters.truth import PretendDevice, Truth
from hpctrain.config.parallelism import Overlap
from hpctrain.data.order import open_datasets
from hpctrain.observe.folder.run_folder import RunFolder
from hpctrain.observe.folder.schema import TRACE_SUMMARY
from hpctrain.observe.folder.spans import Observed, StepRecorder
from hpctrain.observe.trace import TRACE, RunTrace
from hpctrain.plan.schedule import schedule_of
from hpctrain.plan.tiling import Plan, Tile
from hpctrain.plan.uniform import resolve_plan
from hpctrain.sharding.grid import TensorGrid
from hpctrain.sharding.intervals import Interval
from hpctrain.sharding.items import layers, name_layer
from tests.pretended import CLUSTER
from tests.ranks.punctual import Measurement
from tests.ranks.small_runs import by, make_job, make_trainer, rehearsed_world

STEPS = 2
ON, OFF = ({key: on for key in ("tensor", "data", "z")} for on in (True, False))


def traced(world, job, plan: Plan, folder, accelerator, before_each=lambda: None) -> list[dict]:
    """Train a step, and trace those after it; return their metrics. Then `before_each` has been called before each."""
    _, training, _ = open_datasets(job.data, job.train.seed)
    recorder = StepRecorder(accelerator)
    world.configure(tracer=recorder)
    trace = RunTrace(Observed(world, accelerator, recorder, plan, RunFolder(folder)), STEPS)
    result = []
    with world.freeing():
        trainer = make_trainer(world, job, plan, accelerator)
        trainer.initialise()
        trainer.step(training)
        recorder.begin_step()
        for step in range(STEPS):
            before_each()
            result.append(trainer.step(training)[0])
            said = trace.step_is_done(1.0)
            assert (said is not None) == (world.rank == 0 and step == STEPS - 1)
            recorder.begin_step()
        assert trace.finish() is None
    world.configure(tracer=UNTRACED)
    return result


def with_overlap(job, switches):
    return job.model_copy(update={"overlap": Overlap(bucket_bytes=3000, **switches)})


def spans_by_thread(folder) -> dict[tuple[int, str], list[dict]]:
    """Return the events of each (rank, thread), with integer nanoseconds, in their order."""
    events = json.loads((folder / TRACE).read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    result = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin = round(event["ts"] * 1e3)
            times = {"begin": begin, "end": begin + round(event["dur"] * 1e3)}
            result[event["pid"], names[event["pid"], event["tid"]]].append(event | times)
    return result


def assert_nested(spans) -> None:
    around = []
    for span in spans:
        while around and around[-1]["end"] <= span["begin"]:
            around.pop()
        assert not around or span["end"] <= around[-1]["end"], (span, around[-1])
        around.append(span)


LAYOUTS = {
    2: {"tensor": {"z": 2}, "microbatch": 8},
    4: {"tensor": {"z": 2}, "pipeline": 2, "microbatch": 4},
    8: {"tensor": {"y": 2}, "pipeline": 2, "data": 2, "microbatch": 4},
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("switches", [OFF, ON], ids=["off", "on"])
@pytest.mark.parametrize("route", ["auto", "messages"])
def test_all_that_ranks_did_is_in_one_file(world, tokens, folder, switches, route, monkeypatch):
    monkeypatch.setattr(world, "settings", by(route, world.settings))
    job = with_overlap(make_job(tokens, "llama", LAYOUTS[world.size], shape={"num_layers": 4}), switches)
    plan = resolve_plan(job, world.size).plan
    traced(world, job, plan, folder, CpuAccelerator())
    if world.rank == 0:
        threads = spans_by_thread(folder)
        for rank in range(world.size):
            spans = threads[rank, "compute"]
            assert_nested(spans)
            tile = plan.tile_of(rank)
            schedule = [str(i) for i in schedule_of(plan, tile, reduce_early=switches["data"])]
            names = [span["name"] for span in spans]
            assert [name for name in names if name in schedule] == schedule * STEPS
            assert [name for name in names if name.startswith("step")] == ["step 2", "step 3"]
            layouts = (
                ("forward", "backward")
                if "backward 0" in schedule
                else ("forward", "backward input", "backward weight")
            )
            num_items = max(each.items.stop for each in plan.tiles)
            for layer, layout in itertools.product(layers(tile.items), layouts):
                assert names.count(f"{name_layer(layer, num_items)} {layout}") == STEPS * plan.microbatches
        lanes = {(rank, name): spans for (rank, name), spans in threads.items() if name != "compute"}
        for spans in lanes.values():
            assert all(a["end"] <= b["begin"] for a, b in itertools.pairwise(spans))
        of = {name.split()[1] for _, name in lanes}
        expected = {axis for axis, size in plan.tiles[0].tensor.sizes.items() if size > 1} | {"data"}
        assert of - {"pipeline"} == (
            {key for key in expected if key != "data" or "data" in str(LAYOUTS[world.size])} if switches["z"] else set()
        )
        starts = [spans[0]["begin"] for (_, name), spans in threads.items() if name == "compute"]
        ends = [span["end"] for spans in threads.values() for span in spans if span["name"] == "step 2"]
        assert max(starts) < min(ends)  # all agree within a step, so that steps of all ranks overlap
        summary = json.loads((folder / TRACE_SUMMARY.name).read_text())
        assert summary["steps"] == STEPS
        for each in summary["axes"].values():
            assert each["hidden_seconds"] <= each["communication_seconds"]
            assert switches["z"] or each["hidden_seconds"] == 0.0
    world.agree(None)


@pytest.mark.timeout(60)
def test_clocks_of_hosts_are_aligned(world, monkeypatch):
    """All ranks have one clock here; the test adds an offset to it on every other pretended host."""
    hosts = [f"host {rank // 2}" for rank in range(world.size)]
    monkeypatch.setattr(world, "hosts", hosts)
    extra_warmup, real = 100.0 * (world.rank // 2), time.monotonic
    monkeypatch.setattr("hpctrain.comm.world.time.monotonic", lambda: real() + extra_warmup)
    offset = clock_offset(world)
    assert offset == pytest.approx(-extra_warmup, abs=0.05)  # ranks may share a core
    assert (offset == 0.0) == (world.rank < 2)


DEVICE = PretendDevice(memory_bytes=50_000_000, memory_bytes_per_second=2e9, flops_per_second={"fp32": 5e8})
TRUTH = Truth(devices={"fast": DEVICE, "slow": DEVICE}, time_scale=3.0)
# Weights are gathered and scattered through the NICs.
ACROSS = Plan(
    tuple(
        Tile(Interval(0, 10), Interval(4 * i, 4 * i + 4), (i, i + 2), TensorGrid(z=2), family="cpu") for i in range(2)
    ),
    microbatches=1,
    rows=8,
)


@pytest.mark.measured
@pytest.mark.ranks(4)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("switches", [OFF, ON], ids=["off", "on"])
def test_computed_and_exposed_is_a_rehearsed_step(world, tokens, folder, switches):
    """In pretended time a rank computes or waits: what it computed and what was exposed are the step."""
    shape = {"num_layers": 4, "hidden_size": 128}
    job = with_overlap(make_job(tokens, "llama", shape=shape, global_batch=8), switches)
    measurement = Measurement(world)
    with rehearsed_world(world, CLUSTER, TRUTH) as own:
        device, busy = own.accelerator, []
        metrics = traced(own, job, ACROSS, folder, device, lambda: busy.append(device.busy_seconds))
        every = own.gather_objects((device.busy_seconds - busy[0], [m["step_seconds"] for m in metrics]))
        overrun = device.overrun
    with measurement.checking(overrun):
        if world.rank == 0:
            summary = json.loads((folder / TRACE_SUMMARY.name).read_text())
            print(summary["axes"])
            threads = spans_by_thread(folder)
            for rank, (busy, seconds) in enumerate(every):
                steps = [s for s in threads[rank, "compute"] if s["name"].startswith("step")]
                assert [s["dur"] / 1e6 for s in steps] == pytest.approx(seconds, rel=0.02)
                exposed = sum(ranks[str(rank)]["exposed_seconds"] for ranks in summary["ranks"].values())
                assert sum(seconds) / STEPS == pytest.approx(busy / STEPS + exposed, rel=0.05)
            z = summary["axes"]["z"]
            assert z["communication_seconds"] == pytest.approx(z["hidden_seconds"] + z["exposed_seconds"], rel=0.05)
            assert (z["hidden_seconds"] > 0.2 * z["communication_seconds"]) == switches["z"]
    world.agree(None)
