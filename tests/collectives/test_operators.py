"""The collectives on whole tensors in `torch.library`: gradients of the whole model, opcheck, one graph."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._library.effects import EffectType

from pyrocshmem import Heap, collectives, stream_k, target
from pyrocshmem.calls.operators import name_of
from pyrocshmem.collectives import whole_tensors
from tests.library.bodies import Ops, eagerly
from tests.ranks import run_ranks, values

TIER = 3
TIMEOUT_S = 110.0
ROOT = 1
HALF, FLOAT = torch.float16, torch.float32
# Rows that 2 ranks don't divide, fewer than ranks, none.
CASES = (((7, 3), HALF), ((4, 6), FLOAT), ((1, 5), FLOAT), ((0, 4), HALF))
# Of the x of all ranks, what the result is as a whole.
MODELS: dict[str, Callable[[list[torch.Tensor]], torch.Tensor]] = {
    "all_reduce": lambda parts: torch.stack(parts).sum(0),
    "all_gather": torch.cat,
    "reduce_scatter": lambda parts: torch.stack(parts).sum(0),
    "all_scatter": lambda parts: torch.cat(parts, 1),
    "broadcast": lambda parts: parts[ROOT],
}


def random(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    device = (
        torch.device("cpu") if target.interpreted() else torch.device("cuda", torch.cuda.current_device())
    )
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def call(name: str, x: torch.Tensor, heap: Heap, **more: Any) -> torch.Tensor:
    more |= {"root": ROOT} if name == "broadcast" else {}
    return getattr(collectives, name)(x, group=heap, **more)  # type: ignore[no-any-return]


def twice(heap: Heap) -> list[str]:
    """The derivative of an op that communicates has none itself, and says so, even where only the operands have any."""
    wrong = []
    x, b = random((3, 8), 1, FLOAT).requires_grad_(), random((8, 4), 2, FLOAT).requires_grad_()
    for name, op in {
        "rms_norm": lambda: collectives.rms_norm(x, b[:, 0].contiguous(), 1e-5, group=heap),
        "all_reduce_rms_norm": lambda: collectives.all_reduce_rms_norm(
            x, None, b[:, 0].contiguous(), 1e-5, group=heap
        )[0],
        "gemm_all_reduce": lambda: stream_k.gemm_all_reduce(x, b, group=heap),
        "all_gather_gemm": lambda: stream_k.all_gather_gemm(x, b, group=heap),
    }.items():
        for bent in (False, True):
            y = op()
            loss = y.pow(3).sum() if bent else y.sum()
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            try:
                (grad.square().sum() + b.sum()).backward()
                wrong.append(f"{name}, bent: {bent}, was differentiated twice")
            except RuntimeError as error:
                wrong += [] if "once_differentiable" in str(error) else [str(error)]
    return wrong


def negative(heap: Heap) -> list[str]:
    """Memory that holds the values with the other sign, contiguous as it is, is read as what it stands for."""
    x, wrong = random((4, 8), 3, FLOAT), []
    flipped = torch._neg_view(x)
    weight = torch.ones(8, device=x.device)
    for name, op in {
        "all_reduce": lambda x: collectives.all_reduce(x, group=heap),
        "all_reduce_rms_norm": lambda x: collectives.all_reduce_rms_norm(x, None, weight, 1e-5, group=heap)[
            1
        ],
        "rms_norm": lambda x: collectives.rms_norm(x, weight, 1e-5, group=heap),
    }.items():
        if not torch.equal(op(flipped), op(-x)):
            wrong.append(f"{name} with the negative bit")
    heap.synchronize()
    return wrong


def written(heap: Heap) -> list[str]:
    """Autograd is told of every result that was given."""
    x = random((4, 8), 1, FLOAT)
    wrong = []
    for name, call in {
        "all_reduce": lambda out: collectives.all_reduce(x, group=heap, out=out),
        "rms_norm": lambda out: collectives.rms_norm(x, x[0], 1e-5, group=heap, out=out),
        "gemm_all_reduce": lambda out: stream_k.gemm_all_reduce(x, x.t()[:, :4], group=heap, out=out),
    }.items():
        out = torch.empty(4, 4 if name.startswith("gemm") else 8, device=x.device)
        for repeated in (False, True):
            before = out._version
            call(out)
            if out._version == before:
                wrong.append(f"{name}, repeated: {repeated}")
    heap.synchronize()
    return wrong


class Derived(torch.Tensor):
    """Of a class of its own, which PyTorch's operators keep."""


