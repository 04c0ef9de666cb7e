"""Tensor-parallel styles of ours for models of Hugging Face transformers.

    from pyrocshmem.integrations import transformers as fused

    config = AutoConfig.from_pretrained(name)
    with torch.device("meta"):
        plan = fused.plan_of(AutoModelForCausalLM.from_config(config), tp_size=4)
    with fused.register():
        model = AutoModelForCausalLM.from_pretrained(
            name, distributed_config=DistributedConfig(tp_size=4, tp_plan=plan)
        )

R ranks. Parameters are divided as by transformers' styles of the same names: `DTensor`s on the tensor-parallel mesh,
which its loading and saving know. Between layers every rank holds all tokens, and so do their gradients.

    pyrocshmem_colwise                 x [.., in] -> [.., out/R]       gemm; backward gemm_all_reduce
    pyrocshmem_rowwise                 x [.., in/R] -> [.., out]       gemm_all_reduce; backward gemm
    pyrocshmem_colwise_gather_output   x [.., in] -> [.., out]         gemm_all_scatter; backward gemm_all_reduce
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from pyrocshmem import stream_k
from pyrocshmem.checks import as_integer
from pyrocshmem.elements import WIRE_DTYPES, names
from pyrocshmem.options import MAX_RANKS
from pyrocshmem.stream_k.nn.functional import autocast, column_product, from_rows, row_product, to_rows
from pyrocshmem.stream_k.nn.parameters import OnGroup, check_ordinary, check_styled

# The first and the last that are known to apply styles in the way that `_Style` expects.
VERSIONS = (5, 17), (5, 24)


def _row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any, partial_dtype: Any
) -> torch.Tensor:
    return row_product(x, weight, bias, group=group, partial_dtype=partial_dtype)


def _gathered_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any, partial_dtype: Any
) -> torch.Tensor:
    x, weight, bias = autocast(x, weight, bias)
    return stream_k.gemm_all_scatter(x, weight.t(), group=group, bias=bias, partial_dtype=partial_dtype)


class _Kind(NamedTuple):
    """What tells the styles apart. dim: of the weight [out, in], which is divided. product: of x [M, in or in/R]."""

    dim: int
    product: Callable[..., torch.Tensor]


_KINDS = {
    "pyrocshmem_colwise": _Kind(0, column_product),
    "pyrocshmem_rowwise": _Kind(1, _row_product),
    "pyrocshmem_colwise_gather_output": _Kind(0, _gathered_product),
}
STYLES = tuple(_KINDS)
# By the names of transformers' own, which has an older one for the third, too.
_OURS = {
    **{name.removeprefix("pyrocshmem_"): name for name in STYLES},
    "colwise_rep": "pyrocshmem_colwise_gather_output",
}


class FusedLinear(OnGroup, nn.Linear):
    """What a style makes of an `nn.Linear`: in_features and out_features are the whole layer's, weight and bias
    `DTensor`s. Raises ValueError, naming the layer, for an input of other features."""

    name: str
    kind: _Kind
    partial_dtype: torch.dtype | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the styles, in the module's docstring."""
        weight = self.weight.to_local()
        if x.ndim < 2 or x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"{self.name}: the input has shape {tuple(x.shape)}, (.., {weight.shape[1]}) is needed"
            )
        rows, sizes = to_rows(x, 0)
        bias = None if self.bias is None else self.bias.to_local()
        y = self.kind.product(rows, weight, bias, self.group, self.partial_dtype)
        return from_rows(y, sizes, 0, sizes[0])


