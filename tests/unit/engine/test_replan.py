"""Plans for a run that goes on on another number of ranks."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.config.clusters.cluster_file import parse_cluster
from hpctrain.config.errors import PlanError, RankLossError
from hpctrain.config.job import Job
from hpctrain.engine.start.facts import MachineDescription, Prepared
from hpctrain.engine.start.replan import replan, resized_plan
from hpctrain.engine.start.resolve_overlap import topology_of
from hpctrain.plan.uniform import DEVICE_TOKENS, resolve_plan

DEVICES = """
[families.a100]
kind = "cuda"
memory_bytes = 40e9
memory_bytes_per_second = 1.5e12
sustained_flops_per_second = {bf16 = 2e14}

[[nodes]]
devices = {a100 = 4}
link_latency_seconds = 1e-5
link_bytes_per_second = 2e11
"""
MODEL = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 512, "max_positions": 512}


def prepared(plan: dict) -> tuple[Prepared, Job]:
    """Return a run of four devices, and its job as it was requested."""
    requested = Job.model_validate(
        {
            "name": "resized",
            "model": {"architecture": "llama", "ffn_size": 512, **MODEL},
            "data": {"tokens": "none.bin", "sequence_length": 512},
            "train": {"steps": 9, "global_batch": 1024, "dtype": "bf16"},
            "plan": plan,
            "search": {"seconds": 0.5, "plans": 100},
        }
    )
    cluster = parse_cluster(DEVICES, "a test")
    world = SimpleNamespace(size=4, topology=topology_of(cluster, is_pretended=False))
    described, job = MachineDescription(cluster, "a test"), requested.model_copy(update={"plan": None})
    unused = dict.fromkeys(("source", "training", "validation"))
    return Prepared(world, job, **unused, described_or_none=described), requested  # pyright: ignore[reportArgumentType]


def test_the_plan_of_a_job_gets_as_many_rows_at_once_as_at_a_start():
    run, requested = prepared({"data": 4})
    plan, why = resized_plan(run, requested, "4", Path("resize"))
    assert plan == resolve_plan(requested, 4, ["a100"] * 4, DEVICE_TOKENS[0]).plan
    assert plan.rows > resolve_plan(requested, 4).plan.rows and why == "resize asks for 4 ranks"


@pytest.mark.parametrize(("ranks", "more"), [("4", "; the job's plan cannot be used: the 512 sequences"), ("3", "")])
def test_a_plan_of_a_job_that_cannot_be_used_is_searched_for_and_its_refusal_is_said(ranks, more):
    run, requested = prepared({"data": 2, "pipeline": 2, "microbatch": 3})
    plan, why = resized_plan(run, requested, ranks, Path("resize"))
    assert set(range(int(ranks), 4)) <= set(plan.unused) and why.startswith(f"resize asks for {ranks} ranks{more}")
    assert ("cannot be used" in why) == bool(more)


@pytest.mark.parametrize("name", ["resize", "next-plan.toml"])
def test_a_request_is_there_for_the_next_start_where_a_rank_is_lost(tmp_path, name):
    def lose(choose):
        with suppress(PlanError):
            choose()
        assert not (tmp_path / name).exists()
        raise RankLossError("rank 1 was killed", is_dead=True)

    run, requested = prepared({"data": 4})
    world = SimpleNamespace(size=4, settings=SimpleNamespace(devices=None), on_first_rank=lose)
    (tmp_path / name).write_text("nonsense")
    with pytest.raises(RankLossError):
        replan(run.but(world=world), requested, tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "nonsense")]
