"""Hosts on one machine: network namespaces as hosts, in clusters with a fast network and a slow link between them.

    alpha-0 --.                                .-- beta-0       fabric: what MPI uses, shaped by `tc tbf`
               alpha ==== backbone ==== beta --
    alpha-1 --'      slow          slow        '-- beta-1       manage: mpirun's own, not shaped, not counted

The bridges are in one more namespace, the switch, where mpirun runs too: nothing shows on the machine itself.
Namespaces are called hpctrain-PID-TOKEN-NAME after the process that made them; those of a dead process are removed by
the next one. Needs Linux, root, and `ip` and `tc` of iproute2.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.started import BIN, Finished

LAUNCHER, RELAY = Path(__file__).with_name("launch.sh"), Path(__file__).with_name("relay.py")
SWITCH, SWITCH_ADDRESS = "switch", "10.77.0.1"
# Linux takes 15 characters for an interface; ours are CLUSTER-NN-m and CLUSTER-down.
LONGEST_CLUSTER_NAME = 10
# What a link lets through at once after a pause: two packets of the size that TCP hands to an interface, 64 KiB.
BURST_BYTES = 128 * 1024
# What may wait in front of a link; what comes then is dropped, as in a switch.
QUEUE_SECONDS, SMALLEST_QUEUE_BYTES = 0.02, 512 * 1024
# All hosts are one machine, and UCX would detect that and use its memory: only TCP, and only the shaped network.
# The ranks of one host still use MPICH's own shared memory.
MPI_ENVIRONMENT = {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "fabric"}
# How long a process may take to end in order.
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class Cluster:
    """Hosts NAME-0, NAME-1, ... on one network; NAME is the family of their ranks."""

    name: str
    num_hosts: int
    bits_per_second: float
    """Of each host's link to the network, in each direction."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{i}" for i in range(self.num_hosts))


@dataclass(frozen=True)
class Site:
    """Clusters that a backbone joins."""

    clusters: tuple[Cluster, ...]
    bits_per_second: float
    """Of each cluster's link to the backbone, in each direction: the slow one."""
    under_way_seconds: float = 0.0
    """How long a packet takes between the first cluster and the others, beside its bytes."""

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host for cluster in self.clusters for host in cluster.hosts)


@dataclass(frozen=True)
class Bytes:
    """What went over a link, with headers (once for the up to 64 KiB that TCP hands over) and acknowledgements."""

    sent: int
    received: int

    def __sub__(self, earlier: "Bytes") -> "Bytes":
        return Bytes(self.sent - earlier.sent, self.received - earlier.received)


@dataclass(frozen=True)
class Traffic:
    """What went over the link of each host, and over the slow link of each cluster, as that end sees it."""

    hosts: dict[str, Bytes]
    clusters: dict[str, Bytes]

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        return Traffic(
            {name: now - earlier.hosts[name] for name, now in self.hosts.items()},
            {name: now - earlier.clusters[name] for name, now in self.clusters.items()},
        )


@dataclass(frozen=True)
class Moved(Finished):
    """What a command on the hosts said, and what it moved between them."""

    traffic: Traffic


