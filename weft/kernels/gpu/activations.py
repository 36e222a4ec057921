"""Activations and their derivatives inside kernels, on float32 values."""

import triton
import triton.language as tl

# The kinds by number, since kernels are compiled for numbers.
KINDS = {"none": 0, "gelu": 1, "silu": 2, "quick_gelu": 3, "relu": 4}


@triton.jit
def normal_cdf(x):
    """The probability that a normal variable is below x, to 1e-7: formula 7.1.26 of Abramowitz and Stegun.

    Half as many instructions as the erf of CUDA's library, which would make these kernels wait for arithmetic.
    """
    z = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * poly * tl.exp(-z * z)
    return tl.where(x < 0, tail, 1.0 - tail)


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == 1:
        x = x * normal_cdf(x)
    elif KIND == 2:
        x = x * tl.sigmoid(x)
    elif KIND == 3:
        x = x * tl.sigmoid(1.702 * x)
    elif KIND == 4:
        x = tl.maximum(x, 0.0)
    return x


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of `activate` at x."""
    if KIND == 1:
        return normal_cdf(x) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 2:
        s = tl.sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == 3:
        s = tl.sigmoid(1.702 * x)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    elif KIND == 4:
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)
