"""What is compiled: every op in its shipped configurations, planned by the public functions themselves."""

from dataclasses import dataclass

from pyrocshmem.testing import TARGETS

# On every target, with and without programs for communication, the last wave is partly full: tiles can be split.
LARGE = (3968, 4096, 4096)
# One wave or less: other blocks, and the fewest hops.
SMALL = (16, 4096, 4096)
# As much, in more bytes.
FEW = (128, 8192, 2048)
# The rows of each of 4 or 8 ranks are whole tiles.
EVEN = (8192, 3584, 4096)
# Ranks have unequal numbers of rows.
UNEVEN = (3970, 4096, 4096)
# All four stages of A and B on sm_90, and the tile on its way out.
FULL_PIPELINE_BYTES = 229_408
# The same of five stages of 128 x 128 x 64: gathered rows, unequally many on each rank.
GATHERED_PIPELINE_BYTES = 196_648
# Those stages alone: (128 + 256) x 64 elements of 2 bytes.
FOUR_STAGES_BYTES = 4 * 49_152
# Partial sums in fp32, also of 16-bit results.
STRICT = (("partial_dtype", "float32"),)


@dataclass(frozen=True)
class Case:
    """A call: `op` of a local product [M, K] x [K, N], M being all ranks' rows, or of a tensor [M, N]; of what layers
    compute element by element, forward and backward on the product [M, N].

    changes: (field, value) that differ from what `stream_k.choose` chooses for that partial_dtype. arguments: more
    keywords of the op. hot: its kernels may not spill. recipe: of 8-bit operands, in the configuration that is chosen
    for them; dtype is then that of the result.
    """

    op: str
    dtype: str = "bfloat16"
    shape: tuple[int, int, int] = LARGE
    world_size: int = 4
    changes: tuple[tuple[str, object], ...] = ()
    arguments: tuple[tuple[str, object], ...] = ()
    layouts: tuple[str, str] = ("row", "row")
    hot: bool = False
    recipe: str = ""

    def __str__(self) -> str:
        facts = [str(value) for _, value in self.changes] + [f"{k}={v}" for k, v in self.arguments]
        if self.shape != LARGE:
            facts.append("x".join(map(str, self.shape)))
        if self.layouts != ("row", "row"):
            facts.append("+".join(self.layouts))
        if self.recipe:
            facts.append(self.recipe)
        if self.world_size != 4:
            facts.append(f"R{self.world_size}")
        return "-".join([self.op, self.dtype, *facts])


def _shipped(dtype: str, placements: tuple[str, ...]) -> list[Case]:
    hot = dtype != "float32"
    # Of all programs, of which the last wave is partly full.
    cases = [
        Case("gemm", dtype, changes=(("split", split), ("num_programs", 0)), hot=hot)
        for split in ("none", "stream_k")
    ]
    for placement in placements:
        changes = (("placement", placement), ("algorithm", "two_shot"))
        cases.append(Case("gemm_all_reduce", dtype, changes=changes, hot=hot))
        cases.append(Case("gemm_all_scatter", dtype, changes=(("placement", placement),), hot=hot))
    return cases


# Row blocks, which copy engines move.
_COPIED = (("placement", "copy_engine"),)
# One that sums, of few ranks.
SUMMING = Case(
    "gemm_reduce_scatter", world_size=2, changes=_COPIED, arguments=(("activation", "silu"), ("bias", True))
)

# Sums of products of the BLAS.
_BY_BLAS = (("placement", "blas_blocks"),)
SUMMED = [
    *(Case("gemm_all_reduce", changes=(*_BY_BLAS, *changes)) for changes in ((), STRICT)),
    Case("gemm_all_reduce", world_size=2, changes=_BY_BLAS),
    Case("gemm_all_reduce", shape=UNEVEN, world_size=8, changes=_BY_BLAS),
    Case(
        "gemm_reduce_scatter",
        world_size=2,
        changes=_BY_BLAS,
        arguments=(("activation", "silu"), ("bias", True)),
    ),
]

# One-shot differs by a constant of what communicates: as a kernel of its own, and in the GEMM's.
_ONE_SHOT = [
    Case("gemm_all_reduce", changes=(("placement", placement), ("algorithm", "one_shot")), hot=True)
    for placement in ("own_stream", "inside")
]

# float16 takes the same ways as bfloat16, through other matrix instructions: once in each way of a tile out of a GEMM.
_FLOAT16 = [
    Case("gemm", "float16", changes=(("split", "none"),), hot=True),
    Case("gemm_all_reduce", "float16", changes=(("placement", "own_stream"),), hot=True),
    Case("gemm_all_scatter", "float16", changes=(("placement", "own_stream"),), hot=True),
    Case("gemm_all_reduce", "float16", changes=_COPIED, hot=True),
]