def watched(heap: Heap) -> list[str]:
    """What still watches where the kernels run does not see the call again: a mode that is shut out, a tensor's class,
    a batch of gradients."""
    wrong = []
    x = random((4, 3), 1, FLOAT).requires_grad_()
    rows = collectives.reduce_scatter(x, group=heap)
    total = collectives.all_reduce(x.detach(), group=heap)
    with Ops() as mode, torch._C._DisableTorchDispatch():
        wrong += [] if torch.equal(collectives.all_reduce(x.detach(), group=heap), total) else ["shut out"]
    wrong += mode.seen
    with Ops() as mode, torch.no_grad():
        # No schema has these arguments, nor a barrier.
        out = torch.empty_like(x)
        collectives.all_reduce(x, group=heap, out=out)
        wrong += [] if torch.equal(out, total) else ["a result that is given"]
        stream_k.gemm(x, x.t(), config=stream_k.choose("gemm", 4, 4, 3, FLOAT, 1, x.device))
        collectives.barrier(group=heap)
    wrong += mode.seen
    found = collectives.all_reduce(x.detach().as_subclass(Derived), group=heap)
    wrong += [] if type(found) is Derived and torch.equal(found, total) else ["a class"]
    grads = torch.stack([random(tuple(rows.shape), seed, FLOAT) for seed in (2, 3)])
    each = [torch.autograd.grad(rows, x, grad, retain_graph=True)[0] for grad in grads]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of how slow a loop is
        (batch,) = torch.autograd.grad(rows, x, grads, is_grads_batched=True)
    return wrong if torch.equal(batch, torch.stack(each)) else [*wrong, "a batch of gradients"]


def gradients(heap: Heap) -> list[str]:
    """Each gradient is that of the loss of the model as one, in float64: values are moved, so it is exact. Twice it is
    not, which is the mistake of tensors that every rank has."""
    wrong = []
    for name, model in MODELS.items():
        for number, (shape, dtype) in enumerate(CASES):
            parts = [random(shape, 10 * number + rank, dtype) for rank in range(heap.world_size)]
            leaves = [part.double().requires_grad_() for part in parts]
            whole = model(leaves)
            weight = random(tuple(whole.shape), 1000 + number, dtype)
            (expected,) = torch.autograd.grad(whole, leaves[heap.rank], weight.double(), allow_unused=True)
            expected = (
                torch.zeros(shape, dtype=torch.float64).to(weight.device) if expected is None else expected
            )
            x = parts[heap.rank].requires_grad_()
            with Ops() as forward:
                found = call(name, x, heap)
            mine = weight.tensor_split(heap.world_size)[heap.rank] if name == "reduce_scatter" else weight
            with Ops() as backward:
                found.backward(mine)
            with Ops() as plain, torch.no_grad():
                same = call(name, x, heap)
            grad = x.grad
            assert grad is not None
            if not torch.equal(grad.double(), expected) or grad.dtype != dtype:
                wrong.append(f"{name} {shape} {dtype}: {grad} instead of {expected}")
            if expected.any() and torch.equal(2 * grad.double(), expected):
                wrong.append(f"{name}: twice the gradient would pass")
            gathers = ["all_gather"] if name == "reduce_scatter" else []
            if (forward.seen, backward.seen, plain.seen) != ([name], gathers, [name]):
                wrong.append(f"{name}: {forward.seen}, {backward.seen}, {plain.seen}")

            def step(name: str = name, x: torch.Tensor = x, mine: torch.Tensor = mine) -> list[torch.Tensor]:
                found = call(name, x, heap)
                return [found, *torch.autograd.grad(found, x, mine)]

            (result, again), through = eagerly(step)
            if through:
                wrong.append(f"{name}: eagerly {through}")
            if not (torch.equal(found, same) and torch.equal(found, result) and torch.equal(grad, again)):
                wrong.append(f"{name}: another result by way of the dispatcher")
    return wrong


