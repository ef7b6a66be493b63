"""`hpctrain what-if` as a user types it: its table, its page, its JSON, its refusals, and by hand from two searches."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpctrain.config.clusters.cluster_file import dump_cluster
from hpctrain.config.errors import JobError, TopologyError
from hpctrain.jobs.plan import command as plan
from hpctrain.jobs.what_if import command
from hpctrain.plan.file import parse_plan
from hpctrain.planner.prices.efficiency import EFFICIENCIES
from hpctrain.planner.what_if import TOLERANCE
from tests.unit.small_searches import cluster_of

JOB = """
[model]
preset = "tiny"
vocab_size = 512
[data]
tokens = "none.h5"
sequence_length = 16
[train]
steps = 1
global_batch = 8
"""
TABLES = {"now": [("a", 1, 2), ("c", 1, 1)], "more": [("a", 1, 2), ("c", 1, 1), ("c", 2, 1)]}


@pytest.fixture
def files(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    for name, tables in TABLES.items():
        (tmp_path / f"{name}.toml").write_text(dump_cluster(cluster_of(tables)))
    prices = 'currency = "USD"\nkwh = 0.3\n[families.a]\ndevice_hour = 1.0\nwatts = 300\n[families.c]\nwatts = 200\n'
    (tmp_path / "prices.toml").write_text(prices)
    return tmp_path


def ask(files, *arguments: str) -> str:
    where = [str(files / "job.toml"), "--cluster", str(files / "now.toml")]
    done = CliRunner().invoke(command, [*where, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_each_number_is_that_of_a_search_on_the_changed_file(files):
    rows = json.loads(ask(files, "--json", "--add", "c=2").splitlines()[-1])
    assert [row["machine"] for row in rows] == ["now", "--add c=2"]
    speeds = []
    for name, row in zip(TABLES, rows, strict=True):
        where = [str(files / "job.toml"), "--cluster", str(files / f"{name}.toml"), "--budget", "100", "--json"]
        found = json.loads(CliRunner().invoke(plan, ["search", *where]).stdout.splitlines()[-1])
        assert 1 - 1e-9 <= row["tokens_per_second"] / found["tokens_per_second"] <= 1 + TOLERANCE
        assert sum(row["waterfall_seconds"].values()) == pytest.approx(row["step_seconds"])
        speeds.append(found["tokens_per_second"])
    assert rows[1]["change"] == pytest.approx(speeds[1] / speeds[0] - 1, abs=2 * TOLERANCE)


def test_without_a_change_every_part_of_the_machine_is_asked_for(files):
    text = ask(files, "--price", str(files / "prices.toml"), "--mtbf", "1000", "--html", str(files / "page.html"))
    rows = [line.split("  ")[0] for line in text.splitlines()]
    for name in ("now", "without a", "without c", "one more NIC on ib", "ib: twice the GB/s", "a: twice the GB"):
        assert name in rows, text
    assert "tokens/USD" in text and "tokens/kWh" in text and "trains" in text
    assert "prices: families.c costs nothing but its energy" in text
    page = (files / "page.html").read_text()
    assert page.count("<svg") >= 3 and "without a" in page and "tokens/USD" in page


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (["--add", "h1000=8"], TopologyError, "neither a family of the cluster nor a model; did you mean 'h100'?"),
        (["--without", "a", "--without", "c"], TopologyError, "nothing is left of the cluster"),
        (["--set", "fabrics.ib.speed=1"], TopologyError, "fabrics.ib.speed: unknown key"),
        (["--price", "none.toml"], JobError, "none.toml: cannot be read"),
    ],
)
def test_what_cannot_be_asked_is_refused(files, arguments, kind, says):
    with pytest.raises(kind) as refused:
        ask(files, *arguments)
    assert says in str(refused.value)


def test_what_a_loss_costs_stands_below_the_plan(files):
    where = ["search", str(files / "job.toml"), "--cluster", str(files / "now.toml"), "--budget", "20"]
    done = CliRunner().invoke(plan, [*where, "--if-lost", "rank", "--out", str(files / "plan.toml")])
    assert done.exit_code == 0, done.output
    for text in (
        "nothing",
        "a rank of a",
        "a rank of c",
        "moves, GB",
        "restarted, s",
        "a start: 2.8 s of torch's import",
    ):
        assert text in done.output
    assert "made 0.5 s, first step" in done.output
    found = json.loads(CliRunner().invoke(plan, [*where, "--if-lost", "family", "--json"]).stdout.splitlines()[-1])
    now, *losses = found["if_lost"]
    assert [(loss["lost"], loss["ranks"]) for loss in losses] == [("all 2 a", [0, 1]), ("all 1 c", [2])]
    for loss in losses:
        assert loss["moved_bytes"] > 0 and loss["stall_seconds"]["restarted"]["first step"] == loss["step_seconds"]
        assert loss["tokens_per_second"] <= now["tokens_per_second"] * (1 + TOLERANCE)


def test_without_a_file_the_costs_of_losses_are_comments_of_the_plan(files):
    where = ["search", str(files / "job.toml"), "--cluster", str(files / "now.toml"), "--budget", "20"]
    done = CliRunner().invoke(plan, [*where, "--if-lost", "rank"])
    assert "# nothing" in done.output and parse_plan(done.output, "printed").ranks == (0, 1, 2)


def test_the_best_published_run_stands_beside_the_prediction(files):
    (files / "now.toml").write_text(
        (files / "now.toml").read_text().replace("[families.a]", '[families.a]\nmodel = "A100-80"')
    )
    text = ask(files, "--set", "families.a.memory_bytes=50000000")
    assert "of the peak of all devices (MFU)" in text
    assert "best published of a: 68.7 % MFU in bf16, Llama 3 8B on 8 A800-80" in text
    assert "best published of c: nothing is known" in text


def test_best_published_figures_are_those_of_the_benchmarks():
    """The catalogue's texts repeat what `python -m benchmarks.evidence.predictor --best` printed."""
    table = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    texts = [each.best_published for each in EFFICIENCIES.values() if "MFU" in each.best_published]
    figures = [figure for text in texts for figure in re.findall(r"[\d.]+ %", text)]
    assert len(figures) == 5
    assert not [figure for figure in figures if f"| {figure} |" not in table]
