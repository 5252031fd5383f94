"""Models that several files compile."""

from __future__ import annotations

import functools

import torch
from benchmarks.models import bert
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.compiler._compare import compare, stack

# This is for gradients in float32.
_TOLERANCE = 1e-4
# transformers asks torch.jit what it would do.
BERT_WARNINGS = ((".*", DeprecationWarning), (".*", FutureWarning))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stack(2), stack(2)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.double()

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.middle, self.head = nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, x):
        return self.head(self.middle(self.embed((x.abs() * 3).long().clamp(max=7))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts, self.wrapped = stack(2), nn.Sequential(*map(checkpoint_wrapper, stack(2)))

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False)
        return self.wrapped(x)


def _policy(context, op, *args, **kwargs):
    keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = stack(2), stack(2)

    def forward(self, x):
        contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
        x = checkpoint(self.first, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.second, x, use_reentrant=False)


def _alibi(score, b, h, q, k):
    return score + (q - k) * (h + 1) * 0.1


class Attentive(nn.Module):
    def __init__(self, attention=flex_attention) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.inputs, self.middle, self.outputs = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 16)
        self.attention = attention

    def forward(self, x):
        q, k, v = (part.view(2, 16, 1, 16).transpose(1, 2) for part in self.inputs(x).chunk(3, dim=-1))
        mixed = self.attention(q, k, v, score_mod=_alibi)
        return self.outputs(self.middle(mixed.transpose(1, 2).reshape(2, 16, 16)))


class Salted(nn.Module):
    """A module that no cache has seen yet."""

    def __init__(self, salt: float) -> None:
        super().__init__()
        self.salt, self.inner = salt, stack(2)

    def forward(self, x):
        return self.inner(x) * self.salt


def _bert_step(model, rank, n):
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(10 * n + rank))
    model(input_ids=tokens, labels=tokens).loss.backward()


def compare_bert(rank, compile_, options):
    def make():
        torch.manual_seed(5)
        return bert(vocabulary=40, width=16, layers=1, heads=2, length=16)

    options = {"bucket_cap_mb": 4000 / 2**20, "steps": 2, "rtol": _TOLERANCE, "atol": _TOLERANCE, **options}
    return compare(rank, make, compile=compile_, step=_bert_step, **options)