BLOCKS = [
    # A GEMM that sums takes as long to compile as it has ranks: of four and eight where that could make it spill.
    Case("gemm_reduce_scatter", changes=_COPIED, hot=True),
    Case("gemm_reduce_scatter", shape=EVEN, world_size=8, hot=True),
    Case("gemm_reduce_scatter", "float32", world_size=2, changes=_COPIED),
    Case("gemm_reduce_scatter", shape=SMALL),
    SUMMING,
    *(Case("gemm_all_reduce", changes=(*_COPIED, *changes), hot=True) for changes in ((), STRICT)),
    Case("gemm_all_scatter", changes=_COPIED, hot=True),
    Case("gemm_all_scatter", shape=(97, 193, 64), world_size=8, changes=_COPIED),
    Case("gemm_all_scatter", changes=(("placement", "pull"),), hot=True),
    Case("gemm_all_scatter", "float32", changes=(("placement", "pull"),)),
    # Rows in whole tiles, and equally many on each rank, are stored by TMA, others by pointers.
    *(Case("all_gather_gemm", shape=shape, changes=_COPIED, hot=True) for shape in (EVEN, LARGE, UNEVEN)),
    Case("all_gather_gemm", "float32", changes=_COPIED),
    Case("all_gather_gemm", shape=EVEN, world_size=8, arguments=(("activation", "relu"), ("bias", True))),
    Case("all_gather_gemm", shape=SMALL),
]

TF32 = Case("gemm", "float32", arguments=(("allow_tf32", True),))

