"""Operations for fused blocks: a plain PyTorch twin that defines each and, for GPUs, a Triton kernel that equals it.

    <operation>.py        the twin, its gradient, the operator `weft::<operation>` where torch.compile should see it
    gpu/<operation>.py    the Triton kernels, imported only when one is launched
    op.py                 what an operation is
    switch.py             whether kernels are used: WEFT_KERNELS=off, no CUDA or no Triton mean the twins
    launches.py           tiles, warps and programs of each kernel
    ahead.py              compiling kernels before they are needed

Feature maps are (B, H, W, C). All kernels compute in float32 and store in the type of what comes in.
"""

from weft.kernels.switch import switched, usable

__all__ = ["switched", "usable"]
