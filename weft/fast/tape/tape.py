"""A block as one node of autograd: its operations run one after the other, and a single step leads back.

In eager mode torch needs ten to thirty microseconds to call and to record an operation, more than most of ours take on
a GPU. A `Tape` records them itself, in a list, and is attached to torch's graph as a whole.

An operation has what a `torch.autograd.Function` has, `forward(ctx, *args)` and `backward(ctx, *grads)`, and, where
nothing is recorded, `run(*args)`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.kernels.switch import amp_dtype

NO_SLOT = -1


class Var:
    """A tensor inside a tape, and the slot of its gradient in the tape's table."""

    __slots__ = ("slot", "value")

    def __init__(self, value: Tensor, slot: int = NO_SLOT):
        self.value, self.slot = value, slot

    @property
    def shape(self) -> torch.Size:
        return self.value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype


class Context:
    """A place for what an operation's `forward` leaves to its `backward`, as torch's own has it."""

    def __init__(self, needs_input_grad: list[bool]):
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Sequence[Tensor | None] = ()
        self.saved_count = 0  # while torch keeps them
        self.materialize = True
        self.non_differentiable: list[int] = []  # outputs without a gradient, by their ids

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value

    def mark_non_differentiable(self, *outputs: Tensor) -> None:
        self.non_differentiable = [id(y) for y in outputs]


class CastCache:
    """Parameters in the type that products compute in."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self.made: dict[int, Tensor] = {}  # by the parameter's id

    def prepare(self, *layers: Any) -> None:
        """Casts weights and biases of all these layers by one kernel."""
        parameters = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
        others = [p for p in parameters if p.dtype != self.dtype]
        if others:
            cast = [torch.empty_like(p, dtype=self.dtype) for p in others]
            torch._foreach_copy_(cast, others)
            self.made.update(zip(map(id, others), cast, strict=True))

    def __call__(self, parameters: Sequence[Tensor | None]) -> list[Any]:
        made = self.made
        return [
            p if p is None or p.dtype == self.dtype else made[id(p)] if id(p) in made else p.to(self.dtype)
            for p in parameters
        ]


class Tape:
    """Runs operations on `Var`s and remembers how to go back; without `grad_enabled` it only runs them.

    Tensors among the arguments, such as parameters, are leaves: torch gets their gradients from the tape.
    """

    def __init__(self, grad_enabled: bool, dtype: torch.dtype):
        self.grad_enabled = grad_enabled
        self.dtype = dtype  # of products: autocast's, where it is on
        self.casts = CastCache(dtype)
        self.leaves: list[Tensor] = []
        self.slots: dict[int, int] = {}  # of leaves, by the tensor's id
        self.count = 0
        self.steps: list[tuple[Any, Context, list[int], list[int], Any]] = []

    def leaf_slot(self, tensor: Tensor) -> int:
        """The slot of a tensor that torch wants a gradient of."""
        if not self.grad_enabled or not tensor.requires_grad:
            return NO_SLOT
        slot = self.slots.get(id(tensor))
        if slot is None:
            slot = self.slots[id(tensor)] = self.count
            self.leaves.append(tensor)
            self.count += 1
        return slot

    def var(self, tensor: Tensor | None) -> Var | None:
        """An input of the block."""
        if tensor is None:
            return None
        return Var(tensor, self.leaf_slot(tensor))

    def __call__(self, operation: Any, *args: Any) -> Any:
        """Runs `operation` on `Var`s, tensors and other values; returns `Var`s, and None where it gives None."""
        values, slots = [], []
        for arg in args:
            if type(arg) is Var:
                values.append(arg.value)
                slots.append(arg.slot)
            else:
                values.append(arg)
                slots.append(self.leaf_slot(arg) if isinstance(arg, Tensor) else NO_SLOT)
        if not self.grad_enabled or max(slots) < 0:
            return _wrap(operation.run(*values))
        needed = [slot >= 0 for slot in slots]
        ctx = Context(needed)
        found = operation.forward(ctx, *values)
        first = self.count
        if type(found) is not tuple:
            self.count += 1
            self.steps.append((operation, ctx, slots, [first], None))
            return Var(found, first)
        self.count += len(found)
        shapes = [None if y is None or id(y) in ctx.non_differentiable else (y.shape, y.dtype, y.device) for y in found]
        self.steps.append((operation, ctx, slots, list(range(first, self.count)), shapes if ctx.materialize else None))
        return tuple(None if y is None else Var(y, first + i) for i, y in enumerate(found))

    def backward(self, outputs: list[int], grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of all leaves from those of the slots `outputs`."""
        table: list[Tensor | None] = [None] * self.count
        for slot, grad in zip(outputs, grads, strict=True):
            _add(table, slot, grad)
        for operation, ctx, ins, outs, shapes in reversed(self.steps):
            given = [table[slot] for slot in outs]
            if given.count(None) == len(given):
                ctx.saved_tensors = ()
                continue
            for slot in outs:
                table[slot] = None
            if shapes is not None:
                given = [
                    torch.zeros(shape[0], dtype=shape[1], device=shape[2]) if grad is None and shape else grad
                    for grad, shape in zip(given, shapes, strict=True)
                ]
            found = operation.backward(ctx, *given)
            ctx.saved_tensors = ()
            for slot, grad in zip(ins, found if type(found) is tuple else (found,), strict=True):
                _add(table, slot, grad)
        return [table[slot] for slot in self.slots.values()]


