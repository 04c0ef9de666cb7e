"""GEMMs by the vendor's BLAS, through PyTorch: those of placements "blas", "unfused" and "blas_blocks".

Its tiles may be of any multiple of 8 columns, and clusters of its programs share what they read by multicast: of more
than 64 rows of 16 bits our GEMM has 0.914 of its speed on average (one H200, docs/log.md).

What it computes must be what `gemm` promises, an IEEE product summed over K in fp32 and rounded once. Part of that is
known when a call is planned (`why_not`); part of it switches of the process decide, which are read at each call, never
written: then our own GEMM multiplies, which is planned beside it, since loading a kernel waits for those that spin.

Of 8-bit operands it is `torch._scaled_mm`, with scales of blocks `torch._scaled_mm_v2`. Which of them those take
differs by version and GPU, so it is tried when a kind of call is planned (`takes`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Protocol

import torch

from pyrocshmem import target, trace
from pyrocshmem.calls import planning
from pyrocshmem.calls.tensors import POINTER, elements_held, how_to_read, how_to_write
from pyrocshmem.collectives.float8 import UNIT
from pyrocshmem.collectives.quantize import dequantize
from pyrocshmem.elements import ELEMENTS
from pyrocshmem.stream_k.local_gemm.scales import Operand, Scaled, Scaling, data_of

# Whether the BLAS rounds the parts of a split K to 16 bits where PyTorch lets it, as it does unless told otherwise
# (`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`). cuBLAS 13 kept them in fp32 in all 30 kernels
# of split K that were looked at (docs/log.md). True: while PyTorch lets it, our own GEMM multiplies.
ROUNDS_PARTS = False
# Bytes that what the BLAS reads may have to be aligned to, and rows that it may take so many at a time.
_ALIGNED, _ROWS_ALIKE = 16, 16
# Of `torch._scaled_mm_v2`, the values of `torch.nn.functional.ScalingType` for A and for B, and of `SwizzleType`.
_OF_GROUPS, _OF_BLOCKS, _NOT_SWIZZLED = 4, 5, 0
# What `torch._scaled_mm` was tried on: kinds of calls, at most so many.
_KEPT = 4096
_taken: dict[Hashable, bool] = {}


class OwnGemm(Protocol):
    """Our GEMM for the same operands: `stream_k.local_gemm.plan.GemmPlan`."""

    @property
    def replayable(self) -> bool: ...

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue it."""


def why_not(
    a: Operand,
    b: Operand,
    bias: torch.Tensor | None,
    activation: str,
    out: torch.Tensor,
    allow_tf32: bool,
) -> str:
    """Why the BLAS can't compute what `gemm` does with these arguments: a clause; "" where it can. bias: [N], or a
    residual [M, N]; the BLAS adds a bias of the operands' dtype to the sum in fp32."""
    if activation != "none":
        return f"activation {activation!r} would follow the rounding"
    if not out.is_contiguous():
        return f"out has strides {out.stride()}, rows one behind another are needed"
    if isinstance(a, Scaled) or isinstance(b, Scaled):
        return _why_not_scaled(a, b, bias)
    if bias is not None and (bias.ndim != 1 or bias.dtype != a.dtype or out.dtype != a.dtype):
        what = "bias" if bias.ndim == 1 else "residual"
        return f"a {what} of {bias.dtype} would be added after the rounding to {out.dtype}"
    if allow_tf32 and ELEMENTS[a.dtype].tf32:
        return "allow_tf32 is True, and whether the BLAS goes through tf32 a switch of the process decides"
    if out.dtype not in (a.dtype, torch.float32):
        return f"results of {out.dtype} are none that the BLAS has for operands of {a.dtype}"
    if out.dtype != a.dtype and not target.interpreted() and target.backend() != "cuda":
        return f"results of {out.dtype} are asked of NVIDIA's BLAS alone"
    return ""


