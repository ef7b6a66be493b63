"""A run is a sequence of legs in the same processes: each begins where the one before it ended."""

import json

import pytest

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.job import Job
from hpctrain.engine.run import Run
from hpctrain.engine.start.facts import Described
from hpctrain.engine.start.resolve import prepare_run
from tests.ranks.small_runs import largest_relative_difference, make_job, world_of

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


def job_of(tokens, plan: dict) -> Job:
    return make_job(tokens, "llama", plan, shape={"vocab_size": 64}, steps=STEPS)  # a .bin has a multiple of 64


def losses_of(run: Run) -> list[float]:
    return [json.loads(line)["loss"] for line in (run.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks(2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", [{"data": 2}, {"tensor": {"y": 2}}], ids=str)
def test_a_second_leg_continues_the_first_by_the_same_plan_or_another(own, tokens, folder, plan):
    described = Described(parse_cluster(DEVICES.format(count=own.size), "a test"), "a test")
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
