"""A small vision transformer."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manta.limits import image_shape, positive, probability


class Block(nn.Module):
    """Pre-norm self-attention and MLP, each with a residual. (N, T, dim) -> (N, T, dim)."""

    def __init__(self, dim: int, heads: int, mlp_ratio: float, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        inner = int(dim * mlp_ratio)
        self.mlp = nn.Sequential(
            nn.Linear(dim, inner), nn.GELU(), nn.Dropout(dropout), nn.Linear(inner, dim), nn.Dropout(dropout)
        )

    def attend(self, tokens: Tensor) -> Tensor:
        # (N, T, 3 * dim) -> three of (N, heads, T, dim / heads)
        query, key, value = self.qkv(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=drop)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attend(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class ViT(nn.Module):
    """Patches, learned positions, pre-norm blocks, mean over tokens, Linear. (N, C, H, W) -> (N, num_classes).

    Dosovitskiy et al. 2020, arXiv:2010.11929, with the mean in place of a class token as in Beyer et al. 2022,
    arXiv:2205.01580.
    """

    def __init__(
        self,
        input_shape: list[int],
        num_classes: int,
        patch_size: int,
        dim: int = 64,
        depth: int = 4,
        heads: int = 4,
        mlp_ratio: float = 2.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels, height, width = image_shape(input_shape)
        positive(num_classes=num_classes, patch_size=patch_size, dim=dim, depth=depth, heads=heads)
        positive(**{"int(dim * mlp_ratio)": int(dim * mlp_ratio)})
        probability(dropout=dropout)
        if height % patch_size or width % patch_size:
            raise ValueError(f"patch_size={patch_size} does not divide the image of input_shape={list(input_shape)}")
        if dim % heads:
            raise ValueError(f"dim={dim} is not a multiple of heads={heads}")
        self.patches = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty(1, (height // patch_size) * (width // patch_size), dim))
        nn.init.trunc_normal_(self.positions, std=0.02)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(dim, heads, mlp_ratio, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(self.dropout(tokens))).mean(1))
