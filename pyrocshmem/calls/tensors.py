"""Tensors as kernels take them: checks of what callers gave, the kind of a tensor that a plan is made for, and how a
matrix is addressed, through a tensor descriptor where TMA can, by pointers otherwise.

How a matrix is read or written:
  ROW, COLUMN   by a tensor descriptor (TMA) of contiguous rows, or of contiguous columns
  POINTER       by pointers, any strides
  MASKED        by pointers, where all columns are inside: only rows are masked
  BLOCKS        written by a tensor descriptor (TMA) of equally many rows a rank, each rank's up to its last one
"""

from __future__ import annotations

import math
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from pyrocshmem import blocks, target

ROW = 0
COLUMN = 1
POINTER = 2
MASKED = 3
BLOCKS = 4

# TMA addresses whole 16-byte units: the base and every stride but the contiguous one must be multiples of
# that.
_TMA_BYTES = 16
# What Triton knows of an integer, and of a pointer in bytes: whether this divides it.
_DIVISOR = 16


def check_plain(name: str, x: torch.Tensor) -> None:
    """ValueError for a view whose memory holds its values with the other sign, and as `check_held`."""
    check_held(name, x)
    # A traced call is checked when it runs.
    if not torch.compiler.is_compiling() and x.is_neg():
        raise ValueError(f"{name} has PyTorch's negative bit; give {name}.resolve_neg()")


def check_held(name: str, x: torch.Tensor) -> None:
    """ValueError for a tensor whose place on its heap was freed: it may be another's."""
    if not torch.compiler.is_compiling() and blocks.retired and blocks.is_freed(x):
        raise ValueError(f"{name} was freed: its place on the heap may be another tensor's")


def check_dense(x: torch.Tensor) -> None:
    """TypeError for a sparse, nested or otherwise packed tensor, which has no strides."""
    if x.layout is not torch.strided or x.is_nested:
        what = "nested" if x.is_nested else f"of layout {x.layout}"
        raise TypeError(f"a tensor is {what}; dense ones (torch.strided) are needed")


def _check_same_device(name: str, x: torch.Tensor | None, a: torch.Tensor) -> None:
    if x is not None and x.device != a.device:
        raise ValueError(f"{name} is on {x.device}, a is on {a.device}; all must be on one device")


def tell_autograd(out: torch.Tensor) -> None:
    """As `claim`, without the operands."""
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "out requires a gradient, which no op with an out has; call it under torch.no_grad()"
        )
    if not out.is_inference():
        torch.autograd.graph.increment_version(out)


def check_device(a: torch.Tensor, device: torch.device) -> None:
    """ValueError unless `a` lives on `device`, and kernels of this process can run there."""
    if a.device.type != target.device_type():
        raise ValueError(f"a is on {a.device}, but kernels run elsewhere: {target.describe()}")
    if a.device != device:
        raise ValueError(f"a is on {a.device}, the kernels of this rank run on {device}")


def check_writable(name: str, x: torch.Tensor) -> None:
    """ValueError for a tensor that can't be written, since some of its elements share a place."""
    if _overlaps_itself(x):
        raise ValueError(f"{name} has strides {x.stride()}: several of its elements share a place")


def _overlaps_itself(x: torch.Tensor) -> bool:
    if x.numel() == 0:
        return False
    span = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in span:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a byte may belong to both. Exact for blocks of columns, or of rows, of one matrix; else by
    first and last byte."""
    if x.numel() == 0 or y.numel() == 0:
        return False
    x_first, y_first = x.data_ptr(), y.data_ptr()
    if x_first + _reach(x) <= y_first or y_first + _reach(y) <= x_first:
        return False
    strides = x.stride()
    if x.dtype != y.dtype or x.ndim != 2 or strides != y.stride() or min(strides) != 1 or max(strides) == 1:
        return True
    # Lines of so many elements, `pitch` apart: two such sets are disjoint when the lines are, modulo the
    # pitch.
    inner, pitch = strides.index(1), max(strides)
    ahead = (y_first - x_first) // x.element_size() % pitch
    return ahead < x.shape[inner] or ahead + y.shape[inner] > pitch


def _reach(x: torch.Tensor) -> int:
    """Bytes from the first of `x`, a vector or a matrix, to past its last."""
    elements = 1
    for stride, size in zip(x.stride(), x.shape, strict=True):
        elements += stride * (size - 1)
    return elements * x.element_size()


def aligned(x: torch.Tensor | None) -> bool:
    """Whether Triton takes the pointer for divisible by 16 bytes. It compiles other code when it isn't."""
    return x is None or x.data_ptr() % _DIVISOR == 0


def kind(x: Any) -> Any:
    """All of a tensor that a plan depends on, but for `rows_held`. TypeError as `check_dense`."""
    if not isinstance(x, torch.Tensor):
        return None if x is None else type(x)
    check_dense(x)
    # One that was freed has no plan: `check_held` has refused it.
    return (
        x.shape,
        x.stride(),
        x.dtype,
        x.device,
        x.data_ptr() % _TMA_BYTES,
        x.is_neg(),
        bool(blocks.retired) and blocks.is_freed(x),
    )


def how_to_read(x: torch.Tensor) -> int:
    """ROW, COLUMN or POINTER for a matrix of any strides."""
    rows, cols = x.shape
    size = x.element_size()
    if not aligned(x):
        return POINTER
    if x.stride(1) == 1 and x.stride(0) >= cols and x.stride(0) * size % _TMA_BYTES == 0:
        return ROW
    if x.stride(0) == 1 and x.stride(1) >= rows and x.stride(1) * size % _TMA_BYTES == 0:
        return COLUMN
    return POINTER


