"""Places sequences in the global batch: a function of (seed, step) alone, the same for every layout."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from hpctrain.config.errors import DataError
from hpctrain.config.job import Data
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import TokenSource, open_tokens
from hpctrain.sharding.intervals import Interval

NO_TOKEN = -1  # the id in rows that only fill up a batch; the loss leaves out such a target
MIXED_AT_ONCE = 1024  # consecutive positions, of which each source has its share
ROUNDS = 16  # rounds of the Feistel network; measured: with 8 some of the 120 orders of 5 sequences are too rare
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
    base = np.frombuffer(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "<u8").astype(np.uint64)
    stream = _mix(base + epochs.ravel().astype(np.uint64) * _GOLDEN)
    keys = _mix(stream + np.arange(1, ROUNDS + 1, dtype=np.uint64)[:, None] * _GOLDEN)  # [ROUNDS, epochs]
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
        mask_documents: bool = False,
    ):
        self.source = source
        self.interval = interval
        self.sequence_length = sequence_length
        self.seed = seed
        self.shuffle = shuffle
        self.masks_documents = mask_documents
        self.has_loss_mask = mask_documents or source.answers is not None
        """Whether the loss leaves some targets out."""
        self._learnt_from = source.turns + (mask_documents & np.isin(source.turns, source.documents))
        """For each turn, the index of the first token that counts in the loss."""
        if source.answers is not None:
            self._learnt_from = np.maximum(self._learnt_from, source.answers)
        self.num_sequences = max(0, interval.size - 1) // sequence_length
        if self.num_sequences == 0:
            largest = interval.size - 1
            shorter = f"set data.sequence_length to at most {largest}, or " if largest > 0 else ""
            raise DataError(
                f"{source.path}: data.sequence_length = {sequence_length} needs {sequence_length + 1} tokens, and"
                f" {part} has {interval.size}; {shorter}give more text"
            )

    def by_source(self, positions: np.ndarray) -> Iterator[tuple["Sequences", slice, np.ndarray]]:
        """Yield these sequences alone, as `Mixture.by_source` does."""
        yield self, slice(len(positions)), positions

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return the sequences at int64 positions that count through all epochs, int64 [positions, length + 1]."""
        batch = np.empty((len(positions), self.sequence_length + 1), np.int64)
        for row, start in enumerate(self.first_tokens(positions).tolist()):
            batch[row] = self.source.read(start, self.sequence_length + 1)
        return batch

    def first_tokens(self, positions: np.ndarray) -> np.ndarray:
        """Return the index in the file of each sequence's first token; int64 positions count through all epochs."""
        epochs, sequences = np.divmod(positions, self.num_sequences)
        if self.shuffle:
            sequences = permute(sequences, self.num_sequences, self.seed, epochs)
        return self.interval.start + sequences * self.sequence_length

    def document_starts(self, positions: np.ndarray) -> np.ndarray:
        """Return for each input of sequences where its document starts, int64 [positions, length].

        Counted from the sequence's first token, which is where a document starts that began before.
        """
        first = self.first_tokens(positions)[:, None]
        tokens = first + np.arange(self.sequence_length)
        documents = self.source.documents
        return np.maximum(documents[np.searchsorted(documents, tokens, side="right") - 1] - first, 0)

    def loss_mask(self, positions: np.ndarray) -> np.ndarray:
        """Return for each target of sequences whether it counts in the loss, bool [positions, length]."""
        targets = self.first_tokens(positions)[:, None] + np.arange(1, self.sequence_length + 1)
        return targets >= self._learnt_from[self._turn_of(targets)]

    def count_targets(self, positions: np.ndarray) -> int:
        """Return how many targets of sequences count in the loss."""
        if not self.has_loss_mask:
            return len(positions) * self.sequence_length
        first = self.first_tokens(positions) + 1
        return int((self._learnt_before(first + self.sequence_length) - self._learnt_before(first)).sum())

    @property
    def num_targets(self) -> int:
        """Number of targets in an epoch that count in the loss."""
        if not self.has_loss_mask:
            return self.num_sequences * self.sequence_length
        first = np.array([self.interval.start + 1])
        return int(
            (self._learnt_before(first + self.num_sequences * self.sequence_length) - self._learnt_before(first))[0]
        )

    def _learnt_before(self, tokens: np.ndarray) -> np.ndarray:
        """Return how many tokens of the file before each of these count in the loss."""
        ends = np.append(self.source.turns[1:], self.source.num_tokens)
        in_turns = np.concatenate([[0], np.cumsum(np.maximum(0, ends - self._learnt_from))])
        turn = self._turn_of(tokens - 1)
        return in_turns[turn] + np.maximum(0, tokens - self._learnt_from[turn])

    def _turn_of(self, tokens: np.ndarray) -> np.ndarray:
        return np.searchsorted(self.source.turns, tokens, side="right") - 1

    @property
    def identity(self) -> str:
        """A text that identifies these sequences; a run that continues must have the same."""
        return f"{self.source.identity} {tuple(self.interval)}"


