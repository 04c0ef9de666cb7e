"""What sees `stream_k.gemm` besides autograd, and what can't: fake tensors, make_fx, classes of tensors, torch.func."""

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from pyrocshmem import stream_k
from pyrocshmem.stream_k.nn.functional import sum_gradient
from tests.stream_k.products import check_product, device, random

TIER = 1
# The interpreter computes with NumPy, which tells of every infinity.
pytestmark = [pytest.mark.num_ranks(1)]


class Derived(torch.Tensor):
    """Of a class of its own, which PyTorch's operators keep."""


def test_what_transforms_see() -> None:
    """No forward-mode derivative is dropped; fake tensors stay fake, and leave nothing behind; make_fx has a node,
    above autograd as below it; a tensor's class is asked; vmap maps."""
    a, b = random(8, 16, torch.float32), random(16, 8, torch.float32)
    with forward_ad.dual_level():
        stream_k.gemm(a, b)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            stream_k.gemm(forward_ad.make_dual(a, a), b)
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(a) @ mode.from_tensor(b)
        found = stream_k.gemm(mode.from_tensor(a), mode.from_tensor(b))
        assert (type(found), found.shape) == (type(fake), fake.shape)
    check_product(stream_k.gemm(a, b), a, b)
    for early in (False, True):
        graph = make_fx(lambda x: stream_k.gemm(x, b), pre_dispatch=early)(a).graph
        assert torch.ops.stream_k.gemm.default in [node.target for node in graph.nodes]
    assert type(stream_k.gemm(a.as_subclass(Derived), b)) is Derived
    batch = torch.stack((a, 2 * a))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        each = torch.func.vmap(lambda x: stream_k.gemm(x, b))(batch)
    assert torch.equal(each, torch.stack([stream_k.gemm(x, b) for x in batch]))


def test_what_torch_func_can_not_do() -> None:
    """Derivatives, above and below vmap; what is no part of one goes through."""
    a, b = random(8, 16, torch.float32), random(16, 8, torch.float32)
    func, batch = torch.func, torch.stack((a, 2 * a))

    def total(x: torch.Tensor) -> torch.Tensor:
        return stream_k.gemm(x, b).sum()

    for derive in (
        lambda: func.grad(total)(a),
        lambda: func.jacrev(total)(a),
        lambda: func.vjp(total, a),
        lambda: func.vmap(func.grad(total))(batch),
        lambda: func.grad(lambda x: func.vmap(total)(x).sum())(batch),
    ):
        with pytest.raises(NotImplementedError, match="the ops have no derivative by"):
            derive()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        func.jvp(total, (a,), (a,))
    for other in (lambda x: x.sum() * total(a), lambda x: x.sum() * total(x.detach())):
        torch.testing.assert_close(func.grad(other)(a), total(a).expand(8, 16))
    with pytest.raises(NotImplementedError, match="layers that sum gradients over ranks"):
        func.vmap(sum_gradient)(batch)
    functionalized = func.functionalize(lambda x: stream_k.gemm(x, b))(a)
    assert torch.equal(functionalized, stream_k.gemm(a, b))


def test_a_class_is_no_reason_to_refuse_an_out() -> None:
    a, b, out = random(4, 6, torch.float32), random(6, 5, torch.float32), torch.empty(4, 5, device=device())
    assert stream_k.gemm(a, b.as_subclass(Derived), out=out) is out
    assert torch.equal(out, stream_k.gemm(a, b))
