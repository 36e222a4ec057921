"""Matrix products inside kernels."""

import triton
import triton.language as tl

from weft.kernels.switch import interpreted

INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def dot(a, b, total):
    """total + a b, in float32. Float32 matrices keep their precision, on matrix units, by three products of tf32."""
    if INTERPRETED:  # Triton's interpreter takes the bits of bfloat16 for integers
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    else:
        return tl.dot(a, b, total, input_precision="tf32x3")
