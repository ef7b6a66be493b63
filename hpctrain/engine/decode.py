"""Writes text with the weights of a checkpoint, on one rank, whatever layout wrote it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from hpctrain.checkpoint.index import Index
from hpctrain.checkpoint.state import read_job, read_region
from hpctrain.config.errors import CheckpointError, DataError, JobError
from hpctrain.data.order import NO_TOKEN, Batch, Sequences, check_tokenizer
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.data.tokens import open_tokens
from hpctrain.model.operators.attention import Documents
from hpctrain.model.parallel.axes import ONE_RANK, Axes
from hpctrain.model.stage import Stage
from hpctrain.model.storage.store import Store
from hpctrain.model.transformer import Block, Cache, Embedding, Head, LayerContext
from hpctrain.plan.holdings import whole_model
from hpctrain.plan.tiling import Tile
from hpctrain.sharding.intervals import Interval


class WholeModel:
    """A checkpoint's model on one rank, in fp32. Raises CheckpointError where it is damaged."""

    def __init__(self, checkpoint: Path):
        with Index(checkpoint) as index:
            self.job = read_job(index)
            self.tokenizer_json = str(index.about["tokenizer"])
            self.model = model = self.job.model
            axes = Axes()
            store = Store([ONE_RANK], whole_model(model), axes, torch.float32, torch.device("cpu"))
            tile = Tile(Interval(0, model.num_items), Interval(0, 1), (0,))
            self._stage = Stage(tile, LayerContext(model, axes, store))
            for group in store.groups:
                for region in group.regions(Interval(0, group.size)):
                    read_region(index, "model", region, group.weights[slice(*region.at)])
        self._first = 0

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, last: int | None = None) -> torch.Tensor:
        """Return fp32 logits [rows, positions, vocabulary] for ids [rows, positions], or those of the `last` ones.

        With a cache, ids are those that follow what it has.
        """
        *layers, head = self._stage.layers
        assert isinstance(head, Head)
        value = ids
        for layer in layers:
            value = layer.forward(value)
        self._first += ids.shape[1]
        return head.logits(value[:, -last:] if last else value)[..., : self.model.num_ids]

    @torch.no_grad()
    def loss(self, batch: Batch, rows: Interval) -> float:
        """Return the summed loss of rows of a batch, of the targets that training learns from."""
        tokens, learnt, starts = batch.rows(rows), batch.loss_mask(rows), batch.document_starts(rows)
        targets = tokens[:, 1:] if learnt is None else np.where(learnt, tokens[:, 1:], NO_TOKEN)
        documents = None if starts is None else Documents(torch.from_numpy(starts))
        ids, expected = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(targets)
        return self._stage.forward(ids, expected, training=False, documents=documents)[0].item()

    def keep(self, positions: int) -> None:
        """Clear the cache, and keep keys and values of up to so many positions from now on; 0: keep none."""
        self._first = 0
        for layer in self._stage.layers:
            if isinstance(layer, Block):
                layer.cache = Cache(positions) if positions else None
            if isinstance(layer, Embedding):
                layer.first = (lambda: self._first) if positions else (lambda: 0)


@dataclass(frozen=True)
class Sampling:
    """The rules by which the next token is sampled."""

    temperature: float = 0.8
    """Temperature of sampling; 0: always the likeliest token."""
    top_k: int = 50
    """Number of likeliest tokens to sample from."""
    top_p: float = 1.0
    """Probability mass: tokens are sampled from the likeliest ones that reach it together."""
    seed: int = 0
    stop: tuple[str, ...] = field(default=())
    """Texts after which to end, in addition to the tokenizer's end of a document."""
    ignores_end: bool = False
    """Whether to continue after the end of a document."""


class Evaluation(NamedTuple):
    """The loss of a model on some tokens."""

    loss: float
    """Mean loss of a predicted token, in nats."""
    perplexity: float
    sequences: int
    tokens: int
    """Number of tokens in the mean loss."""
    left_out: int
    """Number of tokens in the sequences that training leaves out of the loss too."""
    masks: tuple[str, ...]
    """What the loss leaves out, and what attention does not see, in words."""


