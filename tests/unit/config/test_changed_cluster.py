"""Other machines than a file describes: what `what-if` may change, and what it refuses; the price file."""

import pytest

from hpctrain.config.clusters.changed_cluster import ClusterChanges, usual_changes
from hpctrain.config.clusters.cluster_file import ready_clusters
from hpctrain.config.errors import JobError, TopologyError
from hpctrain.config.prices import load_prices

TEXT = """
[families.a100]
model = "A100-80"
[families.v100]
model = "V100"
[fabrics.ib]
network = "HDR"
[[nodes]]
count = 2
devices = {a100 = 4}
nics = [{fabric = "ib", count = 2}]
[[nodes]]
devices = {v100 = 8}
nics = [{fabric = "ib"}]
"""


@pytest.fixture
def changes(tmp_path):
    (tmp_path / "c.toml").write_text(TEXT)
    return ClusterChanges(tmp_path / "c.toml")


def test_added_devices_are_on_nodes_like_those_that_there_are(changes):
    cluster = changes.changed(add=["a100=10", "h100=8"]).cluster
    assert [(dict(nodes.devices), nodes.count) for nodes in cluster.nodes] == [
        ({"a100": 4}, 2),
        ({"v100": 8}, 1),
        ({"a100": 4}, 2),
        ({"a100": 2}, 1),
        ({"h100": 8}, 1),
    ]
    assert cluster.families["h100"].model == "H100" and cluster.families["h100"].memory_bytes > 80e9
    assert all(nodes.nics[0].send_bytes_per_second == 25e9 for nodes in cluster.nodes)
    assert cluster.nodes[4].nics[0].count == 2 and cluster.nodes[4].link_bytes_per_second == 450e9


def test_a_family_left_out_takes_its_nodes_along(changes):
    cluster = changes.changed(without=["a100"]).cluster
    assert list(cluster.families) == ["v100"] and cluster.num_devices == 8


def test_a_key_of_all_nics_and_any_other_key_can_be_set(changes):
    changed = changes.changed(overrides=["nics.ib.count=4", "fabrics.ib.network=NDR", "nodes.0.count=3"]).cluster
    assert [nodes.nics[0].count for nodes in changed.nodes] == [4, 4] and changed.nodes[0].count == 3
    assert changed.nodes[1].nics[0].send_bytes_per_second == 50e9, "filled in by the network's name"
    assert changes.changed().cluster.nodes[0].nics[0].count == 2, "each change begins with the file"


@pytest.mark.parametrize(
    ("more", "result"),
    [
        ([], True),
        (["families.a100.model=H100"], False),
        (["nodes.0.fully_connected=false"], False),
        (["families.v100.model=MI300X"], True),
    ],
)
def test_links_that_get_another_bandwidth_stay_as_many(tmp_path, more, result):
    (tmp_path / "c.toml").write_text(TEXT.replace("A100-80", "MI300X"))
    overrides = ["nodes.0.link_bytes_per_second=9e10", "nodes.1.link_bytes_per_second=9e10", *more]
    nodes = ClusterChanges(tmp_path / "c.toml").changed(overrides=overrides).cluster.nodes
    assert [each.link_bytes_per_second for each in nodes] == [9e10, 9e10]
    assert [each.fully_connected for each in nodes] == [result, "v100" in "".join(more)]


def test_a_figure_that_is_set_is_measured_no_longer(tmp_path):
    (tmp_path / "c.toml").write_text(TEXT.replace('network = "HDR"', 'network = "HDR"\norigin = "measured"'))
    fabric = (
        ClusterChanges(tmp_path / "c.toml").changed(overrides=["fabrics.ib.latency_seconds=9e-6"]).cluster.fabrics["ib"]
    )
    assert fabric.latency_seconds == 9e-6 and fabric.origin_of("latency_seconds") == "datasheet"
    assert fabric.origin == "measured"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"add": ["h1000=8"]}, "--add h1000=8: neither a family of the cluster nor a model; did you mean"),
        ({"add": ["h100"]}, "--add h100: write it as family=devices, such as h100=8"),
        ({"add": ["h100=0"]}, "write it as family=devices"),
        ({"add": ["h100=" + "9" * 5000]}, "write it as family=devices"),
        ({"without": ["v10"]}, "--without v10: no such family; did you mean 'v100'?"),
        ({"without": ["a100", "v100"]}, "--without v100: nothing is left of the cluster"),
        ({"overrides": ["nics.ip.count=4"]}, "no node has a NIC on 'ip'; known are: ib"),
        ({"overrides": ["nics.ib.number=4"]}, "nics.0.number: unknown key"),
        ({"overrides": ["fabric.ib.latency_seconds=1"]}, "has no table 'fabric'; did you mean 'fabrics'?"),
        ({"overrides": ["families.a10.memory_bytes=1e9"]}, "families has no table 'a10'; did you mean 'a100'?"),
        ({"overrides": ["families.a100.memory=1e9"]}, "families.a100.memory: unknown key"),
        ({"overrides": ["nodes.count=3"]}, "'nodes' is a list; say which table, such as nodes.0"),
        ({"overrides": ["nodes.7.count=3"]}, "nodes has no table '7'"),
        ({"overrides": ["nodes.0.count"]}, "write it as section.key=value"),
        ({"overrides": ["families.a100.memory_bytes=80"]}, "a unit was forgotten"),
    ],
)
def test_what_makes_no_cluster_is_refused(changes, change, says):
    with pytest.raises(TopologyError) as refused:
        changes.changed(**change)
    assert says in str(refused.value), refused.value


