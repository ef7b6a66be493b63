"""From what a job asks for to a plan: uniform layouts, and errors with the numbers."""

from dataclasses import replace

import pytest

from hpctrain.config.clusters.cluster_file import load_cluster, locate_cluster
from hpctrain.config.errors import HpctrainError, PlanError
from hpctrain.config.job import load_job
from hpctrain.plan.checks import check_positions
from hpctrain.plan.file import dump_plan, parse_plan
from hpctrain.plan.uniform import resolve_plan
from hpctrain.planner.choose import with_enough_rows
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.setup import Setup
from hpctrain.sharding.grid import TensorGrid


def job(*overrides: str):
    return load_job("tiny", ["model.vocab_size=1024", *overrides])


def test_a_described_plan_has_no_more_microbatches_than_one_of_a_file():
    """It was checked for minutes, and then trained for minutes a step."""
    with pytest.raises(PlanError, match="microbatches = 500,000 are more than 20,000; make them of more rows"):
        resolve_plan(job("plan.data=1", "plan.microbatch=2", "train.global_batch=1000000"), 1)


def test_a_plan_that_is_open_needs_a_machine():
    with pytest.raises(PlanError, match=r'plan = "auto" is no even plan: set .* whose product is 4, or search'):
        resolve_plan(job(), 4)


def test_a_pipeline_gets_enough_microbatches():
    resolved = resolve_plan(job("plan.pipeline=4"), 4)
    assert resolved.plan.microbatches >= 16
    assert "leave a bubble of" in resolved.reasons["plan.microbatch"]


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (["plan.data=3"], 3, "train.global_batch 32 is not divisible by plan.data 3; set it to a multiple of 3"),
        (["plan.microbatch=5"], 1, "not divisible by plan.microbatch 5; set one of [1, 2, 4, 8, 16, 32]"),
        (["plan.tensor.z=4", "plan.microbatch=2"], 4, "tensor z = 4 splits the 2 sequences of a microbatch"),
        (
            ["plan.tensor.c=4", "data.sequence_length=60"],
            4,
            "tensor c = 4 cuts the 60 positions of data.sequence_length into 8 intervals, two for each of its ranks",
        ),
        (["plan.pipeline=5"], 5, "pipeline = 5 stages need as many blocks, the model has 4"),
        (
            ["plan.tensor=2", "plan.sequence_parallel=true", "data.sequence_length=31"],
            2,
            "sequence_parallel cuts the 31 positions of data.sequence_length into 2 parts (tensor y), which does not"
            " divide them; set data.sequence_length to a multiple of 2, or sequence_parallel to false",
        ),
        (
            ["plan.data=2", "plan.exchange_heads=true"],
            2,
            "exchange_heads is of ranks that cut positions, and tensor c = 1; remove it, or raise c",
        ),
        (
            ["plan.data=2", "plan.sequence_parallel=true"],
            2,
            "sequence_parallel cuts positions over y, and tensor y = 1; remove it, or raise y",
        ),
        (["plan.tensor.x=2"], 4, "is for 2 ranks, but MPI started 4; start it with mpirun -n 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(overrides, ranks, message):
    with pytest.raises(HpctrainError) as caught:
        resolve_plan(job(*overrides), ranks)
    assert message in str(caught.value)


FAMILIES = ["a100-80"] * 4 + ["a100-40"] * 4


def tokens_at_once(*overrides: str, memory: float = 1.0, kind: str = "cuda") -> int:
    """Return the tokens of a microbatch of a replica on eight devices with so many times the memory of A100s."""
    given = load_job("mixed", ["train.global_batch=512", "train.dtype=bf16", *overrides])
    assert given.plan is not None
    cluster = load_cluster(locate_cluster("a100-80-40"))
    families = {
        name: family.model_copy(update={"kind": kind, "memory_bytes": int(memory * family.memory_bytes)})
        for name, family in cluster.families.items()
    }
    cluster = cluster.model_copy(update={"families": families})
    names = [device.family for device in cluster.devices]
    few = resolve_plan(given, 8, names)
    setup = Setup.of_job(given)
    made = with_enough_rows(given, few, names, cluster, lambda plan: setup)
    assert made is few or predict(setup, made.plan, cluster).fits
    return made.plan.rows // given.plan.data * 2048


def test_devices_have_as_many_rows_at_once_as_they_are_busy_with_and_have_memory_for():
    assert tokens_at_once("plan.data=8", memory=4) == 16384
    assert tokens_at_once("plan.data=8", memory=4, kind="cpu") == 2048
    assert tokens_at_once("plan.data=8", "plan.microbatch=2", memory=4) == 4096, "as the job says"
    assert tokens_at_once("plan.tensor.z=4", "plan.data=2", memory=4) == 4 * 16384, "z splits them"
    assert tokens_at_once("plan.data=8", "train.global_batch=16", memory=4) == 4096, "a replica has no more"
    assert tokens_at_once("plan.pipeline=2", "plan.data=4", "train.global_batch=64", memory=4) == 4096, "microbatches"
    by_memory = [tokens_at_once("plan.tensor=4", "plan.data=2", memory=share) for share in (0.5, 0.4, 0.3, 0.2)]
    assert by_memory == [16384, 8192, 4096, 2048]


def test_what_cuts_positions_is_written_by_tile_and_read_again(tmp_path):
    plan = resolve_plan(job("plan.tensor=2", "plan.sequence_parallel=true", "plan.pipeline=2"), 4).plan
    assert plan.describe().startswith("TP2+SP x PP2 x DP1")
    first, second = plan.tiles
    mixed = replace(plan, tiles=(first, replace(second, tensor=TensorGrid(y=2))))
    assert dump_plan(mixed).count("sequence_parallel = true") == 1
    for grid in (TensorGrid(c=2, exchanges_heads=True), TensorGrid(c=2, position_shares=(3, 1))):
        other = replace(mixed, tiles=(first, replace(second, tensor=grid)))
        assert parse_plan(dump_plan(other), "plan.toml") == other
    assert dump_plan(other).count("position_shares = [3, 1]") == 1 and "position_shares" not in dump_plan(mixed)
    assert parse_plan(dump_plan(mixed), "plan.toml") == mixed


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((1, 2), "cuts the 32 positions of data.sequence_length into 6 parts, twice the sum of position_shares [1, 2]"),
        ((1, 2, 1), "position_shares = [1, 2, 1] has 3 shares for tensor c = 2; give one for each rank of c"),
        ((2, 2), "or remove them where they are equal"),
    ],
)
def test_shares_that_cut_no_positions_are_refused(shares, message):
    with pytest.raises(PlanError) as caught:
        check_positions(32, TensorGrid(c=2, position_shares=shares), "tile 0")
    assert message in str(caught.value)
    with pytest.raises(PlanError, match=r"into 16 parts \(tensor y x c\)"):
        check_positions(24, TensorGrid(y=4, c=2, sequence_parallel=True, position_shares=(1, 3)), "tile 0")


