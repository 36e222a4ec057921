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
from weft.fast.recording.record import BlockRecordings, may_record
from weft.fast.tape.tape import Tape, run_as_one_node
from weft.kernels.switch import has_triton, kernels_are_on, usable

ModelT = TypeVar("ModelT", bound=nn.Module)
FormT = TypeVar("FormT", bound=type)
FORMS: dict[type, type] = {}  # plain class to fused form
PLAIN: dict[type, type] = {}  # and back
# Attributes that fused forms have beside those of the plain class.
FUSED_ATTRIBUTES = ("_parts", "_bypassed", "_fits", "_precompiled", "_recordings")


def fused(plain: type) -> Callable[[FormT], FormT]:
    """Registers the decorated class as the fused form of `plain`."""

    def register(form: FormT) -> FormT:
        FORMS[plain], PLAIN[form] = form, plain
        return form

    return register


@cache
def import_forms() -> None:
    """Imports every file with forms: each registers what it has."""
    for folder in ("weft.fast.forms", "weft.fast.inference"):
        for info in pkgutil.iter_modules(importlib.import_module(folder).__path__):
            importlib.import_module(f"{folder}.{info.name}")


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
            module.remember_parts()
            module.__dict__["_recordings"] = BlockRecordings() if record else None
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
            for key in FUSED_ATTRIBUTES:
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
    """The base of every fused form, in front of its plain class: it computes `steps` as one node of autograd."""

    # Elements of the input below which the plain form runs where Python launches: that would take longer than a GPU
    # needs without our kernels. Measured with an H200 on a slow processor.
    MIN_ELEMENTS = 2**24

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
        """The computation that compilers see."""
        return super().forward(*inputs)  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not named and torch.compiler.is_compiling():
            return self.compiled(*inputs)
        return self.run(super().forward, *inputs, **named)  # pyright: ignore[reportAttributeAccessIssue]

    def compute(self, *inputs: Any) -> Any:
        """The fused form, launched by Python."""
        return run_as_one_node(self.steps, *inputs)

    def run(self, plain: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Computes `plain` by the fused form where that can run: replayed, or launched if it takes no longer."""
        if named or not self.is_fused(*inputs):
            return plain(*inputs, **named)
        recordings: BlockRecordings | None = self.__dict__["_recordings"]
        if replaying.get() or recordings is None or "_is_replica" in self.__dict__ or not may_record(inputs[0]):
            expects_recording = replaying.get()  # a replica, of DataParallel, has no parameters of its own
        else:
            found = recordings.run(self.compute, [part for part, *_ in self.__dict__["_parts"]], inputs)
            if found is not None:
                return found
            expects_recording = recordings.expects_recording
        return self.compute(*inputs) if expects_recording or inputs[0].numel() >= self.MIN_ELEMENTS else plain(*inputs)

    def __prepare_scriptable__(self) -> nn.Module:
        """TorchScript compiles the plain form."""
        module: Any = copy.copy(self)
        module.__class__ = next(kind for kind in type(self).__mro__ if kind in FORMS)
        module.__dict__["_modules"] = dict(module.__dict__["_modules"])
        for key in FUSED_ATTRIBUTES:
            module.__dict__.pop(key, None)
        return module

    def is_fused(self, *inputs: Any) -> bool:
        """Whether the fused form knows these inputs, here and now."""
        x = inputs[0]
        return is_eager_tensor(x) and usable(x) and x.numel() > 0 and self.is_unmodified() and self.ready(*inputs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Converts or moves the block as torch does; recordings of weights that are elsewhere now free their memory."""
        recordings: BlockRecordings | None = self.__dict__.get("_recordings")
        module: Any = self
        before = [p.data_ptr() for p in module.parameters()] if recordings is not None and recordings.made else []
        found = super()._apply(fn, recurse)  # pyright: ignore[reportAttributeAccessIssue]
        if recordings is not None and before and before != [p.data_ptr() for p in module.parameters()]:
            recordings.made.clear()
        return found

    def remember_parts(self) -> None:
        """Takes a snapshot of what is inside, to notice what changes later."""
        parts: list[nn.Module] = list(self.modules())  # pyright: ignore[reportAttributeAccessIssue]
        self.__dict__["_parts"] = snapshot(parts)

    def is_unmodified(self) -> bool:
        """Whether calling the modules inside would do nothing but what their classes say, as when `fast` saw them.

        `steps` reads the parameters of modules that it does not call. That must not happen where somebody has put
        something else in a module's place, hooked it, pruned it or parametrised it.
        """
        return are_unmodified(self.__dict__["_parts"], self)


Snapshot = list[tuple[nn.Module, type, tuple[nn.Module | None, ...]]]


def snapshot(parts: Sequence[nn.Module]) -> Snapshot:
    """These modules, their classes, and what is inside of each."""
    return [(part, type(part), tuple(part._modules.values())) for part in parts]


def are_unmodified(parts: Snapshot, owner: Any) -> bool:
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


def is_eager_tensor(x: Any) -> bool:
    """Whether this is a tensor in eager mode, and no tracer, subclass or mode that wants to see torch's operations."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0  # derivatives forward are torch's own
    )
