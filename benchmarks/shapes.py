"""What is measured: ops and sets of shapes.

    cases = cases_of("gemm_all_reduce", "llama3", ranks=4, dtype="bfloat16", on_gpu=True)

M, N, K are always those of one rank's product: all_gather_gemm and gemm_all_scatter M, N/R, K, the ops that sum
over ranks M, N, K/R. A standalone collective has K = 0 and M x N elements on each rank, of all_reduce_rms_norm M rows.
Of a whole layer (`benchmarks.layers`) M is tokens, N the hidden and K the intermediate size.
"""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pyrocshmem.benchmarks import models

# Bytes a second that a GPU can send to its peers together: what a floor divides by. From 4 x H200, where the copy
# engine pushes 385 GB/s to one peer and pulls 367.
LINK_BYTES_PER_S = 370e9
# Peaks of device memory by the vendor's data sheets, and up to how many rows a product is held to them.
MEMORY_BYTES_PER_S = {"NVIDIA H200": 4.8e12, "NVIDIA H100 80GB HBM3": 3.35e12}
MEMORY_BOUND_ROWS = 128

# Llama 3 layers on 4 to 8 GPUs, as (N, K) of one rank's column-parallel product.
LLAMA = ((1792, 4096), (3584, 8192), (6656, 16384))
LLAMA_ROWS = (4096, 8192, 16384)
# Row-parallel (N, K) of one rank.
DECODE = ((4096, 1024), (4096, 3584), (8192, 2048), (8192, 7168))
# Sizes of a batch: powers of two, or others, where the last tile is never full.
DECODE_ROWS = {"decode": (1, 16, 64, 128, 256), "batches": (3, 24, 40, 100, 200)}
SWEEP = (3584, 8192)
SWEEP_ROWS = tuple(256 << i for i in range(8))
NO_TILE = (4091, 1801, 4104)
CORPUS_SHAPES, CORPUS_LOW, CORPUS_HIGH, CORPUS_SEED = 500, 128, 8192, 20260
# Its sizes as drawn, hardly any of which is aligned, and as layers have them: the nearest multiples of 64.
CORPORA = {"stream-k-corpus": 1, "stream-k-corpus-64": 64}
TINY = ((64, 48, 32), (33, 17, 40))
# A program a row, which costs the interpreter a tenth of a second.
TINY_NORM = ((3, 17, 40),)
# Tokens at a time: of one sequence, or (decode) of so many sequences with this many tokens behind them.
LAYER_ROWS = {"all": (2048, 8192), "decode": (1, 16, 64)}
TINY_ROWS = {"all": (8,), "decode": (3,)}
SIZES = tuple(1 << i for i in range(10, 30))
TINY_SIZES = (1 << 10, 5 << 10)
# (rows, hidden) of a norm between two blocks of a decoding transformer.
NORM_ROWS = ((1, 512), (1, 4096), *((rows, 8192) for rows in (1, 4, 8, 16, 32, 64, 128)))

# A product that would take less than this is timed as a replayed graph of many calls, collectives are at any size.
_GRAPH_SECONDS = 50e-6
GRAPH_CALLS = 20
_LARGE_BYTES, _LARGE_CALLS = 64 << 20, 5
_ROUGH_FLOPS = 7e14


