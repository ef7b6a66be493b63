"""Chooses who keeps a second copy of whose state in the memory of hosts, and counts the memory that it takes. Pure."""

from collections.abc import Sequence


def keepers(hosts: Sequence[str], counts: Sequence[int]) -> list[int | None]:
    """Return the rank of another host that keeps a second part of each rank; None where there is none to keep. Pure.

    Where hosts are equal, they are pairs: of the losses of two hosts few take both parts.
    """
    loads = [0] * len(hosts)
    result: list[int | None] = []
    for host, count in zip(hosts, counts, strict=True):
        others = [rank for rank, theirs in enumerate(hosts) if theirs != host]
        keeper = min(others, key=lambda rank: (loads[rank], rank)) if others and count else None
        if keeper is not None:
            loads[keeper] += count
        result.append(keeper)
    return result


def host_bytes(hosts: Sequence[str], counts: Sequence[int]) -> dict[str, int]:
    """Return the bytes that each host needs for copies: its own parts and those that it keeps, twice. Pure.

    One copy is complete while the next one is written.
    """
    needs = dict.fromkeys(hosts, 0)
    for rank, keeper in enumerate(keepers(hosts, counts)):
        for holder in {rank, rank if keeper is None else keeper}:
            needs[hosts[holder]] += 2 * 4 * counts[rank]
    return needs
