"""Placement "blas" of `gemm` with 8-bit operands: `torch._scaled_mm` where it takes them and is the faster one, our own
GEMM elsewhere."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pyrocshmem import stream_k, target
from pyrocshmem.calls import invariance
from pyrocshmem.calls.workspace import local_workspace
from pyrocshmem.stream_k.choice.config import BY_BLAS
from pyrocshmem.stream_k.choice.scaled import choose_scaled
from pyrocshmem.stream_k.local_gemm import blas, plan
from pyrocshmem.stream_k.local_gemm.scales import Scaled, Scheme
from tests.stream_k.test_float8 import DEVICE, E5M2, RECIPES, operands, scales_of, worst_ratio

TIER = 2
M, N, K = 72, 96, 512
# Results of bfloat16 the CPU target rounds from float32.
RESULT = torch.float16 if target.interpreted() else torch.bfloat16


@pytest.fixture(autouse=True)
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who multiplied, call by call: "blas" or "own"; of calls that are planned anew."""
    found: list[str] = []
    real = blas.BlasPlan.run, plan.GemmPlan.run

    def by_blas(self: Any, *given: Any) -> None:
        found.append("blas")
        real[0](self, *given)

    def own(self: Any, *given: Any) -> None:
        found.append("own")
        real[1](self, *given)

    monkeypatch.setattr(blas.BlasPlan, "run", by_blas)
    monkeypatch.setattr(plan.GemmPlan, "run", own)
    local_workspace(DEVICE).plans.clear()
    return found


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the rules chose the BLAS, wherever this runs."""
    rules = plan.choose_scaled
    monkeypatch.setattr(plan, "choose_scaled", lambda *given: replace(rules(*given), placement="blas"))


def product(recipe: str, M: int, N: int, K: int, **more: Any) -> tuple[torch.Tensor, Any]:
    """(a result, what `worst_ratio` takes) of random operands."""
    a, b = operands(M, N, K)
    scales = scales_of(recipe, M, N, K)
    given = {"scale_a": scales[0], "scale_b": scales[1], "out_dtype": RESULT, **more}
    return stream_k.gemm(a, b, **given), (a, b, scales, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.usefixtures("chosen")
def test_every_element(recipe: str, multiplied: list[str]) -> None:
    for fast in (False, True):
        out, given = product(recipe, M, N, K, use_fast_accum=fast)
        assert worst_ratio(out, *given, fast) <= 1
    assert multiplied == ["blas"] * 2


@pytest.mark.usefixtures("chosen")
def test_by_hand_and_into_what_is_there(multiplied: list[str]) -> None:
    out = torch.full((M, N), float("nan"), dtype=RESULT, device=DEVICE)
    config = choose_scaled("gemm", M, N, K, 1, DEVICE, Scheme("rowwise", fast=False), invariance.NONE)
    found, given = product("rowwise", M, N, K, out=out, config=replace(config, placement="blas"))
    assert found is out
    assert worst_ratio(out, *given) <= 1
    # Tensors of inference mode, which PyTorch doesn't write to outside of it.
    with torch.inference_mode():
        kept = torch.empty_like(out)
    found, given = product("rowwise", M, N, K, out=kept)
    assert worst_ratio(kept, *given) <= 1
    assert multiplied == ["blas"] * 2


@pytest.mark.usefixtures("chosen")
def test_scales_that_lie_by_rows_or_by_columns(multiplied: list[str]) -> None:
    a, b = operands(M, N, K)
    of_a, of_b = scales_of("blockwise", M, N, K)
    turned = (x.t().contiguous().t() for x in (of_a, of_b))
    first, second = (
        stream_k.gemm(a, b, scale_a=x, scale_b=y, out_dtype=RESULT) for x, y in ((of_a, of_b), turned)
    )
    assert torch.equal(first, second)
    assert multiplied == ["blas"] * 2


@pytest.mark.usefixtures("chosen")
def test_numbers_of_rows_that_are_no_multiple_of_four(
    multiplied: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a row more of A, of its scales and of the result lie: the BLAS gets all as it takes them, nothing is
    written behind a result that is given, and nothing is copied where there is room."""
    real, copied = blas._multiply_on_cpu, []

    def checked(a: Any, b: Any, out: torch.Tensor) -> None:
        assert len(a.data) == len(a.scale) == len(out)
        assert len(out) % 4 == 0
        assert a.scale.stride() == (1, len(out))
        assert a.scale.data_ptr() % 16 == 0
        assert out.is_contiguous()
        assert len(b.scale) % 4 == 0
        copied.append((a.data.data_ptr(), a.scale.data_ptr(), out.data_ptr()))
        real(a, b, out)

    monkeypatch.setattr(blas, "_multiply_on_cpu", checked)
    for rows in (1, 69, 70, 71):
        weight, of_b = stream_k.quantize(torch.randn(N, K, device=DEVICE), "blockwise_weight")
        a, of_a = stream_k.quantize(torch.randn(rows, K, device=DEVICE), "blockwise")
        compact = (a.clone(), of_a.t().contiguous().t())
        x, ones = torch.randn(rows, K, device=DEVICE), torch.ones(K, device=DEVICE)
        normed = stream_k.quantize_rms_norm(x, ones, 0.0, quantize="blockwise")
        rest = {"scale_b": of_b.t(), "out_dtype": RESULT}
        whole = torch.full((rows + 3, N), float("nan"), dtype=RESULT, device=DEVICE)
        for x, scale in ((a, of_a), compact, normed[:2]):
            for out in (None, whole[:rows]):
                found = stream_k.gemm(x, weight.t(), scale_a=scale, out=out, **rest)
                assert found.shape == (rows, N)
                assert worst_ratio(found, x, weight.t(), (scale, of_b.t()), "blockwise") <= 1
                if copied:
                    places = (x.data_ptr(), scale.data_ptr(), found.data_ptr())
                    roomy = (x is not compact[0], x is not compact[0], out is None)
                    assert [p == q for p, q in zip(places, copied[-1], strict=True)] == list(roomy)
        assert whole[rows:].isnan().all()
    assert multiplied == ["blas"] * 24
    assert len(copied) == (24 if DEVICE.type == "cpu" else 0)


