"""Cluster files that people type: all mistakes in one message, what may be left out, figures of another world."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.clusters.cluster import assumed_figures
from hpctrain.config.clusters.cluster_file import dump_cluster, parse_cluster
from hpctrain.config.clusters.device_catalogue import LINK_LATENCY_SECONDS
from hpctrain.config.clusters.links import link_between
from hpctrain.config.errors import HpctrainError, TopologyError
from hpctrain.config.job import load_job
from hpctrain.plan.tiling import even_plan
from hpctrain.planner.prediction.predictor import predict
from hpctrain.planner.prices.curves import describe_training
from hpctrain.planner.prices.setup import HPCTRAIN, Setup
from hpctrain.sharding.grid import TensorGrid
from tests.unit.described import FAMILY, TEXT

# By what is replaced in LISTED: with what, and what the message says of it.
IN_TABLES = {
    'model = "some"\n': ('modle = "some"\n', "families.extra.modle: unknown key"),
    "memory_bytes = 64_000_000_000": ('memory_bytes = "64 GB"', "families.mi250x.memory_bytes = '64 GB'"),
    "latency_seconds = 2.5e-6": ("latency_secs = 2.5e-6", "fabrics.sling.latency_secs: unknown key"),
    "latency_seconds = 30e-6\nbytes": ("bytes", "fabrics.ethernet.latency_seconds: missing"),
    "count = 2\ndevices = {a100 = 8}": ("count = 0\ndevices = {a100 = 8}", "nodes.0.count = 0"),
    "bytes_per_second = 1e9\n": ("bytes_per_second = 1e-308\n", "links.0.bytes_per_second = 1e-308: input should be"),
    "{message_bytes = 1_000, flows = 1, seconds = 41e-6},": ("3,", "links.0.times.0 = 3: must be a section"),
}
BETWEEN_KEYS = {
    "sustained_flops_per_second = {bf16 = 140e12}": ("reserved_bytes = 65e9", "families.mi250x: no speed: set peak"),
    "link_bytes_per_second = 50e9\n": ("", "nodes.1: 8 devices on a node, and nothing said of the link between them"),
}
BETWEEN_TABLES = {
    '"sling", count = 4': ('"slang", count = 4', "nodes.1.nics.0.fabric: no fabric 'slang'"),
    'families = ["mi250x", "a100"]': ('families = ["mi250x", "a10"]', "links.0.families: no family 'a10'"),
}
LISTED = TEXT + FAMILY.replace("mi250x]", 'extra]\nmodel = "some"')


@pytest.mark.parametrize("mistakes", [IN_TABLES, BETWEEN_KEYS, BETWEEN_TABLES], ids=["keys", "tables", "all"])
@given(data=st.data())
def test_all_mistakes_of_a_file_are_in_one_message(mistakes, data):
    chosen = data.draw(st.sets(st.sampled_from(sorted(mistakes)), min_size=1))
    text = LISTED
    for old in chosen:
        assert old in text
        text = text.replace(old, mistakes[old][0], 1)
    with pytest.raises(TopologyError) as caught:
        parse_cluster(text, "a file")
    lines = str(caught.value).splitlines()
    for old in chosen:
        assert sum(mistakes[old][1] in line for line in lines) == 1, f"{mistakes[old][1]} in:\n{caught.value}"
    assert len(lines) <= len(chosen) + 1, "what follows from a mistake is left out"  # one figure is two mistakes


def test_typed_figures_need_no_origin_and_a_node_no_latency():
    """They count as from a data sheet; the latency is assumed, and listed as such."""
    text = re.sub(r"(?m)^(origin = .*|link_latency_seconds = .*)\n|origin = \"[a-z]*\", ", "", TEXT)
    assert "origin =" not in text and "link_latency" not in text
    cluster = parse_cluster(text, "a file")
    tables = [*cluster.families.values(), *cluster.fabrics.values(), *cluster.nodes, *cluster.links]
    origins = {table.origin_of(figure) for table in tables for figure in table.given}
    assert origins == {"datasheet", "assumed"} and not link_between(cluster, 0, 1).is_measured
    assert link_between(cluster, 0, 1).latency_seconds == LINK_LATENCY_SECONDS
    assert [key for key in assumed_figures(cluster) if "link" in key] == [
        f"nodes.{i}.link_latency_seconds" for i in (0, 1)
    ]
    assert parse_cluster(dump_cluster(cluster), "written") == cluster


MEASURED = """
[families.cpu]
kind = "cpu"
origin = "measured"
memory_bytes = 2_000_000_000
memory_bytes_per_second = 8e9
reserved_bytes = 1_000_000
half_speed_rows = 12.5
overlap_slowdown = 1.1
sustained_flops_per_second = {fp32 = 2e10}
products = [{dtype = "fp32", shape = [64, 64, 64], flops_per_second = 2e10}]

[fabrics.net]
origin = "measured"
latency_seconds = 2e-5
bytes_per_second = 2e9

[[nodes]]
origin = "measured"
count = 2
devices = {cpu = 2}
link_latency_seconds = 8e-5
link_bytes_per_second = 1e9
host_memory_bytes = 8_000_000_000
nics = [{origin = "measured", fabric = "net", send_bytes_per_second = 1e9, receive_bytes_per_second = 1e9}]

[[links]]
origin = "measured"
families = ["cpu", "cpu"]
latency_seconds = 8e-5
bytes_per_second = 1e9
times = [{message_bytes = 1024, flows = 1, seconds = 1e-4}, {message_bytes = 65536, flows = 1, seconds = 2e-4}]

[[profiles]]
origin = "measured"
family = "cpu"
work = "WORK"
zero = 1
replicas = 4
update_seconds = 3e-3
times = [
  {rows = 1, embedding_seconds = [1e-4, 1e-4], block_seconds = [1e-2, 2e-2], head_seconds = [4e-3, 6e-3]},
  {rows = 4, embedding_seconds = [2e-4, 2e-4], block_seconds = [2e-2, 4e-2], head_seconds = [8e-3, 9e-3]},
]
"""
JOB = load_job("tiny", ["model.vocab_size=1024"])
SETUP = Setup(JOB.model, 128, "fp32", HPCTRAIN)
FILES = {
    "profiled": MEASURED.replace("WORK", describe_training(JOB.model, 128, "fp32")),
    "measured": MEASURED.replace("WORK", "another job"),
    "typed": MEASURED.replace("WORK", "another job").replace("measured", "datasheet"),
}
PLAN = even_plan(JOB.model.num_items, TensorGrid(), 2, 2, 2, 8)
FIGURE = re.compile(r"(?<=[=\[ ])\d[\d_.]*(?:e-?\d+)?(?=[\s,}\]])")


@pytest.mark.parametrize("value", ["1e-308", "1e-30", "1e30", "1e308"])
@pytest.mark.parametrize("name", FILES)
def test_a_figure_of_another_world_is_refused_or_priced(name, value):
    for figure in FIGURE.finditer(FILES[name]):
        text = FILES[name][: figure.start()] + value + FILES[name][figure.end() :]
        try:
            predicted = predict(SETUP, PLAN, parse_cluster(text, "a file"))
        except HpctrainError as error:
            assert "nan" not in str(error)
        else:
            seconds = predicted.step_seconds, *predicted.breakdown_seconds.values()
            assert all(map(math.isfinite, seconds)) and seconds[0] > 0, text
