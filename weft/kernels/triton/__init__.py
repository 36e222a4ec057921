"""Triton kernels. Nothing outside weft/kernels imports this package, and nothing imports it without a Triton."""