def traced(heap: Heap) -> list[str]:
    """opcheck of each, and all of them in one graph, whose gradients are those of the same calls one by one."""
    wrong = []
    for name in MODELS:
        options = {"all_reduce": ("two_shot",), "broadcast": (ROOT,)}.get(name, ())
        arguments = (random((3, 4), heap.rank, FLOAT).requires_grad_(), *options, name_of(heap))
        op = getattr(torch.ops.collectives, name).default
        for test, outcome in torch.library.opcheck(op, arguments, raise_exception=False).items():
            if outcome != "SUCCESS":
                wrong.append(f"{name}: {test}: {outcome}")

    def everything(x: torch.Tensor) -> torch.Tensor:
        rows = call("reduce_scatter", call("all_reduce", x, heap), heap)
        wide = call("all_scatter", call("broadcast", x, heap), heap)
        return (call("all_gather", rows[:2], heap).square() * wide[:4, :3]).sum()

    torch._dynamo.reset()
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for rows in (5, 6):
        x = random((rows, 3), 50 + heap.rank, FLOAT).requires_grad_()
        pairs = [(function(x), x) for function in (everything, compiled)]
        eager, other = ((loss, *torch.autograd.grad(loss, leaf)) for loss, leaf in pairs)
        wrong += [f"{rows} rows" for a, b in zip(eager, other, strict=True) if not torch.equal(a, b)]
    return wrong


def barrier_refused(heap: Heap) -> list[str]:
    """A graph would write `x` at its end only, past the barrier."""

    def put(x: torch.Tensor) -> None:
        x.fill_(1.0)
        collectives.barrier(group=heap)

    wrong = []
    for whole in (False, True):
        torch._dynamo.reset()
        try:
            torch.compile(put, fullgraph=whole, backend="aot_eager")(torch.zeros(3))
            wrong.append(f"a traced barrier, fullgraph {whole}")
        except (NotImplementedError, torch._dynamo.exc.Unsupported) as error:
            if "past it; call it between compiled functions" not in str(error):
                wrong.append(str(error))
    collectives.barrier(group=heap)
    return wrong


def calls_made(heap: Heap) -> int:
    """Of three calls in a graph, two of them alike and one whose result nobody reads."""
    made, honest = [], whole_tensors._exchanged

    def counting(*args: Any, **options: Any) -> torch.Tensor:
        made.append(args)
        return honest(*args, **options)

    def three(x: torch.Tensor) -> torch.Tensor:
        call("broadcast", x, heap)
        return call("all_reduce", x, heap) * call("all_reduce", x, heap)

    torch._dynamo.reset()
    whole_tensors._exchanged = counting
    # With the partitioner of the backends that ship, which merges what is equal.
    x = random((2, 3), 1, FLOAT).requires_grad_()
    torch.compile(three, fullgraph=True, backend="aot_eager_decomp_partition")(x)
    whole_tensors._exchanged = honest
    return len(made)


def with_effects(effect: EffectType | None) -> None:
    """Register the collectives as having this effect."""
    for name in MODELS:
        torch.library._register_effectful_op(f"collectives::{name}", effect)


def operators(rank: int, world_size: int) -> list[str]:
    with Heap(16 << 20) as heap:
        # The control first: without effects some are lost. Once traced, an effect is known to graphs for good, and from
        # torch 2.14 on equal calls of such an operator are not merged.
        with_effects(None)
        assert calls_made(heap) < 3
        with_effects(EffectType.ORDERED)
        assert calls_made(heap) == 3
        x = random((4, 3), 1, FLOAT).requires_grad_()
        with pytest.raises(ValueError, match="all_reduce takes no out where a gradient is needed"):
            collectives.all_reduce(x, group=heap, out=torch.empty_like(x))
        with pytest.raises(TypeError, match=r"x is torch.complex64, a tensor is needed of torch.float16"):
            collectives.all_gather(x.to(torch.complex64), group=heap)
        with pytest.raises(TypeError, match=r"of layout torch.sparse_coo; dense ones"):
            collectives.all_reduce(x.detach().to_sparse(), group=heap)
        with pytest.raises(ValueError, match="1 dimensions or more"):
            collectives.reduce_scatter(x[0, 0], group=heap)
        with pytest.raises(ValueError, match="a matrix is needed"):
            collectives.all_scatter(x[0], group=heap)
        with pytest.raises(ValueError, match="root is 2, the group has ranks 0 to 1"):
            collectives.broadcast(x, 2, group=heap)
        wrong = (
            gradients(heap)
            + watched(heap)
            + twice(heap)
            + written(heap)
            + negative(heap)
            + traced(heap)
            + barrier_refused(heap)
        )
        return wrong


@pytest.mark.num_ranks(2)
def test_operators() -> None:
    assert values(run_ranks(operators, 2, timeout=TIMEOUT_S)) == [[], []]
