"""`hpctrain doctor` as a person would start it."""

import json

from hpctrain.jobs.doctor import report


def test_the_doctor_tells_what_there_is(hpctrain, tmp_path):
    found = hpctrain("doctor", "--json", ranks=2, cwd=tmp_path)
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]
    assert told["mpi"]["launcher"] == "PMI_SIZE"
    assert all(rank["memory_bytes"] > 1e9 and rank["flops_per_second"]["fp32"] > 1e8 for rank in told["ranks"])
    assert told["routes"] and all(route["reason"] for route in told["routes"])
    assert told["shared_memory"]["total_bytes"] > 0
    text = report(told)
    for word in ("torch", "mpi4py", "MPICH", "threads: multiple", "PMI_SIZE", "/dev/shm", "GFLOP/s", "2 of family"):
        assert word in text
