"""Linears that read one input: one quantization and one product, the same numbers, never a stale one."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rotaquant.ops import packing, reference
from rotaquant.recipe import IntFormat
from rotaquant.runtime import kernel_path
from rotaquant.runtime import shared_input as module_under_test
from rotaquant.runtime.layout import LinearLayout
from rotaquant.runtime.linear import QuantizedLinear
from rotaquant.runtime.shared_input import share_inputs
from tests.runtime.on_kernels import PRODUCTS, on_kernels

INPUTS = 64
OUTPUTS = (48, 16, 24)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(
    outputs: int, bits: tuple[int, int | None] = (4, 4), group: int | None = None, bias: bool = True, seed: int = 0
) -> QuantizedLinear:
    """A linear of random codes, scales and bias."""
    generator = torch.Generator().manual_seed(seed + outputs)
    weights = IntFormat(bits=bits[0], group_size=group)
    activations = IntFormat(bits=bits[1], clip_ratio=0.9, group_size=group) if bits[1] else None
    layout = LinearLayout(weights=weights, activations=activations)
    types = {"dtype": torch.bfloat16, "scale_dtype": torch.bfloat16}
    linear = QuantizedLinear((outputs, INPUTS), layout, bias=bias, **types)
    linear.weight_packed.random_(-(1 << 31), 1 << 31, generator=generator)
    linear.weight_scale.uniform_(0.5, 2, generator=generator)
    if linear.bias is not None:
        linear.bias.normal_(generator=generator)
    return linear


def trio(**fields: Any) -> nn.ModuleList:
    """Three linears that share their input."""
    linears = nn.ModuleList(make(outputs, **fields) for outputs in OUTPUTS)
    share_inputs(linears)
    return linears


def alone(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """What a linear makes of x without the others."""
    shared, linear.shared_input = linear.shared_input, None
    try:
        return linear(x)
    finally:
        linear.shared_input = shared


def rows(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, INPUTS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def is_stacked(linears: nn.ModuleList) -> bool:
    return len({linear.weight_packed.untyped_storage().data_ptr() for linear in linears}) == 1


class TestOneProduct:
    @pytest.mark.parametrize("bits", [(4, 4), (8, 8), (6, 6), (3, 8)])
    @pytest.mark.parametrize("group", [None, 32])
    @pytest.mark.parametrize("bias", [True, False])
    def test_is_that_of_each_linear(self, bits: tuple[int, int], group: int | None, bias: bool) -> None:
        linears, x = trio(bits=bits, group=group, bias=bias), rows()
        by_definition = [linear(x) for linear in linears]
        with on_kernels() as calls:
            outputs = [linear(x) for linear in linears]
            assert calls["quantize_rows"] == 1 and sum(calls[name] for name in PRODUCTS) == 1
            for linear, output, expected in zip(linears, outputs, by_definition, strict=True):
                assert output.abs().max() > 1
                assert torch.equal(output, expected)
                assert torch.equal(output, alone(linear, x))

    @pytest.mark.parametrize("bits", [4, 3])
    @pytest.mark.parametrize("group", [None, 32])
    def test_float_inputs_share_a_product_too(
        self, bits: int, group: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = []

        def w4a16_matmul(x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
            calls.append(packed.shape)
            codes = packing.unpack_weight(packed, 4, x.shape[1])
            return nn.functional.linear(x, reference.dequantize_groups(codes, scale, x.dtype), bias)

        monkeypatch.setattr(kernel_path.ops, "w4a16_matmul", w4a16_matmul)
        linears, x = trio(bits=(bits, None), group=group), rows()
        by_definition = [linear(x) for linear in linears]
        with on_kernels():
            for linear, expected in zip(linears, by_definition, strict=True):
                torch.testing.assert_close(linear(x), expected, rtol=2**-7, atol=0.1)
            assert calls == [(88, INPUTS // 8)]
            # Wider floats have no such product.
            assert linears[0](x.float()).dtype == torch.float32
            assert len(calls) == 1

    def test_holds_where_only_some_have_biases(self) -> None:
        linears, x = nn.ModuleList([make(48), make(16, bias=False), make(24)]), rows()
        share_inputs(linears)
        by_definition = [linear(x) for linear in linears]
        with on_kernels() as calls:
            assert all(torch.equal(one(x), expected) for one, expected in zip(linears, by_definition, strict=True))
            assert calls["int4_matmul"] == 1
            linears[2].bias += 1
            assert torch.equal(linears[2](x), alone(linears[2], x))
            linears[0].bias = linears[0].bias + 1
            linears[1].bias = torch.ones(16, dtype=torch.bfloat16)
            y = rows(1)
            for linear in linears:
                assert torch.equal(linear(y), alone(linear, y))

    def test_joins_only_what_is_alike(self) -> None:
        narrow, wide, other, same = make(16), make(48), make(8, bits=(8, 8)), make(24)
        in_float = QuantizedLinear.from_float(nn.Linear(INPUTS, 8), LinearLayout())
        share_inputs([narrow, in_float, wide, other, same])
        assert narrow.shared_input is wide.shared_input is same.shared_input is not None
        assert other.shared_input is in_float.shared_input is None

    def test_the_definition_shares_nothing(self) -> None:
        linears, x = trio(), rows()
        before = [linear.weight_packed.data_ptr() for linear in linears]
        for linear in linears:
            linear(x)
        assert [linear.weight_packed.data_ptr() for linear in linears] == before
        assert module_under_test._this_thread.call is None or not module_under_test._this_thread.call.is_with(x)

    def test_float64_and_empty_inputs_run_by_the_definition(self) -> None:
        linears = trio()
        with on_kernels() as calls:
            assert linears[0](rows().double()).dtype == torch.float64
            assert not kernel_path.kernels_run_on(torch.empty(0, INPUTS))
            assert not calls


class TestResults:
    """A result is for one tensor as it was, and for each linear once."""

    def test_another_order_and_a_linear_left_out(self) -> None:
        linears = trio()
        with on_kernels() as calls:
            for order in ((2, 0, 1), (1, 2), (0,), (1, 0, 2)):
                x = rows(order[0])
                for index in order:
                    assert torch.equal(linears[index](x), alone(linears[index], x))
            calls.clear()
            x = rows()
            outputs = [linears[index](x) for index in (2, 1, 0)]
            assert calls["int4_matmul"] == 1
            assert [output.shape[-1] for output in outputs] == [24, 16, 48]

    def test_an_input_written_to_is_another_one(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            linears[0](x)
            x.mul_(2)
            assert torch.equal(linears[1](x), alone(linears[1], x))
            x.data = rows(3)
            assert torch.equal(linears[2](x), alone(linears[2], x))

    def test_another_tensor_in_the_same_memory_is_another_one(self) -> None:
        linears, memory = trio(), torch.empty(2 * 5 * INPUTS, dtype=torch.bfloat16)
        with on_kernels():
            x = memory.view(2, 5, INPUTS).copy_(rows())
            linears[0](x)
            del x
            numpy_like = memory.view(torch.int16).numpy()
            numpy_like[:] = rows(1).view(torch.int16).flatten().numpy()  # no version counts this
            y = memory.view(2, 5, INPUTS)
            assert torch.equal(linears[1](y), alone(linears[1], y))

    def test_weights_written_to_make_new_outputs(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            linears[0](x)
            linears[1].load_state_dict(make(16, seed=7).state_dict())
            assert torch.equal(linears[1](x), make(16, seed=7)(x))
            linears[2].weight_scale = linears[2].weight_scale * 2
            assert torch.equal(linears[2](x), alone(linears[2], x))
            y = rows(1)
            for linear in linears:
                assert torch.equal(linear(y), alone(linear, y))

    @pytest.mark.parametrize("bits", [(3, 4), (6, 8)])
    def test_widened_weights_follow_the_stored_ones(self, bits: tuple[int, int]) -> None:
        linears = trio(bits=bits)
        with on_kernels():
            for linear in linears:
                linear(rows())
            fresh = make(16, bits=bits, seed=7)
            linears[1].load_state_dict(fresh.state_dict())
            x = rows(1)
            for linear in linears:
                assert torch.equal(linear(x), alone(linear, x))
            assert torch.equal(linears[1](x), fresh(x))

    def test_every_call_with_one_input_is_right(self) -> None:
        """As a loop over a fixed input does: the results of one round are gone in the next."""
        linears, x = trio(), rows()
        with on_kernels() as calls:
            for _ in range(3):
                outputs = [linear(x) for linear in linears]
            assert calls["int4_matmul"] == 3
            twice = [linears[0](x), linears[0](x)]
            assert torch.equal(twice[0], twice[1]) and torch.equal(twice[0], outputs[0])

    def test_results_go_when_they_are_taken_or_their_input_dies(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            output = linears[0](x)
            call = module_under_test._this_thread.call
            assert call is not None and len(call._outputs) == 2
            del x
            gc.collect()
            assert not call.is_open
            x = rows()
            for linear in linears:
                output = linear(x)
            assert not module_under_test._this_thread.call.is_open
            assert output._base is not None

    def test_threads_do_not_take_from_one_another(self) -> None:
        linears, failures = trio(), []

        def work(seed: int) -> None:
            with torch.no_grad():
                for step in range(20):
                    x = rows(100 * seed + step)
                    expected = [alone_copies[seed][index](x) for index in range(3)]
                    if any(not torch.equal(linears[index](x), expected[index]) for index in range(3)):
                        failures.append((seed, step))

        alone_copies = [copy.deepcopy(linears) for _ in range(4)]
        for linear in (linear for copies in alone_copies for linear in copies):
            linear.shared_input = None
        with on_kernels():
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures

    def test_inference_mode_leaves_tensors_that_can_be_written(self) -> None:
        linears = trio()
        with on_kernels():
            with torch.inference_mode():
                x = rows()
                for linear in linears:
                    assert torch.equal(linear(x), alone(linear, x))
            linears[0].load_state_dict(make(48, seed=3).state_dict())
            assert torch.equal(linears[0](x), make(48, seed=3)(x))

    def test_a_compiled_model_computes_each_for_itself(self) -> None:
        linears, x = trio(), rows()

        def run(x: Tensor) -> tuple[Tensor, ...]:
            return tuple(linear(x) for linear in linears)

        with on_kernels():
            expected = run(x)
            compiled = torch.compile(run, backend="eager", fullgraph=True)
            assert all(torch.equal(*pair) for pair in zip(compiled(x), expected, strict=True))
            y = rows(1)
            assert all(torch.equal(*pair) for pair in zip(compiled(y), run(y), strict=True))


class TestMemory:
    """Weights lie together once; copying, moving and saving are as if they did not."""

    @pytest.fixture
    def linears(self) -> nn.ModuleList:
        linears, x = trio(), rows()
        with on_kernels():
            for linear in linears:
                linear(x)
        assert is_stacked(linears)
        return linears

    def test_the_state_dict_is_what_it_was(self, linears: nn.ModuleList) -> None:
        expected = trio().state_dict()
        assert linears.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in linears.state_dict().items())
        total = sum(tensor.nbytes for tensor in expected.values() if tensor.dtype == torch.int32)
        assert linears[0].weight_packed.untyped_storage().nbytes() == total

    def _is_right(self, linears: nn.ModuleList, *, calls: int = 1) -> None:
        x = rows(11).to(linears[0].weight.dtype)
        with on_kernels() as counts:
            outputs = [linear(x) for linear in linears]
            assert counts["int4_matmul"] == calls
            assert all(torch.equal(out, alone(one, x)) for out, one in zip(outputs, linears, strict=True))
        assert is_stacked(linears) == (calls == 1)

    def test_a_copy_stands_for_itself(self, linears: nn.ModuleList) -> None:
        copied = copy.deepcopy(linears)
        copied[0].weight_packed.zero_()
        copied[1].bias.zero_()
        self._is_right(copied)
        self._is_right(linears)
        assert linears[0].weight_packed.any() and linears[1].bias.any()
        assert copied[0].shared_input is copied[2].shared_input is not linears[0].shared_input

    def test_pickling(self, linears: nn.ModuleList) -> None:
        file = io.BytesIO()
        torch.save(linears, file)
        file.seek(0)
        self._is_right(torch.load(file, weights_only=False))

    def test_casts_and_moves(self, linears: nn.ModuleList) -> None:
        scales = [linear.weight_scale.clone() for linear in linears]
        linears.to(torch.float32)
        assert all(torch.equal(linear.weight_scale, scale) for linear, scale in zip(linears, scales, strict=True))
        self._is_right(linears)
        linears._apply(lambda tensor: tensor.clone())  # as a move to another device
        assert not is_stacked(linears)
        self._is_right(linears)

    def test_assigned_tensors_are_laid_out_anew(self, linears: nn.ModuleList) -> None:
        state = {name: tensor.clone() for name, tensor in trio(seed=5).state_dict().items()}
        linears.load_state_dict(state, assign=True)
        assert not is_stacked(linears)
        self._is_right(linears)
        assert all(torch.equal(linears.state_dict()[name], tensor) for name, tensor in state.items())

    def test_a_linear_that_goes_another_way_ends_it(self, linears: nn.ModuleList) -> None:
        linears[1].shared_input = None
        with on_kernels() as calls:
            x = rows()
            for linear in linears:
                linear(x)
            assert calls["int4_matmul"] == 3

    def test_a_copy_of_one_is_alone(self, linears: nn.ModuleList) -> None:
        single, x = copy.copy(linears[1]), rows()
        with on_kernels() as calls:
            linears[0](x)
            assert torch.equal(single(x), linears[1](x))
            assert calls["int4_matmul"] == 2
