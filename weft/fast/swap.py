"""`weft.fast`: the modules of a model that have a fused form get it; `weft.plain` undoes that.

A fused form is a subclass of the plain class, in the file of its family. Swapping changes the class of a module and
nothing else: parameters, buffers and the keys of the state dict stay what they are, and `repr` says `Fused...`.
"""

import copy
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as module_hooks

from weft.errors import WeftError
from weft.fast.record import Recordings, may_record
from weft.fast.tape import Tape, one_step
from weft.kernels.switch import has_triton, kernels_are_on, usable

ModelT = TypeVar("ModelT", bound=nn.Module)
FormT = TypeVar("FormT", bound=type)
FORMS: dict[type, type] = {}  # plain class to fused form
PLAIN: dict[type, type] = {}  # and back
NOTES = ("_parts", "_passed_by", "_fits", "_rehearsed", "_recordings")  # what fused forms write down about themselves


def fused(plain: type) -> Callable[[FormT], FormT]:
    """Registers the decorated class as the fused form of `plain`."""

    def register(form: FormT) -> FormT:
        FORMS[plain], PLAIN[form] = form, plain
        return form

    return register


@cache
def import_forms() -> None:
    """Imports every file of this package: each registers what it has."""
    package = importlib.import_module("weft.fast")
    for info in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"weft.fast.{info.name}")


def fast(model: ModelT, *, record: bool = True) -> ModelT:
    """Gives the blocks of `model` their fused forms, for training and inference, in place; returns the model.

        model = weft.fast(timm.create_model("cvt_13").cuda())

    There are forms for CeiT, ViTAE, VT, CvT, CETNet and its hosts, and for timm's ResNets; other models stay plain.
    Parameters, state dict and results stay what they are, up to rounding. A block computes plainly
        - if it has an activation, a norm or a layer of a kind that its fused form does not know;
        - as long as somebody watches it by hooks, or has replaced something in it;
        - where kernels cannot run: on a CPU, in torch.export, with WEFT_KERNELS=off;
        - where its maps are so small that Python would take longer to launch kernels, unless launches are recorded.

    With `record`, a block that is called three times in a row with inputs of the same shape has its launches recorded,
    as CUDA graphs, and replayed from then on, which takes Python's time out of it. Recordings keep the memory that they
    need; none are made where more than half of the GPU's is in use, in a group of processes, under checkpointing, or in
    torch's deterministic mode.

    A fused block has no second derivatives, and torch.fx wants the plain model. Twice is once; `weft.plain(model)`
    undoes it.
    """
    _check(model, "fast")
    import_forms()
    for module in list(model.modules()):
        form: Any = FORMS.get(type(module))
        if form is not None and form.fits(module):
            module.__class__ = form
    for module in model.modules():
        if isinstance(module, Fused):
            module.remember()
            module.__dict__["_recordings"] = Recordings() if record else None
    return model


def fast_on(model: ModelT, device: torch.device, *, record: bool = True) -> ModelT:
    """`fast(model)` where its kernels can run: on a GPU, with Triton, unless they are switched off."""
    can = device.type == "cuda" and kernels_are_on() and has_triton()
    return fast(model, record=record) if can else model


def plain(model: ModelT) -> ModelT:
    """Undoes `weft.fast`, in place; returns the model."""
    _check(model, "plain")
    for module in model.modules():
        if type(module) in PLAIN:
            module.__class__ = PLAIN[type(module)]
            for key in NOTES:
                module.__dict__.pop(key, None)
    return model


def _check(model: Any, name: str) -> None:
    if not isinstance(model, nn.Module):
        inside = isinstance(getattr(model, "model", None), nn.Module)
        hint = "give it its .model" if inside else "make one with weft.create_model"
        raise WeftError(f"weft.{name} takes a model, not {type(model).__name__}; {hint}.")


# Whether launches are recorded, now or soon, and then replayed without Python.
replaying: ContextVar[bool] = ContextVar("replaying", default=False)


