"""A search times a plan as it runs: `plan search` and `predict` print the same seconds of it."""

import json

from click.testing import CliRunner

from hpctrain.jobs import plan, predict

SITE = """
[families.mi300x]
model = "MI300X"
[families.h100]
model = "H100"
[fabrics.ib-amd]
network = "NDR"
[fabrics.ib-nvidia]
network = "NDR"
[fabrics.roce]
network = "RoCE-100"
[[nodes]]
devices = {mi300x = 4}
nics = [{fabric = "ib-amd", count = 4}, {fabric = "roce"}]
[[nodes]]
devices = {h100 = 4}
nics = [{fabric = "ib-nvidia", count = 4}, {fabric = "roce"}]
"""
JOB = """
[model]
preset = "gpt2-124m"
[data]
tokens = "mine.h5"
sequence_length = 1024
[train]
steps = 4
global_batch = 32
[overlap]
tensor_parts = 1
"""


def _json(command, *arguments) -> dict:
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"], catch_exceptions=False)
    return json.loads(done.stdout)


def test_a_search_prints_of_its_plan_what_predict_prints(tmp_path):
    """Without a plan, gradients count as exchanged between families, which forbids to sum them early."""
    site, job, out = (tmp_path / name for name in ("site.toml", "my.toml", "plan.toml"))
    site.write_text(SITE)
    job.write_text(JOB)
    searched = _json(plan.command, "search", job, "--cluster", site, "--budget", 100, "--out", out)
    predicted = _json(predict.command, job, "--cluster", site, "--plan", out)
    assert searched["step_seconds"] == predicted["step_seconds"] == searched["top"][0]["step_seconds"]
    assert searched["resolved"]["overlap.data"] == predicted["resolved"]["overlap.data"]
    runner_up = searched["top"][1]["step_seconds"] / searched["step_seconds"] - 1
    assert f"{runner_up:.1%} slower" in searched["runner_up"]
