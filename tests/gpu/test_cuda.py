"""On a CUDA device: the same integers as on the CPU, the same pipeline, the same generation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import rotaquant
from rotaquant.ops import reference
from tests.tiny_models import CONFIGS, save_tiny, tokens

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
