"""Activations and their derivatives inside kernels, on float32 values.

Made of the few operations that a GPU does at full speed: with the erf, the exponential and the division of CUDA's
library, kernels that read and write each number once would wait for arithmetic. NaN stays NaN.
"""

import triton
import triton.language as tl

# The kinds by number, since kernels are compiled for numbers.
KINDS = {"none": 0, "gelu": 1, "silu": 2, "quick_gelu": 3, "relu": 4}


@triton.jit
def sigmoid(x):
    root = tl.rsqrt(1.0 + tl.exp2(-1.4426950408889634 * x))
    return root * root


@triton.jit
def relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def clamped_abs(x):
    """|x| up to 10: beyond, cdf(-|x|) is nothing, and the polynomials are no longer what they stand for."""
    return tl.minimum(tl.abs(x), 10.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gelu(x):
    """x cdf(x) = relu(x) - |x| cdf(-|x|), with the logarithm of the last factor as a polynomial: to 1e-7."""
    z = clamped_abs(x)
    p = 3.177334588661149e-05 * z - 0.0007569015141606938
    p = p * z + 0.00803692344446852
    p = p * z - 0.05333731695470929
    p = p * z - 0.4588344024411115
    p = p * z - 1.151177081136547
    p = p * z - 0.9999963322702907
    return relu(x) - z * tl.exp2(p)


@triton.jit
def gelu_slope(x):
    """cdf(x) + x pdf(x). At -|x| a polynomial times exp(-x^2 / 2), at |x| one minus that: to 3e-7."""
    z = clamped_abs(x)
    p = -8.063281900050294e-06 * z + 0.00015194513047190475
    p = p * z - 0.0012711827288761862
    p = p * z + 0.0063828754767750705
    p = p * z - 0.022231014797671263
    p = p * z + 0.059496956258306824
    p = p * z - 0.13177299399261816
    p = p * z + 0.24975233244113695
    p = p * z - 0.7978649052969885
    p = p * z + 0.4999997433464889
    low = p * tl.exp2(z * z * -0.7213475204444817)
    return tl.where(x < 0, low, 1.0 - low)


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == 1:
        x = gelu(x)
    elif KIND == 2:
        x = x * sigmoid(x)
    elif KIND == 3:
        x = x * sigmoid(1.702 * x)
    elif KIND == 4:
        x = relu(x)
    return x


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of `activate` at x."""
    if KIND == 1:
        return gelu_slope(x)
    elif KIND == 2:
        s = sigmoid(x)
        return s * (1.0 + x * (1.0 - s))
    elif KIND == 3:
        s = sigmoid(1.702 * x)
        return s * (1.0 + 1.702 * x * (1.0 - s))
    elif KIND == 4:
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)
