"""Reads and writes raw GPU addresses from a kernel, as the heap's users do, in tests and in the children they start."""

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def copy_bytes_kernel(source, target, num_bytes, BLOCK: tl.constexpr):
    """target[i] = source[i] for i < num_bytes; both are addresses as int64. Program 2, BLOCK 1024: 2048..3071."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_bytes
    data = tl.load(source.to(tl.pointer_type(tl.uint8)) + offsets, mask=mask)
    tl.store(target.to(tl.pointer_type(tl.uint8)) + offsets, data, mask=mask)


def _copy(source: int, target: int, num_bytes: int, device: int) -> None:
    with torch.cuda.device(device):
        grid = (triton.cdiv(num_bytes, BLOCK),)
        copy_bytes_kernel[grid](source, target, num_bytes, BLOCK=BLOCK)
        torch.cuda.synchronize()


def read(ptr: int, num_bytes: int, device: int = 0) -> bytes:
    """The bytes at ``ptr`` as a kernel on ``device`` sees them."""
    result = torch.full((num_bytes,), 0xA5, dtype=torch.uint8, device=f"cuda:{device}")
    _copy(ptr, result.data_ptr(), num_bytes, device)
    return result.cpu().numpy().tobytes()


def write(ptr: int, data: bytes, device: int = 0) -> None:
    """Stores ``data`` at ``ptr`` from a kernel on ``device``."""
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(f"cuda:{device}")
    _copy(source.data_ptr(), ptr, len(data), device)