# Variations that hardly depend on the dtype.
_ONCE = [
    # A GEMM of one program: Triton makes the count a constant. Of 32 rows at a time, a thread moves 16 bytes.
    Case(
        "gemm_all_reduce",
        shape=(64, 128, 64),
        changes=(("placement", "own_stream"), ("comm_warps", 4), ("comm_rows", 32)),
    ),
    Case("gemm", shape=SMALL, hot=True),
    Case("gemm", "float32", shape=SMALL),
    # b as the transposed view that a linear layer's weight is.
    Case("gemm", layouts=("row", "column"), hot=True),
    Case("gemm", shape=(128, 8192, 7168), layouts=("row", "column"), hot=True),
    Case("gemm", shape=(256, 8192, 7168), layouts=("row", "column"), hot=True),
    # In parts that a second kernel adds.
    Case(
        "gemm",
        shape=(64, 1024, 8192),
        arguments=(("activation", "silu"), ("bias", True)),
        changes=(("split", "separate"), ("block_m", 64), ("block_n", 64), ("num_warps", 4)),
    ),
    # Half tiles of 256 columns, which leave in fp32 beside three stages, not four.
    Case("gemm_reduce_scatter", shape=(644, 3072, 1024), world_size=2, changes=(*_COPIED, *STRICT), hot=True),
    # Blocks of K whose sums are a tree: few rows, and the peers' and own rows of a sum.
    Case("gemm", shape=SMALL, changes=(("split", "none"), ("k_blocks", 2)), hot=True),
    Case(
        "gemm_reduce_scatter",
        world_size=2,
        changes=(*_COPIED, *STRICT, ("k_blocks", 2), ("block_n", 128), ("subtiles", 4)),
        hot=True,
    ),
    Case(
        "gemm_all_reduce",
        shape=FEW,
        world_size=2,
        changes=(
            ("placement", "messages"),
            ("split", "none"),
            *STRICT,
            ("k_blocks", 4),
            ("block_m", 128),
            ("block_n", 64),
            ("block_k", 64),
            ("num_warps", 8),
            ("subtiles", 2),
        ),
        hot=True,
    ),
    # Not held to "no spills": 4 vector registers on gfx950 with Triton 3.6 where tiles are split.
    Case("gemm", layouts=("column", "column")),
    Case("gemm", layouts=("odd", "odd")),
    Case("gemm", shape=(97, 193, 131), arguments=(("activation", "gelu"), ("bias", True))),
    TF32,
    # Where the switches of the process keep the BLAS from multiplying (sm_90).
    Case("gemm_all_reduce", "float32"),
    Case("gemm_all_reduce", shape=SMALL, hot=True),
    # Of 17 to 32 rows, in tiles of as many; of fewer than a tile has, by pointers.
    Case("gemm_all_reduce", shape=(24, 4096, 4096), hot=True),
    Case("gemm_all_reduce", shape=(3, 8192, 4096), hot=True),
    Case("gemm_all_scatter", shape=SMALL, hot=True),
    # In two shots.
    Case("gemm_all_reduce", shape=FEW, hot=True),
    Case("gemm_all_reduce", shape=FEW, changes=STRICT, hot=True),
    Case("gemm_all_reduce", changes=(("placement", "beside"), ("split", "stream_k")), hot=True),
    Case("gemm_all_reduce", changes=(("placement", "beside"), *STRICT), hot=True),
    Case("gemm_all_reduce", world_size=8, changes=(("placement", "own_stream"),)),
    # Messages of two lengths.
    Case("all_gather_gemm", shape=UNEVEN, hot=True),
    Case(
        "gemm_all_reduce",
        changes=(("placement", "own_stream"),),
        arguments=(("squared_partials", True), ("activation", "silu"), ("bias", True)),
    ),
    Case("gemm_all_scatter", arguments=(("squared_partials", True), ("activation", "relu"), ("bias", True))),
    # By messages in both ways, with the norm at their end, a row on many programs; the weight of the operands' type or
    # not.
    Case("gemm_all_reduce_rms_norm", shape=SMALL, changes=(("algorithm", "one_shot"),), hot=True),
    Case(
        "gemm_all_reduce_rms_norm",
        shape=(64, 8192, 2048),
        changes=(("algorithm", "two_shot"),),
        arguments=(("weight", "float32"),),
        hot=True,
    ),
    # Whose residual whatever sums adds: another kernel, the GEMM of the own rows, the GEMM of one rank.
    *(
        Case("gemm_all_reduce_rms_norm", changes=(("placement", placement),), hot=True)
        for placement in ("own_stream", "copy_engine", "inside")
    ),
    Case("gemm_all_reduce_rms_norm", world_size=1, hot=True),
    Case("gemm_all_reduce_rms_norm", shape=SMALL, world_size=1, hot=True),
    Case(
        "gemm_all_reduce_rms_norm",
        shape=(64, 1024, 8192),
        world_size=1,
        changes=(("split", "separate"), ("block_m", 64), ("block_n", 64), ("block_k", 64), ("num_warps", 4)),
    ),
    # Products whose tiles leave the squares of their rows: whole ones and split ones, of few rows, of odd sizes.
    *(
        Case("gemm_rms_norm_all_scatter", changes=(("split", split), ("num_programs", 0)), hot=True)
        for split in ("none", "stream_k")
    ),
    Case("gemm_rms_norm_all_scatter", shape=(3, 4096, 4096), layouts=("row", "column"), hot=True),
    Case("gemm_rms_norm_all_scatter", shape=(97, 193, 131), arguments=(("bias", True),)),
    # The same kernel, of parts in the result's type.
    Case("all_reduce_rms_norm", shape=(64, 8192, 1), arguments=(("algorithm", "two_shot"),), hot=True),
    # The norm in 8 bits: scales of rows, whose largest elements travel, too, and of groups of a row.
    *(
        Case(
            "all_reduce_rms_norm",
            shape=(64, 8192, 1),
            world_size=world_size,
            arguments=(("algorithm", algorithm), ("quantize", recipe)),
            hot=True,
        )
        for recipe in ("rowwise", "blockwise")
        for algorithm, world_size in (("one_shot", 2), ("two_shot", 4), ("two_shot", 8))
    ),
    Case(
        "gemm_all_reduce_rms_norm",
        shape=SMALL,
        arguments=(("quantize", "rowwise"), ("keep_norm", True)),
        hot=True,
    ),
    Case("all_reduce", arguments=(("algorithm", "one_shot"),), hot=True),
    Case("all_reduce", arguments=(("algorithm", "two_shot"),), hot=True),
    Case("all_reduce", "float32", arguments=(("algorithm", "two_shot"),), hot=True),
    *(Case(op, hot=True) for op in ("all_gather", "reduce_scatter", "all_scatter", "broadcast")),
    # Integers, with marks: what moves, and every width that is added.
    *(Case(op, "int32", hot=True) for op in ("all_gather", "reduce_scatter", "all_scatter", "broadcast")),
    *(
        Case("all_reduce", dtype, arguments=(("algorithm", algorithm),), hot=True)
        for dtype in ("int64", "uint8")
        for algorithm in ("one_shot", "two_shot")
    ),
    Case("all_reduce", "int32", arguments=(("algorithm", "two_shot"), ("op", "min")), hot=True),
    Case("all_gather", "uint8", shape=(97, 193, 1)),
    # Other reductions than sums.
    *(
        Case("all_reduce", dtype, arguments=(("algorithm", "two_shot"), ("op", op)), hot=True)
        for dtype in ("bfloat16", "float32")
        for op in ("avg", "max")
    ),
    # Not held to "no spills": the derivative of many rows keeps 16 bytes on the stack with Triton 3.6.
    Case("rms_norm", shape=(8192, 2048, 1)),
    Case("rms_norm", shape=(1, 2048, 1), arguments=(("replicated", True),), hot=True),
    # Two norms at once, of queries and keys: over all columns, and of heads.
    Case("rms_norm_pair", shape=(64, 2048, 1), hot=True),
    Case("rms_norm_pair", shape=(64, 2048, 1), arguments=(("head_dim", 128),), hot=True),
    # Of odd columns units are loaded an element at a time.
    Case("all_reduce", shape=(97, 193, 1), arguments=(("algorithm", "two_shot"),)),
]

