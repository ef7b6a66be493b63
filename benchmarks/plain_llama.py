"""Llama in plain PyTorch, as its users write it, of the shape of a job: what hpctrain is measured against on a GPU.

Shapes: B sequences, S positions, E hidden size, H heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.config.job import Model


class PlainBlock(nn.Module):
    """A block of Llama as its users write it in PyTorch."""

    def __init__(self, model: Model):
        super().__init__()
        block = model.description.blocks[0]
        self.of, hidden, inner = block.attention, model.hidden_size, block.mlp.inner
        self.norms = nn.ModuleList(nn.RMSNorm(hidden, eps=self.of.norm.epsilon) for _ in range(2))
        self.qkv = nn.Linear(hidden, self.of.query_size + 2 * self.of.key_size, bias=False)
        self.out = nn.Linear(self.of.query_size, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x_BSE: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        heads = [self.of.heads, self.of.kv_heads, self.of.kv_heads]
        qkv = self.qkv(self.norms[0](x_BSE)).unflatten(-1, (sum(heads), self.of.head_size)).transpose(1, 2)
        q, k, v = qkv.split(heads, dim=1)
        q, k = (self.rotate(each, cos_SD, sin_SD) for each in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
        x_BSE = x_BSE + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x_BSE)).chunk(2, dim=-1)
        return x_BSE + self.down(F.silu(gate) * up)

    @staticmethod
    def rotate(x_BHSD: Tensor, cos_SD: Tensor, sin_SD: Tensor) -> Tensor:
        first, second = x_BHSD.chunk(2, dim=-1)
        return (x_BHSD * cos_SD + torch.cat((-second, first), dim=-1) * sin_SD).to(x_BHSD.dtype)


class PlainLlama(nn.Module):
    """Llama in plain PyTorch; returns its mean loss."""

    def __init__(self, model: Model, length: int):
        super().__init__()
        self.embedding = nn.Embedding(model.num_ids, model.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=1e-5)
        self.head = nn.Linear(model.hidden_size, model.num_ids, bias=False)
        size = model.description.blocks[0].attention.head_size
        angles_SD = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat([angles_SD.cos()] * 2, dim=-1))
        self.register_buffer("sin", torch.cat([angles_SD.sin()] * 2, dim=-1))

    def forward(self, ids_BS: Tensor, targets_BS: Tensor) -> Tensor:
        x_BSE = self.embedding(ids_BS)
        for block in self.blocks:
            x_BSE = block(x_BSE, self.cos, self.sin)
        return self.loss(x_BSE, targets_BS)

    def loss(self, x_BSE: Tensor, targets_BS: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x_BSE)).flatten(0, 1).float(), targets_BS.flatten())

    def compile_parts(self) -> None:
        """Compile the blocks, which are equal, and the loss: the whole at once takes a minute longer."""
        for block in self.blocks:
            block.compile()
        self.loss = torch.compile(self.loss)
