"""Whether a module may be computed without being called."""

from itertools import islice
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from weft.kernels.switch import usable

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def bare(*modules: Any, types: tuple[type[nn.Module], ...] = ()) -> bool:
    """True if calling these modules would do nothing but what their class says.

    A fused path reads the parameters of modules that it does not call. That must not happen where somebody has put
    something else in a module's place, hooked it, pruned it or parametrised it. `types`: the classes that are meant;
    without them any class is.
    """
    if module_hooks._has_any_global_hook():
        return False
    return all(
        (not types or type(module) in types)
        and "forward" not in module.__dict__
        and not any(getattr(module, hooks) for hooks in HOOKS)
        for module in modules
    )


def fusable(x: Tensor, owner: nn.Module) -> bool:
    """Whether kernels may be launched on `x` in place of the modules inside `owner`."""
    return usable(x) and bare(*islice(owner.modules(), 1, None))