def _why_not_scaled(a: Operand, b: Operand, bias: torch.Tensor | None) -> str:
    assert isinstance(a, Scaled)
    assert isinstance(b, Scaled)
    if bias is not None:
        return "a bias or a residual would be added after the rounding"
    if a.data.stride(1) != 1 or b.data.stride(0) != 1:
        return f"a and b have strides {a.data.stride()} and {b.data.stride()}, rows of a and columns of b are needed"
    if (a.scale.numel() == 1) != (b.scale.numel() == 1):
        return "one of a and b has a scale of the whole, the other one of each row"
    return ""


def _of_blocks(b: Operand) -> bool:
    """Whether the scales of a B are of blocks."""
    if not isinstance(b, Scaled) or b.scale.ndim != 2:
        return False
    along_k, along_n = b.scale.shape
    return along_k > 1 or along_n not in (1, b.data.shape[1])


def _missing(b: Operand) -> torch.Tensor | None:
    """Zeros to go behind the scales of B of each column, up to a multiple of UNIT: cuBLAS looks for those of the next
    column where such a multiple ends. None: nothing is missing."""
    if not _of_blocks(b) or len(b.scale) % UNIT == 0:
        return None
    blocks, columns = b.scale.shape
    return b.scale.new_zeros(columns, -blocks % UNIT)


def _completed(b: Operand, missing: torch.Tensor | None) -> Operand:
    """`b` with as many scales as the BLAS takes: those behind its own, where they lie like that, or zeros. A of them is
    zeros."""
    if missing is None:
        return b
    assert isinstance(b, Scaled)
    there = _lie_by(b.scale, len(b.scale) + missing.shape[1])
    return Scaled(b.data, torch.cat((b.scale.t(), missing), 1).t() if there is None else there)


def takes(a: Scaled, b: Scaled, fast: bool, out: torch.Tensor) -> bool:
    """Whether `torch._scaled_mm` takes these operands, for which there is no `why_not`. A try takes as long as the
    product, so one counts for all numbers of rows that leave the same remainder by _ROWS_ALIKE."""
    if planning.here.mode == "sizes":
        return True
    alignments = (
        x % _ALIGNED for x in (a.data.stride(0), a.data.data_ptr(), b.data.stride(1), b.data.data_ptr())
    )
    kinds = (
        a.data.dtype,
        b.data.dtype,
        out.dtype,
        a.scale.numel() == 1,
        b.scale.numel() == 1,
        _of_blocks(b),
    )
    key = (out.device, *b.data.shape, len(a.data) % _ROWS_ALIKE, *alignments, *kinds, fast)
    found = _taken.get(key)
    if found is None:
        if len(_taken) == _KEPT:
            _taken.clear()
        found = _taken[key] = _is_taken(a, b, fast, out)
    return found


def _is_taken(a: Scaled, b: Scaled, fast: bool, out: torch.Tensor) -> bool:
    if out.device.type == "cpu":
        return True
    try:
        _multiply(a, _completed(b, _missing(b)), None, torch.empty_like(out), fast)
    except (RuntimeError, ValueError, NotImplementedError):
        return False
    return True


