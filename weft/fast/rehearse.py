"""Models that compile all their kernels at their first call, on all cores, before anything waits for one of them.

A kernel takes a second to compile, and a model has dozens. Met one by one they would take a minute; Triton keeps them
on disk for the next time.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from weft.fast.record import may_record, records_here
from weft.fast.swap import Fused, fused, is_plain, replaying
from weft.kernels.switch import amp_dtype, usable
from weft.kernels.tuning.ahead import compile_ahead
from weft.models.ce_hosts import CESwin
from weft.models.ceit import CeiT
from weft.models.cetnet import CETNet
from weft.models.cvt import CvT
from weft.models.vitae import ViTAE
from weft.models.vt_resnet import VTResNet

MOST = 16  # kinds of pictures; whoever has more gets kernels as they are met


class Rehearsed(Fused):
    """A model whose first call with a kind of pictures is rehearsed, forward and, in training, backward."""

    def remember(self) -> None:
        """Nothing inside is passed by."""

    def forward(self, x: Tensor) -> Tensor:
        forward = super(Fused, self).forward  # pyright: ignore[reportAttributeAccessIssue]
        if torch.compiler.is_compiling():
            return self.by_itself(x) if self.is_trained_by_recordings(x) else forward(x)  # pyright: ignore
        self.rehearse(forward, x)
        return forward(x)

    @torch.compiler.disable
    def by_itself(self, x: Tensor) -> Tensor:
        """Without the compiler that called it."""
        return self.forward(x)

    def is_trained_by_recordings(self, x: Tensor) -> bool:
        """Whether to pass by torch.compile: replayed blocks train faster than what it makes of plain ones."""
        records = self.__dict__["_recordings"] is not None and torch.is_grad_enabled() and self.training  # pyright: ignore
        return records and usable(x) and compiler_lets_go()

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward_intermediates  # pyright: ignore[reportAttributeAccessIssue]
        self.rehearse(lambda x: forward(x, *args, **kwargs), x)
        return forward(x, *args, **kwargs)

    def rehearse(self, forward: Any, x: Tensor) -> None:
        if torch.compiler.is_compiling() or not (is_plain(x) and x.is_cuda and usable(x)):
            return
        from weft.kernels.triton.launch import rehearsing  # imports Triton

        model: Any = self
        kind = (x.shape, x.dtype, x.device, amp_dtype(x), torch.is_grad_enabled(), model.training, replaying.get())
        known: set[Any] = self.__dict__.setdefault("_rehearsed", set())
        if kind in known or len(known) >= MOST or rehearsing.get() is not None:
            return
        if torch.cuda.is_current_stream_capturing() or is_watched(model):
            return
        known.add(kind)
        records = self.__dict__["_recordings"] is not None and may_record(x)  # so that every block is fused soon
        compile_ahead(lambda: _pass(model, forward, torch.empty_like(x), records or replaying.get()))


@torch.compiler.assume_constant_result  # asked, not compiled
def compiler_lets_go() -> bool:
    """Whether torch.compile may leave a part to Python here: not with fullgraph=True; and whether that is recorded."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = getattr(InstructionTranslator, "current_tx", lambda: None)()
    return not getattr(translator, "one_graph", True) and records_here()


def _pass(model: Any, forward: Any, x: Tensor, replayed: bool = False) -> None:
    """What a call would launch, and its backward pass; all that it changes is put back."""
    token = replaying.set(replayed)
    before = [(buffer, _version(buffer), buffer.clone()) for buffer in model.buffers()]
    devices = [x.device] if x.is_cuda else []
    try:
        with torch.random.fork_rng(devices=devices), contextlib.suppress(RuntimeError, ValueError):
            found = forward(x)
            outputs = [y for y in _tensors(found) if y.requires_grad]
            parameters = [p for p in model.parameters() if p.requires_grad]
            if outputs and parameters:
                torch.autograd.grad(outputs, parameters, [torch.empty_like(y) for y in outputs], allow_unused=True)
    finally:
        replaying.reset(token)
        for buffer, version, value in before:
            if _version(buffer) != version:
                buffer.data.copy_(value)  # which graphs that wait for their backward pass do not notice


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version  # nothing changes those by itself


def is_watched(model: Any) -> bool:
    """Whether somebody would see a rehearsal: by hooks, or in another process."""
    if module_hooks._has_any_global_hook() or any(p._backward_hooks for p in model.parameters()):
        return True
    return any(
        isinstance(module, nn.SyncBatchNorm)
        or any(getattr(module, f"_{kind}_hooks") for kind in ("forward", "forward_pre", "backward", "backward_pre"))
        for module in model.modules()
    )


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [y for part in found for y in _tensors(part)] if isinstance(found, list | tuple) else []


@fused(CeiT)
class FusedCeiT(Rehearsed, CeiT):
    pass


@fused(CESwin)
class FusedCESwin(Rehearsed, CESwin):
    pass


@fused(CETNet)
class FusedCETNet(Rehearsed, CETNet):
    pass


@fused(CvT)
class FusedCvT(Rehearsed, CvT):
    pass


@fused(ViTAE)
class FusedViTAE(Rehearsed, ViTAE):
    pass


@fused(VTResNet)
class FusedVTResNet(Rehearsed, VTResNet):
    pass
