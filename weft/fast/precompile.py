"""Models that compile all their kernels at their first call, on all cores, before anything waits for one of them.

A kernel takes a second to compile, and a model has dozens. Met one by one they would take a minute; Triton keeps them
on disk for the next time.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from weft.fast.recording.record import may_record, process_may_record
from weft.fast.swap import Fused, is_eager_tensor, replaying
from weft.kernels.switch import amp_dtype, usable
from weft.kernels.tuning.ahead import compile_ahead

MOST_KINDS = 16  # of pictures; whoever has more gets kernels as they are met
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PrecompiledModel(Fused):
    """A model whose first call with a kind of pictures is preceded by a dry run, forward and, in training, backward."""

    def remember_parts(self) -> None:
        """Remembers none: every module inside is called."""

    def forward(self, x: Tensor) -> Tensor:
        forward = super(Fused, self).forward  # pyright: ignore[reportAttributeAccessIssue]
        if torch.compiler.is_compiling():
            return self.run_uncompiled(x) if self.trains_by_recordings(x) else forward(x)  # pyright: ignore
        self.precompile(forward, x)
        return forward(x)

    @torch.compiler.disable
    def run_uncompiled(self, x: Tensor) -> Tensor:
        """Without the compiler that called it."""
        return self.forward(x)

    def trains_by_recordings(self, x: Tensor) -> bool:
        """Whether to pass by torch.compile: replayed blocks train faster than what it makes of plain ones."""
        records = self.__dict__["_recordings"] is not None and torch.is_grad_enabled() and self.training  # pyright: ignore
        return records and usable(x) and compiler_allows_graph_break()

    def forward_intermediates(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward_intermediates  # pyright: ignore[reportAttributeAccessIssue]
        self.precompile(lambda x: forward(x, *args, **kwargs), x)
        return forward(x, *args, **kwargs)

    def precompile(self, forward: Any, x: Tensor) -> None:
        """Compiles all kernels that `forward(x)` would launch, once for each kind of `x`."""
        if torch.compiler.is_compiling() or not (is_eager_tensor(x) and x.is_cuda and usable(x)):
            return
        from weft.kernels.triton.launch import dry_run_keys  # imports Triton

        model: Any = self
        kind = (x.shape, x.dtype, x.device, amp_dtype(x), torch.is_grad_enabled(), model.training, replaying.get())
        known: set[Any] = self.__dict__.setdefault("_precompiled", set())
        if kind in known or len(known) >= MOST_KINDS or dry_run_keys.get() is not None:
            return
        if torch.cuda.is_current_stream_capturing() or not is_unhooked(model):
            return
        known.add(kind)
        records = self.__dict__["_recordings"] is not None and may_record(x)  # so that every block is fused soon
        compile_ahead(lambda: dry_run(model, forward, torch.empty_like(x), records or replaying.get()))


@torch.compiler.assume_constant_result  # asked, not compiled
def compiler_allows_graph_break() -> bool:
    """Whether torch.compile may leave a part to Python here: not with fullgraph=True; and whether that is recorded."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    translator: Any = getattr(InstructionTranslator, "current_tx", lambda: None)()
    return not getattr(translator, "one_graph", True) and process_may_record()


def dry_run(model: Any, forward: Any, x: Tensor, replayed: bool = False) -> None:
    """Launches what a call would, and its backward pass; all that it changes is put back."""
    token = replaying.set(replayed)
    before = [(buffer, _version(buffer), buffer.clone()) for buffer in model.buffers()]
    devices = [x.device] if x.is_cuda else []
    try:
        with torch.random.fork_rng(devices=devices), contextlib.suppress(RuntimeError, ValueError):
            outputs = [y for y in _tensors(forward(x)) if y.requires_grad]
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


def is_unhooked(model: nn.Module) -> bool:
    """Whether nobody would see a dry run: no hook of a module or a parameter, nor a norm in another process."""
    if module_hooks._has_any_global_hook() or any(p._backward_hooks for p in model.parameters()):
        return False
    return not any(
        isinstance(module, nn.SyncBatchNorm) or any(module.__dict__[hooks] for hooks in HOOKS)
        for module in model.modules()
    )


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        return [found]
    return [y for part in found for y in _tensors(part)] if isinstance(found, list | tuple) else []
