"""One rank among thousands computes what it takes part in, quickly and in little memory."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, re, sys, time
from dataclasses import replace
from hpctrain.comm.topology import Place, Topology
from hpctrain.sharding.grid import TensorGrid
from hpctrain.plan.tiling import even_plan
from hpctrain.architectures.registry import presets
from hpctrain.config.job import Model
from hpctrain.plan.role import role_of

model = Model(**presets()["llama-70b"])
start = time.process_time()
grid = TensorGrid(x=2, y=4, z=2)
plan = even_plan(model.num_items, grid, pipeline=8, data=32, microbatches=16, rows=64)
if sys.argv[1] == "different":  # every other tile by another grid, so that every weight is cut
    other = TensorGrid(x=1, y=16, z=1)
    tiles = [replace(t, tensor=other) if i % 2 else t for i, t in enumerate(plan.tiles)]
    plan = replace(plan, tiles=tuple(tiles))
families = ["a100"] * 1024 + ["v100"] * 2048 + ["mi250x"] * 1024
places = tuple(Place(f"node{rank // 8}", family) for rank, family in enumerate(families))
topology = Topology(places)
role = role_of(model, 2048, plan, 2077)
groups = [tuple(plan.ranks), *role.axes.values(), *(shard_group.ranks for shard_group in role.holding.shard_groups)]
groups += [tuple(sorted((2077, need.peer))) for need in role.channels]
routes = [topology.route(ranks).kind for ranks in groups]
seconds = time.process_time() - start
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
heavy = sorted({"torch", "mpi4py"} & set(sys.modules))
print(json.dumps({"ranks": len(places), "groups": len(groups), "routes": routes, "seconds": seconds, "bytes": peak,
                  "heavy": heavy}))
"""


@pytest.mark.parametrize("grids", ["equal", "different"])
def test_a_rank_among_4096_knows_its_groups_and_routes(grids):
    done = subprocess.run([sys.executable, "-c", SCRIPT, grids], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    print(result)
    assert result["ranks"] == 4096
    assert result["groups"] >= 7
    assert {"hierarchical", "messages"} <= set(result["routes"])
    assert ("shared" in result["routes"]) == (grids == "equal"), "x and y of the other grid are on two nodes"
    assert result["seconds"] < 1.0
    assert result["bytes"] < 200e6
    assert result["heavy"] == []
