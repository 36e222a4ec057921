"""Operations for fused blocks: a reference in plain PyTorch that defines each, and a Triton kernel that equals it.

    ops/<operation>.py       the reference, its gradient, the operator `weft::<operation>` for torch.compile
    ops/op.py                what an operation is
    triton/<operation>.py    the Triton kernels, imported only when one is launched
    switch.py                whether kernels are used: WEFT_KERNELS=off, no CUDA or no Triton mean the references
    tuning/launches.py       tiles, warps and programs of each kernel
    tuning/ahead.py          compiling kernels before they are needed

Feature maps are (B, H, W, C). All kernels compute in float32 and store in the type of what comes in.
"""

from weft.kernels.switch import switched, usable

__all__ = ["switched", "usable"]
