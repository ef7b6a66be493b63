"""A short run of the mutated files: no traceback, nothing slow or large, no nonsense accepted."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.mutants import EITHER, REFUSE, SAME, Mutant, garbled_text, wrong_values
from benchmarks.mutations import PLAN, Case, classify
from benchmarks.sandbox import FAILED, Ended

KINDS = ("job", "plan", "cluster", "tokens.h5", "tokens.bin", "records.jsonl", "records.parquet", "tokenizer.json")
KINDS += ("csv", "run folder", "checkpoint", "arguments")


@pytest.mark.timeout(240)
def test_mutated_files_end_well(request):
    every = 19 if request.config.getoption("--thorough") else 57
    only = [word for kind in KINDS for word in ("--only", kind)]
    command = [sys.executable, "-m", "benchmarks.mutations", "--every", str(every), *only]
    done = subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = int(done.stdout.splitlines()[-1].split()[1])
    assert 150 <= cases * every / 19 <= 230, done.stdout


def test_a_bad_end_is_distinguished_from_a_good_one():
    def verdict(right: str, ended: Ended, intact: Ended | None = None) -> str:
        return classify(Case(Mutant("job", "", "job.toml", right), "inspect job.toml"), ended, intact, 0)

    good = Ended(0, '{"step": 3}', "", 0.1, 0, False)
    said = Ended(11, "", "hpctrain: JobError: no\n", 0.1, 0, False)
    assert verdict(EITHER, good) == "accepted, as is right"
    assert verdict(REFUSE, good) == "nonsense accepted"
    assert verdict(SAME, Ended(0, '{"step": 4}', "", 0.1, 0, False), good) == "nonsense accepted"
    assert verdict(SAME, good, good) == "accepted, as is right"
    assert verdict(REFUSE, said) == "refused with a message"
    assert verdict("accept", said) == "legal and refused"
    assert verdict(REFUSE, Ended(3, "", "", 0.1, 0, False)) == "refused without a message"
    assert verdict(REFUSE, Ended(FAILED, "", "Traceback (most recent call last):\n", 0.1, 0, False)) == "traceback"
    assert verdict(REFUSE, Ended(-11, "", "", 0.1, 0, False)) == "traceback"
    assert verdict(REFUSE, Ended(11, "", said.err, 9.0, 0, True)) == "over 5 s"
    assert verdict(REFUSE, Ended(11, "", said.err, 0.1, 2 * 10**9, False)) == "over 1 GB"


def test_mutations_follow_from_the_seed():
    made = [garbled_text("plan", "plan.toml", PLAN, 20, seed) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    values = wrong_values("plan", "plan.toml", PLAN, {"tile.0.ranks": "ranks"})
    assert any(b"1000000000" in (mutant.data or b"") for mutant in values)