class Fused:
    """What a fused form derives from, in front of its plain class: it computes `steps` as one step for torch."""

    # Elements of the input below which the plain form runs where Python launches: that would take longer than a GPU
    # needs without our kernels. Measured with an H200 on a slow processor.
    LEAST = 2**24

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Whether a module of the plain class has nothing inside that `steps` does not know."""
        return True

    def ready(self, *inputs: Any) -> bool:
        """Whether `steps` knows the mode that the module is in now."""
        return True

    def steps(self, t: Tape, *inputs: Any) -> Any:
        raise NotImplementedError

    def compiled(self, *inputs: Any) -> Any:
        """What compilers see."""
        return super().forward(*inputs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not named and torch.compiler.is_compiling():
            return self.compiled(*inputs)
        return self.run(super().forward, *inputs, **named)  # pyright: ignore[reportAttributeAccessIssue]

    def compute(self, *inputs: Any) -> Any:
        """The fused form, launched by Python."""
        return one_step(self.steps, *inputs)

    def run(self, plain: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """What `plain` gives, from the fused form where it can run: replayed, or launched if that takes no longer."""
        if named or not self.is_fused(*inputs):
            return plain(*inputs, **named)
        recordings: Recordings | None = self.__dict__["_recordings"]
        if replaying.get() or recordings is None or not may_record(inputs[0]):
            is_near = replaying.get()
        else:
            found = recordings.run(self.compute, [part for part, *_ in self.__dict__["_parts"]], inputs)
            if found is not None:
                return found
            is_near = recordings.is_near
        return self.compute(*inputs) if is_near or inputs[0].numel() >= self.LEAST else plain(*inputs)

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript compiles the plain form."""
        module: Any = copy.copy(self)
        module.__class__ = next(kind for kind in type(self).__mro__ if kind in FORMS)
        module.__dict__["_modules"] = dict(module.__dict__["_modules"])
        for key in NOTES:
            module.__dict__.pop(key, None)
        return module

    def is_fused(self, *inputs: Any) -> bool:
        """Whether the fused form knows these inputs, here and now."""
        x = inputs[0]
        return is_plain(x) and usable(x) and x.numel() > 0 and self.is_untouched() and self.ready(*inputs)

    def remember(self) -> None:
        """Takes down what is inside, to notice what changes later."""
        parts: list[nn.Module] = list(self.modules())  # pyright: ignore[reportAttributeAccessIssue]
        self.__dict__["_parts"] = taken_down(parts)

    def is_untouched(self) -> bool:
        """Whether calling the modules inside would do nothing but what their classes say, as when `fast` saw them.

        `steps` reads the parameters of modules that it does not call. That must not happen where somebody has put
        something else in a module's place, hooked it, pruned it or parametrised it.
        """
        return are_untouched(self.__dict__["_parts"], self)


Parts = list[tuple[nn.Module, type, tuple[nn.Module | None, ...]]]


def taken_down(parts: Sequence[nn.Module]) -> Parts:
    """These modules, their classes, and what is inside of each."""
    return [(part, type(part), tuple(part._modules.values())) for part in parts]


def are_untouched(parts: Parts, owner: Any) -> bool:
    """Whether all of these are as they were, and nobody watches them; `owner`, which is called, may be watched."""
    if module_hooks._has_any_global_hook():
        return False
    for part, kind, children in parts:
        state = part.__dict__
        if type(part) is not kind or (children and tuple(state["_modules"].values()) != children):
            return False
        if state.get("momentum", 0.0) is None or state.get("track_running_stats") is False:  # a BatchNorm of its own
            return False
        if state.get("padding_mode", "zeros") != "zeros":
            return False
        if part is not owner and (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
            or "forward" in state
        ):
            return False
    return True


def is_exactly(module: Any, *kinds: type) -> bool:
    """Whether a module is of one of these classes, plain or fused, and not of a class derived from it."""
    return PLAIN.get(type(module), type(module)) in kinds


def is_plain(x: Any) -> bool:
    """Whether this is a tensor in eager mode, and no tracer, subclass or mode that wants to see torch's operations."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0  # derivatives forward are torch's own
    )