def _wrap(found: Any) -> Any:
    if type(found) is not tuple:
        return Var(found)
    return tuple(None if y is None else Var(y) for y in found)


def _add(table: list[Tensor | None], slot: int, grad: Tensor | None) -> None:
    if slot < 0 or grad is None:
        return
    before = table[slot]
    table[slot] = grad if before is None else before + grad


class TapeFunction:
    """An operation in the style of `torch.autograd.Function`; to run it is to go forward with nobody to tell."""

    @classmethod
    def run(cls, *args: Any) -> Any:
        return cls.forward(Context([False] * len(args)), *args)

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError


class Checkpointed(TapeFunction):
    """Any function that torch can differentiate: `Checkpointed, function, *inputs`, of which some are tensors.

    As in torch's checkpointing, it runs again on the way back.
    """

    @staticmethod
    def run(function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], *args: Any) -> Any:
        ctx.function, ctx.others = function, [None if isinstance(arg, Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, Tensor) else None for arg in args))
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [
                other if tensor is None else tensor.detach().requires_grad_(need)
                for tensor, other, need in zip(ctx.saved_tensors, ctx.others, needed, strict=True)
            ]
            found = ctx.function(*inputs)
        wanted = [x for x, need in zip(inputs, needed, strict=True) if need]
        slopes = iter(torch.autograd.grad(found, wanted, grads, allow_unused=True))
        return None, *(next(slopes) if need else None for need in needed)


class _TapeNode(torch.autograd.Function):
    """The node of a tape in torch's graph."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, found: tuple[Var, ...], *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tape, ctx.slots = tape, [y.slot for y in found]
        saved: list[Tensor | None] = []
        for _, context, *_ in tape.steps:  # all through torch: checkpointing replaces what is saved
            saved += context.saved_tensors
            context.saved_count, context.saved_tensors = len(context.saved_tensors), ()
        ctx.save_for_backward(*saved)
        tape.leaves = []  # torch has them
        tape.casts.made.clear()
        return tuple(y.value for y in found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        tape, saved, first = ctx.tape, ctx.saved_tensors, 0
        for _, context, *_ in tape.steps:
            context.saved_tensors = saved[first : first + context.saved_count]
            first += context.saved_count
        return None, None, *tape.backward(ctx.slots, grads)


def apply_operation(operation: Any, *args: Any) -> Any:
    """One operation, with its gradient, on tensors."""
    tensors = [arg if isinstance(arg, Tensor) else None for arg in args]

    def steps(t: Tape, *given: Var | None) -> Any:
        return t(operation, *(arg if x is None else x for x, arg in zip(given, args, strict=True)))

    return run_as_one_node(steps, *tensors)


def run_as_one_node(steps: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """`steps(tape, *inputs)`, in which inputs and results are `Var`s or None, as one operation on tensors."""
    first = next(x for x in inputs if x is not None)
    tape = Tape(torch.is_grad_enabled(), amp_dtype(first))
    with torch.no_grad():
        found = steps(tape, *(tape.var(x) for x in inputs))
    results = found if type(found) is tuple else (found,)
    if tape.steps:
        there = tuple(y for y in results if y is not None)
        attached = iter(_TapeNode.apply(tape, there, *tape.leaves))
        values = tuple(None if y is None else next(attached) for y in results)
    else:
        values = tuple(None if y is None else y.value for y in results)
    return values if type(found) is tuple else values[0]
