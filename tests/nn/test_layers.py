"""Layers one by one against float64: shapes, checkpoints, decoding, `parallelize_module`. No gradients here."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from pyrocshmem import CallMismatch, stream_k, target
from pyrocshmem.stream_k import nn as parallel
from pyrocshmem.stream_k.nn.functional import row_product
from tests.nn import models
from tests.nn.models import Case
from tests.ranks import run_ranks, values

TIER = 3
# Of the largest element; float32 through at most six layers.
TOLERANCE = 1e-5


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, as a share of the largest element."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    return float((found.cpu().double() - wanted).abs().max() / wanted.abs().max())


def random(*shape: int) -> torch.Tensor:
    """Alike on all ranks, other ones at each call."""
    return torch.randn(*shape)


def block_of(x: torch.Tensor, dim: int, rank: int, world_size: int) -> torch.Tensor:
    return x.tensor_split(world_size, dim)[rank]


def linears(rank: int, ranks: int, device: torch.device) -> dict[str, float]:
    """Both layers on activations of two to four dimensions, divided along the first or the second."""
    found = {}
    column, row = nn.Linear(13, 5 * ranks).to(device), nn.Linear(7 * ranks, 11).to(device)
    for shape, dim, sequence_parallel in (
        ((3, 5, 13), 0, False),
        ((2, 3, 5, 13), 0, False),
        ((9, 13), 0, True),
        ((2 * ranks, 3, 13), 0, True),
        ((3, 2 * ranks, 13), 1, True),
        ((1, 9, 13), 1, True),
    ):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": dim}
        x = random(*shape).to(device)
        mine = block_of(x, dim, rank, ranks).contiguous() if sequence_parallel else x
        y = parallel.ColumnParallelLinear.from_linear(column, **options)(mine, x.numel() // 13)
        exact = x.cpu().double() @ column.weight.cpu().double().t() + column.bias.cpu().double()
        found[f"column {shape} {options}"] = off(y, exact.chunk(ranks, -1)[rank])
        x = random(*shape[:-1], 7 * ranks).to(device)
        residual = random(*shape[:-1], 11).to(device)
        exact = x.cpu().double() @ row.weight.cpu().double().t() + row.bias.cpu().double() + residual.cpu()
        if sequence_parallel:
            residual = block_of(residual, dim, rank, ranks)
            exact = block_of(exact, dim, rank, ranks)
        y = parallel.RowParallelLinear.from_linear(row, **options)(
            x.chunk(ranks, -1)[rank], residual=residual
        )
        found[f"row {shape} {options}"] = off(y, exact)
    return found


def empty(rank: int, ranks: int, device: torch.device) -> None:
    """No tokens, of however many sequences: the shapes of ordinary layers, and of blocks of theirs."""
    column, row = nn.Linear(13, 5 * ranks).to(device), nn.Linear(7 * ranks, 11).to(device)
    for sizes, dim, sequence_parallel in (
        ((0,), 0, False),
        ((3, 0), 0, False),
        ((2, 0, 3), 0, False),
        ((2 * ranks, 0), 0, True),
        ((0, 2 * ranks), 1, True),
        ((2 * ranks, 3, 0), -4, True),
        ((0, 3), 0, True),
    ):
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "sequence_dim": dim}
        wide, narrow = torch.zeros(*sizes, 13, device=device), torch.zeros(*sizes, 7, device=device)
        mine = block_of(wide, dim, rank, ranks) if sequence_parallel else wide
        layer = parallel.ColumnParallelLinear.from_linear(column, **options)
        for num_rows in (None, 0):
            assert layer(mine, num_rows).shape == (*sizes, 5)
        y, _ = parallel.RowParallelLinear.from_linear(row, **options)(narrow, norm=nn.RMSNorm(11).to(device))
        whole = torch.zeros(*sizes, 11)
        assert y.shape == (block_of(whole, dim, rank, ranks) if sequence_parallel else whole).shape


class OnePlus(nn.RMSNorm):
    """One that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def norms(rank: int, ranks: int, device: torch.device) -> dict[str, float]:
    """Whatever norm goes with a row-parallel layer is the one that is called, with its hooks."""
    found = {}
    row = nn.Linear(6 * ranks, 16).to(device)
    layer = parallel.RowParallelLinear.from_linear(row)
    x = random(5, 6 * ranks).to(device)
    exact = x.cpu().double() @ row.weight.cpu().double().t() + row.bias.cpu().double()
    hooked = nn.RMSNorm(16, 1e-5, device=device)
    hooked.register_forward_hook(lambda module, inputs, output: 2 * output)
    for norm in (nn.RMSNorm(16, 1e-5, device=device), OnePlus(16, 1e-5, device=device), hooked):
        norm.weight.fill_(0.25)
        y, total = layer(x.chunk(ranks, -1)[rank], norm=norm)
        scale = {OnePlus: 1.25}.get(type(norm), 0.5 if norm is hooked else 0.25)
        wanted = scale * exact * (exact.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        found |= {f"norm {scale}": off(y, wanted), f"norm {scale}, total": off(total, exact)}
    return found


def mixed(rank: int, ranks: int, device: torch.device) -> dict[str, float]:
    """Under torch.autocast the layers give what PyTorch's give there, in its dtype; parameters keep theirs."""
    column, row = nn.Linear(16, 8 * ranks).to(device), nn.Linear(8 * ranks, 16).to(device)
    x, residual = random(6 * ranks, 16).to(device), random(6 * ranks, 16).to(device)
    norm = nn.RMSNorm(16, 1e-5, device=device)
    found = {}
    for sequence_parallel in (False, True):
        options = {"sequence_parallel": sequence_parallel}
        up = parallel.ColumnParallelLinear.from_linear(column, **options)
        down = parallel.RowParallelLinear.from_linear(row, **options)
        mine, rest = (block_of(each, 0, rank, ranks) if sequence_parallel else each for each in (x, residual))
        with torch.autocast(device.type, torch.float16):
            wanted, between = row(column(x)), up(mine)
            y, total = down(between, residual=rest, norm=norm)
        assert (between.dtype, wanted.dtype, down.weight.dtype) == (
            torch.float16,
            torch.float16,
            torch.float32,
        )
        assert total.dtype == torch.float32
        exact = (wanted.float() + residual).cpu().double()
        exact = block_of(exact, 0, rank, ranks) if sequence_parallel else exact
        # float32 as it comes from two roundings to float16.
        found[f"mixed {options}"] = off(total, exact) * TOLERANCE / 2e-3
        normal = nn.functional.rms_norm(exact, (16,), eps=1e-5)
        found[f"mixed {options}, norm"] = off(y, normal) * TOLERANCE / 2e-3
    return found


class Chain(nn.Module):
    """What parallelize_module is given: an ordinary model, activations [batch, tokens, features]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.norm(x)).relu())


def styles(rank: int, ranks: int, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Plans of our styles alone and beside torch's, sequence-parallel or not; weights are rank 0's."""
    found: dict[str, Any] = {}
    for dim in (None, 1):
        torch.manual_seed(7)
        exact_model, x = Chain().double(), random(3, 2 * ranks, 12)
        model = Chain().to(device)
        model.load_state_dict(exact_model.state_dict())
        if rank > 0:
            nn.init.zeros_(model.up.weight)
        outer = Replicate() if dim is None else Shard(dim)
        plan: dict[str, Any] = {
            "up": parallel.ColwiseParallel(input_layouts=outer),
            "down": parallel.RowwiseParallel(output_layouts=outer, use_local_output=dim is None),
        }
        if dim is not None:
            plan["norm"] = SequenceParallel(sequence_dim=dim)
        up = model.up
        parallelize_module(model, mesh, plan)
        assert model.up is up
        assert model.up.weight.shape == (20, 12)
        assert model.up.weight.to_local().shape == (20 // ranks, 12)
        exact = exact_model(x.double()).detach()
        if dim is None:
            y = model(x.to(device))
        else:
            mine = block_of(x, dim, rank, ranks).to(device)
            made = model(mine)
            assert isinstance(made, DTensor)
            assert made.placements == (outer,)
            y, exact = made.to_local(), block_of(exact, dim, rank, ranks)
        found[f"styles {dim}"] = off(y, exact)
        if dim is None:
            state = parallel.full_state_dict(model)
            for key, value in exact_model.state_dict().items():
                found[f"state {key}"] = off(state[key], value)
    model = Chain().to(device)
    parallelize_module(model, mesh, {"up": parallel.ColwiseParallel(input_layouts=Shard(2))})
    with pytest.raises(ValueError, match=rf"the input has shape \(.*{12 * ranks}\), \(.., 12\) is needed"):
        model(x.to(device))
    return found


@torch.no_grad()
def uneven_styles(rank: int, ranks: int) -> float:
    """Tokens that the ranks don't divide, cut as DTensor cuts them: on some ranks perhaps none."""
    device = target.device(rank)
    mesh = init_device_mesh(device.type, (ranks,))
    torch.manual_seed(8)
    exact_model = Chain().double()
    model = Chain().to(device)
    model.load_state_dict(exact_model.state_dict())
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": parallel.ColwiseParallel(input_layouts=Shard(0)),
        "down": parallel.RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    found = 0.0
    for size in (3 * ranks - 1, ranks + 1, 1):
        x = random(size, 12)
        y = model(distribute_tensor(x.to(device), mesh, [Shard(0)], src_data_rank=None))
        exact = exact_model(x.double()).detach()
        assert y.shape == exact.shape
        cut = [*exact.chunk(ranks), *[exact[:0]] * ranks][rank]
        assert y.to_local().shape == cut.shape
        found = max(found, off(y.full_tensor(), exact), off(y.to_local(), cut) if len(cut) else 0.0)
    # Without a DTensor nobody knows: the layer says what is wrong.
    with pytest.raises(CallMismatch, match="ColwiseLinear: ranks made different calls"):
        model.up(random(9, 12).to(device).tensor_split(ranks)[rank])
    return found


def checkpoints(mesh: DeviceMesh, device: torch.device, folder: Path) -> dict[str, float]:
    """Saved by these ranks in both ways; what the unsharded model would save comes back."""
    case = Case(True, True, 1, 4)
    block = models.unsharded(case)
    wanted = {key: value.clone() for key, value in block.state_dict().items()}
    model = models.ParallelBlock(block.to(device), True, mesh)
    dcp.save(parallel.sharded_state_dict(model), checkpoint_id=folder)
    full = parallel.full_state_dict(model)
    assert full.keys() == wanted.keys()
    assert all(torch.equal(full[key].cpu(), value) for key, value in wanted.items())
    other = {key: random(*value.shape) for key, value in wanted.items()}
    parallel.load_full_state_dict(model, other)
    found = parallel.full_state_dict(model)
    assert all(torch.equal(found[key].cpu(), value) for key, value in other.items())
    dcp.load(parallel.sharded_state_dict(model), checkpoint_id=folder)
    found = parallel.full_state_dict(model)
    return {
        f"checkpoint {key}": off(found[key], value.double()) + float(off(other[key], value.double()) == 0)
        for key, value in wanted.items()
    }


def back_again(mesh: DeviceMesh, device: torch.device) -> None:
    """Ordinary layers, divided and put together, are what they were; layers alone, too, and their kinds of tensors."""
    block = models.unsharded(Case(True, True, 1, 4)).to(device)
    wanted = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    found = parallel.full_linears(models.ParallelBlock(block, True, mesh))
    assert found.keys() == wanted.keys()
    for name, linear in found.items():
        assert type(linear) is nn.Linear
        assert (linear.in_features, linear.out_features) == (
            wanted[name].in_features,
            wanted[name].out_features,
        )
        assert torch.equal(linear.weight, wanted[name].weight)
        assert torch.equal(linear.bias, wanted[name].bias)

    frozen = nn.Linear(8, 12, bias=False, device=device, dtype=torch.bfloat16)
    frozen.weight.requires_grad_(False)
    row = parallel.RowParallelLinear.from_linear(frozen, group=mesh).eval()
    whole = parallel.full_linears(row)[""]
    assert torch.equal(whole.weight, frozen.weight)
    assert (whole.weight.dtype, whole.bias, whole.weight.requires_grad) == (torch.bfloat16, None, False)
    assert not whole.training
    whole.weight.zero_()
    assert row.weight.any(), "it has memory of its own"
    # Under both of its names, as an ordinary layer.
    shared = nn.ModuleDict({"a": row, "b": nn.Sequential(row)})
    for factor in (1, 2):
        wanted = dict.fromkeys(("a.weight", "b.0.weight"), factor * frozen.weight)
        parallel.load_full_state_dict(shared, wanted)
        full = parallel.full_state_dict(shared)
        assert full.keys() == wanted.keys()
        assert all(torch.equal(full[key], weight) for key, weight in wanted.items())
    assert parallel.full_linears(shared).keys() == {"a", "b.0"}


def everything(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    device = target.device(rank)
    torch.manual_seed(3)
    mesh = init_device_mesh(device.type, (world_size,))
    with torch.no_grad():
        found = linears(rank, world_size, device) | norms(rank, world_size, device)
        found |= mixed(rank, world_size, device)
        empty(rank, world_size, device)
        back_again(mesh, device)
        return found | styles(rank, world_size, mesh, device) | checkpoints(mesh, device, folder)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.num_ranks(n)) for n in (2, 4)])
