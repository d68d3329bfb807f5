"""A model family of its own: a small vision transformer and the adapter that splits it."""

import torch
from torch import nn

from seecause.models.block import Block, TokenLayout, chain
from seecause.models.parts import Parts
from seecause.models.preprocess import Preprocess

WIDTH, HEADS, PATCH, SIDE = 16, 2, 8, 32


class TinyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def heads(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        return q, k, v  # [B, T, H, dh] each

    def forward(self, x):
        q, k, v = (part.transpose(1, 2) for part in self.heads(self.before(x)))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.mlp(self.between(x))


class TinyViT(nn.Module):
    def __init__(self, classes: int = 2):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.place = nn.Parameter(torch.randn(1, 1 + (SIDE // PATCH) ** 2, WIDTH))
        self.layers = nn.ModuleList(TinyBlock() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, classes)

    def tokens(self, images):
        patches = self.stem(images).flatten(2).transpose(1, 2)
        first = self.first.expand(len(images), -1, -1)
        return torch.cat([first, patches], dim=1) + self.place

    def features(self, images):
        x = self.tokens(images)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, images):
        return self.head(self.features(images)[:, 0])


def find_parts(module):
    """What seecause needs to know of a TinyViT; None for anything else."""
    if not isinstance(module, TinyViT):
        return None
    blocks = [
        Block(
            name=f"layers.{index}",
            native=layer,
            heads=HEADS,
            head_dim=WIDTH // HEADS,
            scale=(WIDTH // HEADS) ** -0.5,
            norm=layer.before,
            project=layer.heads,
            mix=layer.out,
            feed=chain(layer.between, layer.mlp),
        )
        for index, layer in enumerate(module.layers)
    ]
    return Parts(
        family="sparkle.TinyViT",
        embed=module.tokens,
        layout_at=lambda height, width: TokenLayout(
            grid=(height // PATCH, width // PATCH), prefix=1, class_index=0
        ),
        blocks=blocks,
        norm=module.norm,
        patch=(PATCH, PATCH),
        native_tokens=module.features,
        preprocess=Preprocess((SIDE, SIDE), (0.5,) * 3, (0.5,) * 3),
        pool="cls",
        head=module.head,
        native_logits=module,
        native_pooled=lambda images: module.features(images)[:, 0],
        classes=("left", "right"),
        size=(SIDE, SIDE),
    )


def open_model(name, *, weights=None):
    """`tinyvit:SEED`."""
    torch.manual_seed(int(name))
    return TinyViT()
