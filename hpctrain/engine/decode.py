"""Writes text with the weights of a checkpoint, on one rank, whatever layout wrote it."""

from pathlib import Path

import torch

from hpctrain.checkpoint.format import Index
from hpctrain.checkpoint.state import read_job, read_region
from hpctrain.comm.communicator import Communicator
from hpctrain.config.errors import CheckpointError
from hpctrain.data.tokenizer import Tokenizer
from hpctrain.model.axes import Axes
from hpctrain.model.stage import Stage
from hpctrain.model.store import Store
from hpctrain.model.transformer import Head
from hpctrain.plan.holders import whole_model
from hpctrain.plan.tiling import Tile
from hpctrain.sharding.intervals import Interval


class Generator:
    """A model loaded whole, in fp32, with its tokenizer. Raises CheckpointError if the checkpoint has none."""

    def __init__(self, checkpoint: Path):
        with Index(checkpoint) as index:
            index.verify()
            self.job = read_job(index)
            if not index.about["tokenizer"]:
                raise CheckpointError(f"{checkpoint}: was trained on tokens without a tokenizer, so it writes no text")
            self.tokenizer = Tokenizer.from_json(index.about["tokenizer"])
            model = self.job.model
            alone = Communicator([0])
            axes = Axes(alone, alone, alone)
            store = Store([alone], whole_model(model), axes, torch.float32, torch.device("cpu"))
            self._stage = Stage(model, Tile(Interval(0, model.num_items), Interval(0, 1), (0,)), axes, store)
            for group in store.groups:
                for region in group.regions(Interval(0, group.size)):
                    group.weights[slice(*region.at)] = read_region(index, "model", region)

    @torch.no_grad()
    def _logits(self, ids: list[int]) -> torch.Tensor:
        """Return fp32 logits [vocabulary] of the token after `ids`."""
        *items, head = self._stage.items
        assert isinstance(head, Head)
        value = torch.tensor([ids])
        for item in items:
            value = item.forward(value)
        return head.logits(value[:, -1:])[0, -1]

    def text(self, prompt: str, num_tokens: int, temperature: float = 0.8, top_k: int = 50, seed: int = 0) -> str:
        """Return `num_tokens` sampled tokens after the prompt, as text; temperature 0 takes the likeliest.

        The whole context is computed anew for each token.
        """
        ids = self.tokenizer.encode(prompt).tolist() or [self.tokenizer.separator or 0]
        length = self.job.data.sequence_length
        generator = torch.Generator().manual_seed(seed)
        written: list[int] = []
        for _ in range(num_tokens):
            logits = self._logits((ids + written)[-length:])[: self.tokenizer.vocab_size]
            if temperature == 0:
                written.append(int(logits.argmax()))
                continue
            top = logits.topk(min(top_k, logits.numel()))
            resolved = torch.multinomial(torch.softmax(top.values / temperature, dim=0), 1, generator=generator)
            written.append(int(top.indices[resolved]))
        return self.tokenizer.decode(written)
