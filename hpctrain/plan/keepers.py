"""Chooses who keeps a second copy of whose state in the memory of hosts, and counts the memory that it takes. Pure."""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace


def keepers(hosts: Sequence[str], counts: Sequence[int]) -> list[int | None]:
    """Return the rank of another host that keeps a second part of each rank; None where there is none to keep. Pure.

    Where hosts are equal, they are pairs: of the losses of two hosts few take both parts.
    """
    ranks: dict[str, list[tuple[int, int]]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append((0, rank))
    # Of each host the rank that keeps least: a heap, as the ranks of each host are.
    first = [(*queue[0], host) for host, queue in ranks.items()]
    result: list[int | None] = []
    for host, count in zip(hosts, counts, strict=True):
        keeper = None
        if count and len(ranks) > 1:
            own = heappop(first) if first[0][2] == host else None
            load, keeper, other = first[0]
            heapreplace(ranks[other], (load + count, keeper))
            heapreplace(first, (*ranks[other][0], other))
            if own:
                heappush(first, own)
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