@dataclass(frozen=True)
class LayerSize:
    """A transformer layer. context: tokens that a cache has room for, all but the last of them seen before."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int


LAYER_SIZES = {
    "llama3-8b": LayerSize(4096, 14336, 32, 8, 128, 1024),
    "llama3-70b": LayerSize(8192, 28672, 64, 8, 128, 1024),
    "tiny": LayerSize(32, 48, 4, 4, 8, 16),
}


@dataclass(frozen=True)
class Op:
    """An op. kind: "gemm", "row" (sums over ranks), "column", "collective" (no product), or "layer" (many of them).

    sets: its default shape sets.
    """

    name: str
    kind: str
    sets: tuple[str, ...]


OPS = {
    op.name: op
    for op in (
        Op("gemm", "gemm", ("llama3", "decode", "batches", "sweep", *CORPORA)),
        Op("all_gather_gemm", "column", ("llama3", "sweep")),
        Op("gemm_reduce_scatter", "row", ("llama3", "sweep")),
        Op("gemm_all_reduce", "row", ("llama3", "sweep", "decode", "batches")),
        Op("gemm_all_scatter", "column", ("llama3", "sweep")),
        Op("gemm_all_reduce_rms_norm", "row", ("decode", "batches")),
        Op("gemm_rms_norm_all_scatter", "column", ("decode", "llama3")),
        Op("all_reduce", "collective", ("sizes",)),
        Op("all_reduce_rms_norm", "collective", ("norm-rows",)),
        Op("all_gather", "collective", ("sizes",)),
        Op("reduce_scatter", "collective", ("sizes",)),
        Op("all_scatter", "collective", ("sizes",)),
        Op("broadcast", "collective", ("sizes",)),
        Op("rms_norm", "collective", ("norm-rows",)),
        Op("rms_norm_replicated", "collective", ("norm-rows",)),
        Op("barrier", "collective", ("once",)),
    )
}
# Those that end with a residual and a norm.
NORMS = ("gemm_all_reduce_rms_norm", "all_reduce_rms_norm")
# Those with a norm of rows whose columns lie on all ranks, N on each.
COLUMN_NORMS = ("rms_norm", "rms_norm_replicated", "gemm_rms_norm_all_scatter")
MODELS = ("llama3-8b", "llama3-70b")
LAYERS = {name: Op(name, "layer", MODELS) for name in ("layer_forward", "layer_training", "layer_decode")}
TIMED = OPS | LAYERS
# Of sets and providers: they stand in tables, plots and names of files.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
NAMES = "are letters, digits, _ . and -, 64 at most, the first no mark"
SETS = ("llama3", *DECODE_ROWS, "sweep", *CORPORA, "sizes", "norm-rows", "once", "tiny")


@dataclass(frozen=True)
class Case:
    """One op at one local shape. shapes: the set's name. timing: "eager", or "graph" (replays of many calls)."""

    op: str
    shapes: str
    M: int
    N: int
    K: int
    dtype: str
    ranks: int
    timing: str