def test_several_changes_are_asked_for_alone_and_together(changes):
    machines = changes.machines(["h100=8"], ["a100"], ["nics.ib.count=4"])
    assert list(machines) == ["--add h100=8", "--without a100", "--set nics.ib.count=4", "all of these"]
    whole = machines["all of these"].cluster
    assert whole.describe().startswith("8 v100 and 8 h100 on 2 nodes") and whole.nodes[1].nics[0].count == 4


@pytest.mark.parametrize("name", ready_clusters())
def test_the_usual_questions_can_be_asked_of_every_ready_cluster(name):
    changes = ClusterChanges(ready_clusters()[name])
    cluster = changes.changed().cluster
    machines = changes.machines([], [], [])
    assert list(machines) == list(usual_changes(cluster))
    assert {f"without {family}" for family in cluster.families} <= set(machines)
    assert all(file.cluster != cluster for file in machines.values())


def test_a_family_and_a_fabric_may_have_dots_in_their_names(tmp_path):
    (tmp_path / "dots.toml").write_text(
        TEXT.replace("a100 =", '"a.100" =')
        .replace("s.a100", 's."a.100"')
        .replace('"ib"', '"i.b"')
        .replace("s.ib", 's."i.b"')
    )
    changes = ClusterChanges(tmp_path / "dots.toml")
    assert {"without a.100", "i.b: twice the GB/s", "a.100: twice the GB"} <= set(changes.machines([], [], []))
    changed = changes.changed(overrides=["nics.i.b.count=4"]).cluster
    assert [nodes.nics[0].count for nodes in changed.nodes] == [4, 4]


MEASURED = """
[families.cpu]
kind = "cpu"
memory_bytes = 8_000_000_000
memory_bytes_per_second = 8e9
sustained_flops_per_second = {fp32 = 1e10}
[[nodes]]
count = 1
devices = {cpu = 2}
link_latency_seconds = 1e-4
link_bytes_per_second = 1e8
[[links]]
origin = "measured"
families = ["cpu", "cpu"]
latency_seconds = 1e-4
bytes_per_second = 1e8
times = [{message_bytes = 1_000, seconds = 9e-5}, {message_bytes = 1_000_000, seconds = 0.0101}]
"""


def test_measured_links_get_faster_with_what_they_replace(tmp_path):
    (tmp_path / "measured.toml").write_text(MEASURED)
    changes = ClusterChanges(tmp_path / "measured.toml")
    link = changes.machines([], [], [])["in nodes: twice the GB/s"].cluster.links[0]
    assert link.bytes_per_second == 2e8 and [each.seconds for each in link.times] == pytest.approx([9e-5, 0.0051])


TIMED = (
    TEXT.replace("a100 = 4}", "a100 = 4}\nlink_latency_seconds = 2e-6\nlink_bytes_per_second = 3e11")
    + """
[[links]]
origin = "measured"
families = ["a100", "v100"]
fabric = "ib"
latency_seconds = 4e-6
bytes_per_second = 2e10
"""
)


def test_what_is_set_of_nics_and_fabrics_scales_measured_links(tmp_path):
    (tmp_path / "timed.toml").write_text(TIMED)
    changes = ClusterChanges(tmp_path / "timed.toml")
    old = changes.changed().cluster
    for overrides, gain, delay in (
        (["nics.ib.send_bytes_per_second=50e9", "nics.ib.receive_bytes_per_second=50e9"], 2, 1),
        ([f"fabrics.ib.latency_seconds={3 * old.fabrics['ib'].latency_seconds}"], 1, 3),
        (["links.0.bytes_per_second=3e10"], 1.5, 1),
        (["families.v100.memory_bytes=64e9"], 1, 1),
        (["nics.ib.count=4"], 1, 1),
    ):
        link = changes.changed(overrides=overrides).cluster.links[0]
        assert link.bytes_per_second == pytest.approx(gain * 2e10), overrides
        assert link.latency_seconds == pytest.approx(delay * 4e-6), overrides
    (tmp_path / "timed.toml").write_text(TIMED + "times = [{message_bytes = 1_000_000, seconds = 5.4e-5}]\n")
    changes = ClusterChanges(tmp_path / "timed.toml")
    assert "one more NIC on ib" not in changes.machines([], [], [])
    with pytest.raises(TopologyError, match="--set nics.ib.count: links of a100 and v100 by ib have `times`, .* take"):
        changes.changed(overrides=["nics.ib.count=4"])


@pytest.mark.parametrize("override", ["nics.ib.number=4", "nics.ib.count=-1"])
def test_a_mistake_in_all_nodes_is_reported_once(changes, override):
    with pytest.raises(TopologyError) as refused:
        changes.changed(overrides=[override])
    assert len(str(refused.value).splitlines()) == 1


def test_a_price_file_is_checked(tmp_path):
    path = tmp_path / "p.toml"
    path.write_text(
        'currency = "USD"\nkwh = 0.1\nyears = 2\n[families.a]\npurchase = 17532\n[families.b]\ndevice_hour = 3.0'
    )
    prices = load_prices(path)
    assert [prices.hourly(family) for family in "abc"] == [1.0, 3.0, None]
    path.write_text("kwh = -1\n[families.a]\ndevice_hours = 3.0\n[families.b]\npurchase = 1.0\ndevice_hour = 1.0")
    with pytest.raises(JobError) as refused:
        load_prices(path)
    text = str(refused.value)
    assert "line 1: kwh" in text and "line 3: families.a.device_hours: unknown key; did you mean 'device_hour'?" in text
    assert "families.b: device_hour and purchase: a device is rented or bought; keep one" in text
