"""Models of transformers whose linear layers are divided over two ranks in our styles, beside the whole model.

Models are made from a config, saved into a folder by rank 0 and loaded by both, as users load theirs. The error of a
tensor is its largest difference from that of the whole model in float64, over the largest element there. It may be
twice that of the whole model in the same type on one rank, or 8 units in the last place of fp32.
"""

import contextlib
import copy
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from pyrocshmem import stream_k, target
from tests.ranks import run_ranks, values

TIER = 3
PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
# Grouped queries and biases; norms of queries and keys, and a head that is the embedding, too.
MORE = {
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Qwen3": {"tie_word_embeddings": True},
}
RATE = 0.1
FLOOR = 8 * torch.finfo(torch.float32).eps
OPS = ("gemm", "gemm_all_reduce", "gemm_all_scatter")


def config_of(kind: str, **more: Any) -> Any:
    import transformers

    return getattr(transformers, f"{kind}Config")(**{**SIZES, **MORE[kind], **more})


def class_of(kind: str) -> Any:
    import transformers

    return getattr(transformers, f"{kind}ForCausalLM")


def new_model(kind: str, device: Any, **more: Any) -> Any:
    """The same weights on all ranks; none of them is 0 or 1, as biases and norms begin."""
    torch.manual_seed(3)
    model = class_of(kind)(config_of(kind, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    return model.to(device)


def some_tokens(device: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(1, SIZES["vocab_size"], (2, 9), generator=generator).to(device)


def divided_here(model: Any, plan: Any, ranks: int) -> Any:
    """`model`, divided in place: without a file."""
    from transformers.distributed import DistributedConfig

    config, _, mesh = model.prepare_distribute_model(DistributedConfig(tp_size=ranks, tp_plan=plan))
    return model.maybe_distribute_model(model, config, mesh)


def whole(x: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def error(x: torch.Tensor, right: torch.Tensor) -> float:
    assert x.shape == right.shape
    return float((x.double() - right.detach()).norm() / right.detach().norm())


def by_block(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All parameters of an attention or an MLP in one: a bias or a norm of a head alone has few elements, so that much
    of its error is chance."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, x in model.items():
        found.setdefault(".".join(name.split(".")[:4]), []).append(x.flatten())
    return {block: torch.cat(parts) for block, parts in found.items()}


def is_close(ours: float, whole_model: float) -> bool:
    return ours <= max(2 * whole_model, FLOOR)


@contextlib.contextmanager
def counted_ops() -> Iterator[Counter[str]]:
    """How often each op is called."""
    counts: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        op = getattr(stream_k, name)

        def counted(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return op(*args, **options)

        return counted

    with contextlib.ExitStack() as stack:
        for name in OPS:
            stack.enter_context(mock.patch.object(stream_k, name, counting(name)))
        yield counts


def trained(
    model: Any, tokens: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(loss, gradients, weights) of one step. Plain tensors and DTensors each have a group of parameters, as PyTorch's
    optimizers that go through all at once need."""
    from torch.distributed.tensor import DTensor

    groups: dict[bool, list[Any]] = {}
    for parameter in model.parameters():
        groups.setdefault(isinstance(parameter, DTensor), []).append(parameter)
    optimizer = torch.optim.SGD([{"params": group} for group in groups.values()], lr=RATE, foreach=True)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
    optimizer.step()
    return loss.item(), gradients, {name: whole(parameter) for name, parameter in model.named_parameters()}


def of_model(kind: str, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """What the divided model does, and by how much that differs from what the whole one does."""
    from transformers.distributed import DistributedConfig

    from pyrocshmem.integrations import transformers as fused

    device = target.device(rank)
    one = new_model(kind, device)
    if rank == 0:
        one.save_pretrained(folder)
    dist.barrier()
    with torch.device("meta"):
        plan = fused.plan_of(class_of(kind)(config_of(kind)), ranks)
    options = {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan=plan)}
    with fused.register():
        two = class_of(kind).from_pretrained(folder, **options)
        half = class_of(kind).from_pretrained(folder, dtype=torch.bfloat16, **options)

    # From here on without the registration.
    exact, one_half = copy.deepcopy(one).double(), copy.deepcopy(one).bfloat16()
    tokens = some_tokens(device)
    found: dict[str, Any] = {"plan": plan}
    with torch.no_grad():
        right = exact(tokens).logits
        with counted_ops() as counts:
            logits = two(tokens).logits
        found["calls"] = dict(counts)
        found["logits"] = [error(x, right) for x in (logits, one(tokens).logits)]
        found["16 bits"] = [error(model(tokens).logits, right) for model in (half, one_half)]
    how = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    found["tokens"] = one.generate(tokens, **how).tolist(), two.generate(tokens, **how).tolist()

    prompt = torch.tensor([[1, 2, 3, 4]], device=device)
    found["page"] = one.generate(prompt, **how | {"attention_mask": torch.ones_like(prompt)}).tolist()

    losses, *tensors = zip(*(trained(model, tokens) for model in (two, one, exact)), strict=True)
    found["loss"] = [abs(loss / losses[2] - 1) for loss in losses[:2]]
    for what, models_and_right in zip(("gradients", "weights"), tensors, strict=True):
        *models, right = map(by_block, models_and_right)
        found[what] = {name: [error(model[name], right[name]) for model in models] for name in right}
    two.save_pretrained(folder / "trained")
    loaded = class_of(kind).from_pretrained(folder / "trained").to(device)
    state = {name: whole(x) for name, x in two.state_dict().items()}
    found["saved"] = [name for name, x in loaded.state_dict().items() if not torch.equal(x, state[name])]
    found["unused"] = sorted(state.keys() ^ loaded.state_dict().keys())
    return found


def from_a_config(kind: str, rank: int, ranks: int) -> tuple[list[float], bool, bool]:
    """(The logits' errors, whether a copy uses its own weights, whether the original then still does.)"""
    from pyrocshmem.integrations import transformers as fused

    device = target.device(rank)
    one, two, tokens = new_model(kind, device), new_model(kind, device), some_tokens(device)
    right = copy.deepcopy(one).double()(tokens).logits
    with fused.register(torch.float32):
        two = divided_here(two, fused.plan_of(two, ranks), ranks)
    twin = copy.deepcopy(two)
    with torch.no_grad():
        twin.get_output_embeddings().weight.zero_()
        logits = two(tokens).logits
        compiled = torch.compile(two, fullgraph=True, backend="aot_eager")(tokens).logits
        errors = [error(x, right) for x in (logits, compiled, one(tokens).logits)]
        return errors, not twin(tokens).logits.any(), bool(logits.any())


def message(kind: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def refusals(folder: Path, ranks: int, device: Any) -> dict[str, str]:
    """The errors' texts."""
    import transformers
    from transformers.distributed import DistributedConfig

    from pyrocshmem.integrations import transformers as fused

    def divide(plan: dict[str, str], **more: Any) -> Callable[[], Any]:
        dtype = more.pop("dtype", torch.float32)
        return lambda: divided_here(new_model("Llama", device, **more).to(dtype), plan, ranks)

    def from_a_file() -> Any:
        config = DistributedConfig(tp_size=ranks, tp_plan={"model.norm": "pyrocshmem_rowwise"})
        return class_of("Llama").from_pretrained(folder, distributed_config=config)

    found = {}
    for version in ("5.16.1", "5.25.0.dev0", "4.57.6"):
        with mock.patch.object(transformers, "__version__", version):
            found[version] = message(ValueError, fused.register)
            assert message(ValueError, lambda: fused.plan_of(None, 2)) == found[version]
    found["partial_dtype"] = message(ValueError, lambda: fused.register(torch.float64))
    model = new_model("Llama", device)
    found["tp_size"] = message(ValueError, lambda: fused.plan_of(model, 9))
    found["heads"] = message(ValueError, lambda: fused.plan_of(model, 4))
    found["no model"] = message(TypeError, lambda: fused.plan_of(model.config, 2))
    model.tp_plan = {"model.norm": "colwise"}
    found["no rule"] = message(ValueError, lambda: fused.plan_of(model, 2))
    with fused.register():
        found["twice"] = message(ValueError, fused.register)
        found["no linear"] = message(TypeError, from_a_file)
        found["features"] = message(ValueError, divide({"lm_head": fused.STYLES[2]}, vocab_size=97))
        found["float64"] = message(ValueError, divide({"lm_head": fused.STYLES[2]}, dtype=torch.float64))
        gathers = {f"model.layers.*.mlp.{name}_proj": fused.STYLES[2] for name in ("gate", "up")}
        whole_input = divide({**gathers, "model.layers.*.mlp.down_proj": fused.STYLES[1]})()
    tokens = torch.ones(1, 4, dtype=torch.int64, device=device)
    found["input"] = message(ValueError, lambda: whole_input(tokens))
    found["unregistered"] = message(ValueError, divide({"lm_head": fused.STYLES[2]}))
    uneven = fused.plan_of(new_model("Llama", device, vocab_size=97), ranks)
    found["left"] = uneven["lm_head"]
    return found


def bodies(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """All that these tests look at: to import transformers takes a rank several seconds."""
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun says it to transformers
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    class_of("Llama")  # whose import adds the last of transformers' own
    before = dict(ALL_PARALLEL_STYLES)
    found: dict[str, Any] = {kind: of_model(kind, folder / kind, rank, ranks) for kind in MORE}
    found["from a config"] = from_a_config("Llama", rank, ranks)
    found["refusals"] = refusals(folder / "Llama", ranks, target.device(rank))
    found["registry"] = dict(ALL_PARALLEL_STYLES) == before
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return values(run_ranks(bodies, 2, folder, timeout=120.0))


needs_transformers = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="transformers or accelerate is not installed; the extra 'transformers' has them",
)
SHARED = "PyTorch's DTensor over gloo ends in a segmentation fault with tensors of a GPU"


def two_ranks(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.num_ranks(2)(pytest.mark.gpu_a_rank(SHARED)(test))


each_kind = pytest.mark.parametrize("kind", sorted(MORE))


@needs_transformers
@two_ranks
@each_kind
def test_logits_and_tokens_are_those_of_one_rank(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert is_close(*rank[kind]["logits"]), rank[kind]["logits"]
        assert is_close(*rank[kind]["16 bits"]), rank[kind]["16 bits"]
        ours, others = rank[kind]["tokens"]
        assert ours == others


@needs_transformers
@two_ranks
@each_kind
def test_a_step_of_training_is_that_of_one_rank(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert is_close(*rank[kind]["loss"]), rank[kind]["loss"]
        for what in ("gradients", "weights"):
            bad = {name: errors for name, errors in rank[kind][what].items() if not is_close(*errors)}
            assert not bad, (what, bad)


@needs_transformers
@two_ranks
@each_kind
def test_all_linear_layers_are_our_ops(found: list[dict[str, Any]], kind: str) -> None:
    layers = SIZES["num_hidden_layers"]
    for rank in found:
        assert rank[kind]["calls"] == {
            "gemm": 5 * layers,
            "gemm_all_reduce": 2 * layers,
            "gemm_all_scatter": 1,
        }
        assert {style for style in rank[kind]["plan"].values() if not style.startswith("pyrocshmem")} <= {
            "embedding_rowwise",
            "replicated_with_grad_allreduce",
        }


@needs_transformers
@two_ranks
@each_kind
def test_saved_models_are_whole(found: list[dict[str, Any]], kind: str) -> None:
    for rank in found:
        assert rank[kind]["saved"] == rank[kind]["unused"] == []


@needs_transformers
@two_ranks
def test_models_from_a_config_and_their_copies(found: list[dict[str, Any]]) -> None:
    for rank in found:
        logits, copy_uses_its_own, original_uses_its_own = rank["from a config"]
        eager, compiled, whole_model = logits
        assert is_close(eager, whole_model), logits
        assert is_close(compiled, whole_model), logits
        assert copy_uses_its_own
        assert original_uses_its_own


@needs_transformers
@two_ranks
@pytest.mark.cpu
def test_the_program_of_the_page_under_torchrun(
    found: list[dict[str, Any]], folder: Path, tmp_path: Path
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "program.py").write_text(code)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*start, str(tmp_path / "program.py"), str(folder / "Llama")],
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        cwd=PAGE.parents[1],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip() == str(found[0]["Llama"]["page"])


REFUSALS = {
    "5.16.1": ("5.16.1", "supported are 5.17 to 5.24"),
    "5.25.0.dev0": ("5.25.0.dev0", "supported are 5.17 to 5.24"),
    "4.57.6": ("4.57.6", "supported are 5.17 to 5.24"),
    "partial_dtype": ("partial_dtype is torch.float64, allowed are None, torch.float32",),
    "tp_size": ("tp_size is 9, allowed are 1 to 8",),
    "heads": ("model.layers.1.self_attn.k_proj: 2 heads, which the 4 ranks can't divide",),
    "no model": ("LlamaConfig", "PreTrainedModel"),
    "no rule": (
        "supported are colwise, rowwise, colwise_gather_output",
        "its rules are: model.norm: colwise",
    ),
    "twice": ("pyrocshmem_colwise", "registered already"),
    "no linear": ("model.norm: pyrocshmem_rowwise is for nn.Linear, got LlamaRMSNorm",),
    "features": ("lm_head: pyrocshmem_colwise_gather_output: out_features is 97", "allowed are multiples"),
    "float64": ("lm_head", "torch.float64, allowed are torch.float16, torch.bfloat16, torch.float32"),
    "input": ("model.layers.0.mlp.down_proj: the input has shape (1, 4, 48), (.., 24) is needed",),
    "unregistered": ("Unsupported", "pyrocshmem_colwise_gather_output"),
    "left": ("colwise_gather_output",),
}


@needs_transformers
@two_ranks
@pytest.mark.parametrize("case", sorted(REFUSALS))
def test_what_is_not_supported_is_refused_before_the_first_step(
    found: list[dict[str, Any]], case: str
) -> None:
    for rank in found:
        for text in REFUSALS[case]:
            assert text in rank["refusals"][case]


@needs_transformers
@two_ranks
def test_nothing_is_left_in_the_registry(found: list[dict[str, Any]]) -> None:
    assert all(rank["registry"] for rank in found)


def test_without_transformers() -> None:
    from pyrocshmem.integrations import transformers as fused

    with (
        mock.patch.dict(sys.modules, {"transformers": None}),
        pytest.raises(ImportError, match="pip install"),
    ):
        fused.register()
