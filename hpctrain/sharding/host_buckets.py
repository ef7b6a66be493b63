"""Buckets in which state moves between a device and host memory: rules that engine and planner share. Pure."""

LARGEST_BUCKET = 1 << 22
"""Elements: 16 MiB of each kind of state, which an x16 link of PCIe 4 moves in less than a millisecond."""
BUCKETS = 32
"""Into about so many buckets a small state is cut."""
SLOTS = 2
"""Buckets on the device at once: one is updated while the next comes in and the last goes out."""
ALIGNED = 64
"""Buckets of a tensor begin at multiples of so many elements, so that vectors of a kernel hold the same elements as
without buckets."""


def bucket_elements(num_elements: int) -> int:
    """Return the most elements of a bucket, where a rank updates so many: a multiple of `ALIGNED`, at least that."""
    even = -(-num_elements // BUCKETS)
    return min(LARGEST_BUCKET, max(ALIGNED, -(-even // ALIGNED) * ALIGNED))