@pytest.mark.usefixtures("chosen")
def test_numbers_of_blocks_that_are_no_multiple_of_four(multiplied: list[str]) -> None:
    """cuBLAS looks for the scales of a column of B where a multiple of four ends."""
    for inner in (640, 128, 5376, 400):
        out, given = product("blockwise", M, 272, inner)
        assert worst_ratio(out, *given) <= 1
        # Those of `quantize` have zeros behind them.
        a, of_a = stream_k.quantize(torch.randn(M, inner, device=DEVICE), "blockwise")
        b, scale = stream_k.quantize(torch.randn(272, inner, device=DEVICE), "blockwise_weight")
        completed = blas._completed(Scaled(b.t(), scale.t()), blas._missing(Scaled(b.t(), scale.t()))).scale
        assert completed.data_ptr() == scale.data_ptr()
        assert not completed[scale.shape[1] :].any()
        out = stream_k.gemm(a, b.t(), scale_a=of_a, scale_b=scale.t(), out_dtype=RESULT)
        assert worst_ratio(out, a, b.t(), (of_a, scale.t()), "blockwise") <= 1
    assert multiplied == ["blas"] * 8


@pytest.mark.usefixtures("chosen")
def test_scales_that_begin_anywhere(multiplied: list[str]) -> None:
    """As those of the second rank's rows do among gathered ones, where four don't divide the first rank's."""
    a, b = operands(M, N, K)
    of_a, of_b = scales_of("rowwise", M + 3, N + 3, K)
    for begin in range(4):
        x, y = of_a[begin:][:M], of_b[:, begin:][:, :N]
        out = stream_k.gemm(a, b, scale_a=x, scale_b=y, out_dtype=RESULT)
        assert worst_ratio(out, a, b, (x, y), "rowwise") <= 1
    assert multiplied == ["blas"] * 4


