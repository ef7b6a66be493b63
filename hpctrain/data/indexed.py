"""Reads Megatron-LM's tokens: `NAME.bin` has the ids, `NAME.idx` their dtype and where documents begin.

The index is, little-endian: a signature, the version (uint64), a code of the dtype (uint8), the numbers of sequences
and of bounds of documents (uint64 each), the lengths of sequences (int32), where each begins in bytes (int64), and the
bounds of documents, counted in sequences (int64). Other `.bin` files are looked at, so that none is read as what it is
not.
"""

import struct
from pathlib import Path

import numpy as np

from hpctrain.config.errors import DataError, describe_os_error
from hpctrain.config.paths import is_file, read_bytes

SIGNATURE = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""The numpy dtype for each dtype code of an index."""
OTHER_HEADS = {
    b"\x93NUMPY": "an array of numpy",
    b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"PK\x03\x04": "a zip file, such as torch saves",
    b"PAR1": "a Parquet file",
    b"MMIDIDX": "an index of Megatron",
    b"TNTIDX": "an index of fairseq",
    struct.pack("<i", 20240520): "a file of llm.c or modded-nanogpt, whose first 1,024 bytes are a header",
    struct.pack("<i", 20240801): "a file of llm.c, whose first 1,024 bytes are a header",
}
"""The first bytes of other kinds of files that are also called .bin."""
LOOKED_AT = 4096
"""Number of tokens at the start of a file that are examined."""
FEWEST_LOOKED_AT = 64
"""Fewest pairs of 2-byte numbers from which a file of 4-byte tokens can be recognised."""
MOST_HIGH_HALF = 15
"""The largest high half of a 4-byte token with an id below a million."""


def index_of(path: Path) -> Path | None:
    """Return the index in the folder of a `.bin` file; None where it has none."""
    index = path.with_suffix(".idx")
    return index if is_file(index) else None


def open_indexed(path: Path, index: Path, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Map the tokens of a `.bin` file of so many bytes by its index; return them, and where each document begins.

    Raises DataError where file and index contradict each other.
    """
    try:
        data = read_bytes(index)
    except OSError as error:
        raise DataError(f"{index}: cannot be read: {describe_os_error(error)}") from None
    if not data.startswith(SIGNATURE) or len(data) < len(SIGNATURE) + HEADER.size:
        raise DataError(
            f"{index}: lies beside {path.name} and is no index of Megatron, which begins with {SIGNATURE!r};"
            f" remove it if {path.name} holds plain tokens of 2 bytes"
        )
    version, code, num_sequences, num_bounds = HEADER.unpack_from(data, len(SIGNATURE))
    at = len(SIGNATURE) + HEADER.size
    needed = at + 12 * num_sequences + 8 * num_bounds
    if version != 1 or code not in DTYPES or len(data) < needed:
        raise DataError(
            f"{index}: is damaged or of another version: version {version}, dtype code {code}, {len(data):,} bytes, of"
            f" which {needed:,} are needed; copy it again"
        )
    dtype = np.dtype(DTYPES[code])
    if dtype.kind == "f":
        raise DataError(f"{index}: says that {path.name} has elements of {dtype}, and ids are whole numbers")
    lengths = np.frombuffer(data, "<i4", num_sequences, at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", num_sequences, at + 4 * num_sequences)
    bounds = np.frombuffer(data, "<i8", num_bounds, at + 12 * num_sequences)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    if size != starts[-1] * dtype.itemsize or (lengths < 0).any():
        raise DataError(
            f"{path}: has {size:,} bytes, and {index.name} says {starts[-1]:,} tokens of {dtype.itemsize};"
            " copy both again"
        )
    if not size:
        raise DataError(f"{path}: has no tokens")
    if (pointers != starts[:-1] * dtype.itemsize).any():
        raise DataError(f"{index}: has sequences in another order than {path.name}; write both again, by merging them")
    if (np.diff(bounds) < 0).any() or (len(bounds) and (bounds[0] < 0 or bounds[-1] > num_sequences)):
        raise DataError(f"{index}: its bounds of documents are not those of {num_sequences:,} sequences")
    begins = np.unique(np.concatenate([[0], starts[bounds]]))
    tokens = np.memmap(path, dtype, mode="r").view(np.ndarray)
    return tokens, begins[begins < len(tokens)]


def refuse_other_kinds(path: Path, head: bytes, size: int) -> None:
    """Raise DataError for a `.bin` file that holds no plain tokens of 2 bytes, by how it begins."""
    expected = "a .bin without an .idx beside it holds tokens of 2 bytes each, as nanoGPT's"
    for start, what in OTHER_HEADS.items():
        if head.startswith(start):
            raise DataError(f"{path}: is {what}, and {expected}; write it so, or as Megatron's .bin and .idx")
    if size == 0 or size % 2:
        raise DataError(f"{path}: has {size} bytes, and {expected}, at least one; copy it again")
    halves = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    if len(halves) < FEWEST_LOOKED_AT:
        return
    if halves[:, 1].max() <= MOST_HIGH_HALF < halves[:, 0].max():
        raise DataError(
            f"{path}: looks like tokens of 4 bytes: every second number of the first {2 * len(halves):,} is at most"
            f" {halves[:, 1].max()}; {expected}. Write 2 bytes a token, or an .idx as Megatron does"
        )
    text = np.frombuffer(head, np.uint8)
    if ((text >= 32) & (text < 127) | (text == 10) | (text == 9) | (text == 13)).all():
        raise DataError(f"{path}: is text, and {expected}; make a token file of it with hpctrain prepare")