def is_slow(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether lines of 16-bit operands or results begin between multiples of 16 bytes: cuBLAS takes 2.1 times as long
    as our GEMM then, which copies such operands first (H200, 500 sizes; docs/log.md)."""
    if target.backend() != "cuda" or ELEMENTS[a.dtype].wide:
        return False
    return POINTER in (how_to_read(a), how_to_read(b), how_to_write(out))


def _fp32_is_ieee() -> bool:
    # The public attribute takes a microsecond. What interprets kernels has oneDNN for a BLAS.
    library = "mkldnn" if target.interpreted() else "cuda"
    return torch._C._get_fp32_precision_getter(library, "matmul") in ("ieee", "none")


def _fp16_is_summed_in_fp32() -> bool:
    return not torch._C._get_cublas_allow_fp16_accumulation() and not _rounds_parts("fp16")


def _bf16_is_summed_in_fp32() -> bool:
    return not _rounds_parts("bf16")


def _rounds_parts(dtype: str) -> bool:
    return ROUNDS_PARTS and getattr(torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction")


def _check_of(dtype: torch.dtype) -> Callable[[], bool] | None:
    """What says at each call whether the switches of the process let the BLAS compute what `gemm` promises; None where
    none of them concerns operands of `dtype`."""
    if dtype == torch.float32:
        return _fp32_is_ieee
    if dtype == torch.float16:
        return _fp16_is_summed_in_fp32
    return _bf16_is_summed_in_fp32 if ROUNDS_PARTS else None


def keeps_own(dtype: torch.dtype) -> bool:
    """Whether our own GEMM is planned, and compiled, beside the BLAS' for operands of `dtype`."""
    return _check_of(dtype) is not None


def _outlives_its_capture(device: torch.device) -> bool:
    """Whether what PyTorch allocates under capture, where the library adds up parts, is there for other graphs, too.
    `cudaMallocAsync` gives it to that graph alone."""
    return device.type == "cpu" or torch.cuda.get_allocator_backend() == "native"


class BlasPlan:
    """A GEMM in the place of a `GemmPlan`, for operands of one kind for which there is no `why_not`: stored to results
    like `out`. own: makes our own GEMM for the same operands; asked where switches of the process may want it.
    loads: whether the BLAS multiplies once here: it loads its kernels before those of the op wait for peers, and all
    ranks wait until all are ready. fast: not `promoted`. roomy: whether results come from `new_result`.
    switch: whether the process lets the BLAS multiply; None: no switch forbids it."""

    def __init__(
        self,
        a: Operand,
        b: Operand,
        bias: torch.Tensor | None,
        out: torch.Tensor,
        own: Callable[[], OwnGemm],
        loads: bool,
        fast: bool = False,
        roomy: bool = False,
    ) -> None:
        self.switch = _check_of(data_of(a).dtype)
        self._own = None if self.switch is None else own()
        self._fast, self._roomy, self._device = fast, roomy, out.device
        self._missing = _missing(b)
        if loads and out.device.type != "cpu" and planning.here.mode != "sizes":
            _multiply(a, _completed(b, self._missing), bias, torch.empty_like(out), fast)

    @property
    def replayable(self) -> bool:
        """Whether a graph of a call can be replayed, while `multiplies` says the same."""
        return (self._own is None or self._own.replayable) and _outlives_its_capture(self._device)

    def multiplies(self) -> bool:
        """Whether the BLAS does, by the switches of the process as they are."""
        return self.switch is None or self.switch()

    def run(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue a call on tensors of this kind."""
        if self.multiplies():
            trace.product(lambda: self._multiply(a, b, bias, out))
        else:
            assert self._own is not None
            self._own.run(a, b, bias, out)

    def _multiply(self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        _multiply(a, _completed(b, self._missing), bias, out, self._fast, self._roomy)


def new_result(
    M: int, N: int, dtype: torch.dtype, device: torch.device, scaling: Scaling | None
) -> torch.Tensor:
    """Memory for a result [M, N], with room for the rows that the BLAS multiplies beyond it (`_multiply_blocks`)."""
    if scaling is None or M % UNIT == 0 or scaling.a.ndim != 2 or scaling.a.shape[1] == 1:
        return torch.empty(M, N, dtype=dtype, device=device)
    return torch.empty(M + -M % UNIT, N, dtype=dtype, device=device)[:M]


def _multiply_scaled(a: Operand, b: Operand, out: torch.Tensor, fast: bool, roomy: bool) -> None:
    assert isinstance(a, Scaled)
    assert isinstance(b, Scaled)
    if _of_blocks(b):
        _multiply_blocks(a, b, out, fast, roomy)
    elif out.device.type == "cpu":
        _multiply_on_cpu(a, b, out)
    else:
        scales = (_by_columns(x.scale) for x in (a, b))
        torch.ops.aten._scaled_mm.out(
            a.data, b.data, *scales, out_dtype=out.dtype, use_fast_accum=fast, out=out
        )


def _multiply_blocks(a: Scaled, b: Scaled, out: torch.Tensor, fast: bool, roomy: bool) -> None:
    """With scales of blocks. The BLAS takes rows by UNIT: behind others it multiplies what lies there, or what is in
    memory that was taken for it, into rows that nobody reads: those behind `out`, where that is roomy, or else those of
    a result from which `out` is copied."""
    M = len(a.data)
    rows = M + -M % UNIT
    a = Scaled(_with_rows(a.data, rows), _scales_of_rows(a.scale, rows))
    in_place = rows == M or (roomy and _holds(out, rows))
    result = _with_rows(out, rows) if in_place else out.new_empty(rows, out.shape[1])
    if out.device.type == "cpu":
        _multiply_on_cpu(a, b, result)
    else:
        kinds = (
            [a.scale],
            [_OF_GROUPS],
            [_NOT_SWIZZLED],
            [_by_columns(b.scale)],
            [_OF_BLOCKS],
            [_NOT_SWIZZLED],
        )
        torch.ops.aten._scaled_mm_v2.out(
            a.data, b.data, *kinds, bias=None, out_dtype=out.dtype, use_fast_accum=fast, out=result
        )
    if not in_place:
        out.copy_(result[:M])


def _multiply_on_cpu(a: Scaled, b: Scaled, out: torch.Tensor) -> None:
    """PyTorch on a CPU has not all recipes."""
    out.copy_(dequantize(*a) @ dequantize(b.data.t(), b.scale.t() if b.scale.ndim == 2 else b.scale).t())


def _with_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with what lies behind it as its last rows, where its storage holds so many; else a copy with such rows."""
    if rows == len(x):
        return x
    if _holds(x, rows):
        return x.as_strided((rows, x.shape[1]), x.stride())
    whole = x.new_empty(rows, x.shape[1])
    whole[: len(x)] = x
    return whole


def _scales_of_rows(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """`_with_rows` of scales of blocks, `_by_columns`, which lie `rows` from one column to the next."""
    if rows == len(scale):
        return _by_columns(scale)
    there = _lie_by(scale, rows)
    if there is None:
        there = scale.new_empty(scale.shape[1], rows).t()
        there[: len(scale)] = scale
    return there


def _lie_by(scale: torch.Tensor, rows: int) -> torch.Tensor | None:
    """`scale` with what lies behind each column, up to so many rows, where columns are so far apart."""
    by_columns = (len(scale) == 1 or scale.stride(0) == 1) and scale.stride(1) == rows
    if by_columns and scale.data_ptr() % _ALIGNED == 0 and rows * scale.shape[1] <= elements_held(scale):
        return scale.as_strided((rows, scale.shape[1]), (1, rows))
    return None


def _holds(x: torch.Tensor, rows: int) -> bool:
    """Whether the storage of a matrix `x` has so many rows from its first on."""
    return (rows - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1) < elements_held(x)


def _by_columns(scale: torch.Tensor) -> torch.Tensor:
    """Scales as the BLAS takes them: those of a column one behind another, from a multiple of 16 bytes on."""
    if scale.ndim != 2 or (scale.t().is_contiguous() and scale.data_ptr() % _ALIGNED == 0):
        return scale
    return scale.t().clone(memory_format=torch.contiguous_format).t()


def _multiply(
    a: Operand,
    b: Operand,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    fast: bool = False,
    roomy: bool = False,
) -> None:
    if out.is_inference() and not torch.is_inference_mode_enabled():
        # Elsewhere PyTorch writes to no such tensor; kernels of ours do.
        with torch.inference_mode():
            _multiply(a, b, bias, out, fast, roomy)
    elif isinstance(a, Scaled) or isinstance(b, Scaled):
        _multiply_scaled(a, b, out, fast, roomy)
    elif out.device.type == "cpu" and a.dtype != torch.float32:
        # PyTorch on a CPU has no fp32 results of 16-bit operands.
        wide = torch.empty(out.shape, dtype=torch.float32)
        _multiply(a.float(), b.float(), None if bias is None else bias.float(), wide)
        out.copy_(wide)
    # Calls with an `out` autocast leaves alone.
    elif bias is not None:
        torch.addmm(bias, a, b, out=out)
    elif out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