def test_scales_are_laid_out_for_the_blas() -> None:
    whole = torch.rand(3, 12, device=DEVICE).t()
    assert blas._by_columns(whole) is whole
    later = torch.rand(9, 1, device=DEVICE)[1:]
    moved = blas._by_columns(later)
    assert moved.data_ptr() % 16 == 0
    assert torch.equal(moved, later)


@pytest.mark.usefixtures("chosen")
def test_a_plan_takes_other_scales(multiplied: list[str]) -> None:
    """It writes to none of its tensors, which another stream's call may be reading, and which may be of inference mode:
    new scales are in new memory."""
    a, b = operands(M, N, 640)
    before: list[tuple[torch.Tensor, torch.Tensor]] = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            scales = scales_of("blockwise", M, N, 640)
            out = stream_k.gemm(a, b, scale_a=scales[0], scale_b=scales[1], out_dtype=RESULT)
        assert worst_ratio(out, a, b, scales, "blockwise") <= 1
        (made,) = (plan for plan in local_workspace(DEVICE).plans.values() if isinstance(plan, blas.BlasPlan))
        held = [x for x in vars(made).values() if isinstance(x, torch.Tensor)]
        before = before or [(x, x.clone()) for x in held]
        assert all(torch.equal(now, then) for now, then in before)
    assert before
    assert multiplied == ["blas"] * 3


REFUSED: list[tuple[str, tuple[int, int, int], dict[str, Any], str]] = [
    ("rowwise", (M, N, K), {"bias": "bias"}, "a bias or a residual would be added"),
    ("rowwise", (M, N, K), {"activation": "relu"}, "activation 'relu' would follow"),
]


@pytest.mark.parametrize(("recipe", "size", "more", "text"), REFUSED, ids=str)
@pytest.mark.usefixtures("chosen")
def test_what_it_can_not_do(
    recipe: str, size: tuple[int, int, int], more: dict[str, Any], text: str, multiplied: list[str]
) -> None:
    """Left to the rules our own GEMM does it; by hand it is a ValueError that says why."""
    if "bias" in more:
        more = {"bias": torch.zeros(N, dtype=RESULT, device=DEVICE)}
    out, given = product(recipe, *size, **more)
    if "activation" not in more:
        assert worst_ratio(out, *given) <= 1
    assert multiplied == ["own"]
    config = replace(
        choose_scaled("gemm", *size, 1, DEVICE, Scheme(recipe, False), invariance.NONE),  # type: ignore[arg-type]
        placement="blas",
    )
    with pytest.raises(ValueError, match=rf"^Config\.placement is 'blas', but {text}"):
        product(recipe, *size, config=config, **more)


@pytest.mark.usefixtures("chosen")
def test_operands_that_lie_otherwise(multiplied: list[str]) -> None:
    """Rows of B, columns of A; one scale beside those of rows."""
    a, b = operands(M, N, K)
    of_a, of_b = scales_of("rowwise", M, N, K)
    one = torch.full((1,), 0.5, device=DEVICE)
    for x, y, scale in ((a, b.contiguous(), of_a), (a.t().contiguous().t(), b, of_a), (a, b, one)):
        out = stream_k.gemm(x, y, scale_a=scale, scale_b=of_b, out_dtype=RESULT)
        assert worst_ratio(out, a, b, (scale, of_b), "rowwise") <= 1
    assert multiplied == ["own"] * 3


@pytest.mark.usefixtures("chosen")
def test_what_a_version_does_not_take_is_ours(multiplied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "takes", lambda *_: False)
    out, given = product("rowwise", M, N, K)
    assert worst_ratio(out, *given) <= 1
    assert multiplied == ["own"]