def test_uneven_tensors_of_styles(ranks: int) -> None:
    found = values(run_ranks(uneven_styles, ranks))
    assert max(found) <= TOLERANCE, found


@pytest.mark.num_ranks(2)
@pytest.mark.gpu_a_rank("PyTorch's DTensor over gloo ends in a segmentation fault with tensors of a GPU")
def test_every_layer(tmp_path: Path) -> None:
    for found in values(run_ranks(everything, 2, tmp_path, timeout=100)):
        bad = {key: value for key, value in found.items() if not value <= TOLERANCE}
        assert not bad
        assert len(found) > 30
    # By another number of ranks: one, without any process group.
    device = target.device(0)
    case = Case(True, True, 1, 4)
    with torch.no_grad():
        wanted = models.unsharded(case)
        ordinary = {key: torch.full_like(value, torch.nan) for key, value in wanted.state_dict().items()}
        dcp.load(ordinary, checkpoint_id=tmp_path, no_dist=True)
        assert all(torch.equal(ordinary[key], value) for key, value in wanted.state_dict().items())
        model = models.ParallelBlock(models.Block(case.bias).to(device), True)
        parallel.load_full_state_dict(model, ordinary)
        x = case.inputs(0)[0]
        exact = wanted.double()(x.double(), 1)
        assert off(model(x.to(device), 1, case.rows), exact) <= TOLERANCE


@pytest.mark.cpu
def test_a_residual_is_added_where_the_product_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for one of another dtype, whose sum is of a wider one."""
    made: list[torch.Tensor] = []
    product = stream_k.gemm_all_reduce

    def kept(*args: Any, **options: Any) -> torch.Tensor:
        made.append(product(*args, **options))
        return made[-1]

    monkeypatch.setattr(stream_k, "gemm_all_reduce", kept)
    x, weight = random(4, 6).half(), random(5, 6).half()
    exact = x.double() @ weight.double().t()
    for dtype, there in ((torch.float16, True), (torch.float32, False)):
        residual = random(4, 5).to(dtype)
        found = row_product(x, weight, None, residual=residual)
        assert (found.data_ptr() == made[-1].data_ptr(), found.dtype) == (there, dtype)
        torch.testing.assert_close(found.double(), exact + residual.double(), rtol=1e-2, atol=1e-2)
