"""Linears that read one input: one quantization and one product, the same numbers, never a stale one."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
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
from tests.runtime.on_kernels import PRODUCTS, Owner, laid_out, on_kernels, owner_of

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


def trio(**fields: Any) -> Owner:
    """Three linears that share their input, laid out as on a device with kernels."""
    owner = owner_of(*(make(outputs, **fields) for outputs in OUTPUTS))
    with on_kernels():
        return laid_out(owner)


def alone(linear: QuantizedLinear, x: Tensor) -> Tensor:
    """What a linear makes of x without the others."""
    shared, linear.shared_input = linear.shared_input, None
    try:
        return linear(x)
    finally:
        linear.shared_input = shared


def rows(seed: int = 0) -> Tensor:
    return torch.randn(2, 5, INPUTS, generator=torch.Generator().manual_seed(seed)).bfloat16()


def each_alone(linears: Iterable[Any], x: Tensor) -> list[Tensor]:
    return [alone(linear, x) for linear in linears]


def all_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def is_stacked(linears: nn.ModuleList) -> bool:
    return len({linear.weight_packed.untyped_storage().data_ptr() for linear in linears}) == 1


class TestOneProduct:
    @pytest.mark.parametrize("bits", [(4, 4), (8, 8), (6, 6), (3, 8)])
    @pytest.mark.parametrize("group", [None, 32])
    @pytest.mark.parametrize("bias", [True, False])
    def test_is_that_of_each_linear(self, bits: tuple[int, int], group: int | None, bias: bool) -> None:
        linears, x = trio(bits=bits, group=group, bias=bias), rows()
        by_definition = linears(x)
        with on_kernels() as calls:
            outputs = linears(x)
            assert calls["quantize_rows"] == 1 and sum(calls[name] for name in PRODUCTS) == 1
            assert all(output.abs().max() > 1 for output in outputs)
            assert all_equal(outputs, by_definition)
            assert all_equal(outputs, each_alone(linears, x))

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
        by_definition = linears(x)
        with on_kernels():
            for output, expected in zip(linears(x), by_definition, strict=True):
                torch.testing.assert_close(output, expected, rtol=2**-7, atol=0.1)
            assert calls == [(88, INPUTS // 8)]
            # Wider floats have no such product.
            assert linears[0](x.float()).dtype == torch.float32
            assert len(calls) == 1

    @pytest.mark.parametrize("bits", [(4, None), (3, None)])
    def test_gradients_reach_the_input_of_float_products(self, bits: tuple[int, None]) -> None:
        linears, x = trio(bits=bits), rows().requires_grad_()

        def gradient() -> Tensor | None:
            x.grad = None
            with torch.enable_grad():
                outputs = linears(x)
                torch.stack([output.float().square().sum() for output in outputs]).sum().backward()
            return x.grad

        expected = gradient()
        assert expected is not None and expected.abs().max() > 1
        with on_kernels():
            actual = gradient()
        assert actual is not None
        assert ((actual - expected).norm() / expected.norm()).item() < 0.02

    @pytest.mark.parametrize("as_parameter", [True, False])
    def test_gradients_reach_biases(self, as_parameter: bool) -> None:
        linears, x = trio(bits=(4, None)), rows()
        bias = linears[1].bias
        linears[1].bias = nn.Parameter(bias) if as_parameter else bias.requires_grad_()
        with on_kernels(), torch.enable_grad():
            linears(x)[1].float().sum().backward()
            assert torch.equal(linears[1].bias.grad, torch.full_like(bias, 10))
            # Nor does a move take it from whoever trains it.
            held = linears[1].bias
            laid_out(linears)
            assert linears[1].bias is held and held.requires_grad
        with on_kernels():
            assert all_equal(linears(x), each_alone(linears, x))

    def test_outputs_that_adapters_add_to_are_tensors_of_their_own(self) -> None:
        """As in the first block, whose input has no gradient."""
        linears, adapters = trio(), [nn.Parameter(torch.zeros(outputs).bfloat16()) for outputs in OUTPUTS]
        with on_kernels(), torch.enable_grad():
            outputs = linears(rows())
            for output, adapter in zip(outputs, adapters, strict=True):
                output += adapter
            sum(output.float().square().sum() for output in outputs).backward()  # type: ignore[union-attr]
        assert all(adapter.grad is not None and adapter.grad.abs().max() > 1 for adapter in adapters)

    def test_outputs_that_are_learnt_with_can_be_written_to(self) -> None:
        linears, x = trio(bits=(4, None)), rows().requires_grad_()
        with on_kernels(), torch.enable_grad():
            first, second, third = linears(x)
            squares = second.square()
            first.mul_(2)
            (first.sum() + squares.sum() + third.sum()).backward()
            assert x.grad is not None and x.grad.abs().max() > 1

    def test_a_batch_of_calls_in_one(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            outputs = torch.func.vmap(lambda x: tuple(linears(x)))(x)
            assert all_equal(outputs, each_alone(linears, x))

    def test_holds_where_only_some_have_biases(self) -> None:
        linears, x = owner_of(make(48), make(16, bias=False), make(24)), rows()
        by_definition = linears(x)
        with on_kernels() as calls:
            assert all_equal(laid_out(linears)(x), by_definition)
            assert calls["int4_matmul"] == 1
            linears[0].bias = linears[0].bias + 1
            linears[1].bias = torch.ones(16, dtype=torch.bfloat16)
            assert all_equal(linears(x), each_alone(linears, x))
            assert not all_equal(linears(x), by_definition)

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_a_bias_written_to_counts(self, mode: Any) -> None:
        with on_kernels(), mode():
            linears, x = laid_out(owner_of(make(48), make(16, bias=False), make(24))), rows()
            before = linears(x)
            linears[2].bias += 1
            linears[0].bias.data.add_(1)
            after = linears(x)
            assert all_equal(after, each_alone(linears, x))
            assert not torch.equal(after[2], before[2]) and not torch.equal(after[0], before[0])

    def test_a_bias_taken_away_is_gone(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            before = linears(x)
            linears[1].bias = None
            after = linears(x)
            assert all_equal(after, each_alone(linears, x)) and not torch.equal(after[1], before[1])

    def test_joins_only_what_is_alike(self) -> None:
        narrow, wide, other, same = make(16), make(48), make(8, bits=(8, 8)), make(24)
        in_float = QuantizedLinear.from_float(nn.Linear(INPUTS, 8), LinearLayout())
        owner_of(narrow, in_float, wide, other, same)
        assert narrow.shared_input is wide.shared_input is same.shared_input is not None
        assert other.shared_input is in_float.shared_input is None

    def test_two_products_of_one_owner(self) -> None:
        with on_kernels() as calls:
            linears, x = laid_out(owner_of(make(16), make(8, bits=(8, 8)), make(24), make(40, bits=(8, 8)))), rows()
            expected = each_alone(linears, x)
            calls.clear()
            assert all_equal(linears(x, (0, 1, 2, 3)), expected)
            assert (calls["int4_matmul"], calls["int8_matmul"]) == (1, 1)

    def test_the_owner_is_the_nearest_module_of_all(self) -> None:
        block = nn.ModuleDict({"attention": Owner([make(16), make(24)]), "mlp": Owner([make(48)])})
        share_inputs(block, ["attention.0", "attention.1"])
        assert block["attention"]._forward_pre_hooks and not block._forward_pre_hooks
        share_inputs(block, ["attention.0", "attention.1", "mlp.0"])
        assert block._forward_pre_hooks

    def test_the_definition_shares_nothing(self) -> None:
        linears, x = owner_of(make(16), make(24)), rows()
        before = [linear.weight_packed.data_ptr() for linear in linears]
        linears(x, (0, 1))
        assert [linear.weight_packed.data_ptr() for linear in linears] == before

    def test_float64_and_empty_inputs_run_by_the_definition(self) -> None:
        linears = trio()
        with on_kernels() as calls:
            assert linears(rows().double())[0].dtype == torch.float64
            assert linears(rows()[:0])[0].shape == (0, 5, 48)
            assert not calls


class TestResults:
    """A result is for one tensor as it was, for each linear once, while their owner runs."""

    def test_another_order_and_a_linear_left_out(self) -> None:
        linears = trio()
        with on_kernels() as calls:
            for order in ((2, 0, 1), (1, 2), (0,), (1, 0, 2)):
                x = rows(order[0])
                assert all_equal(linears(x, order), [alone(linears[index], x) for index in order])
            calls.clear()
            outputs = linears(rows(), (2, 1, 0))
            assert calls["int4_matmul"] == 1
            assert [output.shape[-1] for output in outputs] == [24, 16, 48]

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_an_input_written_to_between_calls_is_another_one(self, mode: Any) -> None:
        linears = trio()
        with on_kernels(), mode():
            x = rows()
            for write in (lambda: x.mul_(2), lambda: x.data.copy_(rows(3)), lambda: x.set_(rows(4))):
                assert torch.equal(linears[0](x), alone(linears[0], x))
                linears(x, (0,))
                write()
                assert torch.equal(linears[1](x), alone(linears[1], x))
                assert all_equal(linears(x), each_alone(linears, x))

    def test_an_input_written_to_within_a_call_is_another_one(self) -> None:
        linears, x = trio(), rows()
        seen = []

        def write() -> None:
            seen.append(each_alone(linears, x))
            x.mul_(2)

        with on_kernels():
            outputs = linears(x, between=write)
            for index, output in enumerate(outputs):
                assert torch.equal(output, seen[index][index])

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_an_input_of_another_shape_is_another_one(self, mode: Any) -> None:
        linears = trio()
        with on_kernels(), mode():
            x = rows().clone()
            outputs = linears(x, between=lambda: x.unsqueeze_(0))
            assert [output.dim() for output in outputs] == [3, 4, 5]
            x = rows().clone()
            outputs = linears(x, (0, 1), between=lambda: setattr(x, "data", x.data.view(10, INPUTS)))
            assert [output.dim() for output in outputs] == [3, 2]

    def test_views_that_begin_where_a_weight_does_are_others(self) -> None:
        with on_kernels():
            for name in ("bias", "weight_scale"):
                linears, x = trio(), rows()
                before = linears(x)
                tensor = getattr(linears[1], name)
                setattr(linears[1], name, tensor[:1].expand(tensor.shape))
                after = linears(x)
                assert all_equal(after, each_alone(linears, x)) and not torch.equal(after[1], before[1])

    def test_an_interrupt_keeps_no_model_alive(self) -> None:
        linears = trio()
        gone = weakref.ref(linears[0])

        def interrupt() -> None:
            raise KeyboardInterrupt

        with on_kernels(), pytest.raises(KeyboardInterrupt):
            linears(rows(), between=interrupt)
        del linears
        gc.collect()
        assert gone() is None

    def test_weights_written_to_make_new_outputs(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            linears(x)
            linears[1].load_state_dict(make(16, seed=7).state_dict())
            assert torch.equal(linears(x)[1], make(16, seed=7)(x))
            linears[2].weight_packed.data.zero_()
            linears[0].weight_scale = linears[0].weight_scale * 2
            assert all_equal(linears(x), each_alone(linears, x))

    @pytest.mark.parametrize("bits", [(4, 4), (3, 4), (6, 8)])
    @pytest.mark.parametrize("shared", [True, False])
    def test_weights_loaded_in_inference_mode_count(self, bits: tuple[int, int], shared: bool) -> None:
        linears, x, fresh = trio(bits=bits), rows(), make(16, bits=bits, seed=7)
        if not shared:
            linears[1].shared_input = None
        with on_kernels() as calls:
            laid_out(linears)
            memory = linears[1].packed_for_kernels().data_ptr()
            with torch.inference_mode():
                linears[1].load_state_dict(fresh.state_dict())
                calls.clear()
                outputs = linears(x)
            assert sum(calls[name] for name in PRODUCTS) == (1 if shared else 3)
            assert torch.equal(outputs[1], fresh(x))
            assert linears[1].packed_for_kernels().data_ptr() == memory

    @pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.data.mul_(2), lambda x: 3 * x])
    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_hooks_before_a_linear_are_obeyed(self, write: Any, mode: Any) -> None:
        linears = trio()

        def hook(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
            return (write(args[0]),)

        linears[1].register_forward_pre_hook(hook)
        apart = copy.deepcopy(linears)
        for linear in apart:
            linear.shared_input = None
        with on_kernels(), mode():
            assert all_equal(linears(rows()), apart(rows()))

    def test_hooks_before_every_module_are_obeyed(self) -> None:
        linears = trio()
        apart = copy.deepcopy(linears)
        for linear in apart:
            linear.shared_input = None
        hook = nn.modules.module.register_module_forward_pre_hook(
            lambda module, args: (args[0].mul_(2),) if module in (linears[1], apart[1]) else None
        )
        try:
            with on_kernels(), torch.inference_mode():
                assert all_equal(linears(rows()), apart(rows()))
        finally:
            hook.remove()

    def test_a_call_after_an_interrupt_is_right(self) -> None:
        linears, x = trio(), rows()

        def interrupt() -> None:
            raise KeyboardInterrupt

        with on_kernels() as calls, torch.inference_mode():
            with pytest.raises(KeyboardInterrupt):
                linears(x, between=interrupt)
            x.mul_(2)
            calls.clear()
            assert all_equal(linears(x), each_alone(linears, x))
            assert not module_under_test._this_thread.calls

    @pytest.mark.parametrize("bits", [(3, 4), (6, 8)])
    def test_widened_weights_follow_the_stored_ones(self, bits: tuple[int, int]) -> None:
        linears, x = trio(bits=bits), rows()
        with on_kernels() as calls:
            linears(x)
            fresh = make(16, bits=bits, seed=7)
            linears[1].load_state_dict(fresh.state_dict())
            calls.clear()
            outputs = linears(x)
            assert sum(calls[name] for name in PRODUCTS) == 1
            assert torch.equal(outputs[1], fresh(x))
            linears[2].weight_packed.zero_()
            before, after = outputs[2], linears(x)
            assert all_equal(after, each_alone(linears, x)) and not torch.equal(after[2], before)

    def test_every_call_with_one_input_is_right(self) -> None:
        """As a loop over a fixed input does: the results of one round are gone in the next."""
        linears, x = trio(), rows()
        with on_kernels() as calls:
            for _ in range(3):
                outputs = linears(x)
            assert calls["int4_matmul"] == 3
            twice = linears(x, (0, 0, 1))
            assert torch.equal(twice[0], twice[1]) and torch.equal(twice[0], outputs[0])
            assert torch.equal(twice[2], outputs[1])

    def test_results_go_when_they_are_taken_or_their_input_or_owner_ends(self) -> None:
        linears = trio()
        calls: list[Any] = []

        def look() -> None:
            calls.append(next(iter(module_under_test._this_thread.calls.values())))
            waiting.append(len(calls[-1]._outputs))

        with on_kernels():
            waiting: list[int] = []
            linears(rows(), between=look)
            assert waiting == [2, 1, 0]
            assert not module_under_test._this_thread.calls
            linears(rows(), (0,), between=look)
            gc.collect()
            assert not calls[-1].is_open
            with pytest.raises(IndexError):
                linears(rows(), (0, 5))
            assert not module_under_test._this_thread.calls

    def test_linears_whose_inputs_differ_stop_sharing(self) -> None:
        linears, x = trio(), rows()
        apart = Owner(linears)
        apart.forward = lambda x: [linear(x.clone()) for linear in linears]  # type: ignore[method-assign]
        share_inputs(apart, ["0", "1", "2"])
        with on_kernels() as calls:
            laid_out(apart)
            for _ in range(3):
                assert all_equal(apart(x), each_alone(linears, x))
            calls.clear()
            widths: list[int] = []
            for linear in linears:
                linear.register_forward_hook(
                    lambda module, args, out: widths.append((out if out._base is None else out._base).shape[-1])
                )
            apart(x)
            assert widths == list(OUTPUTS) and calls["int4_matmul"] == 3

    def test_threads_do_not_take_from_one_another(self) -> None:
        linears, failures = trio(), []

        def work(seed: int) -> None:
            with torch.no_grad():
                for step in range(20):
                    x = rows(100 * seed + step)
                    if not all_equal(linears(x), [linear(x) for linear in alone_copies[seed]]):
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
        linears = owner_of(*(make(outputs) for outputs in OUTPUTS))
        with on_kernels():
            with torch.inference_mode():
                x = rows()
                assert is_stacked(laid_out(linears))
                assert all_equal(linears(x), each_alone(linears, x))
            linears[0].load_state_dict(make(48, seed=3).state_dict())
            assert torch.equal(linears(rows())[0], make(48, seed=3)(rows()))

    def test_a_compiled_owner_computes_each_for_itself(self) -> None:
        linears, x = trio(), rows()
        with on_kernels():
            expected = linears(x)
            compiled = torch.compile(linears, backend="eager", fullgraph=True)
            assert all_equal(compiled(x), expected)
            y = rows(1)
            assert all_equal(compiled(y), linears(y))


class TestMemory:
    """Weights lie together from when they came to their device; copies, moves and files are as if they did not."""

    @pytest.fixture
    def linears(self) -> Owner:
        linears = trio()
        assert is_stacked(linears)
        return linears

    def test_nothing_moves_in_a_forward_pass(self, linears: Owner) -> None:
        apart = owner_of(make(16), make(24))
        held = apart.state_dict()
        with on_kernels():
            assert all_equal(apart(rows(), (0, 1)), each_alone(apart, rows()))
            assert all(tensor.data_ptr() == held[name].data_ptr() for name, tensor in apart.state_dict().items())
            held = linears.state_dict()
            linears(rows())
            assert all(tensor.data_ptr() == held[name].data_ptr() for name, tensor in linears.state_dict().items())

    def test_the_state_dict_is_what_it_was(self, linears: Owner) -> None:
        expected = owner_of(*(make(outputs) for outputs in OUTPUTS)).state_dict()
        assert linears.state_dict().keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in linears.state_dict().items())
        total = sum(tensor.nbytes for tensor in expected.values() if tensor.dtype == torch.int32)
        assert linears[0].weight_packed.untyped_storage().nbytes() == total

    def _is_right(self, linears: Owner, *, calls: int = 1) -> None:
        x = rows(11).to(linears[0].weight.dtype)
        with on_kernels() as counts:
            outputs = linears(x)
            assert counts["int4_matmul"] == calls
            assert all_equal(outputs, each_alone(linears, x))

    def test_a_copy_stands_for_itself(self, linears: Owner) -> None:
        copied = copy.deepcopy(linears)
        copied[0].weight_packed.zero_()
        copied[1].bias.zero_()
        self._is_right(copied)
        self._is_right(linears)
        assert linears[0].weight_packed.any() and linears[1].bias.any()
        assert copied[0].shared_input is copied[2].shared_input is not linears[0].shared_input

    def test_pickling(self, linears: Owner) -> None:
        file = io.BytesIO()
        torch.save(linears, file)
        file.seek(0)
        self._is_right(torch.load(file, weights_only=False))

    def test_casts_and_moves(self, linears: Owner) -> None:
        scales = [linear.weight_scale.clone() for linear in linears]
        with on_kernels():
            linears.to(torch.float32)
            assert all_equal([linear.weight_scale for linear in linears], scales)
            self._is_right(linears)
            before = linears[0].weight_packed
            linears._apply(lambda tensor: tensor.clone())  # as a move to another device
            assert is_stacked(linears) and linears[0].weight_packed.data_ptr() != before.data_ptr()
            self._is_right(linears)
        linears._apply(lambda tensor: tensor.clone())  # to one without kernels
        assert not is_stacked(linears) and linears[0].shared_input._joined is None

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
    def test_a_cast_is_that_of_each(self, linears: Owner, dtype: torch.dtype) -> None:
        expected = [linear.bias.to(dtype) for linear in linears]
        with on_kernels():
            linears.to(dtype)
            assert all(linear.bias.dtype == dtype for linear in linears)
            assert all_equal([linear.bias for linear in linears], expected)
            if dtype != torch.float64:
                self._is_right(linears)

    @pytest.mark.parametrize("bits", [(4, 4), (3, 4)])
    def test_assigned_tensors_are_laid_out_anew(self, bits: tuple[int, int]) -> None:
        linears = trio(bits=bits)
        state = {name: tensor.clone() for name, tensor in trio(seed=5, bits=bits).state_dict().items()}
        with on_kernels():
            linears.load_state_dict(state, assign=True)
            self._is_right(linears)
        assert all(torch.equal(linears.state_dict()[name], tensor) for name, tensor in state.items())

    def test_a_linear_that_goes_another_way_ends_it(self, linears: Owner) -> None:
        linears[1].shared_input = None
        self._is_right(linears, calls=3)

    def test_a_copy_of_one_is_alone(self, linears: Owner) -> None:
        single, x = copy.copy(linears[1]), rows()
        with on_kernels() as calls:
            outputs: list[Tensor] = []
            linears(x, (0,), between=lambda: outputs.append(single(x)))
            assert torch.equal(outputs[0], linears[1](x))
            assert calls["int4_matmul"] == 3