@pytest.mark.usefixtures("chosen")
def test_new_rows_are_not_tried_again(multiplied: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try is a product: of rows that differ by a multiple of 16 one is enough, of another K it is not."""
    tried: list[tuple[int, int]] = []

    def one(a: Any, *_: Any) -> bool:
        tried.append(tuple(a.data.shape))
        return a.data.shape[1] == K

    monkeypatch.setattr(blas, "_is_taken", one)
    monkeypatch.setattr(blas, "_taken", {})
    for rows, inner in ((72, K), (88, K), (72, 2 * K), (80, K), (8, K), (24, 2 * K)):
        out, given = product("rowwise", rows, N, inner)
        assert worst_ratio(out, *given) <= 1
    assert tried == [(72, K), (72, 2 * K), (80, K)]
    assert multiplied == ["blas", "blas", "own", "blas", "blas", "own"]


@pytest.mark.gpu
def test_it_is_tried_on_a_gpu() -> None:
    """Two operands of e5m2 PyTorch multiplies with no scale that we know: not an error, our own GEMM."""
    scale = torch.ones((), device=DEVICE)
    a, b = operands(M, N, K, E5M2, E5M2)
    out = stream_k.gemm(a, b, scale_a=scale, scale_b=scale)
    assert worst_ratio(out, a, b, (scale, scale), "tensorwise") <= 1


CHOICES = [
    ("tensorwise", False, (1, 4096, 4096), "blas"),
    ("tensorwise", True, (4096, 4096, 4096), "blas"),
    ("rowwise", True, (2047, 4096, 4096), "after"),
    ("rowwise", True, (2048, 4096, 4096), "blas"),
    ("rowwise", False, (64, 16384, 4096), "after"),
    ("rowwise", False, (4096, 4096, 4096), "blas"),
    ("blockwise", False, (64, 4096, 4096), "after"),
    # One wave of tiles of 64 x 128, and more.
    *((recipe, False, (256, 128 * 33, 4096), "after") for recipe in ("rowwise", "blockwise")),
    *((recipe, False, (256, 128 * 34, 4096), "blas") for recipe in ("rowwise", "blockwise")),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("recipe", "fast", "size", "expected"), CHOICES, ids=str)
def test_choices_of_an_h200(
    recipe: Any, fast: bool, size: tuple[int, int, int], expected: str, h200: torch.device
) -> None:
    scheme = Scheme(recipe, fast)
    assert choose_scaled("gemm", *size, 1, h200, scheme, invariance.NONE).placement == expected
    if recipe != "tensorwise":
        more = (1, h200, scheme, invariance.NONE, torch.float32)
        assert choose_scaled("gemm", *size, *more).placement == "after"
    for mode in (invariance.BATCH, invariance.TP):
        assert choose_scaled("gemm", *size, 1, h200, scheme, mode).placement == "after"


@pytest.mark.cpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_few_rows_in_wide_tiles(recipe: Any, h200: torch.device) -> None:
    """Where narrow ones are more than the SMs: a step takes as long whatever its columns."""
    for columns, wide in ((64 * 132, 64), (64 * 132 + 1, 128)):
        for rows in (1, 20, 64):
            config = choose_scaled(
                "gemm", rows, columns, 4096, 1, h200, Scheme(recipe, False), invariance.NONE
            )
            assert config.block_n == wide


# Of small tiles: programs on an H200, and whether tiles are cut.
SHARED_OUT = [
    ((4, 4096, 4096), 132, True),
    ((4, 4096, 3840), 64, False),
    ((4, 1024, 2432), 132, True),
    ((4, 5120, 8192), 264, True),
    ((4, 5120, 8064), 80, False),
    ((4, 5696, 8192), 89, False),
    ((4, 16896, 4096), 132, False),
    ((4, 16897, 4096), 264, False),
    ((4, 33792, 4096), 264, False),
    ((4, 33793, 4096), 106, False),
    ((64, 5120, 8192), 264, True),
    ((256, 1280, 8192), 132, True),
    ((40, 4096, 4096), 132, True),
    ((64, 4608, 4096), 72, False),
    ((107, 2048, 2048), 132, False),
]


@pytest.mark.cpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize(("size", "programs", "cut"), SHARED_OUT, ids=str)
def test_small_tiles_are_shared_out(
    size: tuple[int, int, int], programs: int, cut: bool, recipe: Any, h200: torch.device
) -> None:
    config = choose_scaled("gemm", *size, 1, h200, Scheme(recipe, False), invariance.NONE)
    assert (config.split == "separate", config.num_programs or 132) == (cut, programs)
    # Of a fused op nobody would add the parts.
    fused = choose_scaled("gemm_all_reduce", *size, 2, h200, Scheme(recipe, False), invariance.NONE)
    assert fused.split != "separate"


# Tiles of the same, rows and columns, as measured, and whether they are cut.
TILES_OF_PARTS = [
    ((3, 8192, 28672), (16, 128), True),
    ((24, 6144, 24576), (32, 128), True),
    ((48, 3584, 18944), (64, 128), True),
    ((48, 3584, 12160), (64, 64), True),
    ((64, 8448, 12288), (64, 128), True),
    ((64, 8576, 12288), (64, 128), False),
    ((124, 5120, 17408), (128, 128), True),
    ((73, 6144, 12288), (64, 128), False),
    ((256, 1792, 6144), (64, 128), True),
    ((256, 1536, 4096), (64, 64), False),
    ((256, 768, 2048), (64, 32), False),
    ((256, 768, 5120), (64, 128), True),
    ((40, 3584, 3584), (64, 64), False),
]


@pytest.mark.cpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
@pytest.mark.parametrize(("size", "tile", "cut"), TILES_OF_PARTS, ids=str)
def test_tiles_that_are_cut(
    size: tuple[int, int, int], tile: tuple[int, int], cut: bool, recipe: Any, h200: torch.device
) -> None:
    config = choose_scaled("gemm", *size, 1, h200, Scheme(recipe, False), invariance.NONE)
    assert (config.placement, config.block_m, config.block_n) == ("after", *tile)
    assert (config.split == "separate") == cut
    # What keeps rows' bits has tiles of its own.
    kept = choose_scaled("gemm", *size, 1, h200, Scheme(recipe, False), invariance.BATCH)
    assert kept.split == "none"


FUSED = [
    ("all_gather_gemm", "rowwise", (8192, 4096, 4096), "blas_blocks"),
    ("all_gather_gemm", "rowwise", (2558, 8192, 4096), "unfused"),
    ("all_gather_gemm", "rowwise", (2560, 8192, 4096), "blas_blocks"),
    ("all_gather_gemm", "blockwise", (8192, 4096, 4096), "blas_blocks"),
    ("all_gather_gemm", "blockwise", (8190, 4096, 4096), "blas_blocks"),
    ("all_gather_gemm", "blockwise", (8188, 4096, 4096), "unfused"),
    ("all_gather_gemm", "rowwise", (8188, 4096, 4096), "blas_blocks"),
    ("all_gather_gemm", "blockwise", (2046, 8192, 4096), "unfused"),
    ("all_gather_gemm", "blockwise", (256, 16384, 4096), "unfused"),
    ("all_gather_gemm", "tensorwise", (8192, 4096, 4096), "copy_engine"),
    ("gemm_all_scatter", "rowwise", (256, 8192, 4096), "unfused"),
    ("gemm_all_scatter", "rowwise", (8192, 8192, 4096), "copy_engine"),
    # Columns that take longer to travel than our GEMM loses to the BLAS; a GEMM that loses more, or has few tiles.
    ("gemm_all_scatter", "blockwise", (7906, 4096, 4096), "copy_engine"),
    ("gemm_all_scatter", "blockwise", (14000, 2560, 2048), "copy_engine"),
    ("gemm_all_scatter", "blockwise", (12000, 3584, 8192), "unfused"),
    ("gemm_all_scatter", "blockwise", (1792, 7168, 5120), "unfused"),
    ("gemm_reduce_scatter", "rowwise", (256, 4096, 4096), "unfused"),
    ("gemm_reduce_scatter", "rowwise", (8192, 4096, 4096), "blas_blocks"),
    ("gemm_reduce_scatter", "rowwise", (2046, 8192, 4096), "blas_blocks"),
    ("gemm_reduce_scatter", "tensorwise", (2046, 8192, 4096), "blas_blocks"),
    ("gemm_reduce_scatter", "tensorwise", (2048, 2048, 4096), "unfused"),
    # Blocks of 768 rows take a wave more than all rows do.
    *(("gemm_reduce_scatter", recipe, (1536, 6144, 12288), "unfused") for recipe in ("rowwise", "blockwise")),
    *(
        ("gemm_reduce_scatter", recipe, (1792, 6144, 4096), "blas_blocks")
        for recipe in ("rowwise", "blockwise")
    ),
    ("gemm_reduce_scatter", "tensorwise", (1536, 6144, 12288), "blas_blocks"),
    ("gemm_reduce_scatter", "blockwise", (2046, 6144, 4096), "blas_blocks"),
    # Of rows that four doesn't divide the BLAS' results are copied.
    ("gemm_reduce_scatter", "blockwise", (809, 4096, 3584), "messages"),
    ("gemm_reduce_scatter", "blockwise", (808, 4096, 3584), "unfused"),
    ("gemm_reduce_scatter", "blockwise", (229, 14336, 13824), "unfused"),
    ("gemm_all_scatter", "blockwise", (809, 4096, 3584), "unfused"),
    ("all_gather_gemm", "blockwise", (665, 3584, 2560), "messages"),
    ("all_gather_gemm", "blockwise", (664, 3584, 2560), "unfused"),
    ("all_gather_gemm", "blockwise", (809, 4096, 3584), "unfused"),
    # Rows that are copied go the same way whatever the columns.
    *(("all_gather_gemm", "blockwise", (901, N, 28672), "unfused") for N in (1024, 4096)),
    ("all_gather_gemm", "rowwise", (256, 16384, 4096), "unfused"),
    ("all_gather_gemm", "rowwise", (256, 8192, 4096), "messages"),
    ("gemm_all_reduce", "blockwise", (8196, 4096, 4096), "blas_blocks"),
    ("gemm_all_reduce", "blockwise", (2048, 4096, 5376), "unfused"),
    ("gemm_all_reduce", "tensorwise", (8192, 4096, 4096), "blas_blocks"),
    ("gemm_all_reduce", "tensorwise", (8192, 4096, 2560), "copy_engine"),
    ("gemm_all_reduce", "rowwise", (2048, 4096, 3072), "unfused"),
    ("gemm_all_reduce", "rowwise", (2304, 6144, 3000), "copy_engine"),
    ("gemm_all_reduce", "rowwise", (9000, 8192, 4096), "copy_engine"),
    ("gemm_all_reduce", "rowwise", (6144, 7168, 8192), "blas_blocks"),
    # A product so long loses more in blocks than copies beside it gain.
    ("gemm_all_reduce", "rowwise", (1329, 8192, 8704), "blas_blocks"),
    ("gemm_all_reduce", "rowwise", (1329, 8192, 13824), "unfused"),
    ("gemm_all_reduce", "tensorwise", (64, 4096, 4096), "messages"),
]


@pytest.mark.cpu
@pytest.mark.parametrize(("op", "recipe", "size", "expected"), FUSED, ids=str)
def test_choices_of_fused_ops(
    op: str, recipe: Any, size: tuple[int, int, int], expected: str, h200: torch.device
) -> None:
    call = (op, *size, 2, h200)
    assert choose_scaled(*call, Scheme(recipe, False), invariance.NONE).placement == expected
    assert choose_scaled(*call, Scheme(recipe, False), invariance.BATCH).placement not in BY_BLAS
    if recipe != "blockwise":
        assert choose_scaled(*call, Scheme(recipe, True), invariance.NONE).placement not in BY_BLAS
