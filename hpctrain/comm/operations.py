"""The operations of a group: one row for each operation's properties.

| operation        | ranks of one host          | by messages        | by domains                 | library        |
|------------------|----------------------------|--------------------|----------------------------|----------------|
| `all_reduce`     | each sums a part, in order | exchange, doubling | reduce-scatter, all-gather | whole          |
| `reduce_scatter` | each sums a part, in order | exchange           | inside, then across        | whole          |
| `all_gather`     | through slots              | exchange           | across, then inside        | whole          |
| `all_to_all`     | through slots              | exchange           | inside, while across       | whole          |
| `barrier`        | counters                   | dissemination      | as by messages             | as by messages |

`send` and `receive` are messages of two ranks. `hpctrain.comm.groups.group` has a method for each row, and one that
starts it; both pass their arguments to one place, which reads the row. Each column is a class of
`hpctrain.comm.collectives`, which has a method of the row's name; classes around them pass on all operations alike.
`hpctrain.planner.prices.network` has their seconds. To add an operation, begin here.
"""

from typing import NamedTuple

from hpctrain.config.errors import CommError


class OperationRow(NamedTuple):
    """The facts that follow from the name of an operation."""

    transfers: int = 1
    """Number of times that each rank's share of the tensor goes to every other rank; the bytes and the cost grow with
    it."""
    phases: tuple[str, ...] = ()
    """The operations that it consists of, where it works by domains."""
    is_cut: bool = False
    """Whether each rank has an interval of the tensor, its cut."""
    is_sum: bool = False
    """Whether a rank receives parts of others before it sums them, which takes memory."""
    is_pairwise: bool = False
    """Whether each rank has another part for each other one: the output has cuts too, and all cuts are a rank's own."""
    doubles: bool = False
    """Whether small tensors may be sent whole, by recursive doubling."""
    has_same_bytes: bool = False
    """Whether all ranks of a group bring the same number of bytes."""
    is_launched: bool = False
    """Whether a maker's library does all or parts of it on device memory."""
    matching: str = ""
    """The operation of the other rank, for a message in a group of two."""


OPERATIONS = {
    "all_reduce": OperationRow(
        2, ("reduce_scatter", "all_gather"), is_sum=True, doubles=True, has_same_bytes=True, is_launched=True
    ),
    "reduce_scatter": OperationRow(is_cut=True, is_sum=True, is_launched=True),
    "all_gather": OperationRow(is_cut=True, is_launched=True),
    "all_to_all": OperationRow(is_cut=True, is_pairwise=True, is_launched=True),
    "barrier": OperationRow(transfers=0, has_same_bytes=True),
    "send": OperationRow(matching="receive"),
    "receive": OperationRow(matching="send"),
}


def row_of(operation: str) -> OperationRow:
    """Return the row of an operation. Raises CommError for an unknown name."""
    row = OPERATIONS.get(operation)
    if row is None:
        raise CommError(f"no operation '{operation}'; groups have {', '.join(OPERATIONS)}")
    return row
