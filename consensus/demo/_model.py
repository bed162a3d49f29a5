"""A small character transformer, sharded with FSDP2, and which of its weights Muon gets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

WIDTH = 64  # features of one character
HEADS = 4
LAYERS = 3
CONTEXT = 64  # characters the model looks back


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, context, width) to the same shape."""
        normed = self.attention_norm(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).flatten(-2))
        fed: Tensor = self.down(functional.gelu(self.up(self.feed_norm(x))))
        return x + fed


class CharacterTransformer(nn.Module):
    """Predicts each next character from those before it."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats a character; both arguments are (batch, context), int64."""
        x = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(vocabulary: int, mesh: DeviceMesh, *, seed: int) -> CharacterTransformer:
    """Return a model with the same weights for the same seed, sharded over ``mesh``.

    Collectives:
        Those of ``fully_shard``. Every rank of the mesh must call.
    """
    torch.manual_seed(seed)
    model = CharacterTransformer(vocabulary)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def hidden_matrices(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the weights between layers: what Muon is made for."""
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            yield name, parameter


def other_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the rest: embeddings, head, norms and biases."""
    hidden = {name for name, _ in hidden_matrices(model)}
    for name, parameter in model.named_parameters():
        if name not in hidden:
            yield name, parameter