def cases_of(op: str, shapes: str, ranks: int, dtype: str, on_gpu: bool) -> list[Case]:
    """The cases of `op` for `shapes`: a set's name, "models:SEED", "M,N,K", bytes of a collective ("1024" or
    "1024,4096"), or a TOML file with `shapes = [[M, N, K], ...]` or `sizes = [...]`.

    Raises ValueError for shapes that don't exist for the op, OSError for a file that can't be read.
    """
    kind = TIMED[op].kind
    if kind == "layer":
        return _layer_cases(op, shapes, ranks, dtype, on_gpu)
    if op == "barrier" and shapes not in ("once", "tiny"):
        raise ValueError(f"barrier takes once or tiny, which are the same: it has no data; not {shapes!r}")
    name = "custom" if shapes not in SETS else shapes
    found: Sequence[tuple[int, ...]]
    if shapes.endswith(".toml"):
        path = Path(shapes)
        if not NAME.fullmatch(path.stem):
            raise ValueError(f"{path} gives the set's name, allowed {NAMES}")
        name, found = path.stem, _from_toml(path, kind)
    elif models.is_drawn(shapes):
        name, found = _drawn(op, shapes, ranks)
    elif name == "custom":
        found = (
            [_numbers(shapes, kind)] if kind != "collective" else [(size,) for size in _numbers(shapes, kind)]
        )
    else:
        found = _set(op, shapes)
    local = [_shape_of_size(op, shape[0], ranks, dtype) if len(shape) == 1 else shape for shape in found]
    if name == "norm-rows" and op in COLUMN_NORMS:
        local = [(rows, hidden // ranks, 0) for rows, hidden, _ in local]
    made = []
    for M, N, K in local:
        small = kind == "collective" or 2 * M * N * K < _GRAPH_SECONDS * _ROUGH_FLOPS
        timing = "graph" if on_gpu and (small or name in DECODE_ROWS) else "eager"
        made.append(Case(op, name, M, N, K, dtype, ranks if kind != "gemm" else 1, timing))
    return made


def _drawn(op: str, shapes: str, ranks: int) -> tuple[str, list[tuple[int, int, int]]]:
    kind = OPS[op].kind
    if kind == "collective":
        raise ValueError(f"{op} has no shapes {shapes!r}: its sizes are no GEMM's")
    seed = models.with_seed(shapes).partition(":")[2]
    return models.set_name(seed), models.drawn(kind, ranks, seed)


def _layer_cases(op: str, name: str, ranks: int, dtype: str, on_gpu: bool) -> list[Case]:
    if name not in LAYER_SIZES:
        raise ValueError(f"{op} has no shapes {name!r}, allowed are {', '.join(LAYER_SIZES)}")
    size, decode = LAYER_SIZES[name], op == "layer_decode"
    rows = TINY_ROWS if name == "tiny" else LAYER_ROWS
    timing = "graph" if decode and on_gpu else "eager"
    sizes = (size.hidden, size.intermediate)
    return [Case(op, name, M, *sizes, dtype, ranks, timing) for M in rows["decode" if decode else "all"]]


def _set(op: str, name: str) -> Sequence[tuple[int, ...]]:
    kind = OPS[op].kind
    if (name in ("sizes", "norm-rows", "once") and name not in OPS[op].sets) or (
        name in CORPORA and op != "gemm"
    ):
        raise ValueError(f"{op} has no shapes {name!r}")
    if op == "barrier":
        return [(1, 0, 0)]
    if name == "norm-rows":
        return [(*shape, 0) for shape in NORM_ROWS]
    if kind == "collective":
        if name not in ("sizes", "tiny"):
            raise ValueError(f"{op} takes {OPS[op].sets[0]} or tiny, or bytes, not {name!r}")
        return [(size,) for size in (SIZES if name == "sizes" else TINY_SIZES)]
    if name == "tiny":
        return list(TINY_NORM if op in (*NORMS, *COLUMN_NORMS) else TINY)
    if name in CORPORA:
        return corpus(CORPORA[name])
    if name in DECODE_ROWS:
        return [
            (m, *(pair if kind != "column" else pair[::-1])) for pair in DECODE for m in DECODE_ROWS[name]
        ]
    if name == "sweep":
        column = [*((m, *SWEEP) for m in SWEEP_ROWS), NO_TILE]
    else:
        column = [(m, n, k) for n, k in LLAMA for m in LLAMA_ROWS]
    row = [(m, k, n) for m, n, k in column]
    if op == "gemm" and name == "llama3":
        return column + row
    return row if kind == "row" else column


def baseline(op: str) -> str:
    """The provider that ours is first compared with."""
    return "blas" if op == "gemm" else "torch_tp" if op in LAYERS else "unfused"


def corpus(multiple: int = 1) -> list[tuple[int, ...]]:
    """The Stream-K paper's corpus, thinned: sizes drawn log-uniformly, the same ones every time, rounded to multiples
    of `multiple`, which divides the bounds."""
    draw = random.Random(CORPUS_SEED)
    ratio = CORPUS_HIGH / CORPUS_LOW

    def size() -> int:
        return round(CORPUS_LOW * ratio ** draw.random() / multiple) * multiple

    return [(size(), size(), size()) for _ in range(CORPUS_SHAPES)]


def _shape_of_size(op: str, size: int, ranks: int, dtype: str) -> tuple[int, int, int]:
    """Local (M, N, 0) of a collective on `size` bytes (`tensor_bytes`)."""
    elements = max(1, size // _width(dtype))
    if op == "all_reduce_rms_norm":
        columns = min(elements, NORM_ROWS[-1][1])
        return elements // columns, columns, 0
    if op in COLUMN_NORMS:
        mine = max(1, elements // ranks)
        columns = min(mine, NORM_ROWS[-1][1] // ranks)
        return mine // columns, columns, 0
    if op in ("all_reduce", "broadcast"):
        return 1, elements, 0
    mine = max(1, elements // ranks)
    columns = min(mine, 1024)
    rows = mine // columns
    return rows * ranks if op == "reduce_scatter" else rows, columns, 0


def tensor_bytes(op: str, M: int, N: int, ranks: int, dtype: str) -> int:
    """Of the whole tensor of a collective: what gathers give, what is reduced or sent."""
    return M * N * _width(dtype) * (ranks if op in ("all_gather", "all_scatter", *COLUMN_NORMS) else 1)


def graph_calls(case: Case) -> int:
    """Calls in a replayed graph: fewer of those that take a millisecond each."""
    large = tensor_bytes(case.op, case.M, case.N, case.ranks, case.dtype) >= _LARGE_BYTES
    return _LARGE_CALLS if TIMED[case.op].kind == "collective" and large else GRAPH_CALLS


def _width(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _numbers(text: str, kind: str) -> tuple[int, ...]:
    parts = text.split(",")
    wanted = len(parts) == 3 or kind == "collective"
    if not wanted or not all(re.fullmatch(r"[1-9]\d*", part.strip()) for part in parts):
        what = "bytes" if kind == "collective" else "M,N,K"
        raise ValueError(
            f"shapes is {text!r}; allowed are {', '.join(SETS)}, {models.NAME}[:SEED or :commit], {what}, or a "
            ".toml file"
        )
    return tuple(int(part) for part in parts)


def _from_toml(path: Path, kind: str) -> list[tuple[int, ...]]:
    try:
        content = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    key = "sizes" if kind == "collective" else "shapes"
    found = content.get(key)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{path} must have a list `{key}`, got {sorted(content)}")
    shapes = [(item,) if kind == "collective" else tuple(item) for item in found]
    length = 1 if kind == "collective" else 3
    for shape in shapes:
        if len(shape) != length or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ValueError(f"{path}: {list(shape)} must be {length} whole numbers above 0")
    return shapes
