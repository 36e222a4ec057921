"""`weft.fast(model)`: gives the blocks of a model their fused forms, in place, and returns it.

    model = weft.fast(timm.create_model("cvt_13").cuda())

It speeds up training and inference on NVIDIA GPUs; parameters, state dict and results stay what they are, up to
rounding. `weft.plain(model)` undoes it; `weft.fast.swap.fast` says all of it. The package, which is called here, has

swap.py       fast, plain: fused forms in place of plain classes, and back
tape.py       a block as one step for torch
ops.py linear.py blocks.py      what fused forms are made of
ceit.py cetnet.py cvt.py vitae.py vt.py      the forms, a file for each family
fuse.py       the copy for inference; class_token.py packed_linear.py on_cpu.py what runs differently in it
record.py     a block's launches recorded, replay.py a model's; graphs.py recordings, CUDA graphs
rehearse.py   kernels compiled at a model's first call; compiled.py what torch.compile sees
"""

import sys
import types
from typing import TypeVar

from torch import nn

ModelT = TypeVar("ModelT", bound=nn.Module)


class _Fast(types.ModuleType):
    """A package that is also the function of its name."""

    def __call__(self, model: ModelT, *, record: bool = True) -> ModelT:
        from weft.fast.swap import fast

        return fast(model, record=record)


sys.modules[__name__].__class__ = _Fast