def evaluate(
    checkpoint: Path, data: Path, sequences: int | None = None, sequence_length: int | None = None
) -> Evaluation:
    """Return the loss of a checkpoint's model on the first sequences of a token file, or on all.

    It is that of a validation: prompts do not count, nor does attention reach other documents where the model was
    trained so. Raises CheckpointError, DataError, JobError.
    """
    model = WholeModel(checkpoint)
    length = sequence_length or model.job.data.sequence_length
    if length > model.model.max_positions:
        raise JobError(f"--sequence-length {length} is more than the model's {model.model.max_positions} positions")
    with open_tokens(data) as source:
        check_tokenizer(source, model.tokenizer_json, checkpoint)
        if source.least_vocabulary > model.model.num_ids:
            raise JobError(
                f"{data} has {source.least_vocabulary} token ids and the model {model.model.num_ids}: make it with the"
                " model's own tokenizer (hpctrain prepare --tokenizer)"
            )
        if source.num_tokens <= length:
            raise JobError(f"{data}: {source.num_tokens} tokens are no sequence of {length}; lower --sequence-length")
        masks_documents, everything = model.job.data.mask_documents, Interval(0, source.num_tokens)
        read = Sequences(source, everything, length, shuffle=False, mask_documents=masks_documents)
        count = min(sequences or read.num_sequences, read.num_sequences)
        batch = Batch(read, 0, count)
        if not (learnt := batch.num_targets()):
            raise DataError(f"{data}: the {count} sequences have prompts alone, and no token to learn")
        loss = sum(model.loss(batch, Interval(i, i + 1)) for i in range(count)) / learnt
        masks = ("prompts",) * (source.answers is not None) + ("other documents",) * masks_documents
    return Evaluation(loss, math.exp(loss), count, learnt, count * length - learnt, masks)


class Generator:
    """A model loaded whole, in fp32, with its tokenizer. Raises CheckpointError if the checkpoint has none."""

    def __init__(self, checkpoint: Path):
        self._model = WholeModel(checkpoint)
        self.job = self._model.job
        if not self._model.tokenizer_json:
            raise CheckpointError(f"{checkpoint}: was trained on tokens without a tokenizer, so it writes no text")
        self.tokenizer = Tokenizer.from_json(self._model.tokenizer_json)

    def text(self, prompt: str, num_tokens: int, sampling: Sampling = Sampling(), cached: bool = True) -> str:
        """Return at most `num_tokens` sampled tokens after the prompt, as text.

        With `cached` the keys and values of earlier tokens are kept. Without it they are computed again for each token.
        Where the context is full, its older half is dropped.
        """
        start = [*self.tokenizer.begin, *self.tokenizer.encode(prompt).tolist()] or [self.tokenizer.separator or 0]
        generator = torch.Generator().manual_seed(sampling.seed)
        written: list[int] = []
        for logits in self._logits(start, written, cached):
            if len(written) == num_tokens:
                break
            token = choose(logits[: self.tokenizer.vocab_size], sampling, generator)
            if token == self.tokenizer.separator and not sampling.ignores_end:
                break
            written.append(token)
            if sampling.stop and (end := _first_stop(self.tokenizer.decode(written), sampling.stop)) is not None:
                return self.tokenizer.decode(written)[:end]
        return self.tokenizer.decode(written)

    def _logits(self, start: Sequence[int], written: Sequence[int], cached: bool):
        """Yield logits for each next token, after `start` and all tokens that `written` has by then."""
        limit = self.job.data.sequence_length
        context, taken = list(start)[-limit:], 0
        self._model.keep(limit if cached else 0)
        new = context
        while True:
            yield self._model.logits(torch.tensor([new if cached else context]), last=1)[0, -1]
            fresh = list(written[taken:])
            taken = len(written)
            if len(context) + len(fresh) > limit:
                context = (context + fresh)[-max(1, limit // 2) :]
                new = context
                self._model.keep(limit if cached else 0)
            else:
                context, new = context + fresh, fresh


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Return a token by its logits [vocabulary]."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    top = logits.topk(min(sampling.top_k, logits.numel()))
    shares = torch.softmax(top.values / sampling.temperature, dim=0)
    before = shares.cumsum(0) - shares
    shares = shares.masked_fill(before >= sampling.top_p, 0.0)
    return int(top.indices[torch.multinomial(shares, 1, generator=generator)])


def _first_stop(text: str, stops: Sequence[str]) -> int | None:
    return min((text.index(stop) for stop in stops if stop in text), default=None)