class Network:
    """A site that exists, made by `open_network`."""

    def __init__(self, site: Site):
        self.site = site
        self._prefix = f"hpctrain-{os.getpid()}-{secrets.token_hex(2)}-"
        self._relay: subprocess.Popen | None = None

    @property
    def namespaces(self) -> list[str]:
        return [self.namespace(name) for name in (SWITCH, *self.site.hosts)]

    def namespace(self, name: str) -> str:
        """Return the network namespace that is a host, or the switch."""
        return self._prefix + name

    def run(
        self,
        command: Sequence[str | Path],
        ranks_per_host: int = 1,
        *,
        hosts: Sequence[str] | None = None,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_seconds: float = 60.0,
    ) -> Moved:
        """Run a command by one mpirun; ranks are numbered host by host. Without `hosts`: on all.

        Raises subprocess.TimeoutExpired after `timeout_seconds`, when all ranks are stopped.
        """
        hosts = self.site.hosts if hosts is None else hosts
        mpirun = ["ip", "netns", "exec", self.namespace(SWITCH), BIN / "mpirun", "-localhost", SWITCH_ADDRESS]
        mpirun += ["-launcher", "rsh", "-launcher-exec", LAUNCHER, "-hosts", ",".join(hosts)]
        mpirun += ["-ppn", ranks_per_host, "-n", ranks_per_host * len(hosts)]
        outside = {name: value for name, value in os.environ.items() if not name.startswith("HPCTRAIN_")}
        outside |= {name: os.environ[name] for name in ("HPCTRAIN_CACHE", "HPCTRAIN_IGNORE_LOAD")}  # the tests' own
        before = self.traffic()
        process = subprocess.Popen(
            [str(part) for part in (*mpirun, *command)],
            cwd=cwd,
            env=outside | MPI_ENVIRONMENT | {"NAMESPACE_PREFIX": self._prefix} | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=timeout_seconds)
        except BaseException:
            _stop_processes(self.namespaces)
            process.communicate()
            raise
        return Moved(process.returncode, out, err, self.traffic() - before)

    def traffic(self) -> Traffic:
        """Read the counters of all links since they were made."""
        hosts = {host: self._counters(host)["fabric"] for host in self.site.hosts}
        switch = self._counters(SWITCH)
        return Traffic(hosts, {cluster.name: switch[f"{cluster.name}-up"] for cluster in self.site.clusters})

    def _counters(self, name: str) -> dict[str, Bytes]:
        links = json.loads(_call("ip", "-netns", self.namespace(name), "-json", "-stats", "link"))
        counted = {link["ifname"]: link["stats64"] for link in links}
        return {link: Bytes(stats["tx"]["bytes"], stats["rx"]["bytes"]) for link, stats in counted.items()}

    def build(self) -> None:
        """Make the namespaces, the bridges and the links with their rates."""
        for namespace in self.namespaces:
            _call("ip", "netns", "add", namespace)
        for bridge in ("manage", "backbone", "beyond", *(cluster.name for cluster in self.site.clusters)):
            self._ip(SWITCH, f"link add {bridge} type bridge")
        is_far = self.site.under_way_seconds > 0
        for number, cluster in enumerate(self.site.clusters):
            up, down = f"{cluster.name}-up", f"{cluster.name}-down"
            self._ip(SWITCH, f"link add {up} type veth peer name {down}")
            self._plug(up, cluster.name, self.site.bits_per_second)
            self._plug(down, "beyond" if is_far and number else "backbone", self.site.bits_per_second)
            for host in cluster.hosts:
                self._ip(SWITCH, f"link add {host} type veth peer name fabric netns {self.namespace(host)}")
                self._ip(SWITCH, f"link add {host}-m type veth peer name manage netns {self.namespace(host)}")
                self._plug(host, cluster.name, cluster.bits_per_second)
                self._plug(f"{host}-m", "manage")
                self._shape(host, "fabric", cluster.bits_per_second)
        self._bring_up(SWITCH, {"manage": f"{SWITCH_ADDRESS}/16"})
        for i, cluster in enumerate(self.site.clusters, start=1):
            for j, host in enumerate(cluster.hosts, start=1):
                addresses = {"manage": f"10.77.{i}.{j}/16", "fabric": f"10.78.{i}.{j}/16"}
                self._bring_up(host, addresses)
                if is_far:
                    self._widen(host)
        if is_far:
            words = ["ip", "netns", "exec", self.namespace(SWITCH), sys.executable, RELAY, "backbone", "beyond"]
            words.append(self.site.under_way_seconds)
            self._relay = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, text=True)
            assert self._relay.stdout is not None and self._relay.stdout.readline(), "the relay did not start"

    def close(self) -> None:
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()

    def _widen(self, host: str) -> None:
        """Let TCP have as many bytes under way as a far link holds, also after a pause."""
        most = int(4 * self.site.bits_per_second / 8 * self.site.under_way_seconds) + 2**22
        settings = {
            "tcp_rmem": f"4096 131072 {most}",
            "tcp_wmem": f"4096 131072 {most}",
            "tcp_slow_start_after_idle": 0,
        }
        for name, value in settings.items():
            command = "ip", "netns", "exec", self.namespace(host), "sh", "-c"
            _call(*command, f"echo '{value}' > /proc/sys/net/ipv4/{name}")

    def _plug(self, port: str, bridge: str, bits_per_second: float | None = None) -> None:
        self._ip(SWITCH, f"link set {port} master {bridge}")
        if bits_per_second:
            self._shape(SWITCH, port, bits_per_second)

    def _shape(self, name: str, link: str, bits_per_second: float) -> None:
        """Set the rate at which a link sends."""
        queue_bytes = max(int(bits_per_second / 8 * QUEUE_SECONDS), SMALLEST_QUEUE_BYTES)
        shape = f"tbf rate {int(bits_per_second)}bit burst {BURST_BYTES} limit {queue_bytes}"
        _call("tc", "-netns", self.namespace(name), *f"qdisc add dev {link} root {shape}".split())

    def _bring_up(self, name: str, addresses: Mapping[str, str]) -> None:
        """Set all links up, without IPv6, whose own messages would be counted."""
        links = json.loads(_call("ip", "-netns", self.namespace(name), "-json", "link"))
        names = [link["ifname"] for link in links]
        self._ip(name, *(f"link set {link} addrgenmode none" for link in names if link != "lo"))
        self._ip(name, *(f"address add {address} dev {link}" for link, address in addresses.items()))
        self._ip(name, *(f"link set {link} up" for link in names))

    def _ip(self, name: str, *lines: str) -> None:
        _call("ip", "-netns", self.namespace(name), "-batch", "-", given="\n".join(lines) + "\n")


