"""Kernels that consume GEMM tiles, or whole symmetric tensors: all-reduce and all-scatter."""
