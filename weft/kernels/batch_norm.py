"""BatchNorm with what follows it, y = act(keep * bn(x) + residual): two passes (in inference one), and two back.

Torch takes as many for BatchNorm alone, three times as long, and one more pass for each of the others.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.activation import plain_activation
from weft.kernels.case import Case
from weft.kernels.op import define
from weft.kernels.switch import usable


def _finish(y: Tensor, act: str, residual: Optional[Tensor], keep: Optional[Tensor]) -> Tensor:
    if keep is not None:
        y = y * keep.to(y.dtype).view(-1, 1, 1, 1)
    if residual is not None:
        y = residual + y
    return plain_activation(y, act)


def plain_batch_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    training: bool,
    momentum: float,
    eps: float,
    act: str,
    residual: Optional[Tensor] = None,
    keep: Optional[Tensor] = None,
    batches: Optional[Tensor] = None,
) -> Tensor:
    """The twin of `batch_norm_act`."""
    if training and batches is not None:
        batches.add_(1)
    nchw = F.batch_norm(x.permute(0, 3, 1, 2), running_mean, running_var, weight, bias, training, momentum, eps)
    return _finish(nchw.permute(0, 2, 3, 1), act, residual, keep)


# The statistics, an operator that changes the running ones --------------------------------------------------------


def _plain_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    """Mean and biased variance of each channel, (2, C)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.to(wide), dim=(0, 1, 2), correction=0)
    rows = x.numel() // x.shape[-1]
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (rows / (rows - 1))).to(running_var.dtype), momentum)
    if batches is not None:
        batches.add_(1)
    return torch.stack([mean, var])


def _launch_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    from weft.kernels.gpu import batch_norm

    return batch_norm.statistics(x.contiguous(), running_mean, running_var, batches, momentum)


def _fake_statistics(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, batches: Tensor | None, momentum: float
) -> Tensor:
    return x.new_empty(2, x.shape[-1], dtype=torch.promote_types(x.dtype, torch.float32))


batch_norm_statistics = define(
    "batch_norm_statistics(Tensor x, Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, "
    "float momentum) -> Tensor",
    _plain_statistics,
    _launch_statistics,
    _fake_statistics,
)


# The rest, an operator with a gradient ---------------------------------------------------------------------------
# With a var, mean and var are fixed; without, `mean` is (2, C), mean and variance of this batch, which depend on x.


