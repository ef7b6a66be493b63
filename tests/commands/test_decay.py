"""Warm up, stay, decay: a run is prolonged from the checkpoint that is kept where its rate begins to fall."""

import json

from hpctrain.config.errors import CheckpointError

JOB = (
    "job.toml",
    "--sample",
    "0",
    "--set",
    "plan.data=1",
    "--set",
    "train.validate_every=0",
    "--set",
    "checkpoint.keep=1",
)
STAY = ("--set", "train.warmup_steps=1", "--set", "train.decay=sqrt", "--set", "train.decay_steps=2")


def test_prolonged_twice_is_planned_so_from_the_start(hpctrain, folder):
    def train(run: str, steps: int, *words: str):
        done = hpctrain("train", *JOB, *STAY, "--set", f"train.steps={steps}", "--run", run, *words, cwd=folder)
        assert done.code == 0, done.err

    def kept(run: str) -> list[str]:
        return sorted(path.name for path in (folder / run / "checkpoints").glob("step-*"))

    train("planned", 8)
    assert kept("planned") == ["step-00000006", "step-00000008"]
    train("prolonged", 4)
    assert kept("prolonged") == ["step-00000002", "step-00000004"]
    train("prolonged", 6, "--set", "checkpoint.resume=step-00000002")
    assert kept("prolonged") == ["step-00000004", "step-00000006"]
    train("prolonged", 8, "--set", "checkpoint.resume=step-00000004")
    compared = hpctrain("compare", "planned", "prolonged", "--exact", "--json", cwd=folder)
    assert compared.code == 0 and json.loads(compared.out)["same"], compared.out
    lion = ("--set", "train.optimizer=lion", "--set", "train.steps=9")
    refused = hpctrain("train", *JOB, *STAY, "--run", "prolonged", *lion, cwd=folder)
    assert refused.code == CheckpointError.exit_code and "train.optimizer is adamw there and lion" in refused.err
