"""What `rotaquant doctor` finds: with no GPU, with pretended ones, without Triton, with tuned plans."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rotaquant import doctor
from rotaquant.doctor import Device, examine
from rotaquant.hadamard import factor_or_fallback
from rotaquant.ops import dispatch, rotations, tuned_plans
from rotaquant.ops.factors import mix_factors, rotation_factors
from rotaquant.ops.product_plans import Plan
from rotaquant.ops.tuned_plans import TunedPlan
from rotaquant.rotation.plan import plan_head_mix
from tests.fake_gpu import fake_gpu

ROOT = Path(__file__).resolve().parents[1]
TILE = Plan(kernel="tile", outputs=32, tokens=16, bytes=64, warps=4, stages=4)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROTAQUANT_CACHE", str(tmp_path))
    monkeypatch.setattr(tuned_plans, "triton_version", lambda: "3.6.0")


@pytest.fixture
def with_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(doctor, "triton_missing", lambda: None)
    yield


def only_device() -> Device:
    [device] = examine().devices
    return device


def test_without_a_gpu_everything_runs_by_its_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    device = only_device()
    assert (device.device, device.capability, device.plan_file) == ("cpu", None, None)
    names = [operation.name for operation in device.operations]
    assert names == list(doctor.OPERATIONS)
    assert {operation.implementation for operation in device.operations} == {"definition in PyTorch"}
    for cuda, words in ((None, f"this torch ({torch.__version__}) is built for the CPU"), ("13.0", "torch sees none")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert {operation.why for operation in only_device().operations} == {f"no CUDA device: {words}"}


@pytest.mark.usefixtures("with_triton")
@pytest.mark.parametrize(
    ("capability", "many", "why"),
    [
        (
            (8, 0),
            "tile",
            "sm_80 has no tensor copy engine: the tile kernel is used for many tokens; int8 products by mma",
        ),
        (
            (9, 0),
            "tma",
            "sm_90 has a tensor copy engine: the tma kernel is used for many tokens; int8 products by wgmma",
        ),
        (
            (12, 0),
            "tma",
            "sm_120 has a tensor copy engine: the tma kernel is used for many tokens; int8 products by mma",
        ),
    ],
)
def test_on_a_gpu_products_take_the_kernels_of_its_capability(capability: tuple[int, int], many: str, why: str) -> None:
    with fake_gpu(capability):
        device = only_device()
    assert (device.device, device.name, device.capability) == ("cuda:0", "NVIDIA Test 9", capability)
    assert (device.memory_bytes, device.multiprocessors) == (80_000_000_000, 132)
    found = {operation.name: operation for operation in device.operations}
    for name in ("int4_matmul", "int8_matmul"):
        assert found[name].implementation == "Triton kernel" and found[name].why.startswith(why)
        assert list(found[name].kernels) == ["1", "16", "64", "2048", "groups"]
        assert (found[name].kernels["2048"], found[name].kernels["groups"]) == (many, "tile")
    assert found["quantize_rows"].implementation == "Triton kernel"
    for name, operation in found.items():
        assert (operation.implementation == "Triton kernel") == dispatch.has_kernel(doctor.OPERATIONS[name][1])
    assert "no kernel" in found["attention"].why
    state = "not measured on it"
    assert any(state in note for note in device.notes) == (capability != (9, 0))


def test_every_operation_that_torch_knows_is_told_of() -> None:
    names = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("rotaquant::")}
    told = {registered for _, registered in doctor.OPERATIONS.values()}
    assert len(names) >= 8 and {name.removeprefix("rotaquant::") for name in names} <= told


@pytest.mark.usefixtures("with_triton")
def test_what_a_kernel_does_not_take_is_told() -> None:
    with fake_gpu((9, 0)):
        whys = {operation.name: operation.why for operation in only_device().operations}
    for name in ("hadamard_quantize", "silu_mul_hadamard_quantize", "gelu_mul_hadamard_quantize"):
        assert "with group scales" in whys[name] and "rotation" in whys[name] and "codes" in whys[name]
    for name in ("hadamard", "head_mix", "hadamard_quantize", "silu_mul_hadamard_quantize", "w4a16_matmul"):
        assert re.search(r"for 16-bit inputs.*float32 models.* run the definition", whys[name])
    for name in ("int4_matmul", "int8_matmul"):
        assert whys[name].endswith("only the tile kernel knows group scales")


def widths_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\b\d{5}\b", text)]


def rotates_by_kernel(width: int, capability: tuple[int, int]) -> bool:
    factors = rotation_factors(factor_or_fallback(width))
    assert factors is not None
    with fake_gpu(capability) as device:
        return rotations.has_kernel(width, torch.bfloat16, device, factors.order, factors.right)


@pytest.mark.usefixtures("with_triton")
def test_widths_that_are_told_to_have_no_kernel_have_none() -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    with fake_gpu((9, 0)):
        whys = {operation.name: operation.why for operation in only_device().operations}
    section = (ROOT / "README.md").read_text().partition("## On a GPU")[2].partition("\n## ")[0]
    for told in (whys["hadamard"], whys["hadamard_quantize"], whys["silu_mul_hadamard_quantize"], section):
        everywhere, _, small = told.partition("99 KiB")
        widths = [width for width in widths_in(everywhere) if width != 32768]
        assert {29568, 36864, 53248} <= set(widths)
        assert [rotation_factors(factor_or_fallback(width)) for width in widths] == [None] * len(widths)
        widths = [int(number) for number in re.findall(r"\b\d{4,5}\b", small.partition(". A warning")[0])]
        narrow = [width for width in widths if width != 16384]
        assert narrow == [8960, 11008, 14592] and len(widths) == 4
        wide = [17408, 17920, 18944, 20480, 21504, 22016, 24576, 25600, 27648, 28672, 32768]
        for capability, expected in (((9, 0), True), ((8, 6), False)):
            assert [rotates_by_kernel(width, capability) for width in narrow + wide] == [expected] * 14
        assert all(rotates_by_kernel(width, (8, 6)) for width in (4096, 9728, 12288, 13824, 14336, 15360, 16384))
    assert rotation_factors(factor_or_fallback(32768)) is not None
    assert "such as 71" in whys["head_mix"] and "71" in section
    for heads, has_kernel in ((71, False), (9, True), (64, True), (128, True)):
        mix = plan_head_mix(heads, factor_or_fallback(64), 1)
        assert mix is not None and (mix_factors(mix.matrix(), 1, heads * 64) is not None) == has_kernel


@pytest.mark.usefixtures("with_triton")
def test_how_many_tokens_a_float_product_takes_is_told() -> None:
    pytest.importorskip("triton", reason="needs Triton: pip install triton")
    from rotaquant.ops.weight_only_kernels import FEW_TOKENS

    with fake_gpu((9, 0)):
        whys = {operation.name: operation.why for operation in only_device().operations}
    assert f"{FEW_TOKENS} tokens or fewer" in whys["w4a16_matmul"]
    assert f"up to {FEW_TOKENS} tokens" in (ROOT / "README.md").read_text()


def test_notes_on_devices_that_the_kernels_are_not_built_for() -> None:
    with fake_gpu((7, 5)):
        assert only_device().notes == ("the kernels are built for sm_80 and later",)
    with fake_gpu((9, 0)), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.version, "hip", "6.4")
        device = only_device()
    assert device.capability is None and "no NVIDIA device" in device.notes[0]


def test_without_triton_a_gpu_runs_definitions_and_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the package triton is not installed (pip install triton)"
    monkeypatch.setattr(doctor, "triton_missing", lambda: reason)
    monkeypatch.setattr(tuned_plans, "triton_version", lambda: None)
    with fake_gpu((9, 0)):
        found = examine()
    assert found.versions["triton"] is None and found.devices[0].plan_file is None
    assert {operation.implementation for operation in found.devices[0].operations} == {"definition in PyTorch"}
    whys = {operation.name: operation.why for operation in found.devices[0].operations}
    assert whys["int4_matmul"] == whys["quantize_rows"] == reason


@pytest.mark.usefixtures("with_triton")
def test_tuned_plans_are_told_and_taken() -> None:
    with fake_gpu((9, 0)) as device:
        file = only_device().plan_file
        assert file is not None and file.state == "absent"
        kind = tuned_plans.device_kind(device)
        assert kind is not None and file.path == kind.file
        entry = TunedPlan(outputs=4096, plane=2048, packed=True, groups=1, tokens=16, plan=TILE, seconds=1e-5)
        before = next(operation for operation in only_device().operations if operation.name == "int4_matmul")
        tuned_plans.store(kind, [entry])
        after = only_device()
        [int4] = [operation for operation in after.operations if operation.name == "int4_matmul"]
        assert after.plan_file is not None and (after.plan_file.state, after.plan_file.plans) == ("in use", 1)
        assert before.kernels["16"] != "tile" and int4.kernels == {**before.kernels, "16": "tile"}
        kind.file.write_text("{")
        ignored = only_device().plan_file
        assert ignored is not None and ignored.state == "ignored" and "is damaged" in str(ignored.reason)


def test_paths_of_capabilities() -> None:
    found = {dispatch.architecture_name(path.capability): path for path in examine().paths}
    assert list(found) == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert [name for name, path in found.items() if path.measured] == ["sm_90"]
    assert "tma" not in found["sm_89"].kernels and "tma" in found["sm_90"].kernels
    assert [path.shared_memory >> 10 for path in found.values()] == [163, 99, 99, 227, 227, 99]


def test_versions() -> None:
    found = doctor.versions()
    assert found["torch"] == torch.__version__ and found["triton"] == "3.6.0" and found["driver"] is None
    assert list(found) == ["rotaquant", "torch", "triton", "transformers", "python", "cuda", "driver"]


def test_the_driver_is_told_where_torch_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 12080, raising=False)
    with fake_gpu((9, 0)):
        assert doctor.versions()["driver"] == "serves CUDA up to 12.8"


def test_triton_is_not_imported_for_it() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from rotaquant.doctor import examine; import rotaquant.tune\n"
        "assert examine().devices; assert 'rotaquant.ops.product_kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
