"""The fast paths: operations with a plain PyTorch twin that defines each and, for GPUs, a Triton kernel that equals it.

    <operation>.py        the twin, the operator `weft::<operation>` with its gradient, and the function models call
    gpu/<operation>.py    the Triton kernels, imported only when one is launched
    switch.py             whether kernels are used: WEFT_KERNELS=off, no CUDA or no Triton mean the twins
    choose.py             which launch parameters, from a table of measurements
    ahead.py              compiling kernels before they are needed

Feature maps are (B, H, W, C). All kernels compute in float32 and store in the type of what comes in.
"""

from weft.kernels.switch import switched, usable

# isort: split
import timm  # noqa: F401  behind it Weft's models load, which import the modules of this package; so it is the first

__all__ = ["switched", "usable"]