def test_a_plan_knows_the_families_of_the_ranks_and_refuses_others(tmp_path):
    resolved = resolve_plan(job("plan.pipeline=2", "plan.tensor.y=2"), 4, families=["a", "a", "b", "c"])
    assert [tile.family for tile in resolved.plan.tiles] == ["a", "b+c"]
    file = tmp_path / "plan.toml"
    file.write_text(dump_plan(resolved.plan))
    assert resolve_plan(job(f"plan.file={file}"), 4, families=["a", "a", "b", "c"]).plan == resolved.plan
    with pytest.raises(PlanError, match=r"tile 1 is for family 'b\+c', but its ranks \[2, 3\] are of 'c'"):
        resolve_plan(job(f"plan.file={file}"), 4, families=["a", "a", "c", "c"])


def test_a_tile_over_families_computes_in_one_dtype():
    values = "plan.tensor.c=2", "train.dtype=bf16", "precision.by_family.a=fp16"
    with pytest.raises(
        PlanError, match="tile 0 is for families that compute in different dtypes: b in bf16, a in fp16;"
    ):
        resolve_plan(job(*values), 2, families=["b", "a"])
    both = job(*values, "precision.by_family.b=fp16")
    (tile,) = resolve_plan(both, 2, families=["b", "a"]).plan.tiles
    assert tile.family == "b+a" and both.dtype_of(tile.family) == "fp16"
    assert resolve_plan(job("plan.tensor.c=2", "precision.by_family.a=fp16"), 2, families=["b", "a"]), "not known yet"


def test_long_shares_are_shown_in_part():
    with pytest.raises(PlanError) as caught:
        check_positions(32, TensorGrid(position_shares=(1, 2) * 500), "tile 0")
    assert "2, …] has 1000 shares for tensor c = 1" in str(caught.value) and len(str(caught.value)) < 250