class Mixture:
    """Sequences of several sources, by weight. The sequence at a place follows from (seed, step) alone.

    In every `MIXED_AT_ONCE` positions each source has its share by weight, to within one sequence, in a permuted order.
    Each source goes through its own epochs.
    """

    def __init__(self, sources: Sequence[Sequences], weights: Sequence[float], seed: int = 0):
        self.sources = sources
        self.sequence_length = sources[0].sequence_length
        self.num_sequences = sum(source.num_sequences for source in sources)
        self.masks_documents = sources[0].masks_documents
        self.has_loss_mask = any(source.has_loss_mask for source in sources)
        self._seed = seed
        total = sum(weights)
        self._shares = [weight / total for weight in weights]
        self._remainder = max(range(len(sources)), key=lambda i: weights[i])
        """The source that takes what rounding leaves."""

    @property
    def identity(self) -> str:
        return "; ".join(f"{share:g} of {s.identity}" for share, s in zip(self._shares, self.sources, strict=True))

    @property
    def num_targets(self) -> int:
        """Number of targets that count in the loss, in one epoch of each source."""
        return sum(source.num_targets for source in self.sources)

    def by_source(self, positions: np.ndarray) -> Iterator[tuple[Sequences, np.ndarray, np.ndarray]]:
        """Yield each source, a mask of the positions that are its own (bool), and their numbers in its own count."""
        numbers, inner = self.place(positions)
        for number, source in enumerate(self.sources):
            own = numbers == number
            yield source, own, inner[own]

    def place(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each position the number of its source, and the position in that source's own count."""
        groups, slots = np.divmod(positions, MIXED_AT_ONCE)
        slots = permute(slots, MIXED_AT_ONCE, self._seed, groups)
        before, after = self._num_before(groups), self._num_before(groups + 1)
        ends = np.cumsum(after - before, axis=0)
        numbers = (slots >= ends).sum(axis=0)
        columns = np.arange(len(positions))
        start_of = ends[numbers, columns] - (after - before)[numbers, columns]
        return numbers, before[numbers, columns] + slots - start_of

    def _num_before(self, groups: np.ndarray) -> np.ndarray:
        """Return how many sequences of each source precede a group of positions, int64 [sources, groups]."""
        counts = np.array([np.floor(groups * (MIXED_AT_ONCE * share)) for share in self._shares], dtype=np.int64)
        counts[self._remainder] = 0
        counts[self._remainder] = groups * MIXED_AT_ONCE - counts.sum(axis=0)
        return counts


def split(source: TokenSource, validation_fraction: float) -> tuple[Interval, Interval]:
    """Cut the tokens into (train, validation), the last `validation_fraction` being validation.

    The cut is at the nearest start of a document. It is at the exact token if validation would otherwise be less than
    half, or more than twice, of the requested size, as in a file of one document.
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


AnySequences = Sequences | Mixture


@dataclass(frozen=True)
class Batch:
    """The sequences at positions `first` to `stop`, which count through those of epoch 0, 1, …

    A batch may span epochs. Rows from `stop` on are there, filled with `NO_TOKEN`, but do not count.
    """

    sequences: AnySequences
    first: int
    stop: int

    @classmethod
    def of_step(cls, sequences: AnySequences, step: int, global_batch: int) -> Self:
        """Return the global batch of a training step."""
        return cls(sequences, step * global_batch, (step + 1) * global_batch)

    def rows(self, rows: Interval) -> np.ndarray:
        """Return int64 [rows.size, positions + 1]: each row's tokens, and the one that follows."""
        return self._filled(rows, Sequences.read, self.sequences.sequence_length + 1, NO_TOKEN)

    def document_starts(self, rows: Interval) -> np.ndarray | None:
        """Return int64 [rows.size, positions]: where in its row each token's document starts.

        None unless attention is to stay inside of documents.
        """
        if not self.sequences.masks_documents:
            return None
        return self._filled(rows, Sequences.document_starts, self.sequences.sequence_length, 0)

    def loss_mask(self, rows: Interval) -> np.ndarray | None:
        """Return bool [rows.size, positions]: whether each target counts in the loss; None: all targets count."""
        if not self.sequences.has_loss_mask:
            return None
        return self._filled(rows, Sequences.loss_mask, self.sequences.sequence_length, 0).astype(bool)

    def num_targets(self) -> int:
        """Return how many targets of the whole batch count in the loss; 0 where all are in prompts."""
        placed = self.sequences.by_source(np.arange(self.first, self.stop))
        return sum(source.count_targets(inner) for source, _, inner in placed)

    def _filled(
        self, rows: Interval, get: Callable[[Sequences, np.ndarray], np.ndarray], length: int, filler: int
    ) -> np.ndarray:
        """Return int64 [rows.size, length] for all rows; rows from `stop` on are filled with the filler."""
        if not 0 <= rows.start <= rows.stop:
            raise ValueError(f"rows {rows.start} to {rows.stop} of a batch")
        positions = np.arange(*rows.shift(self.first).intersect(Interval(self.first, self.stop)), dtype=np.int64)
        result = np.full((rows.size, length), filler, dtype=np.int64)
        there = result[: len(positions)]
        for source, own, inner in self.sequences.by_source(positions):
            there[own] = get(source, inner)
        return result


def open_datasets(data: Data, seed: int) -> tuple[TokenSource, AnySequences, AnySequences | None]:
    """Open what a job's `[data]` names: its first token file, its training sequences and its validation sequences.

    Validation is a file of its own if `data.validation` says so, else the end of each token file; None if that is to
    be nothing. The caller closes the sources. Raises DataError for files that cannot be used, alone or together.
    """
    make = partial(Sequences, sequence_length=data.sequence_length, mask_documents=data.mask_documents)

    def divide(source: TokenSource) -> tuple[Sequences, Sequences | None]:
        train_part, validation_part = split(source, data.validation_fraction)
        fraction = f"data.validation_fraction = {data.validation_fraction:g}"
        train = make(source, train_part, seed=seed, part=f"its training part ({fraction})")
        if data.validation_fraction == 0:
            return train, None
        part = f"its validation part ({fraction}; 0 for none)"
        return train, make(source, validation_part, shuffle=False, part=part)

    source = open_tokens(data.tokens)
    if data.validation is None:
        train, validation = divide(source)
    else:
        held_out = open_tokens(data.validation)
        _check_vocabularies(source, held_out, "data.validation")
        train = make(source, Interval(0, source.num_tokens), seed=seed)
        validation = make(held_out, Interval(0, held_out.num_tokens), shuffle=False, part="data.validation")
    if not data.more:
        return source, train, validation
    weights, parts = [data.weight], [(train, validation)]
    for other in data.more:
        their_source = open_tokens(other.tokens)
        _check_vocabularies(source, their_source, "data.more")
        weights.append(other.weight)
        parts.append(divide(their_source))
    mixed = Mixture([training for training, _ in parts], weights, seed)
    if data.validation is None and validation is not None:
        validation = Mixture([held_out for _, held_out in parts if held_out], weights, seed)
    return source, mixed, validation


def check_targets(data: Data, training: AnySequences, validation: AnySequences | None, num_validated: int) -> None:
    """Raise DataError where no target would count in the loss, in training or in validation."""
    why = "every token is of a prompt, or the first of its document"
    if training.num_targets == 0:
        raise DataError(f"{data.tokens}: has no token to learn: {why}; give texts with answers")
    if validation is None:
        return
    count = min(num_validated, validation.num_sequences)
    if Batch(validation, 0, count).num_targets() == 0:
        raise DataError(
            f"{data.validation or data.tokens}: the {count} sequences that a validation reads have no token to learn:"
            f" {why}; raise train.validation_sequences ({num_validated}) or data.validation_fraction"
            f" ({data.validation_fraction:g}), or name a larger data.validation"
        )


def _check_vocabularies(source: TokenSource, held_out: TokenSource, key: str) -> None:
    """Raise DataError unless a token means the same in both files, as far as they say."""
    if source.declares_vocabulary and held_out.declares_vocabulary:
        agree = source.vocab_size == held_out.vocab_size
    else:  # a .bin does not say which tokens there are beyond those it has
        agree = held_out.largest_token < source.vocab_size
    if not agree:
        raise DataError(
            f"{held_out.path}: {key} has a vocabulary of {held_out.vocab_size}, and data.tokens"
            f" ({source.path}) one of {source.vocab_size};{_REMEDY.format(source.path)}"
        )
    if source.tokenizer_json and held_out.tokenizer_json and source.tokenizer_json != held_out.tokenizer_json:
        raise DataError(
            f"{held_out.path}: {key} was made with another tokenizer than data.tokens ({source.path}),"
            f" though both have {source.vocab_size} tokens;{_REMEDY.format(source.path)}"
        )


def check_tokenizer(source: TokenSource, tokenizer_json: str, checkpoint: Path) -> None:
    """Raise DataError where tokens are not those that the model of a checkpoint knows, as far as both say."""
    if not tokenizer_json or not source.tokenizer_json or tokenizer_json == source.tokenizer_json:
        return
    own, theirs = source.tokenizer, Tokenizer.from_json(tokenizer_json, f"{checkpoint}: tokenizer")
    if own and own.encoding_rules() != theirs.encoding_rules():
        raise DataError(
            f"{source.path}: was made with another tokenizer ({own.vocab_size} ids) than the model of {checkpoint}"
            f" ({theirs.vocab_size} ids);{_REMEDY.format(checkpoint / 'tokenizer.json')}"
        )


_REMEDY = " prepare it with the same one: hpctrain prepare PATH… --tokenizer {} --out OTHER.h5"
