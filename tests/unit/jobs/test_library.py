"""The search for a plan from Python, and its answer for people."""

import subprocess
import sys

import pytest

import hpctrain
from hpctrain import find_plan
from hpctrain.config.errors import JobError, TopologyError
from hpctrain.jobs.plan import format_search
from hpctrain.plan.file import load_plan


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
    assert best.prediction.fits and best.summary["dtype"] == "bf16"


def test_mistakes_are_named():
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


def test_parts_above_a_whole_step_are_explained():
    from hpctrain.jobs.predict import format_parts

    text = format_parts({"compute": 9.8, "data": 1.0, "bubble": 0.0, "hidden": -0.8}, 10.0)
    assert text == "compute 98.0%, data 10.0%; 108.0% in all, of which 8.0% overlap other parts"
    assert format_parts({"compute": 10.0, "hidden": 0.0}, 10.0) == "compute 100.0%"


def test_all_public_names_can_be_imported_at_once():
    done = subprocess.run([sys.executable, "-c", "from hpctrain import *; print(find_plan, Plan)"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert set(hpctrain.__all__) == set(hpctrain.PUBLIC)
