"""SyncBatchNorm: batch statistics over the batches of all ranks, on any device.

There is one collective in forward, of every rank's mean, spread and count, and one in backward, of two sums for each
channel.

[Note: combining statistics]
Ranks exchange ``(mean, M2, count)`` and not ``(sum, sum of squares)``, because with a mean far from zero the difference
of two large sums loses the variance. ``M2`` is the sum of squared distances from the rank's own mean; the spread of the
ranks' means is added afterwards. All ranks combine the same numbers in the same order, so their statistics are equal to
the bit.

[Note: local sums from fused kernels]
Both directions reuse batch norm's own kernels, which keep the memory format and know mixed dtypes. The forward is batch
norm in *evaluation* mode with the combined statistics as its "running" ones. The gradients of weight and bias in that
mode are this rank's sums of ``dy * xhat`` and ``dy``, which backward exchanges.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from paceline import _torch
from paceline.errors import BadArgumentError, BadTypeError, StateError
from paceline.reduction.higher_order import SumAcrossRanks

__all__ = ["SyncBatchNorm"]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# These become one of the above with their first batch.
_LAZY_BATCH_NORMS = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)

# This is small enough to vanish beside any variance that matters. It is not 0, because for a constant channel some
# kernels would then answer that its inverse deviation is infinite, and some that it is 0.
_NEXT_TO_NOTHING = 1e-30


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch norm whose training statistics are those of the whole batch over all ranks.

    A drop-in for ``torch.nn.SyncBatchNorm`` that also runs on the CPU. Ranks may hold different numbers of samples,
    including one or none. Outside training, and in a group of one, it is plain batch norm.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> model = SyncBatchNorm.convert_sync_batchnorm(model)
    >>> type(model[1]).__name__
    'SyncBatchNorm'
    """

    def forward(self, input: Tensor) -> Tensor:
        self._check(input)
        group = self._sync_group() if self.training else None
        if group is not None and _torch.is_transforming():
            raise StateError(
                "SyncBatchNorm in training communicates with the other ranks, which a transform of torch.func (vmap, "
                "grad, jacrev, ...) cannot differentiate or batch. Call eval() on the layer, or use torch.autograd."
            )
        momentum = self._count_batch()
        tracks = self.track_running_stats and self.running_mean is not None
        if group is None:
            use_running = not self.training or self.track_running_stats
            return F.batch_norm(
                input,
                self.running_mean if use_running else None,
                self.running_var if use_running else None,
                self.weight,
                self.bias,
                training=self.training or self.running_mean is None,
                momentum=momentum,
                eps=self.eps,
            )
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps, group)
        # A rank with two values of its own knows that the whole batch has at least two. Only the others read the count.
        local_count = input.numel() // input.size(1)
        total = int(count) if local_count < 2 else local_count
        if total == 1:
            raise BadArgumentError(
                f"Expected more than 1 value per channel when training, got one over all {group.size()} "
                f"ranks (this rank's input has shape {tuple(input.shape)}): give the ranks larger batches, "
                "or call eval() on the layer"
            )
        if tracks and total > 1:
            self._update_running(mean, var * (count / (count - 1)), momentum)
        return output

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):  # type: ignore[no-untyped-def]
        """Replace every batch norm in ``module`` by a ``SyncBatchNorm`` with the same parameters.

        Parameters, buffers, hooks, the training flag and other attributes stay the very same objects, so
        an optimizer made before still holds the right parameters. Returns ``module``, or the new layer if
        ``module`` is a batch norm itself.
        """
        if not isinstance(module, nn.Module):
            raise BadTypeError(f"convert_sync_batchnorm expects a torch.nn.Module, got {type(module).__name__}")
        converted: dict[nn.Module, SyncBatchNorm] = {}
        # Duplicates are included, as one layer under two names must become one layer under both.
        for name, layer in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(layer, (*_BATCH_NORMS, *_LAZY_BATCH_NORMS)):
                continue
            if layer not in converted:
                converted[layer] = _converted(layer, name, process_group)
            if name:
                parent, _, child = name.rpartition(".")
                module.get_submodule(parent).add_module(child, converted[layer])
        return converted.get(module, module)

    def _check(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise BadArgumentError(f"expected at least 2D input (got {input.dim()}D input)")
        if input.size(1) != self.num_features:
            raise BadArgumentError(
                f"SyncBatchNorm has {self.num_features} features but its input of shape "
                f"{tuple(input.shape)} has {input.size(1)} channels in dimension 1"
            )
        if self.num_features == 0:
            raise BadArgumentError("SyncBatchNorm number of input channels should be non-zero")

    def _count_batch(self) -> float:
        """Count this batch if the running statistics learn from it, and return the weight of its statistics."""
        momentum = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        return momentum

    def _sync_group(self) -> dist.ProcessGroup | None:
        """The group to exchange statistics in; None if there is nobody to exchange them with."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        group: Any = self.process_group if self.process_group is not None else dist.group.WORLD
        size = dist.get_world_size(group)
        if size < 1:
            raise BadArgumentError(
                f"rank {dist.get_rank()} is not in the process_group of this SyncBatchNorm: give every rank "
                "the group that it belongs to, or None for all ranks"
            )
        return group if size > 1 else None

    @torch.no_grad()
    def _update_running(self, mean: Tensor, var: Tensor, momentum: float) -> None:
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            # This is computed in the dtype of the statistics, as a buffer in half precision would round twice.
            running.copy_(running.to(new.dtype).mul_(1 - momentum).add_(new, alpha=momentum))


def _converted(layer: nn.Module, name: str, process_group: Any) -> SyncBatchNorm:
    if isinstance(layer, _LAZY_BATCH_NORMS):
        raise BadArgumentError(
            f"{name or 'the module'} is a lazy batch norm that has not seen a batch: run one forward "
            "before convert_sync_batchnorm"
        )
    new = SyncBatchNorm.__new__(SyncBatchNorm)
    # Sharing the attributes keeps whatever is attached to the layer (hooks and their handles, qconfig).
    new.__dict__.update(layer.__dict__)
    new.process_group = process_group
    return new


def told_of_ours(error: Exception, module: nn.Module) -> Exception:
    """The error that the user should see, which is ``error`` unless torch's SyncBatchNorm has refused the CPU.

    In that case the error names the layer, and says that our SyncBatchNorm trains on the CPU. This cannot be checked
    when the module is wrapped. torch's layer raises only when it trains, and until then it may well be on the CPU: the
    module may still be moved to another device, or only evaluate.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if not isinstance(error, ValueError) or trace is None:
        return error
    # We know the refusal by the frame that raised, because its words differ between versions of torch.
    frame = trace.tb_frame
    layer, input = frame.f_locals.get("self"), frame.f_locals.get("input")
    is_torch_s = isinstance(layer, nn.SyncBatchNorm) and not isinstance(layer, SyncBatchNorm)
    if frame.f_code.co_name != "forward" or not is_torch_s or not isinstance(input, Tensor) or not input.is_cpu:
        return error
    name = next((name for name, held in module.named_modules() if held is layer), "")
    return BadArgumentError(
        f"The layer {name!r} is torch.nn.SyncBatchNorm, which does not train on the CPU. paceline.SyncBatchNorm does: "
        "call paceline.SyncBatchNorm.convert_sync_batchnorm(module) before you wrap the module."
    )


def _per_channel(vector: Tensor, like: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (like.dim() - 2))


def _local_stats(input: Tensor) -> Tensor:
    """``[means, M2s, count]`` of this rank's batch, in one flat tensor that can be sent."""
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    channels, count = input.size(1), input.numel() // input.size(1)
    packed = torch.zeros(2 * channels + 1, dtype=dtype, device=input.device)
    if count:  # the kernels divide by the count
        ones = torch.ones(channels, dtype=dtype, device=input.device)
        # The statistics get the dtype of these parameters, which need not be that of the input.
        _, mean, inv_std = torch.native_batch_norm(
            input, ones, torch.zeros_like(ones), None, None, True, 0.0, _NEXT_TO_NOTHING
        )
        packed[:channels] = mean
        packed[channels:-1] = inv_std.to(dtype).pow(-2) * count
        packed[-1] = count
    return packed


def _combined_stats(packed: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count of the batches of all ranks; see [Note: combining statistics]."""
    everyone = packed.new_empty(group.size(), packed.numel())
    dist.all_gather(list(everyone.unbind(0)), packed, group=group)
    channels = (packed.numel() - 1) // 2
    means, m2s, counts = everyone[:, :channels], everyone[:, channels:-1], everyone[:, -1:]
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    mean = (shares * means).sum(0)
    between = (shares * (means - mean).square()).sum(0)
    var = m2s.sum(0) / count.clamp(min=1) + between
    return mean, var, count


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, var, count = _combined_stats(_local_stats(input), group)
        scale = None if weight is None else weight.to(mean.dtype)
        shift = None if bias is None else bias.to(mean.dtype)
        if input.numel():
            output = F.batch_norm(input, mean, var, scale, shift, training=False, eps=eps)
        else:
            output = torch.empty_like(input)
        ctx.save_for_backward(input, weight, mean, var, count)
        ctx.mark_non_differentiable(mean, var, count)
        ctx.eps, ctx.group = eps, group
        ctx.grad_dtypes = [None if p is None else p.dtype for p in (weight, bias)]
        return output, mean, var, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Grad mode is on in here if the caller gave create_graph=True.
        gradients = _gradients_as_graph if torch.is_grad_enabled() else _gradients
        grad_input, grad_weight, grad_bias = gradients(ctx, grads[0])
        needed = ctx.needs_input_grad
        return (
            grad_input,
            grad_weight.to(ctx.grad_dtypes[0]) if needed[1] else None,
            grad_bias.to(ctx.grad_dtypes[1]) if needed[2] else None,
            None,
            None,
        )


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of input, weight and bias; see [Note: local sums from fused kernels]."""
    input, weight, mean, var, count = ctx.saved_tensors
    eps, input_needed = ctx.eps, ctx.needs_input_grad[0]
    scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    grad_input, sums = torch.empty_like(input), mean.new_zeros(2, mean.numel())
    if input.numel():
        grad_input, sums[0], sums[1] = torch.ops.aten.native_batch_norm_backward(
            grad, input, scale, mean, var, None, None, False, eps, [input_needed, True, True]
        )
    if not input_needed:
        return None, sums[0], sums[1]
    totals = sums.clone()
    dist.all_reduce(totals, group=ctx.group)
    if input.numel():
        # The statistics depend on the input too. What that adds is, again, a batch norm of the input.
        factors = totals * (-(var + eps).rsqrt() * scale / count)
        grad_input += F.batch_norm(input, mean, var, factors[0], factors[1], training=False, eps=eps)
    return grad_input, sums[0], sums[1]


def _gradients_as_graph(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
    """The same gradients for ``create_graph=True``: made of differentiable parts, the statistics included."""
    input, weight, mean, _, count = ctx.saved_tensors
    dims, wide = [0, *range(2, input.dim())], mean.dtype
    count = count.clamp(min=1)
    add_up = partial(dist.all_reduce, group=ctx.group)
    # Moments around the known mean are as accurate as centred ones.
    centred = input.to(wide) - _per_channel(mean, input)
    moments = torch.stack([centred.sum(dims), centred.square().sum(dims)])
    first, second = (SumAcrossRanks.apply(moments, add_up) / count).unbind(0)
    inv_std = (second - first.square() + ctx.eps).rsqrt()
    xhat = (centred - _per_channel(first, input)) * _per_channel(inv_std, input)
    grad = grad.to(wide)
    sums = torch.stack([(grad * xhat).sum(dims), grad.sum(dims)])
    if not ctx.needs_input_grad[0]:
        return None, sums[0], sums[1]
    along, level = (SumAcrossRanks.apply(sums, add_up) / count).unbind(0)
    factor = inv_std if weight is None else inv_std * weight.to(wide)
    rest = grad - _per_channel(level, input) - xhat * _per_channel(along, input)
    return (rest * _per_channel(factor, input)).to(input.dtype), sums[0], sums[1]