@contextmanager
def open_network(site: Site) -> Iterator[Network]:
    """Make a site's hosts and links; at the end, whatever happened, stop what runs there and remove them."""
    if too_long := [cluster.name for cluster in site.clusters if len(cluster.name) > LONGEST_CLUSTER_NAME]:
        raise ValueError(f"clusters {too_long}: Linux refuses names above {LONGEST_CLUSTER_NAME} characters")
    remove_leftovers()
    network = Network(site)
    try:
        network.build()
        yield network
    finally:
        network.close()
        _remove([namespace for namespace in network.namespaces if namespace in _existing()])


def missing() -> str | None:
    """Return why there can be no such network here, after an attempt at a small one; None if there can be."""
    if os.geteuid():
        return "network namespaces need root"
    if absent := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"iproute2 is not installed: no {' and no '.join(absent)}"
    if not (BIN / "mpirun").exists():
        return f"MPICH is not installed: no {BIN / 'mpirun'}"
    try:
        with open_network(Site((Cluster("probe", 1, 1e9),), 1e8)) as network:
            _call("ip", "netns", "exec", network.namespace("probe-0"), "true")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return None


def remove_leftovers() -> None:
    """Remove the networks of processes that are gone, and stop what still runs there."""
    made_by = {name: match[1] for name in _existing() if (match := re.match(r"hpctrain-(\d+)-", name))}
    _remove([name for name, pid in made_by.items() if not Path("/proc", pid).exists()])


def _existing() -> list[str]:
    return [line.split()[0] for line in _call("ip", "netns", "list").splitlines()]


def _remove(namespaces: Sequence[str]) -> None:
    _stop_processes(namespaces)
    for namespace in namespaces:
        _call("ip", "netns", "delete", namespace)


def _stop_processes(namespaces: Sequence[str]) -> None:
    """End all processes in namespaces: mpirun takes its ranks with it; who does not go in time is killed."""
    start = time.monotonic()
    while pids := [int(pid) for namespace in namespaces for pid in _call("ip", "netns", "pids", namespace).split()]:
        late = time.monotonic() - start > STOP_SECONDS
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        time.sleep(0.1)


def _call(*command: str, given: str | None = None) -> str:
    return subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=30).stdout
