"""``paceline.mean`` and ``paceline.total``: numbers for logs, over all ranks.

One small all-reduce of a fixed size carries all numbers of a call. Beside them travel two *marks*, which stand for what
was asked for: mean or total, the names, the shapes. Ranks sum the marks and their squares. If all marks are equal, the
number of ranks times the sum of the squares is the square of the sum; otherwise it is larger. So ranks that ask for
different things find that out in the same exchange. Only what does not fit into the small one, such as a large tensor,
takes a second exchange.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from paceline import _torch
from paceline.control import Channel
from paceline.errors import BadArgumentError, BadTypeError, DisagreementError
from paceline.reduction import ownership

N = TypeVar("N", int, float, Tensor)

# All ranks send as much, whatever they ask for, because collectives of different sizes do not match.
_SMALL = 64
_MARKS = 4
# The sum of the squares of such marks is exact in a float64, for up to 8,192 ranks.
_MARK_LIMIT = 1 << 20
# Integers travel as two numbers, because a float64 holds only 53 bits.
_LOW = 32
_SOLE = ""

_channels: dict[dist.ProcessGroup, Channel] = {}
"""For groups in which nothing is wrapped."""


@overload
def mean(
    value: Mapping[str, Any], *, weight: float | Tensor = 1, group: dist.ProcessGroup | None = None
) -> dict[str, Any]: ...
@overload
def mean(value: Tensor, *, weight: float | Tensor = 1, group: dist.ProcessGroup | None = None) -> Tensor: ...
@overload
def mean(value: float, *, weight: float | Tensor = 1, group: dist.ProcessGroup | None = None) -> float: ...
def mean(value: Any, *, weight: float | Tensor = 1, group: dist.ProcessGroup | None = None) -> Any:
    """The mean of ``value`` over all ranks, in which each rank counts ``weight``, such as its number of samples.

    This is a collective: every rank of the group (by default of all) has to call it. ``value`` is a number, a tensor,
    or a dictionary of them, which costs no more than one of them. What comes back has the same form, and no gradient.
    What a rank of weight 0 brings does not count, even if it is not a number. If all weights are 0, the mean is
    ``nan``. Without a process group this process is alone.

    >>> import paceline
    >>> paceline.mean({"loss": 0.5, "accuracy": 1}, weight=32)
    {'loss': 0.5, 'accuracy': 1.0}
    """
    parts = _parts(value)
    share = _weight(weight)
    nothing = [torch.zeros(_numel(part), dtype=torch.float64) for part in parts.values()]
    sent = [share * _floats(part) for part in parts.values()] if share else nothing
    summed = _sum("mean", parts, [*sent, torch.tensor([share], dtype=torch.float64)], group)
    weights = summed[-1].item()
    means = [found / weights if weights else torch.full_like(found, math.nan) for found in summed[:-1]]
    return _shaped(value, {name: _as_mean(m, part) for m, (name, part) in zip(means, parts.items(), strict=True)})


@overload
def total(value: Mapping[str, Any], *, group: dist.ProcessGroup | None = None) -> dict[str, Any]: ...
@overload
def total(value: N, *, group: dist.ProcessGroup | None = None) -> N: ...
def total(value: Any, *, group: dist.ProcessGroup | None = None) -> Any:
    """The sum of ``value`` over all ranks. It is as `mean` is, but without weights. Sums of integers are exact.

    >>> import paceline
    >>> paceline.total({"tokens": 4096, "seconds": 0.5})
    {'tokens': 4096, 'seconds': 0.5}
    """
    parts = _parts(value)
    summed = _sum("total", parts, [torch.cat(_halves(part)) for part in parts.values()], group)
    return _shaped(value, {name: _as_total(s, part) for s, (name, part) in zip(summed, parts.items(), strict=True)})


# -- one exchange --------------------------------------------------------------------------------------


def _sum(what: str, parts: Mapping[str, Any], sent: list[Tensor], group: dist.ProcessGroup | None) -> list[Tensor]:
    """Sum ``sent`` over the ranks. Raises on all ranks if they did not ask for the same."""
    if not (dist.is_available() and dist.is_initialized()):
        return sent
    group = _torch.default_group() if group is None else group
    if _torch.is_not_a_member(group):
        raise BadArgumentError(f"Rank {dist.get_rank()} is not in the process group that was given to paceline.{what}.")
    size = dist.get_world_size(group)
    if size == 1:
        return sent
    channel = _channel_of(group)
    name = _shown(what, parts)
    form = f"{what}:{[(key, _shape(part)) for key, part in parts.items()]}"
    digest = hashlib.sha256(form.encode()).digest()
    marks = [float(int.from_bytes(digest[n : n + 4], "little") % _MARK_LIMIT) for n in (0, 4)]
    lengths = [part.numel() for part in sent]
    payload = torch.cat(sent)
    fits = len(payload) <= _SMALL - _MARKS
    buffer = torch.zeros(_SMALL, dtype=torch.float64)
    buffer[:_MARKS] = torch.tensor([marks[0], marks[0] ** 2, marks[1], marks[1] ** 2], dtype=torch.float64)
    if fits:
        buffer[_MARKS : _MARKS + len(payload)] = payload
    # The numbers are read on the host, so they travel from host to host.
    buffer = _exchanged(channel, buffer, name)
    sums = list(map(int, buffer[:_MARKS].tolist()))
    if any(size * square != mark * mark for mark, square in (sums[:2], sums[2:])):
        _raise_difference(channel, what, name)
    found = buffer[_MARKS : _MARKS + len(payload)] if fits else _exchanged(channel, payload, name)
    return list(found.split(lengths))


def _exchanged(channel: Channel, tensor: Tensor, name: str) -> Tensor:
    channel.check_news()
    channel.start_all_reduce(tensor, name)()
    return tensor


def _raise_difference(channel: Channel, what: str, name: str) -> None:
    told = channel.gather_in_group(name)
    first = told[0]
    other, theirs = next(((rank, text) for rank, text in enumerate(told) if text != first), (channel.rank, name))
    raise DisagreementError(
        f"Ranks asked for different numbers: rank 0 called {first}, and rank {other} called {theirs}. Call "
        f"paceline.{what} on all ranks with the same names and shapes, and in the same order as other collectives.",
        shown_by=0 if channel.rank else None,
    )


def _channel_of(group: dist.ProcessGroup) -> Channel:
    """The channel of a wrapper in this group, on which others may be heard already; or one for numbers only."""
    for reducer in ownership.live():
        if reducer.channel.group is group:
            return reducer.channel
    for old in [known for known in _channels if not _torch.group_is_alive(known)]:
        del _channels[old]
    if group not in _channels:
        _channels[group] = Channel(group, number=0)
    return _channels[group]


# -- values as float64 and back ------------------------------------------------------------------------


def _parts(value: Any) -> dict[str, Any]:
    """The values by name, in an order that all ranks have."""
    if not isinstance(value, Mapping):
        return {_SOLE: _checked(value, "The value")}
    if not value or not all(isinstance(name, str) and name for name in value):
        raise BadTypeError("A dictionary of values must have names, which are texts that are not empty.")
    return {name: _checked(value[name], f"The value {name!r}") for name in sorted(value)}


def _checked(value: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        if _torch.is_dtensor(value):
            raise BadTypeError(f"{what} is a DTensor, of which ranks hold different parts. Give value.full_tensor().")
        if value.is_complex() or value.layout is not torch.strided:
            raise BadTypeError(f"{what} must be a tensor of real numbers, not of {value.dtype} and {value.layout}.")
        return value.detach()
    if isinstance(value, numbers.Integral):
        if not -(2**63) <= int(value) < 2**63:
            raise BadArgumentError(f"{what} is {value}, which does not fit into 64 bits.")
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise BadTypeError(f"{what} must be a number or a tensor, not a {type(value).__name__}.")


def _weight(weight: float | Tensor) -> float:
    if isinstance(weight, Tensor) and weight.numel() != 1:
        raise BadArgumentError(f"weight must be one number, not a tensor of shape {tuple(weight.shape)}.")
    share = float(weight)
    if not math.isfinite(share) or share < 0:
        raise BadArgumentError(f"weight is {share}, but must be finite and not negative.")
    return share


def _shape(part: Any) -> tuple[int, ...]:
    # A number is what a tensor of no dimensions is: ranks may bring either.
    return tuple(part.shape) if isinstance(part, Tensor) else ()


def _numel(part: Any) -> int:
    return part.numel() if isinstance(part, Tensor) else 1


def _floats(part: Any) -> Tensor:
    flat = part.flatten() if isinstance(part, Tensor) else torch.tensor([part], dtype=torch.float64)
    return flat.to("cpu", torch.float64)


def _is_whole(part: Any) -> bool:
    return isinstance(part, int) if not isinstance(part, Tensor) else not part.is_floating_point()


def _halves(part: Any) -> list[Tensor]:
    """Two numbers for each: an integer's high and low bits, or nothing and a float."""
    if not _is_whole(part):
        floats = _floats(part)
        return [torch.zeros_like(floats), floats]
    flat = part.flatten().to("cpu", torch.int64) if isinstance(part, Tensor) else torch.tensor([part])
    return [(flat >> _LOW).double(), (flat & ((1 << _LOW) - 1)).double()]


