"""Buckets in which state moves between a device and host memory: rules that engine and planner share. Pure."""

LARGEST_BUCKET = 1 << 22
"""Maximum elements of a bucket: 16 MiB of each kind of state, which PCIe 4 x16 moves in less than a millisecond."""
BUCKETS = 32
"""Approximate number of buckets into which a small state is cut."""
SLOTS = 2
"""Buckets on the device at once: one is updated while the next comes in and the last goes out."""
ALIGNED = 64
"""Number of elements at whose multiples buckets of a tensor begin. So vectors of a kernel hold the same elements as
without buckets."""


def bucket_elements(num_elements: int) -> int:
    """Return the most elements of a bucket, where a rank updates so many: a multiple of `ALIGNED`, at least that."""
    even = -(-num_elements // BUCKETS)
    return min(LARGEST_BUCKET, max(ALIGNED, -(-even // ALIGNED) * ALIGNED))
