"""Which sequence is where in the global batch: a function of (seed, step) alone, the same for every layout."""

import hashlib

import numpy as np

from hpctrain.config.errors import DataError
from hpctrain.config.job import Data
from hpctrain.data.tokens import TokenSource, open_tokens
from hpctrain.sharding.intervals import Interval

ROUNDS = 16  # of the Feistel network; measured: with 8 some of the 120 orders of 5 sequences are rarer than others
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(positions: np.ndarray, size: int, seed: int, epochs: np.ndarray | int = 0) -> np.ndarray:
    """Return where the permutation of `range(size)` that belongs to (seed, epoch) sends positions; int64, same shape.

    `positions` and `epochs` are integers, broadcast together. Nothing is stored, whatever the size: a Feistel network
    on the next power of two, applied until the result is in range ("cycle walking", Black and Rogaway 2002).
    """
    positions, epochs = np.broadcast_arrays(positions, epochs)
    if ((positions < 0) | (positions >= size)).any():
        raise ValueError(f"positions {positions.min()} to {positions.max()} of a permutation of {size}")
    bits = max(1, (size - 1).bit_length())
    keys = _round_keys(seed, epochs.ravel())
    out = _feistel(positions.ravel().astype(np.uint64), keys, bits)
    while len(outside := np.flatnonzero(out >= size)):
        out[outside] = _feistel(out[outside], keys[:, outside], bits)
    return out.astype(np.int64).reshape(positions.shape)


def _feistel(values: np.ndarray, keys: np.ndarray, bits: int) -> np.ndarray:
    """Permute `range(2 ** bits)`: the halves take turns in being changed by a function of the other one."""
    right_bits = np.uint64(bits // 2)
    left_mask, right_mask = np.uint64((1 << bits - bits // 2) - 1), np.uint64((1 << bits // 2) - 1)
    left, right = values >> right_bits, values & right_mask
    for i in range(0, ROUNDS, 2):
        left = left ^ (_mix(right ^ keys[i]) & left_mask)
        right = right ^ (_mix(left ^ keys[i + 1]) & right_mask)
    return left << right_bits | right


def _round_keys(seed: int, epochs: np.ndarray) -> np.ndarray:
    """Return uint64 [ROUNDS, epochs]; a seed may be any integer."""
    base = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    stream = _mix(base + epochs.astype(np.uint64) * _GOLDEN)
    return _mix(stream + np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None] * _GOLDEN)


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014), on uint64 arrays."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


class Sequences:
    """The sequences of one part of a token file, in an order of their own for each epoch.

    With L = `sequence_length`, sequence i is tokens i * L to i * L + L of the part, the last one included: L inputs
    and, one further, L targets. Every token but the first is a target once an epoch; a tail shorter than L is left
    out. `part` is what an error calls it. Raises DataError if there is not one whole sequence.
    """

    def __init__(
        self,
        source: TokenSource,
        interval: Interval,
        sequence_length: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        part: str = "the corpus",
    ):
        self.source = source
        self.interval = interval
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.num_sequences = max(0, interval.size - 1) // sequence_length
        if self.num_sequences == 0:
            largest = interval.size - 1
            shorter = f"set data.sequence_length to at most {largest}, or " if largest > 0 else ""
            raise DataError(
                f"{source.path}: data.sequence_length = {sequence_length} needs {sequence_length + 1} tokens, and"
                f" {part} has {interval.size}; {shorter}give more text"
            )

    def batch(self, step: int, global_batch: int, rows: Interval) -> np.ndarray:
        """Return the given rows of a step's global batch, int64 [rows.size, sequence_length + 1].

        Position `step * global_batch + row` counts through the sequences of epoch 0, 1, …; a batch may span epochs.
        """
        if not 0 <= rows.start <= rows.stop <= global_batch:
            raise ValueError(f"rows {rows.start} to {rows.stop} of a global batch of {global_batch}")
        positions = step * global_batch + np.arange(rows.start, rows.stop, dtype=np.int64)
        epochs, sequences = np.divmod(positions, self.num_sequences)
        if self.shuffle:
            sequences = permute(sequences, self.num_sequences, self.seed, epochs)
        batch = np.empty((rows.size, self.sequence_length + 1), np.int64)
        for row, sequence in enumerate(sequences.tolist()):
            start = self.interval.start + sequence * self.sequence_length
            batch[row] = self.source.read(start, self.sequence_length + 1)
        return batch


def split(source: TokenSource, validation_fraction: float) -> tuple[Interval, Interval]:
    """Cut the tokens into (train, validation), the last `validation_fraction` being validation.

    The cut is at the start of the document nearest to that, unless validation would become less than half or more
    than twice of what was asked for (as in a file of one document): then it is at the exact token.
    """
    wanted = round(source.num_tokens * validation_fraction)
    cut = source.num_tokens - wanted
    if wanted:
        inner = source.documents[1:]
        at = int(np.searchsorted(inner, cut))
        near = inner[max(0, at - 1) : at + 1]
        if len(near):
            boundary = int(near[np.argmin(np.abs(near - cut))])
            if wanted / 2 <= source.num_tokens - boundary <= wanted * 2:
                cut = boundary
    return Interval(0, cut), Interval(cut, source.num_tokens)


def open_datasets(data: Data, seed: int) -> tuple[TokenSource, Sequences, Sequences | None]:
    """Open what a job's `[data]` names: the token file, its training sequences and its validation sequences, in order.

    Validation is a file of its own if `data.validation` says so, else the end of `data.tokens`; None if that is to
    be nothing. The caller closes the source, and `validation.source` if it is another one. Raises DataError for
    files that cannot be used, alone or together.
    """
    length = data.sequence_length
    source = open_tokens(data.tokens)
    if data.validation is not None:
        held_out = open_tokens(data.validation)
        _check_vocabularies(source, held_out)
        train = Sequences(source, Interval(0, source.num_tokens), length, seed)
        whole = Interval(0, held_out.num_tokens)
        return source, train, Sequences(held_out, whole, length, shuffle=False, part="data.validation")
    train_part, validation_part = split(source, data.validation_fraction)
    kept = f"its training part (data.validation_fraction = {data.validation_fraction:g})"
    train = Sequences(source, train_part, length, seed, part=kept)
    if data.validation_fraction == 0:
        return source, train, None
    end = f"its validation part (data.validation_fraction = {data.validation_fraction:g}; 0 for none)"
    return source, train, Sequences(source, validation_part, length, shuffle=False, part=end)


def _check_vocabularies(source: TokenSource, held_out: TokenSource) -> None:
    """Raise DataError unless a token means the same in both files, as far as they say."""
    if source.declares_vocabulary and held_out.declares_vocabulary:
        agree = source.vocab_size == held_out.vocab_size
    else:  # a .bin does not say which tokens there are beyond those it has
        agree = held_out.largest_token < source.vocab_size
    if not agree:
        raise DataError(
            f"{held_out.path}: data.validation has a vocabulary of {held_out.vocab_size}, and data.tokens"
            f" ({source.path}) one of {source.vocab_size};{_REMEDY.format(source.path)}"
        )
    if source.tokenizer_json and held_out.tokenizer_json and source.tokenizer_json != held_out.tokenizer_json:
        raise DataError(
            f"{held_out.path}: data.validation was made with another tokenizer than data.tokens ({source.path}),"
            f" though both have {source.vocab_size} tokens;{_REMEDY.format(source.path)}"
        )


_REMEDY = " prepare it with the same one: hpctrain prepare PATH… --tokenizer {} --out OTHER.h5"
