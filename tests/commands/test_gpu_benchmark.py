"""Every section of the benchmark for a GPU, in short form on whatever this machine has."""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.gpu import NO_GPU, RESULTS, SECTIONS, STARTER, has_gpu
from tests.warm_start import MODULE

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 300
"""Of a section: its own limit is one for a machine with nothing else to do."""
CHECKS = {
    "versions": lambda result: "torch" in result["doctor"]["versions"],
    "operators": lambda result: result["aligned"] and set(result["worst"]) == {"fp32", "bf16", "fp16"},
    "routes": lambda result: result["auto"]["exit_code"] == 0,
    "parity": lambda result: all(of["same"] for of in result.values()),
    "ranks": lambda result: all(of["num_exact"] == 13 and not of["not_exact"] for of in result.values()),
    "shared": lambda result: all(of["apart"] < 1e-5 for of in result.values() if isinstance(of, dict)),
    "killed": lambda result: all(of["exit_code"] not in (0, 124) for of in result.values()),
    "attention": lambda result: result["llama-1b"]["torch"]["same_bits"] and result["llama-8b"]["flash"]["seconds"] > 0,
    "llama_1b": lambda result: result["plain"]["of_measured_peak"] > 0 and "failed" not in str(result),
    "llama_8b": lambda result: result["hpctrain"]["of_measured_peak"] > 0 and "failed" not in str(result),
    "rows": lambda result: set(result["tokens_per_second"]) == {"1", "2"},
    "kernels": lambda result: (
        result["counts"]["products"] > 0 and result["busy"] > 0 < result["block"]["launched_seconds"]
    ),
    "fused": lambda result: result["kernels_of_a_block"]["separate"] > 10 and result["operators"]["norm"],
    "prediction": lambda result: result["predicted_to_measured"] > 0,
    "families": lambda result: result["fraction_of_the_sum"] > 0,
    "experts": lambda result: result["same_bits"] and result["to_grouped_products"] > 0 < result["forward_seconds"],
    "checkpoints": lambda result: result["bytes"] > 0,
}
"""By section, what its figures must show on any machine."""


@pytest.fixture
def benchmark(warm_start):
    """Run sections; return the exit code, and what was printed."""
    starter = [*warm_start, MODULE]

    def run(folder: Path, *arguments: str) -> tuple[int, list[Mapping]]:
        options = "--folder", str(folder), "--short", "--limit", str(LIMIT_SECONDS)
        words, environment = (
            [*starter, "benchmarks.gpu", *options, *arguments],
            os.environ | {STARTER: shlex.join(starter)},
        )
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=330, env=environment)
        assert not done.stderr, done.stderr
        return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]

    return run


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SECTIONS)
def test_a_section_runs_to_its_end_without_a_gpu(benchmark, tmp_path, name):
    code, (line,) = benchmark(tmp_path, "--section", name)
    assert (code, line["section"], line["status"]) == (0, name, "done"), line
    if not has_gpu():
        assert line["could_not"] == [NO_GPU, SECTIONS[name].without_gpu]
    assert [json.loads(text) for text in (tmp_path / RESULTS).read_text().splitlines()] == [line]
    if name == "versions":
        assert benchmark(tmp_path, "--section", name) == (0, []), "what is done is not repeated"
    check = CHECKS.get(name)
    assert check is None or check(line["result"]), line["result"]