def plain_norm_act(
    x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    """The twin of the operator."""
    if var is None:
        mean, var = mean.unbind(0)
    wide = torch.promote_types(x.dtype, mean.dtype)
    y = (x.to(wide) - mean) * ((var + eps).rsqrt() * weight) + bias
    return _finish(y, act, residual, keep).to(_output_dtype(x, residual), copy=True)


def _output_dtype(x: Tensor, residual: Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def _launch(
    x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str,
) -> Tensor:  # fmt: skip
    from weft.kernels.gpu import batch_norm

    y = x.new_empty(x.shape, dtype=_output_dtype(x, residual))
    if x.numel():
        residual = None if residual is None else residual.contiguous()
        batch_norm.apply(x.contiguous(), mean, var, weight, bias, residual, keep, eps, act, y)
    return y


def _gradients(
    x: Tensor, residual: Tensor | None, act: str, again: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Room for the gradients of x and, unless it is what comes in, of the residual; and for y."""
    room = None if residual is None or act == "none" else residual.new_empty(residual.shape)
    return x.new_empty(x.shape), room, x.new_empty(x.shape, dtype=_output_dtype(x, residual)) if again else None


def _plain_backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str, again: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The gradients of x, weight, bias and residual, and y once more if it is wanted `again`."""
    with torch.enable_grad():
        leaves = [value.detach().requires_grad_() for value in (x, weight, bias)]
        leaves += [residual.detach().requires_grad_()] if residual is not None and act != "none" else []
        x, weight, bias, *rest = leaves
        if var is None:
            var, mean = torch.var_mean(x.to(mean.dtype), dim=(0, 1, 2), correction=0)
        y = plain_norm_act(x, mean, var, weight, bias, rest[0] if rest else residual, keep, eps, act)
        found = torch.autograd.grad(y, leaves, grad.to(y.dtype))
    return *found[:3], found[3] if rest else None, y.detach() if again else None


def _launch_backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str, again: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    from weft.kernels.gpu import batch_norm

    grad_x, grad_residual, y = _gradients(x, residual, act, again)
    if not x.numel():
        return grad_x, torch.zeros_like(weight), torch.zeros_like(weight), grad_residual, y
    grad, x, residual = grad.contiguous(), x.contiguous(), None if residual is None else residual.contiguous()
    parameters = batch_norm.backward(
        grad, x, mean, var, weight, bias, residual, keep, eps, act, grad_x, grad_residual, y
    )
    return grad_x, *parameters, grad_residual, y


def _fake_backward(
    grad: Tensor, x: Tensor, mean: Tensor, var: Tensor | None, weight: Tensor, bias: Tensor,
    residual: Tensor | None, keep: Tensor | None, eps: float, act: str, again: bool,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    grad_x, grad_residual, y = _gradients(x, residual, act, again)
    return grad_x, torch.empty_like(weight), torch.empty_like(weight), grad_residual, y


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, mean, var, weight, bias, residual, keep, ctx.eps, ctx.act = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(x, mean, var, weight, bias, None if ctx.act == "none" else residual, keep)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    found = batch_norm_act_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.act, False)
    grad_x, grad_weight, grad_bias, grad_residual, _ = found
    if ctx.residual_dtype is None:
        grad_residual = None
    elif ctx.act == "none":
        grad_residual = grad if grad.dtype == ctx.residual_dtype else grad.to(ctx.residual_dtype)
    return grad_x, None, None, grad_weight, grad_bias, grad_residual, None, None, None


batch_norm_act_backward = define(
    "batch_norm_act_backward(Tensor grad, Tensor x, Tensor mean, Tensor? var, Tensor weight, Tensor bias, "
    "Tensor? residual, Tensor? keep, float eps, str act, bool again) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plain_backward,
    _launch_backward,
    _fake_backward,
)
batch_norm_act_forward = define(
    "batch_norm_act(Tensor x, Tensor mean, Tensor? var, Tensor weight, Tensor bias, Tensor? residual, Tensor? keep, "
    "float eps, str act) -> Tensor",
    plain_norm_act,
    _launch,
    lambda x, mean, var, weight, bias, residual, *_: x.new_empty(x.shape, dtype=_output_dtype(x, residual)),
    _setup,
    _backward,
)


# What models call -----------------------------------------------------------------------------------------------


def batch_norm_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Optional[Tensor],
    running_var: Optional[Tensor],
    training: bool,
    momentum: float,
    eps: float,
    act: str,
    residual: Optional[Tensor] = None,
    keep: Optional[Tensor] = None,
    batches: Optional[Tensor] = None,
) -> Tensor:
    """act(keep * bn(x) + residual) on (B, H, W, C) maps: the activation comes last, on the sum.

    Args:
        running_mean, running_var: what nn.BatchNorm2d keeps; updated in training, used otherwise.
        training: normalise by the statistics of this batch.
        act: "none" or an activation. residual: None, or a map like x. keep: None, or (B,) factors of stochastic depth.
        batches: None, or the number of batches so far, which training increases.
    """
    if torch.jit.is_scripting():
        return plain_batch_norm_act(
            x, weight, bias, running_mean, running_var, training, momentum, eps, act, residual, keep, batches
        )
    else:  # not compiled by TorchScript
        # In inference compilers fuse it with what stands around it. In training they take longer: CeiT-T's compiled
        # step, launches replayed, took 14.8 ms with their BatchNorm and 11.7 ms with this one on an H200.
        # One row has no variance, which torch says in its own words.
        compiled = torch.compiler.is_compiling() and not training
        if compiled or not usable(x) or x.numel() <= x.shape[-1]:
            return plain_batch_norm_act(
                x, weight, bias, running_mean, running_var, training, momentum, eps, act, residual, keep, batches
            )
        mean, var = running_mean, running_var
        if training:
            mean, var = batch_norm_statistics(x.detach(), running_mean, running_var, batches, momentum), None
        return batch_norm_act_forward(x, mean, var, weight, bias, residual, keep, eps, act)


# Measurements ---------------------------------------------------------------------------------------------------

# Side of the map, channels, activation and residual: CeiT, CvT, ResNet
SHAPES = [
    (14, 768, "gelu", False), (14, 1536, "gelu", False), (14, 384, "none", True), (112, 64, "none", False),
    (28, 192, "none", False), (14, 384, "none", False), (56, 64, "relu", False), (56, 256, "relu", True),
    (28, 128, "relu", False), (14, 1024, "relu", True),
]  # fmt: skip
TILES = [(4096, 64, 4), (4096, 128, 4), (2048, 256, 4), (4096, 256, 8)]  # elements, width, warps
SHARED = [(2048, 64, 4, 3), (2048, 64, 8, 3), (1024, 64, 8, 3), (2048, 256, 4, 3)]  # elements, width, programs, stages


def _inputs(size: int, channels: int, act: str, residual: bool, step: str, device: torch.device) -> tuple[Any, ...]:
    def make(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    maps = (128, size, size, channels)
    x, other = make(*maps, dtype=torch.bfloat16), make(*maps, dtype=torch.bfloat16) if residual else None
    if step == "_statistics":
        return x, None, None, None, 0.1
    moments = _plain_statistics(x, None, None, None, 0.1)
    weight, bias = make(2, channels).unbind(0)
    keep = make(128) if act == "none" and residual else None
    inputs = (x, moments, None, weight, bias, other, keep, 1e-5, act)
    return inputs if step == "" else (make(*maps, dtype=torch.bfloat16), *inputs, False)


def _case(size: int, channels: int, act: str, residual: bool, step: str) -> Case:
    rows = 128 * size * size
    shape: dict[str, Any] = dict(rows=rows, channels=channels)
    passes = 1
    candidates = [dict(elements=elements, width=width, num_warps=warps) for elements, width, warps in TILES]
    kernel, plain = batch_norm_act_forward, plain_norm_act
    if step == "_statistics":
        kernel, plain = batch_norm_statistics, _plain_statistics
    else:
        shape["residual"] = residual
        passes = 2 + residual
    if step == "_backward":
        kernel, plain = batch_norm_act_backward, _plain_backward
        passes = 5 + (2 if residual and act != "none" else 0)  # the sums must be there before the gradient of x
    if step:
        candidates = [
            dict(elements=elements, width=width, num_warps=4, per_processor=programs, stages=stages)
            for elements, width, programs, stages in SHARED
        ]
    return Case(
        operation=f"batch_norm{step}",
        shape=shape,
        inputs=lambda device: _inputs(size, channels, act, residual, step, device),
        kernel=kernel,
        plain=plain,
        bytes=2 * passes * rows * channels,
        candidates=candidates,
    )


def cases() -> list[Case]:
    """BatchNorm in training at the maps of CeiT, CvT and ResNet."""
    sizes = dict.fromkeys(shape[:2] for shape in SHAPES)
    statistics = [_case(*size, "none", False, "_statistics") for size in sizes]
    return statistics + [_case(*shape, step) for step in ("", "_backward") for shape in SHAPES]