def how_to_write(x: torch.Tensor) -> int:
    """ROW or POINTER for an output matrix."""
    # TMA clips a store to whole 16-byte units only: it would write past the last column of a shorter row.
    whole = x.shape[1] * x.element_size() % _TMA_BYTES == 0
    return ROW if whole and how_to_read(x) == ROW else POINTER


def as_argument(x: torch.Tensor, how: int, rows: int, cols: int) -> Any:
    """What the kernel gets for matrix `x`, read or written in blocks [rows, cols]: a descriptor, or the
    tensor itself. For BLOCKS x is [ranks, rows of a rank, columns]."""
    if how == ROW:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, cols])
    if how == COLUMN:
        return TensorDescriptor(x, list(x.shape)[::-1], list(x.stride())[::-1], [cols, rows])
    if how == BLOCKS:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, rows, cols])
    return x


def strides_by_pointer(x: torch.Tensor, how: int) -> tuple[int, int]:
    """Strides of `x` for a kernel that goes there in the way `how`. For a descriptor, which has its own, none: Triton
    would compile the kernel anew for others."""
    return (0, 0) if how in (ROW, COLUMN) else (x.stride(0), x.stride(1))


def template(x: torch.Tensor, how: int, rows: int, cols: int) -> Any:
    """What `as_argument` makes of `x`, without `x` itself, for `filled` to make it again for tensors of the
    same kind."""
    argument = as_argument(x, how, rows, cols)
    if argument is x:
        return None
    argument.base = None
    return argument


def filled(made: Any, x: torch.Tensor) -> Any:
    """The kernel's argument for `x`, of the same kind (`left_kind`) as the one that `made` is the template of: nothing
    is checked again."""
    if made is None:
        return x
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(made.__dict__)
    descriptor.base = x
    return descriptor


def of_rows(made: Any, x: torch.Tensor, how: int) -> Any:
    """`template` of the matrix `x`, where `made` is the one of a matrix of the same kind but for its rows."""
    if made is None:
        return None
    descriptor = object.__new__(TensorDescriptor)
    rows, columns = x.shape
    shape = [columns, rows] if how == COLUMN else [rows, columns]
    descriptor.__dict__.update(made.__dict__, shape=shape)
    return descriptor


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., N] as [M, N] with contiguous rows: a view where memory holds them so."""
    if x.ndim == 2 and x.is_contiguous() and not x.is_neg():
        return x
    M, N = math.prod(x.shape[:-1]), x.shape[-1]
    rows = x.resolve_neg().reshape(M, N)
    return rows if N <= 1 or rows.stride(1) == 1 else rows.contiguous()


def is_laid_alike(x: torch.Tensor) -> bool:
    """Whether kernels add along the rows of `x`, [N] or [.., N], in the order in which they do where rows follow one
    another from a multiple of 16 bytes on. Triton lays a block in registers, and adds it, by what it knows of
    addresses: whether 16 divides where x begins, and the stride of its rows."""
    return aligned(x) and (x.ndim == 1 or (x.stride(-2) % _DIVISOR == 0) == (x.shape[-1] % _DIVISOR == 0))


def laid_alike(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a copy for which `is_laid_alike` holds."""
    return x if is_laid_alike(x) else x.clone(memory_format=torch.contiguous_format)


def rows_laid_alike(x: torch.Tensor) -> torch.Tensor:
    """`laid_alike` of the rows that kernels find in `x`, [.., N]."""
    return laid_alike(as_rows(x)).view(x.shape)


def shape_of(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    """All of a tensor on x's device but its memory, for `new_like`. dtype: x's unless given."""
    return x.new_empty(1, dtype=dtype).expand(shape)


def new_like(x: torch.Tensor) -> torch.Tensor:
    """A new contiguous tensor like `x`, of any strides: microseconds less of the host than by its shape."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_eps(eps: float) -> None:
    """TypeError for what is no number, ValueError for one that no norm adds to its mean of squares."""
    if eps is None or isinstance(eps, str | torch.Tensor):
        raise TypeError(f"eps is a {type(eps).__name__}, a number is needed")
    if not 0 <= eps < math.inf:  # math.isfinite is nothing that torch.compile could ask of a number it traces
        raise ValueError(f"eps is {eps}, allowed are finite numbers of 0 or more")


# Heights of tiles, largest first.
_HEIGHTS = (256, 128, 64, 32, 16)


def elements_held(x: torch.Tensor) -> int:
    """How many elements the storage of `x` has from its first on."""
    return x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()


def rows_held(x: torch.Tensor) -> int:
    """How many rows from the first of `x`, a matrix, may be read: its own, and of those that its storage holds behind
    them as many as make whole tiles, of the largest height that does. Nobody needs what these hold. Where `x` has so
    many rows that the last tile's hardly count, its own.
    """
    rows, cols = x.shape
    pitch, step = x.stride()
    if rows >= _HEIGHTS[0] or step != 1 or pitch < max(cols, 1):
        return rows
    held = (elements_held(x) - cols) // pitch + 1
    if held > rows:
        for height in _HEIGHTS:
            whole = -(-rows // height) * height
            if whole <= held:
                return whole
    return rows


def left_kind(a: Any) -> Any:
    """`kind` of a left operand, and of which rows behind its own a plan depends on."""
    return kind(a), rows_held(a) if isinstance(a, torch.Tensor) and a.ndim == 2 else 0
