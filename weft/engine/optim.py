"""Optimiser, learning rate, weight average, and what of the model stays as it is.

The learning rate is a function of the epoch, not an object with a state, so a resumed run cannot fall out of step:

    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, batch, epoch, epochs) * group["lr_scale"]
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatch
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.config import OptimConfig
from weft.errors import WeftError, did_you_mean

# Optimiser ------------------------------------------------------------------------------------------------------


def make_optimizer(model: nn.Module, config: OptimConfig, batch: int) -> torch.optim.Optimizer:
    """The optimiser of what can be trained in `model`, a bare model: not compiled, not wrapped.

    Each group has an "lr_scale", which is not 1 where the learning rate decays from layer to layer. Weight decay is
    decoupled in AdamW; in SGD and RMSProp it is part of the gradient, as it was in the papers that use them. The
    state of all three is tensors alone.
    """
    groups = parameter_groups(model, config)
    if not groups:
        raise WeftError("Nothing is left to train: every parameter is frozen; change model.freeze.")
    lr = scale_rate(config, batch, config.lr)
    kinds = {p.device.type for p in model.parameters()}
    fused = kinds <= {"cpu", "cuda"}  # one kernel; the same result every time
    if config.name == "adamw":
        first, second = config.betas
        adamw: Any = dict(betas=(first, second), eps=config.eps, fused=fused, capturable=kinds == {"cuda"})
        return torch.optim.AdamW(groups, lr=lr, **adamw)
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=config.momentum, fused=fused)
    from timm.optim import RMSpropTF

    # EfficientNet's RMSProp is TensorFlow's: eps under the root, averages that begin at 1, momentum of scaled steps.
    return RMSpropTF(groups, lr=lr, alpha=config.alpha, eps=config.eps, momentum=config.momentum)


def parameter_groups(model: nn.Module, config: OptimConfig) -> list[dict[str, Any]]:
    """timm's groups: no decay on biases, on what has one dimension, and on what the model exempts, by patterns.

    timm's optimisers take a second to import, so that those which every run has are made here.
    """
    no_weight_decay: Any = getattr(model, "no_weight_decay", set)
    exempt = no_weight_decay()
    if config.layer_decay != 1:
        from timm.optim import param_groups_layer_decay

        return param_groups_layer_decay(model, config.weight_decay, exempt, layer_decay=config.layer_decay)
    free, decayed = [], []
    for name, p in model.named_parameters():
        flat = p.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, pattern) for pattern in exempt)
        if p.requires_grad:
            (free if flat or not config.weight_decay else decayed).append(p)
    groups = {0.0: free, config.weight_decay: decayed} if config.weight_decay else {0.0: free}
    return [dict(params=params, weight_decay=decay, lr_scale=1.0) for decay, params in groups.items() if params]


# Learning rate --------------------------------------------------------------------------------------------------


def learning_rate(config: OptimConfig, batch: int, epoch: float, epochs: float) -> float:
    """The learning rate after `epoch` epochs, which may be a fraction, of a run of `epochs`.

    The linear warm-up takes the place of the beginning of the cosine, the polynomial and the steps, as in timm and
    DeiT: they count from the start of the run. The exponential counts from the end of the warm-up, as VT has it.
    After `epochs` the cosine and the polynomial stay at `min_lr`: that is the cool-down.
    """
    lr = scale_rate(config, batch, config.lr)
    if epoch < config.warmup_epochs:
        start = scale_rate(config, batch, config.warmup_lr)
        return start + (lr - start) * epoch / config.warmup_epochs
    if config.schedule == "cosine":
        low = scale_rate(config, batch, config.min_lr)
        return low + (lr - low) * (1 + math.cos(math.pi * min(1.0, epoch / epochs))) / 2
    if config.schedule == "poly":
        low = scale_rate(config, batch, config.min_lr)
        return low + (lr - low) * (1 - min(1.0, epoch / epochs)) ** config.power
    if config.schedule == "step":
        passed = sum(epoch >= at for at in config.milestones) if config.milestones else epoch // config.step_epochs
        return lr * config.gamma**passed
    if config.schedule == "exponential":
        return lr * config.gamma ** (epoch - config.warmup_epochs)
    return lr


def scale_schedule(config: OptimConfig, factor: float) -> OptimConfig:
    """The same schedule for a run `factor` times as long."""
    lengths = ("warmup_epochs", "cooldown_epochs", "step_epochs")
    changed: dict[str, Any] = {name: getattr(config, name) * factor for name in lengths}
    changed["milestones"] = [at * factor for at in config.milestones]
    if config.schedule == "exponential":  # a factor for each epoch
        changed["gamma"] = config.gamma ** (1 / factor)
    return replace(config, **changed)


def scale_rate(config: OptimConfig, batch: int, rate: float) -> float:
    """`rate`, given for `lr_batch` pictures, for a batch of `batch`."""
    return rate * batch / config.lr_batch if config.lr_batch else rate


# Weight average -------------------------------------------------------------------------------------------------


class Ema:
    """An exponential moving average of the weights. Buffers, such as BatchNorm's statistics, are copied.

    `module` is a copy of the model in eval mode that holds the average. Make it before the model is compiled, wrapped
    or sharded.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        torch._foreach_lerp_(list(self.module.parameters()), list(model.parameters()), 1 - self.decay)
        buffers = list(self.module.buffers())
        if buffers:
            torch._foreach_copy_(buffers, list(model.buffers()))


# Freezing -------------------------------------------------------------------------------------------------------


def freeze(model: nn.Module, what: str) -> int:
    """Freezes `backbone` (all but the classifier), `norm`, or parameters by the beginning of their names.

    Several are given with commas. A BatchNorm whose weights are frozen keeps its statistics too, whoever calls
    `train()`. Returns how many numbers are frozen.
    """
    names = dict(model.named_parameters())
    for word in filter(None, (part.strip() for part in what.split(","))):
        chosen = list(_parameters(model, word))
        if not chosen:
            parts = {".".join(name.split(".")[:depth]) for name in names for depth in (1, 2, 3)}
            text = f"model.freeze={word!r}: no parameter has a name that begins with it."
            raise WeftError(text + did_you_mean(word, parts))
        for parameter in chosen:
            parameter.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.affine and not module.weight.requires_grad:
            module.eval()
            module.train = MethodType(_stay_in_eval, module)
    return sum(p.numel() for p in names.values() if not p.requires_grad)


def _parameters(model: nn.Module, word: str) -> Iterator[Tensor]:
    if word == "backbone":
        get_classifier: Any = model.get_classifier
        classifier = get_classifier()
        heads = classifier if isinstance(classifier, tuple | list) else [classifier]  # several where one was distilled
        kept = {id(p) for head in heads for p in head.parameters()}
        yield from (p for p in model.parameters() if id(p) not in kept)
    elif word == "norm":
        for module in model.modules():
            if "norm" in type(module).__name__.lower():  # LayerNorm2d, RmsNorm, BatchNormAct2d ...
                yield from module.parameters(recurse=False)
    else:
        beginning = word.rstrip(".") + "."  # so that blocks.1 is not blocks.10
        yield from (p for name, p in model.named_parameters() if f"{name}.".startswith(beginning))


def _stay_in_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