# 8-bit operands: scales of rows are multiplied at the end of a tile, those of blocks in its main loop.
_FLOAT8 = [
    Case(op, shape=shape, world_size=2, layouts=("row", "column"), hot=shape != SMALL, recipe=recipe)
    for recipe in ("rowwise", "blockwise")
    for op, shape in (
        ("gemm", LARGE),
        ("gemm", SMALL),
        ("all_gather_gemm", LARGE),
        ("all_gather_gemm", SMALL),
        ("gemm_reduce_scatter", LARGE),
        ("gemm_all_reduce", LARGE),
        ("gemm_all_scatter", LARGE),
        ("gemm_all_reduce_rms_norm", SMALL),
        ("gemm_rms_norm_all_scatter", LARGE),
    )
]
# Operands that TMA can't address, and a piece's scales beside this rank's: Triton 3.6 loses constants of nested tuples.
_SCALES_OF_PIECES = [
    Case(
        "all_gather_gemm",
        shape=(98, 128, 264),
        world_size=2,
        changes=(("placement", "copy_engine"),),
        layouts=("row", "column"),
        recipe=recipe,
    )
    for recipe in ("rowwise", "blockwise")
]

# In 16-byte accesses, heads of any even size.
POINTWISE = [
    *(
        Case(op, shape=(2048, 8192, 1), arguments=((word, recipe),), hot=True)
        for op, word in (
            ("quantize", "recipe"),
            ("quantize_swiglu", "recipe"),
            ("quantize_rms_norm", "quantize"),
        )
        for recipe in ("rowwise", "blockwise")
    ),
    Case("quantize", shape=(4096, 8192, 1), arguments=(("recipe", "blockwise_weight"),), hot=True),
    *(Case("swiglu", dtype, shape=(2048, 7168, 1), hot=True) for dtype in ("bfloat16", "float16", "float32")),
    *(
        Case(
            "rotate",
            dtype,
            shape=(2048, 24 * 128, 1),
            arguments=(("kv_heads", 4), ("head_dim", 128)),
            hot=True,
        )
        for dtype in ("bfloat16", "float16", "float32")
    ),
    Case("rotate", shape=(16, 24 * 80, 1), arguments=(("kv_heads", 8), ("head_dim", 80)), hot=True),
]

CASES = [
    *_shipped("bfloat16", ("after", "beside", "own_stream", "inside")),
    *_ONE_SHOT,
    *_FLOAT16,
    # Where a tile is whole before it is communicated, and where it is communicated as it is made.
    *_shipped("float32", ("own_stream",)),
    *BLOCKS,
    *SUMMED,
    # Consumers on a stream of their own are how large products ship on sm_90.
    Case("gemm_all_reduce", changes=(("placement", "own_stream"), *STRICT), hot=True),
    *_ONCE,
    *_FLOAT8,
    *_SCALES_OF_PIECES,
    *POINTWISE,
]


# Of every op the first configuration of bfloat16, for compilers that differ little from one that gets all.
ONE_OF_EACH = list({case.op: case for case in reversed(CASES) if case.dtype == "bfloat16"}.values())
# For versions of Triton.
EVERY_TRITON = [*ONE_OF_EACH, *_SCALES_OF_PIECES]


def _compiled_on(target: str, case: Case) -> bool:
    """AMD's targets have one compiler and differ in their matrix instructions, as bfloat16 and float16 do. gfx950 gets
    a configuration of each op, the tf32 that it lacks, and integers. gfx942 gets all but what is there for TMA and for
    registers on sm_90, and for ways of a tile whose code another dtype or op shows as well."""
    if case.recipe:
        return target == "sm_90" or case.op == "gemm"
    if target == "sm_90" or case in ONE_OF_EACH or case == TF32 or case.dtype == "int64":
        return True
    if target == "gfx950" or case.world_size == 8 or case.shape in (EVEN, UNEVEN):
        return False
    changes = dict(case.changes)
    whole = case.op == "gemm" or not case.op.startswith(("gemm", "all_gather_gemm"))
    streamed = changes.get("placement") == "own_stream"
    if case.dtype == "float16":
        return case.op == "gemm"
    if case.dtype == "float32":
        return (whole and "op" not in dict(case.arguments)) or streamed
    if "partial_dtype" in changes:
        return streamed
    return changes.get("split") != "stream_k" or case.op in ("gemm", "gemm_all_reduce")


COMPILED = [(case, target) for case in CASES for target in TARGETS if _compiled_on(target, case)]
