"""Linear maps of few rows: equal to torch's in every instruction set, and not used if a hook or mode must see the call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from polyhead._torch import native
from polyhead.linalg import skinny_gemm

pytestmark = pytest.mark.skipif(native is None, reason="the C++ kernels are not built")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes computed by the C++ kernel."""
    seen: list[tuple[int, ...]] = []
    real = native.skinny_gemm

    class Recording:
        def __getattr__(self, name: str):
            return getattr(native, name)

        def skinny_gemm(self, *arguments: int) -> None:
            seen.append(arguments[:3])
            real(*arguments)

    monkeypatch.setattr(skinny_gemm, "native", Recording())
    return seen


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 15), (4, 16), (7, 33), (131, 70), (513, 96)])
@pytest.mark.parametrize("vectors", [1, 3, 4, 5, 8])
@torch.no_grad()
def test_every_instruction_set_equals_torch(vectors: int, rows: int, columns: int, bias: bool, products: list) -> None:
    torch.manual_seed(rows)
    x, weight = torch.randn(vectors, columns), torch.randn(rows, columns)
    b = torch.randn(rows) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double()).float()
    in_use, before = native.instruction_set(), torch.get_num_threads()
    try:
        for name in native.instruction_sets():
            native.use(name)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                torch.testing.assert_close(skinny_gemm.linear(x, weight, b), expected, atol=1e-4, rtol=1e-5)
    finally:
        native.use(in_use)
        torch.set_num_threads(before)
    assert products == [(vectors, rows, columns)] * 2 * len(native.instruction_sets())


@torch.no_grad()
def test_shapes_and_strides(products: list) -> None:
    module = nn.Linear(12, 5)
    for x in (torch.randn(12), torch.randn(2, 1, 12), torch.randn(12, 3).T, torch.randn(2, 2, 24)[..., ::2]):
        torch.testing.assert_close(skinny_gemm.apply_linear(module, x), module(x))
    assert len(products) == 4
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        skinny_gemm.apply_linear(module, torch.randn(1, 11))


@torch.no_grad()
def test_a_bias_of_another_shape_is_left_to_torch(products: list) -> None:
    module, x = nn.Linear(8, 64), torch.randn(1, 8)
    module.bias = nn.Parameter(torch.full((1,), 3.0))
    torch.testing.assert_close(skinny_gemm.apply_linear(module, x), module(x))
    module.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError):
        skinny_gemm.apply_linear(module, x)
    assert products == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@torch.no_grad()
def test_a_traced_linear_map() -> None:
    module = nn.Linear(12, 5).requires_grad_(False)
    traced = torch.jit.trace(lambda x: skinny_gemm.apply_linear(module, x), torch.randn(1, 12))
    x = torch.randn(1, 12)
    torch.testing.assert_close(traced(x), module(x))


def test_calls_that_are_left_to_torch(products: list) -> None:
    module, x = nn.Linear(12, 5), torch.randn(1, 12)
    skinny_gemm.apply_linear(module, x).sum().backward()
    assert module.weight.grad is not None
    with torch.no_grad():
        skinny_gemm.apply_linear(module, torch.randn(skinny_gemm.MAX_SKINNY_ROWS + 1, 12))
        skinny_gemm.apply_linear(module, torch.randn(0, 12))
        skinny_gemm.apply_linear(module.double(), x.double())
        module.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert skinny_gemm.apply_linear(module, x).dtype == torch.bfloat16
        module.weight = nn.Parameter(module.weight.T.contiguous().T)
        torch.testing.assert_close(skinny_gemm.apply_linear(module, x), module(x))
    assert products == []


@torch.no_grad()
def test_hooks_and_modes_see_the_call(products: list) -> None:
    module, x, seen = nn.Linear(12, 5), torch.randn(1, 12), []
    handle = module.register_forward_hook(lambda *_: seen.append("hook"))
    skinny_gemm.apply_linear(module, x)
    handle.remove()
    with FlopCounterMode(display=False) as counted:
        skinny_gemm.apply_linear(module, x)
    assert seen == ["hook"] and counted.get_total_flops() == 2 * 12 * 5
    every = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("every"))
    skinny_gemm.apply_linear(module, x)
    every.remove()
    module.forward = lambda given: given * 0
    assert (skinny_gemm.apply_linear(module, x) == 0).all()
    assert seen == ["hook", "every"] and products == []


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@torch.no_grad()
def test_other_modules_are_called(products: list) -> None:
    module, x = Doubled(12, 5), torch.randn(1, 12)
    torch.testing.assert_close(skinny_gemm.apply_linear(module, x), 2 * F.linear(x, module.weight, module.bias))
    assert products == []


@torch.no_grad()
def test_transforms_and_compilers_use_torchs_linear() -> None:
    module, x = nn.Linear(12, 5), torch.randn(3, 1, 12)
    torch.testing.assert_close(torch.vmap(lambda row: skinny_gemm.apply_linear(module, row))(x), module(x))
    compiled = torch.compile(lambda given: skinny_gemm.apply_linear(module, given), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))
