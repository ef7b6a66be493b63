"""`hpctrain doctor` as a person would start it."""

import json

from hpctrain.jobs.doctor import report


def test_the_doctor_tells_what_there_is(hpctrain, tmp_path):
    result = hpctrain("doctor", "--json", ranks=2, cwd=tmp_path)
    assert result.code == 0, result.err
    summary = json.loads(result.out)
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert summary["mpi"]["launcher"] == "PMI_SIZE"
    assert all(rank["memory_bytes"] > 1e9 and rank["flops_per_second"]["fp32"] > 1e8 for rank in summary["ranks"])
    assert summary["routes"] and all(route["reason"] for route in summary["routes"])
    assert summary["shared_memory"]["total_bytes"] > 0
    text = report(summary)
    for word in ("torch", "mpi4py", "MPICH", "threads: multiple", "PMI_SIZE", "/dev/shm", "GFLOP/s", "2 of family"):
        assert word in text
