"""A small GPT."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manta.limits import positive, probability


class Block(nn.Module):
    """Causal self-attention and a perceptron, each after a LayerNorm and added to what came in."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        parts = self.qkv(self.before_attention(x)).view(n, length, 3, self.heads, dim // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.project(attended.transpose(1, 2).reshape(n, length, dim)))
        return x + self.drop(self.mlp(self.before_mlp(x)))


class GPT(nn.Module):
    """Token ids (n, length) int64 -> logits of the next token (n, length, num_classes).

    Radford et al. 2019, Language Models are Unsupervised Multitask Learners: pre-norm, learned positions, the head's weights
    are the embedding's, and projections into the residual stream start smaller by the root of their number.

    Args:
        input_shape: [the longest context, in tokens].
        num_classes: size of the vocabulary.
    """

    def __init__(
        self, input_shape: list[int], num_classes: int, dim: int, depth: int, heads: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(f"input_shape={list(input_shape)} must be [context length]")
        positive(num_classes=num_classes, dim=dim, depth=depth, heads=heads)
        probability(dropout=dropout)
        if dim % heads:
            raise ValueError(f"dim={dim} must be a multiple of heads={heads}")
        self.context = input_shape[0]
        self.tokens, self.positions = nn.Embedding(num_classes, dim), nn.Embedding(self.context, dim)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, num_classes, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialise)
        for block in self.blocks:
            assert isinstance(block, Block)
            for layer in (block.project, block.mlp[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))  # type: ignore[arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Tensor,
    length: int,
    context: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """`length` more tokens after `prompt` (n,) int64, one by one; all of them, (n + length,).

    Args:
        model: maps (1, up to context) token ids to logits (1, ..., vocabulary).
        temperature: 0 = always the most probable one.
    """
    found = prompt
    for _ in range(length):
        logits = model(found[None, -context:])[0, -1].float()
        if temperature == 0:
            token = logits.argmax(dim=-1, keepdim=True)
        else:
            chances = (logits / temperature).softmax(dim=-1).cpu()
            token = torch.multinomial(chances, 1, generator=generator).to(found.device)
        found = torch.cat([found, token])
    return found
