"""An operation: plain PyTorch that defines it, kernels that equal it, its gradient, and what torch must know of it."""

import warnings
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from weft.kernels.switch import has_triton, interpreted

_current_device = torch._C._cuda_getDevice
LIBRARY = torch.library.Library("weft", "DEF")


class Operation:
    """An operation, made by `define`.

    `run(*args)` is its result, by kernels on a GPU and by its reference elsewhere; torch does not differentiate it.
    `forward(ctx, *args)` and `backward(ctx, *grads)` are for a `weft.fast.tape.tape.Tape`. Called, it is an operator of
    torch, with a gradient, and known to compilers; only a schema and a fake make it one.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        kernels: str,
        setup: Callable[..., None] | None,
        backward: Callable[..., Any] | None,
    ):
        self.name, self.reference, self.kernels, self.setup, self.gradient = name, reference, kernels, setup, backward
        self.operator: Any = None
        self.disabled = False  # since this GPU or this Triton does not run the kernels

    @cached_property
    def launch(self) -> Callable[..., Any]:
        """The function that runs the kernels, imported when first asked for: Triton may be missing."""
        module, function = self.kernels.split(".")
        return getattr(import_module(f"weft.kernels.triton.{module}"), function)

    def run(self, *args: Any) -> Any:
        tensor = args[0] if type(args[0]) is Tensor else next((a for a in args if isinstance(a, Tensor)), None)
        if self.disabled or tensor is None or not has_triton() or not (tensor.is_cuda or interpreted()):
            return _contiguous(self.reference(*args))
        try:
            if tensor.is_cuda and tensor.get_device() != _current_device():
                with torch.cuda.device(tensor.device):  # Triton launches on the current one
                    return self.launch(*args)
            return self.launch(*args)
        except Exception as error:
            if not type(error).__module__.startswith("triton"):
                raise
            self._disable(error)  # too large for this GPU, or not to this Triton's taste
            return _contiguous(self.reference(*args))

    def _disable(self, error: Exception) -> None:
        self.disabled = True
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        warnings.warn(f"The kernel {self.name} does not run here, the plain path does: {reason}", stacklevel=3)

    def forward(self, ctx: Any, *args: Any) -> Any:
        found = self.run(*args)
        if self.setup is not None:
            self.setup(ctx, args, found)
        return found

    def backward(self, ctx: Any, *grads: Any) -> Any:
        assert self.gradient is not None, f"{self.name} has no gradient"
        return self.gradient(ctx, *grads)

    def __call__(self, *args: Any) -> Any:
        return self.operator(*args)

    def dispatch(self, *args: Any) -> Any:
        """As a part of another operation's gradient: an operator for compilers and other modes that want to see one."""
        seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
        return self.operator(*args) if seen else self.run(*args)


def define(
    schema: str,
    reference: Callable[..., Any],
    kernels: str,
    fake: Callable[..., Any] | None = None,
    setup: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Operation:
    """Makes an operation, and of it the operator `weft::<name>` if its shapes are told.

    Args:
        schema: such as "act(Tensor x, str kind) -> Tensor"; the name alone if torch never sees the operation.
        reference: the definition in plain PyTorch, used where no GPU is.
        kernels: the function in `weft.kernels.triton` that launches the kernels, such as "activation.forward".
        fake: the outputs' shapes and types, as empty tensors; without it torch's compiler never sees the operation.
        setup, backward: `torch.library.register_autograd`'s; without them there is no gradient.
    """
    name = schema.split("(")[0]
    operation = Operation(name, reference, kernels, setup, backward)
    if fake is not None:
        LIBRARY.define(schema)
        LIBRARY.impl(name, operation.run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"weft::{name}", fake, lib=LIBRARY)
        if backward is not None:
            torch.library.register_autograd(f"weft::{name}", backward, setup_context=setup, lib=LIBRARY)
        operation.operator = getattr(torch.ops.weft, name).default
    return operation


def _contiguous(outputs: Any) -> Any:
    """Makes the outputs of a reference, which may be views, contiguous, as those of kernels and fakes are."""
    if isinstance(outputs, tuple):
        return tuple(None if out is None else out.contiguous() for out in outputs)
    return outputs.contiguous()
