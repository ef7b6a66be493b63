"""torch.profiler for some steps of some ranks."""

import gzip
import json

import pytest

CLUSTER = """
[families.a100]
model = "A100-40"
[[nodes]]
devices = {a100 = 2}
"""
ASKED = ("--set", "observe.torch_profile_steps=[2,3]", "--set", "observe.torch_profile_ranks=[1]")
SHORT = ("--set", "train.steps=4", "--set", "plan.data=2", "--sample", "0")


@pytest.mark.timeout(200)
def test_the_ranks_and_steps_that_are_asked_for_are_profiled(hpctrain, folder):
    plain = hpctrain("train", "job.toml", "--run", "plain", *SHORT, ranks=2, cwd=folder)
    done = hpctrain("train", "job.toml", "--run", "profiled", *SHORT, *ASKED, ranks=2, cwd=folder)
    assert plain.code == done.code == 0, done.err
    assert "torch profile of steps 2 to 3, ranks 1: profiled/torch-profile" in done.out
    (file,) = (folder / "profiled/torch-profile").iterdir()
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    updates = [each for each in events if "adamw" in each["name"]]
    assert file.name == "rank-00001.json.gz" and updates and any(each["name"] == "aten::mm" for each in events)
    texts = [(folder / name / "metrics.jsonl").read_text() for name in ("plain", "profiled")]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in texts]
    assert losses[0] == losses[1]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("observe.torch_profile_steps=[3,2]",), "ends before it begins"),
        (("observe.torch_profile_steps=[9,9]",), "torch_profile_steps = [9, 9]: the run ends with step 4"),
        (("observe.torch_profile_ranks=[0,2]",), "torch_profile_ranks = 2: there are 2 ranks, from 0 on"),
        ((), "a rehearsal pretends its devices"),
    ],
)
def test_what_cannot_be_profiled_is_refused(hpctrain, folder, keys, said):
    (folder / "cluster.toml").write_text(CLUSTER)
    args = [each for key in keys for each in ("--set", key)] or ["--rehearse", "cluster.toml"]
    done = hpctrain("train", "job.toml", "--run", "no", *SHORT, *ASKED, *args, ranks=2, cwd=folder)
    assert done.code == 81 and said in done.err, done.err
