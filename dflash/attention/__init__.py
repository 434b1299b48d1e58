"""Anchor attention: Triton kernels, their autograd function and a dense reference."""
