"""What is trained: each case is a module, its batches, its loss and its optimizer.

Weights and batches are random and seeded: a case is the same in each mode, so that modes which should agree
can be compared to the bit. No case uses dropout, for the same reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    title: str
    """How tables and pictures call it."""
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    """One rank's batch of one step."""
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


CASES: dict[str, Case] = {}


def register(name: str, title: str, *, build: Any, batch: Any, loss: Any, optimizer: Any) -> None:
    CASES[name] = Case(name, title, build, batch, loss, optimizer)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4, fused=True)


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


# --- GPT -------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    def __init__(self, *, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


def _tokens(*, vocabulary: int, batch: int, length: int) -> Callable[[torch.Generator], Batch]:
    def draw(generator: torch.Generator) -> Batch:
        tokens = torch.randint(vocabulary, (batch, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return draw


register(
    "gpt",
    "GPT 17M",
    build=lambda: GPT(vocabulary=7000, length=64, width=384, layers=8, heads=6),
    batch=_tokens(vocabulary=7000, batch=2, length=64),
    loss=next_token_loss,
    optimizer=adamw,
)
register(
    "tiny",
    "GPT tiny",
    build=lambda: GPT(vocabulary=64, length=16, width=32, layers=2, heads=2),
    batch=_tokens(vocabulary=64, batch=2, length=16),
    loss=next_token_loss,
    optimizer=adamw,
)

# --- MLP of many small parameters ------------------------------------------------------------------------


class Chain(nn.Module):
    """Residual chain of `layers` linear layers, two parameters each."""

    def __init__(self, *, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        for layer in self.layers:
            # Small enough that 500 residual layers neither explode nor end in denormals, which are slow.
            nn.init.normal_(layer.weight, std=0.001)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x


def _vectors(generator: torch.Generator) -> Batch:
    return torch.randn(8, 32, generator=generator), torch.randint(32, (8,), generator=generator)


register(
    "mlp",
    "MLP, 1,000 parameters",
    build=lambda: Chain(layers=500, width=32),
    batch=_vectors,
    loss=class_loss,
    optimizer=sgd,
)

# --- ResNet ----------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


class ResNet(nn.Module):
    def __init__(self, *, widths: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
        ]
        previous = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(Residual(previous, width, stride=2 if stage and not block else 1))
                previous = width
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(previous, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).mean(dim=(2, 3)))


def _images(generator: torch.Generator) -> Batch:
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)


register(
    "resnet",
    "ResNet-20 + BatchNorm",
    build=lambda: ResNet(widths=(16, 32, 64), blocks=3, classes=10),
    batch=_images,
    loss=class_loss,
    optimizer=sgd,
)

# --- BERT-like -------------------------------------------------------------------------------------------


def bert(*, vocabulary: int = 4000, width: int = 256, layers: int = 4, heads: int = 4, length: int = 64) -> nn.Module:
    # Imported here because it takes seconds and only this case needs it.
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def _masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss


register(
    "bert",
    "BERT-like 4M",
    build=bert,
    batch=_tokens(vocabulary=4000, batch=2, length=64),
    loss=_masked_loss,
    optimizer=adamw,
)