class _Style:
    """A parallel style, as transformers applies it: first to each parameter of a module, then to the module."""

    def __init__(self, name: str, kind: _Kind, partial_dtype: torch.dtype | None) -> None:
        self.name, self.kind, self.partial_dtype = name, kind, partial_dtype
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

    def validate_param(
        self, module: nn.Module, param: str, mesh: DeviceMesh, parameter_name: str | None = None
    ) -> None:
        """Raises ValueError, or TypeError for a module that is no `nn.Linear`, naming the module and what is allowed:
        before anything is loaded."""
        path = (parameter_name or param).rpartition(".")[0] or type(module).__name__
        self._paths[module] = path
        where = f"{path}: {self.name}"
        check_ordinary(where, module)
        assert isinstance(module, nn.Linear)
        if mesh.size() > MAX_RANKS:
            raise ValueError(f"{where}: the mesh has {mesh.size()} ranks, allowed are 1 to {MAX_RANKS}")
        check_styled(where, module, mesh)
        if problem := _undivided(module, self.kind, mesh.size()):
            raise ValueError(f"{where}: {problem}")

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Put this rank's share of the parameter `param` in its place."""
        full = module._parameters[param]
        assert full is not None
        dim = self.kind.dim if full.ndim == 2 else 0
        placement = Replicate() if full.ndim == 1 and self.kind.dim == 1 else Shard(dim)
        share = distribute_tensor(full, mesh, [placement], src_data_rank=None)
        module._parameters[param] = nn.Parameter(share, full.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Make `module`, which others hold, a `FusedLinear`, in place."""
        name = self._paths.get(module, self.name)
        check_ordinary(name, module)
        module.__class__ = FusedLinear
        vars(module).update(name=name, kind=self.kind, group=mesh, partial_dtype=self.partial_dtype)
        return module


def _undivided(linear: nn.Linear, kind: _Kind, ranks: int) -> str:
    """What the ranks can't divide; empty where they can."""
    what = ("out_features", "in_features")[kind.dim]
    size = getattr(linear, what)
    fits = size >= ranks and size % ranks == 0
    return "" if fits else f"{what} is {size}, which the {ranks} ranks can't divide; allowed are multiples"


class Registration:
    """That styles of ours are in transformers' registry; also a context manager, which `unregister`s at its end."""

    def __init__(self, registry: Any, styles: dict[str, _Style]) -> None:
        self._registry, self._styles = registry, styles
        for name, style in styles.items():
            registry[name] = style

    def unregister(self) -> None:
        """Take the styles away. Models that were loaded with them keep working. A second call does nothing."""
        while self._styles:
            del self._registry[self._styles.popitem()[0]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.unregister()


def register(partial_dtype: torch.dtype | None = None) -> Registration:
    """Add the styles to transformers' registry, where a model's `tp_plan` can name them, until they are unregistered.

    They are needed only while models are made or loaded. partial_dtype: what partial sums travel in, forward and
    backward: None: the activations' dtype, as with transformers' styles; torch.float32: not rounded, twice the bytes.

    Raises ValueError for a version of transformers, or a partial_dtype, that is not supported, and where the names are
    taken: styles are registered already. ImportError where transformers is not installed.
    """
    registry = _tensor_parallel().ALL_PARALLEL_STYLES
    if partial_dtype is not None and partial_dtype not in WIRE_DTYPES:
        raise ValueError(f"partial_dtype is {partial_dtype}, allowed are None, {names(WIRE_DTYPES)}")
    if taken := [name for name in STYLES if name in registry]:
        raise ValueError(
            f"{', '.join(taken)}: registered already; call unregister() of what register() returned first"
        )
    return Registration(registry, {name: _Style(name, kind, partial_dtype) for name, kind in _KINDS.items()})


def plan_of(model: Any, tp_size: int) -> dict[str, str]:
    """`model.tp_plan` with our styles for linear layers: for `DistributedConfig(tp_size=.., tp_plan=..)`.

    model: a `PreTrainedModel`, which may be on "meta". A rule stays as it is where our styles can't serve it: another
    style than colwise, rowwise or colwise_gather_output, modules other than `nn.Linear`, features that tp_size ranks
    can't divide. Those transformers serves itself.

    Raises TypeError for what is no model; ValueError, naming the rules, where none can be served, or where the ranks
    can't divide the attention heads of a layer, which transformers would notice at the first step; and as `register`
    does for its version.
    """
    ranks = as_integer("tp_size", tp_size)
    if not 1 <= ranks <= MAX_RANKS:
        raise ValueError(f"tp_size is {ranks}, allowed are 1 to {MAX_RANKS}")
    wildcard = _tensor_parallel().replace_layer_number_by_wildcard
    if not hasattr(model, "tp_plan"):
        raise TypeError(f"model is a {type(model).__name__}; one with a tp_plan is needed, a PreTrainedModel")
    plan = dict(model.tp_plan or {})
    modules: dict[str, list[nn.Module]] = {}
    problems = []
    for path, module in model.named_modules():
        rule = wildcard(path)
        if rule in plan:
            modules.setdefault(rule, []).append(module)
            if plan[rule] == "colwise" and (problem := _undivided_heads(model, path, module, ranks)):
                problems.append(f"{path}: {problem}")
    if problems:
        raise ValueError("; ".join(problems))
    found = {
        rule: _OURS[style]
        for rule, style in plan.items()
        if style in _OURS and _served(modules.get(rule, []), _KINDS[_OURS[style]], ranks)
    }
    if not found:
        rules = ", ".join(f"{rule}: {style}" for rule, style in plan.items()) or "none"
        raise ValueError(
            f"no rule of {type(model).__name__}'s tp_plan can be served with {ranks} ranks; supported are "
            f"{', '.join(_OURS)} of nn.Linear layers whose features the ranks can divide; its rules are: {rules}"
        )
    return plan | found


def _served(modules: list[nn.Module], kind: _Kind, ranks: int) -> bool:
    """Whether a rule's modules are layers that a style of ours can take."""
    return bool(modules) and all(
        type(each) is nn.Linear and "forward" not in vars(each) and not _undivided(each, kind, ranks)
        for each in modules
    )


def _undivided_heads(model: nn.Module, path: str, module: nn.Module, ranks: int) -> str:
    """What is amiss where `module` computes the queries, keys or values of heads that the ranks can't divide."""
    above, _, name = path.rpartition(".")
    head_dim = getattr(model.get_submodule(above), "head_dim", None)
    if name not in ("q_proj", "k_proj", "v_proj") or not isinstance(module, nn.Linear) or not head_dim:
        return ""
    heads = module.out_features // head_dim
    fits = heads >= ranks and heads % ranks == 0
    return "" if fits else f"{heads} heads, which the {ranks} ranks can't divide; allowed are multiples"


def _tensor_parallel() -> Any:
    """transformers' module of parallel styles; ValueError for a version that is not known to work."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError("transformers is not installed; pip install 'pyrocshmem[transformers]'") from error
    first, last = VERSIONS
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not first <= version <= last:
        raise ValueError(
            f"transformers is {transformers.__version__}, supported are "
            f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        )
    from transformers.distributed import tensor_parallel

    return tensor_parallel
