"""`weft.fast(model)`: gives the blocks of a model their fused forms, in place, and returns it.

    model = weft.fast(timm.create_model("cvt_13").cuda())

It speeds up training and inference on NVIDIA GPUs; parameters, state dict and results stay what they are, up to
rounding. `weft.plain(model)` undoes it; `weft.fast.swap.fast` says all of it. The package, which is called here, has

swap.py       fast, plain: fused forms in place of plain classes, and back
fuse.py       the copy for inference
replay.py     a model whose launches are recorded as a whole
precompile.py kernels compiled at a model's first call
forms/        the fused forms, a file for each family; whole_models.py theirs, compiled.py what torch.compile sees
tape/         what forms are made of: tape.py a block as one node of autograd, ops.py linear.py blocks.py its layers
recording/    record.py a block's launches recorded; graphs.py recordings, which are CUDA graphs
inference/    what runs differently in the copy for inference
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
