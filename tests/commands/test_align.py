"""`hpctrain align` as a person would start it: what is right passes, and what overflows ends with 1 and a remedy."""

import json
import subprocess

from tests.started import BIN

FAMILIES = {"a": "fp32", "b": "bf16", "c": "fp16"}


def test_all_dtypes_of_one_process_are_within_their_bounds(hpctrain, folder):
    done = hpctrain("align", "job.toml", "--set", "train.dtype=auto", "--steps", "3", "--json", cwd=folder)
    assert done.code == 0, done.err
    summary = json.loads(done.out)
    assert summary["aligned"] and {entry["dtype"] for entry in summary["operators"]} == {"fp32", "bf16", "fp16"}
    assert {"embedding", "norm", "attention", "ffn.down", "cross_entropy"} <= {
        entry["operator"] for entry in summary["operators"]
    }
    assert all(entry["repeats"] for entry in summary["operators"])
    assert {of["dtype"]: of["steps"] for of in summary["losses"]} == {"fp32": 3, "bf16": 3, "fp16": 3}


def test_overflow_ends_with_1_and_the_line_to_type(hpctrain, folder):
    done = hpctrain("align", "job.toml", "--dtype", "fp16", "--deviation", "400", cwd=folder)
    assert done.code == 1
    assert "overflow: activation, output, on cpu in fp16" in done.out
    assert "--set precision.by_family.cpu=fp32" in done.out and done.out.endswith("not aligned\n")


def test_each_family_is_compared_in_its_own_dtype(folder, warm_start):
    given = ", ".join(f'{family} = "{dtype}"' for family, dtype in FAMILIES.items())
    words = [str(BIN / "mpirun")]
    for family in FAMILIES:
        command = [*warm_start, "align", "job.toml", "--set", f"precision.by_family={{{given}}}", "--json"]
        words += [":"] if len(words) > 1 else []
        words += ["-n", "1", "env", f"HPCTRAIN_FAMILY={family}", *map(str, command)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert {(entry["family"], entry["dtype"]) for entry in summary["operators"]} == set(FAMILIES.items())
    assert {family: of["ranks"] for family, of in summary["families"].items()} == dict.fromkeys(FAMILIES, 1)
