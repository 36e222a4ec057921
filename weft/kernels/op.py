"""Registers an operation with torch, so that compilers, autocast, checkpointing and DDP know it."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.choose import TwinIsFaster
from weft.kernels.switch import has_triton, interpreted, is_transformed

LIBRARY = torch.library.Library("weft", "DEF")
# No subclass of Tensor, and no list, in which torch.autograd.Function would not see a tensor.
DIRECT = (Tensor, torch.nn.Parameter, type(None), bool, int, float, str, torch.dtype)


def define(
    schema: str,
    plain: Callable[..., Any],
    launch: Callable[..., Any],
    fake: Callable[..., Any],
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Makes the operator `weft::<name>` of a `schema` such as "act(Tensor x, str kind) -> Tensor".

    Args:
        plain: the twin, used where no GPU is.
        launch: runs the Triton kernels; it imports them itself.
        fake: the outputs' shapes and types, as empty tensors.
            Any of these three may give None for one of several outputs, which the operator then gives as no numbers.
        setup, backward: `torch.library.register_autograd`'s; without them there is no gradient.

    Returns:
        A function that calls the operator. In eager mode it goes straight to the kernels: torch's dispatcher, which
        finds nothing to do there, takes longer than most of them.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema)

    def run(*args: Any) -> Any:
        device = next((value.device for value in args if isinstance(value, Tensor)), None)
        if device is None or not has_triton() or not (device.type == "cuda" or interpreted()):
            return _in_order(plain(*args))
        if name in _refused:
            return _in_order(plain(*args))
        try:
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):  # Triton launches on the current one
                    return launch(*args)
            return launch(*args)
        except TwinIsFaster:
            return _in_order(plain(*args))
        except Exception as error:
            if not type(error).__module__.startswith("triton"):
                raise
            _refuse(name, error)  # too large for this GPU, or not to this Triton's taste
            return _in_order(plain(*args))

    LIBRARY.impl(name, lambda *args: _filled(run(*args)), "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", lambda *args: _filled(fake(*args)), lib=LIBRARY)
    direct = run
    if backward is not None:
        torch.library.register_autograd(f"weft::{name}", backward, setup_context=setup, lib=LIBRARY)
        direct = _with_gradient(name, run, setup, backward)
    operator = getattr(torch.ops.weft, name).default

    def call(*args: Any) -> Any:
        return direct(*args) if nobody_looks(args) else operator(*args)

    return call


_refused: set[str] = set()


def _refuse(name: str, error: Exception) -> None:
    _refused.add(name)
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    warnings.warn(f"The kernel {name} does not run here, the plain path does: {reason}", stacklevel=2)


def _in_order(outputs: Any) -> Any:
    """What kernels and fakes give is contiguous; a twin may give views of another order."""
    if isinstance(outputs, tuple):
        return tuple(None if out is None else out.contiguous() for out in outputs)
    return outputs.contiguous()


def _filled(outputs: Any) -> Any:
    """An operator gives tensors and nothing else: a tensor of no numbers in place of each None."""
    if not isinstance(outputs, tuple):
        return outputs
    some = next(out for out in outputs if out is not None)
    return tuple(some.new_empty(0) if out is None else out for out in outputs)


def nobody_looks(args: tuple[Any, ...]) -> bool:
    """Whether these are plain tensors in eager mode, and no compiler, tracer, tensor subclass or mode is at work."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or is_transformed():
        return False
    return all(type(value) in DIRECT for value in args)


def _with_gradient(
    name: str, run: Callable[..., Any], setup: Callable[..., None] | None, backward: Callable[..., Any]
) -> Callable[..., Any]:
    """`run` as torch.autograd knows it, without the dispatcher."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            if setup is not None:
                setup(ctx, args, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx, *grads)

    Function.__name__ = f"weft_{name}"

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in args):
            return Function.apply(*args)
        return run(*args)

    return call
