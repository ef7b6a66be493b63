"""The search for a plan from Python, and its answer for people."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import hpctrain
from hpctrain import find_plan
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.errors import JobError, TopologyError
from hpctrain.jobs.catalogue import command as catalogue_command
from hpctrain.jobs.common import ready_miniature
from hpctrain.jobs.plan import format_search
from hpctrain.plan.file import load_plan
from hpctrain.planner.yardstick import format_yardstick, predict_families, yardstick

TWO_KINDS = """
[families.a100]
model = "A100-40"
[families.other]
model = "MODEL"
[fabrics.ib]
network = "HDR"
[[nodes]]
devices = {a100 = 4}
nics = [{fabric = "ib"}]
[[nodes]]
devices = {other = 4}
nics = [{fabric = "ib"}]
"""


@pytest.fixture(scope="module")
def result():
    return find_plan("mixed", "v100-t4", scored=60)


def test_names_are_enough_for_a_plan(result, tmp_path):
    assert result.prediction.step_seconds == result.summary["step_seconds"] > 0
    assert result.job.model.num_ids and result.cluster.num_devices == 8
    assert "v100-16" in result.draw() and "s a step" in repr(result)
    assert load_plan(result.save(tmp_path / "plan.toml")) == result.plan


def test_a_notebook_shows_a_picture(result):
    shown = result._repr_html_()
    assert shown.startswith("<iframe srcdoc=") and "&lt;svg" in shown and "tokens/s" in shown


def test_objects_and_their_auto_values_are_resolved():
    """As README's job: neither dtype nor overlaps are said, and the vocabulary is that of a preset."""
    job = hpctrain.load_job("mixed", ["data.tokens=none.h5", "model.preset=gpt2-124m", "data.sequence_length=512"])
    job = job.model_copy(update={"model": job.model.model_copy(update={"vocab_size": None})})
    assert job.train.dtype is None
    best = find_plan(job, hpctrain.load_cluster("a100-80-40"), space="even", scored=20)
    assert best.prediction.fits and best.summary["dtype"] == best.job.train.dtype == "bf16"


def test_a_finished_miniature_is_searched_for_the_job_that_is_trained_there(tmp_path):
    made = ready_miniature("v100-t4")
    path = tmp_path / "small.toml"
    path.write_text(dump_cluster(made.cluster, truth=made.truth))
    best = find_plan("mixed", path, scored=40)
    assert best.job.model.hidden_size == made.job.model.hidden_size < hpctrain.load_job("mixed").model.hidden_size


@pytest.mark.parametrize("model", ["MI250X-GCD", "L40S", "H100"])
def test_what_a_speed_is_worth_is_said_alike(model):
    """In the catalogue, in a prediction and a search, and at the end of a training."""
    worth = json.loads(CliRunner().invoke(catalogue_command, ["--json"]).output)["accelerators"][model]["worth"]
    is_known = model == "H100"
    assert worth.startswith("within 15%" if is_known else "within 45%: nobody measured it; ")
    cluster = parse_cluster(TWO_KINDS.replace("MODEL", model), "a file")
    found = find_plan("mixed", cluster, scored=40)
    said = [line for line in found.summary["assumed_inputs"] if line.startswith("families.other.model: ")]
    assert [line.endswith(f"steps are {worth}") for line in said] == [True] * (not is_known)
    job = found.job.model_copy(update={"search": found.job.search.model_copy(update={"plans": 40})})
    summary = yardstick(predict_families(job, cluster), 1000.0)
    assert ("(within 15%)" if is_known else f"(a100 within 15%, other {worth})") in format_yardstick(summary)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="overrides .'train.steps=1'.: are of a job file or a name; load_job"):
        find_plan(hpctrain.load_job("mixed"), "v100-t4", overrides=["train.steps=1"])
    with pytest.raises(ValueError, match="space = 'odd': is none of all, by-speed, even"):
        find_plan("mixed", "v100-t4", space="odd")
    with pytest.raises(TopologyError, match="v100-t5: no such cluster file, nor a ready one of that name; did"):
        hpctrain.load_cluster("v100-t5")
    with pytest.raises(JobError, match="mixd: no such job file"):
        find_plan("mixd", "v100-t4")


def test_a_search_shows_a_row_for_each_kind_of_tile_and_three_reasons(result):
    short = format_search(result.summary, result.result, result.cluster)
    head, rule, *rows = short.splitlines()
    assert head.split()[:5] == ["family", "tiles", "grid", "items", "rows"] and set(rule) == {"─"}
    kinds = {(tile.family, tile.items) for tile in result.plan.tiles}
    assert sorted(row.split()[0] for row in rows[: len(kinds)]) == sorted(family for family, _ in kinds)
    assert short.count("\nwhy  ") == min(3, len(result.reasons)) and "assumed inputs" in short
    long = format_search(result.summary, result.result, result.cluster, verbose=True)
    assert long.count("\nwhy  ") == len(result.reasons)
    assert all(line in long for line in result.summary["assumed_inputs"])


def test_all_public_names_can_be_imported_at_once():
    done = subprocess.run([sys.executable, "-c", "from hpctrain import *; print(find_plan, Plan)"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert set(hpctrain.__all__) == set(hpctrain.PUBLIC)