def _as_mean(found: Tensor, part: Any) -> Any:
    if not isinstance(part, Tensor):
        return found.item()
    dtype = part.dtype if part.is_floating_point() else torch.get_default_dtype()
    return found.to(part.device, dtype).view(part.shape)


def _as_total(found: Tensor, part: Any) -> Any:
    high, low = found.chunk(2)
    # Ranks may bring integers and floats under one name. Then the sum is a float, unless it is whole.
    if not _is_whole(part) or bool((low % 1 != 0).any()):
        floats = high * 2.0**_LOW + low
        if not isinstance(part, Tensor):
            return floats.item()
        return floats.to(part.device, part.dtype if part.is_floating_point() else torch.get_default_dtype()).view(
            part.shape
        )
    if not isinstance(part, Tensor):
        return (int(high.item()) << _LOW) + int(low.item())
    return ((high.long() << _LOW) + low.long()).to(part.device).view(part.shape)


def _shaped(value: Any, found: Mapping[str, Any]) -> Any:
    """What was found, in the form and the order of what was asked for."""
    return {name: found[name] for name in value} if isinstance(value, Mapping) else found[_SOLE]


def _shown(what: str, parts: Mapping[str, Any]) -> str:
    shapes = [(name, f" of shape {_shape(part)}" if _shape(part) else "") for name, part in parts.items()]
    told = ", ".join(f"{name!r}{shape}" if name else f"a value{shape}" for name, shape in shapes)
    return f"paceline.{what}({told})"
