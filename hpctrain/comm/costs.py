"""What a collective costs in theory, for choosing between algorithms. Pure.

The model is that of Thakur, Rabenseifner and Gropp (2005): a message of n bytes takes latency + n / bandwidth, a rank
sends and receives one at a time. Each further message under way at the same time costs its sender `overhead`.
"""

from hpctrain.job import Link

MOST_DOUBLED_BYTES = 1 << 20
"""Of a tensor: doubling has two more copies of it, others need room for a part; beyond, rounds are cheap."""


def flat_seconds(operation: str, algorithm: str, num_bytes: int, num_ranks: int, link: Link, overhead: float):
    """Return what a flat collective of `num_bytes` (the whole tensor's) over `num_ranks` takes, in seconds."""
    latency, share = link.latency_seconds, num_bytes * (num_ranks - 1) / num_ranks / link.bandwidth_bytes_per_second
    passes = 2 if operation == "all_reduce" else 1
    match algorithm:
        case "doubling":
            whole = num_bytes / link.bandwidth_bytes_per_second
            rounds = (num_ranks - 1).bit_length() + (2 if num_ranks & (num_ranks - 1) else 0)
            return rounds * (latency + overhead + whole)
        case "ring":
            return passes * ((num_ranks - 1) * (latency + overhead) + share)
        case _:
            return passes * (latency + (num_ranks - 1) * overhead + share)


def cheapest_flat(operation: str, num_bytes: int, num_ranks: int, link: Link, overhead: float) -> str:
    """Return the algorithm that takes the least time: exchange, ring, or for small all-reduces doubling."""
    may_double = operation == "all_reduce" and num_bytes <= MOST_DOUBLED_BYTES
    candidates = ["exchange", "ring"] + (["doubling"] if may_double else [])
    return min(candidates, key=lambda a: flat_seconds(operation, a, num_bytes, num_ranks, link, overhead))
