"""The reference ops on ranks of their own against float64, uneven and empty sizes, and what they refuse."""

import secrets

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import spawn, target
from pyrocshmem.reference import ops
from pyrocshmem.reference.accuracy import Accuracy, check, make_operand

TIER = 2
pytestmark = pytest.mark.gpu_a_rank("the reference is NCCL's")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Rows that 2 and 3 ranks divide and that they don't; fewer rows than ranks; nothing at all.
SHAPES = ((66, 95, 131), (67, 95, 131), (6, 1, 1), (1, 8, 4), (0, 17, 5), (12, 0, 5), (13, 17, 0))


def full(
    m: int, n: int, k: int, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    a = make_operand((m, k), dtype, seed, 0, tag="a", device=device)
    b = make_operand((k, n), dtype, seed, 0, tag="b", device=device)
    return a, b, torch.matmul(a, b)


def poisoned(*shape: int, like: torch.Tensor) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def rank_against_float64(rank: int, world_size: int, seed: int) -> dict[str, Accuracy]:
    """Every op in every dtype and shape, with and without buffers; what was found, by a name of the case."""
    found = {}
    for dtype in DTYPES:
        for M, N, K in SHAPES:
            a, b, baseline = full(M, N, K, dtype, seed, target.device(rank))
            k0, k1 = ops.shard_range(K, rank, world_size)
            n0, n1 = ops.shard_range(N, rank, world_size)
            m0, m1 = ops.shard_range(M, rank, world_size)
            width = -(-N // world_size)
            sums = {"num_partials": world_size, "partial_roundings": world_size}
            for buffers in (False, True):
                out, block = poisoned(M, N, like=a), poisoned(M, width, like=a)
                gathered, part = poisoned(world_size, M, width, like=a), poisoned(m1 - m0, N, like=a)
                whole_a, mine = poisoned(M, K, like=a), poisoned(M, n1 - n0, like=a)

                def given(use: bool = buffers, **kept: torch.Tensor) -> dict[str, torch.Tensor]:
                    return kept if use else {}

                case = f"{dtype} {M}x{N}x{K} buffers={buffers}"
                got = ops.gemm_all_reduce(a[:, k0:k1], b[k0:k1], **given(out=out))
                found[f"gemm_all_reduce {case}"] = check(got, a, b, baseline, **sums)
                assert not buffers or got.data_ptr() == out.data_ptr()
                got = ops.gemm_reduce_scatter(
                    a[:, k0:k1], b[k0:k1], **given(out=part, partial=poisoned(M, N, like=a))
                )
                found[f"gemm_reduce_scatter {case}"] = check(got, a[m0:m1], b, baseline[m0:m1], **sums)
                got = ops.gemm_all_gather(
                    a, b[:, n0:n1], num_columns=N, **given(out=out.fill_(9), block=block, gathered=gathered)
                )
                found[f"gemm_all_gather {case}"] = check(got, a, b, baseline)
                got = ops.all_gather_gemm(
                    a[m0:m1], b[:, n0:n1], num_rows=M, **given(out=mine, gathered=whole_a)
                )
                found[f"all_gather_gemm {case}"] = check(got, a, b[:, n0:n1], baseline[:, n0:n1])
    return found


@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 3)])
def test_against_float64(num_ranks: int) -> None:
    seed = secrets.randbits(32)
    for rank, found in enumerate(spawn(rank_against_float64, num_ranks, seed)):
        assert len(found) == len(DTYPES) * len(SHAPES) * 2 * 4
        wrong = {case: str(accuracy) for case, accuracy in found.items() if not accuracy.ok}
        assert not wrong, f"seed {seed}, rank {rank}: {wrong}"
        # The big case really compared something.
        for op in ("gemm_all_reduce", "gemm_reduce_scatter", "gemm_all_gather", "all_gather_gemm"):
            assert found[f"{op} torch.float16 67x95x131 buffers=True"].max_error > 0


def rank_with_a_corrupted_shard(rank: int, world_size: int, seed: int) -> tuple[Accuracy, Accuracy]:
    """One element of rank 1's operand is wrong: both results must show it, on every rank."""
    M, N, K = 32, 48, 64
    a, b, baseline = full(M, N, K, torch.float32, seed, target.device(rank))
    k0, k1 = ops.shard_range(K, rank, world_size)
    n0, n1 = ops.shard_range(N, rank, world_size)
    a_shard, b_shard = a[:, k0:k1].clone(), b[:, n0:n1].clone()
    if rank == 1:
        a_shard[5, 2] += 0.01
        b_shard[7, 3] += 0.01
    reduced = ops.gemm_all_reduce(a_shard, b[k0:k1])
    gathered = ops.gemm_all_gather(a, b_shard)
    return (
        check(reduced, a, b, baseline, num_partials=world_size, partial_roundings=world_size),
        check(gathered, a, b, baseline),
    )


