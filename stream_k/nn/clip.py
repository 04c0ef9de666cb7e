"""`clip_grad_norm_` for models whose layers keep shares of parameters as ordinary tensors, on a ProcessGroup or a Heap.

PyTorch's own can't know that a tensor is a share: it would take each rank's norm for the model's, another on each rank.
Where all parameters are DTensors, PyTorch's is right.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from pyrocshmem import collectives
from pyrocshmem.stream_k.nn.parameters import is_dtensor, local
from pyrocshmem.stream_k.nn.state import divided

# Where gradients are, beside the groups that they are shares on: whole on every rank; DTensors, which know their mesh.
_WHOLE, _DTENSOR = object(), object()


@torch.no_grad()
def clip_grad_norm_(
    model: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` of the unsharded model: gradients times max_norm / norm, where that is below 1.

    model: of parallel layers on groups of any kind, and other modules, whose gradients all ranks hold alike; the
    groups' ranks call it together. norm_type: p of the p-norm, above 0; inf: the largest element. Returns the norm of
    all gradients before, fp32, the same on every rank. RuntimeError for one that is not finite, if error_if_nonfinite.
    """
    groups = {
        getattr(layer, kind): layer.group
        for layer, kind in divided(model).values()
        if layer.DIVIDED[kind] is not None
    }
    grads: dict[Any, list[torch.Tensor]] = defaultdict(list)
    for parameter in model.parameters():
        place = _DTENSOR if is_dtensor(parameter) else groups.get(parameter, _WHOLE)
        if parameter.grad is not None and parameter.grad.numel() > 0:
            grads[place].append(parameter.grad)
        elif place is not _DTENSOR and place is not _WHOLE:
            grads[place]  # the peers may have one
    device = next((parameter.device for parameter in model.parameters()), None)
    norms = [torch.zeros((), device=device)]
    for place, some in grads.items():
        norm = get_total_norm(some, norm_type)
        if place is _DTENSOR:
            norm = norm.full_tensor()
        norm = norm.to(device, torch.float32)
        if place is not _DTENSOR and place is not _WHOLE:
            norm = collectives.all_gather(norm.reshape(1), group=place)
        norms += norm.reshape(-1).unbind()
    total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(f"the norm of order {norm_type} of the gradients is {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if all_grads := [local(grad) for some in grads.values() for grad in some]:
        torch._foreach_mul_(all_grads, scale)
    return total
