"""On a CUDA device: the same integers as on the CPU, the same pipeline, the same generation."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rotaquant
from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import reference
from rotaquant.recipe import IntFormat
from rotaquant.rotation.plan import HeadMix, plan_head_mix
from rotaquant.runtime.gated_mlp import GatedMlp
from rotaquant.runtime.layout import LinearLayout
from rotaquant.runtime.linear import QuantizedLinear
from tests.runtime.on_kernels import Owner, on_kernels, owner_of
from tests.tiny_models import CONFIGS, save_tiny, tiny_model, tokens

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [(4, 4), (8, 8), (6, 3)])
@pytest.mark.parametrize("columns", [33, 576, 1041, 5000])
def test_integer_products_equal_those_of_the_cpu(bits: tuple[int, int], columns: int) -> None:
    a, b = (torch.randint(-(1 << (n - 1)), 1 << (n - 1), (17, columns)).to(torch.int8) for n in bits)
    product = reference.int_matmul(a.cuda(), bits[0], b.cuda(), bits[1])
    assert torch.equal(product.cpu().long(), a.long() @ b.long().T)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_quantized_on_the_device_it_runs_there_and_on_the_cpu(name: str, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", name, torch.float64)
    output = tmp_path / "out"
    rotaquant.quantize(source, "w4a4kv4-tuned", output=output, calibration=tokens(4, 32), device="cuda")
    on_gpu, on_cpu = rotaquant.load(output, device="cuda"), rotaquant.load(output, device="cpu")
    ids = tokens(2, 20)
    got, expected = on_gpu(input_ids=ids.cuda()).logits.cpu(), on_cpu(input_ids=ids).logits
    # RoPE is float32 in every model: its last bit differs between the devices.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    generated = on_gpu.generate(input_ids=ids.cuda(), max_new_tokens=8, do_sample=False).cpu()
    assert torch.equal(generated, on_cpu.generate(input_ids=ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    source = save_tiny(tmp_path / "float", "llama-9-heads", dtype)
    rotaquant.quantize(source, "w8a8kv8-rtn", output=tmp_path / "out", device="cuda")
    model = rotaquant.load(tmp_path / "out", device="cuda")
    ids = tokens(2, 20)
    got = model(input_ids=ids.cuda()).logits.double().cpu()
    expected = rotaquant.load(tmp_path / "out", device="cpu", dtype=torch.float64)(input_ids=ids).logits
    assert ((got - expected).norm() / expected.norm()).item() < 0.1


# --- models on kernels -----------------------------------------------------------------------------------------


def linear(outputs: int, inputs: int, transform: Any = None, group: int | None = None) -> QuantizedLinear:
    """A W4A4 linear of random codes on the device."""
    weights, activations = IntFormat(bits=4, group_size=group), IntFormat(bits=4, clip_ratio=0.9, group_size=group)
    layout = LinearLayout(weights=weights, activations=activations, transform=transform)
    types = {"dtype": torch.bfloat16, "scale_dtype": torch.bfloat16}
    made = QuantizedLinear((outputs, inputs), layout, bias=True, **types)
    made.weight_packed.random_(-(1 << 31), 1 << 31)
    made.weight_scale.uniform_(1e-3, 2e-3)
    made.bias.normal_()
    return made.cuda()


def trio(group: int | None = None) -> Owner:
    """Linears of 512 inputs that share them."""
    return owner_of(*(linear(outputs, 512, group=group) for outputs in (384, 128, 128)))


def apart(modules: nn.Module) -> Any:
    """A copy that shares nothing."""
    copied = copy.deepcopy(modules)
    for module in copied.modules():
        if isinstance(module, QuantizedLinear):
            module.shared_input = None
    return copied


def rows(count: int = 5, width: int = 512) -> Tensor:
    return torch.randn(2, count, width, dtype=torch.bfloat16, device="cuda")


def require_same(actual: Tensor, expected: Tensor) -> None:
    """Kernels of other tilings may round the float32 product, from which the output is cast, otherwise."""
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=2**-7)


class TestKernels:
    @pytest.fixture(autouse=True)
    def _no_gradients(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @pytest.mark.parametrize("group", [None, 128])
    @pytest.mark.parametrize("count", [1, 7, 300])
    def test_one_product_is_that_of_each(self, count: int, group: int | None) -> None:
        linears, x = trio(group), rows(count)
        expected = apart(linears)(x)
        with on_kernels() as calls:
            outputs = linears(x)
        assert dict(calls) == {"quantize_rows": 1, "int4_matmul": 1}
        for output, other in zip(outputs, expected, strict=True):
            require_same(output, other)

    def test_memory_does_not_grow(self) -> None:
        linears = owner_of(*(linear(2048, 2048) for _ in range(3)))
        x = rows(1, 2048)
        apart(linears)(x)  # compiles
        held = torch.cuda.memory_allocated()
        linears(x)
        assert torch.cuda.memory_allocated() - held < 1 << 20
        size = linears[0].weight_packed.nbytes
        linears.cpu()
        assert held - torch.cuda.memory_allocated() >= 3 * size
        expected = linears(x.cpu())
        with on_kernels() as calls:
            outputs = linears.cuda()(x)
        assert calls["int4_matmul"] == 1
        for output, other in zip(outputs, expected, strict=True):
            require_same(output.cpu(), other)

    @pytest.mark.parametrize("warm", [False, True])
    def test_a_captured_graph_computes_what_it_is_given(self, warm: bool) -> None:
        """Whether or not the linears ran before: weights lie where they lie from when they came to the device."""
        linears, x = trio(), rows()
        alone = apart(linears)
        alone(x)
        copy.deepcopy(linears)(x)  # compiles
        if warm:
            linears(x)
        before = [one.weight_packed.data_ptr() for one in linears]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = linears(x)
        linears(x)
        assert [one.weight_packed.data_ptr() for one in linears] == before
        torch.cuda.empty_cache()
        x.copy_(rows())
        graph.replay()
        for output, expected in zip(outputs, alone(x), strict=True):
            require_same(output, expected)

    def test_a_model_in_inference_mode_sees_new_inputs(self) -> None:
        linears = trio()
        with torch.inference_mode():
            x = rows()
            linears(x, (0,))
            x.copy_(rows())
            for output, expected in zip(linears(x, (1, 2)), apart(linears)(x, (1, 2)), strict=True):
                require_same(output, expected)

    def test_another_stream_computes_for_itself(self) -> None:
        linears, x = trio(), rows(4096)
        expected = apart(linears)(x)
        torch.cuda.synchronize()
        stream = torch.cuda.Stream()
        outputs = []

        def run(x: Tensor) -> None:
            outputs.append(linears[0](x))
            with torch.cuda.stream(stream):
                outputs.append(linears[1](x))

        linears.forward = run  # type: ignore[method-assign, assignment]
        linears(x)
        stream.synchronize()
        require_same(outputs[0], expected[0])
        require_same(outputs[1], expected[1])

    @pytest.mark.parametrize("group", [None, 64])
    def test_gradients_pass_through_float_products(self, group: int | None) -> None:
        module = linear(256, 512, factor_or_fallback(512), group)
        module.layout = dataclasses.replace(module.layout, activations=None)
        x = rows().requires_grad_()

        def gradient(x: Tensor) -> Tensor:
            with torch.enable_grad():
                (given,) = torch.autograd.grad(module(x).float().square().sum(), x)
            return given.float().cpu()

        on_gpu = gradient(x)
        module.cpu()
        expected = gradient(x.detach().cpu().requires_grad_())
        assert ((on_gpu - expected).norm() / expected.norm()).item() < 0.02

    @pytest.mark.parametrize(
        "transform",
        [
            factor_or_fallback(512),
            factor_or_fallback(1536),
            plan_head_mix(32, factor_or_fallback(64)),
            plan_head_mix(12, factor_or_fallback(128)),
        ],
    )
    def test_rotated_inputs_are_close_to_the_definition(self, transform: Any) -> None:
        width = {32: 2048, 12: 1536}[transform.heads] if isinstance(transform, HeadMix) else transform.size
        module, x = linear(256, width, transform), rows(33, width)
        with on_kernels() as calls:
            output = module(x)
        assert calls["hadamard_quantize"] == 1
        expected = module.cpu()(x.cpu())
        # Now and then a code is another one, where a value lies between two.
        assert ((output.cpu().float() - expected.float()).norm() / expected.float().norm()).item() < 0.02

    @pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "gemma2", "phi3", "mixtral", "opt", "gpt-oss"])
    def test_a_model_gives_the_logits_of_the_cpu(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(CONFIGS, name, {**CONFIGS[name], "intermediate_size": 192, "ffn_dim": 192})
        rotaquant.quantize(tiny_model(name, torch.bfloat16), "w8a8kv8-rtn", output=tmp_path / "out")
        on_gpu, on_cpu = rotaquant.load(tmp_path / "out", device="cuda"), rotaquant.load(tmp_path / "out", device="cpu")
        ids = tokens(2, 20)
        expected = on_cpu(input_ids=ids).logits.float()
        with on_kernels() as calls:
            got = on_gpu(input_ids=ids.cuda()).logits.float().cpu()
        assert calls["int8_matmul"] and (name in {"opt", "gpt-oss"} or calls["gated_hadamard_quantize"])
        assert ((got - expected).norm() / expected.norm()).item() < 0.05
        again = on_gpu(input_ids=ids.cuda()).logits.float().cpu()
        assert torch.equal(got, again)
        separate = apart(on_gpu)(input_ids=ids.cuda()).logits.float().cpu()
        assert ((got - separate).norm() / expected.norm()).item() < 0.02
        generated = on_gpu.generate(input_ids=ids.cuda(), max_new_tokens=4, do_sample=False)
        assert torch.equal(generated[:, :20].cpu(), ids)

    def test_a_compiled_feed_forward_part_gives_the_same(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(CONFIGS, "llama", {**CONFIGS["llama"], "intermediate_size": 192})
        rotaquant.quantize(tiny_model("llama", torch.bfloat16), "w4a4kv4-rtn", output=tmp_path / "out")
        mlp = rotaquant.load(tmp_path / "out", device="cuda").model.layers[0].mlp
        assert isinstance(mlp, GatedMlp)
        x = rows(7, 64)
        # The very first call is a traced one.
        compiled = torch.compile(mlp, backend="aot_eager", fullgraph=True)(x)
        require_same(compiled, mlp(x))