@pytest.mark.num_ranks(2)
def test_a_corrupted_shard_is_seen() -> None:
    for reduced, gathered in spawn(rank_with_a_corrupted_shard, 2, secrets.randbits(32)):
        # A row of the sum, a column of the second block; where the other factor is tiny, none may show.
        assert reduced.num_bad > 24
        assert reduced.first_bad is not None
        assert reduced.first_bad[0] == 5
        assert gathered.num_bad > 16
        assert gathered.first_bad is not None
        assert gathered.first_bad[1] == 24 + 3


def rank_of_plain_collectives(rank: int, world_size: int) -> None:
    """Small integers, so that every sum is exact in any order; a subgroup as well."""
    device = target.device(rank)
    for dtype in (*DTYPES, torch.int32):
        x = torch.arange(world_size * 6, dtype=dtype, device=device).reshape(world_size * 2, 3) * (rank + 1)
        factor = world_size * (world_size + 1) // 2
        total = torch.arange(world_size * 6, dtype=dtype, device=device).reshape(world_size * 2, 3) * factor
        kept = x.clone()
        assert torch.equal(ops.all_reduce(x), total)
        assert torch.equal(ops.reduce_scatter(x), total[2 * rank : 2 * rank + 2])
        assert torch.equal(x, kept)
        stacked = torch.cat([kept // (rank + 1) * (peer + 1) for peer in range(world_size)])
        assert torch.equal(ops.all_gather(x), stacked)
        # Rows in unequal shares: three on the first rank, two on the other.
        uneven, begin = stacked[: 2 * world_size + 1], 2 * rank + min(rank, 1)
        share = uneven[begin : begin + 2 + (rank == 0)]
        assert torch.equal(ops.all_gather(share, num_rows=len(uneven)), uneven)
        assert torch.equal(ops.reduce_scatter(uneven), share * world_size)
        # Inputs need not be contiguous, and `out` may be the input.
        assert torch.equal(ops.all_reduce(x.T), total.T)
        assert ops.all_reduce(x, out=x) is x
        assert torch.equal(x, total)
    alone = [dist.new_group([peer]) for peer in range(world_size)][rank]
    assert torch.equal(ops.all_reduce(kept, alone), kept)


@pytest.mark.num_ranks(2)
def test_plain_collectives() -> None:
    spawn(rank_of_plain_collectives, 2)


def rank_of_refusals(rank: int, world_size: int) -> float:
    a, b = torch.ones(5, 4, device=target.device(rank)), torch.ones(4, 6, device=target.device(rank))
    with pytest.raises(ValueError, match=f"x must have {4 - rank} of the 7 rows on rank {rank}, got 5"):
        ops.all_gather_gemm(a, b, num_rows=7)
    with pytest.raises(ValueError, match=rf"out must be contiguous \(\({3 - rank}, 6\), .*got \(\(5, 6\)"):
        ops.gemm_reduce_scatter(a, b, out=torch.empty(5, 6, device=a.device))
    with pytest.raises(ValueError, match=r"operands must be .* got \(5, 4\) torch.float32 and \(5, 4\)"):
        ops.gemm_all_reduce(a, a)
    with pytest.raises(ValueError, match="operands must be"):
        ops.gemm_all_reduce(a, b.half())
    with pytest.raises(ValueError, match=r"out must be contiguous \(\(5, 6\), torch.float32.*got \(\(5, 5\)"):
        ops.gemm_all_reduce(a, b, out=torch.empty(5, 5, device=a.device))
    with pytest.raises(ValueError, match="contiguous: False"):
        ops.gemm_all_reduce(a, b, out=torch.empty(6, 5, device=a.device).T)
    with pytest.raises(ValueError, match=f"b_local must have {4 - rank} of the 7"):
        ops.gemm_all_gather(a, torch.ones(4, 5, device=a.device), num_columns=7)
    # Nothing was sent by any of them: the ranks still agree on what comes next.
    return float(ops.gemm_all_reduce(a, b).sum())


@pytest.mark.num_ranks(2)
def test_refusals() -> None:
    assert spawn(rank_of_refusals, 2) == [5 * 6 * 4 * 2] * 2


@pytest.mark.parametrize(("size", "ranks"), [(0, 3), (1, 4), (131, 3), (12, 4), (7, 7)])
def test_shard_range(size: int, ranks: int) -> None:
    ranges = [ops.shard_range(size, rank, ranks) for rank in range(ranks)]
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == size
    lengths = [end - begin for begin, end in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)
