"""What runs on this machine, and why: devices, versions, tuned plans, the implementation of every operation."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch

from rotaquant.ops import device_features, tuned_plans
from rotaquant.ops.dispatch import (
    CAPABILITIES,
    MEASURED,
    OLDEST,
    OUT_BYTES,
    Capability,
    Paths,
    architecture_name,
    has_copy_engine,
    has_kernel,
    matrix_instruction,
    paths,
)
from rotaquant.ops.library import triton_missing
from rotaquant.ops.product_plans import Problem, choose
from rotaquant.ops.tuned_plans import PlanFileState

Implementation = Literal["definition in PyTorch", "Triton kernel"]

DEFINITION: Implementation = "definition in PyTorch"
KERNEL: Implementation = "Triton kernel"

# What each operation does, and the name under which torch knows it, if it does: where it does not, it has no kernel.
OPERATIONS: Mapping[str, tuple[str, str]] = {
    "quantize_rows": ("activations to codes", "quantize_rows"),
    "rmsnorm_quantize": ("norm, then codes", "rmsnorm_quantize"),
    "hadamard": ("online rotation", "rotate"),
    "head_mix": ("online mix of heads", "rotate"),
    "hadamard_quantize": ("online rotation, then codes", "rotate_quantize"),
    "silu_mul_hadamard_quantize": ("SiLU gate, rotation, codes", "gated_rotate_quantize"),
    "gelu_mul_hadamard_quantize": ("GELU gate, rotation, codes", "gated_rotate_quantize"),
    "quantize_matmul": ("codes, then their product", "quantize_matmul"),
    "int4_matmul": ("4-bit weights, quantized activations", "int4_matmul"),
    "int8_matmul": ("8-bit weights, quantized activations", "int8_matmul"),
    "w4a16_matmul": ("4-bit weights, float activations", "w4a16_matmul"),
    "cache_append": ("keys and values to pages", "cache_append"),
    "cache_attention": ("attention over pages", "cache_attention"),
    "cache_read": ("pages to keys and values", "cache_read"),
    "kv_codec": ("packed rows, where pages cannot be", "kv_codec"),
    "attention": ("attention over packed rows", "attention"),
}

# Operations whose kernel depends on the shape, and whether their weights are packed two a byte.
_PRODUCTS = {"int4_matmul": True, "int8_matmul": False}
# What a kernel does not take, and what is done then: the same name means another number of kernels there.
_BY_DEFINITION = (
    "float32 models and widths that it cannot split (such as 29568, 36864, 53248) run the definition; with 99 KiB of "
    "shared memory so do most above 16384 and some below (8960, 11008, 14592)"
)
_LIMITS: Mapping[str, str] = {
    "hadamard": f"for 16-bit inputs; {_BY_DEFINITION}",
    "head_mix": "for 16-bit inputs; float32 models and mixes of too many heads (such as 71) run the definition",
    "hadamard_quantize": (
        f"for 16-bit inputs; with group scales it takes two kernels, rotation, then codes; {_BY_DEFINITION}"
    ),
    **dict.fromkeys(
        ("silu_mul_hadamard_quantize", "gelu_mul_hadamard_quantize"),
        "for 16-bit inputs; with group scales torch gates, then rotation and codes take a kernel each; "
        f"{_BY_DEFINITION}",
    ),
    "quantize_matmul": (
        "one kernel for 1 or 2 tokens of 16-bit inputs (8192 columns at most beside 4-bit weights, 4096 beside 8-bit "
        "ones) without group scales; two kernels otherwise"
    ),
    "w4a16_matmul": (
        "for 16-bit inputs of 64 tokens or fewer; for more each call widens the whole weight, and cuBLAS multiplies; "
        "float32 models run the definition"
    ),
    "cache_append": (
        "for 16-bit inputs; float32 models run the definition; group scales and dense rotations take packed rows"
    ),
    "cache_attention": "for 16-bit queries, 16 at most; more attend over keys and values that cache_read gives",
    "cache_read": "for 16-bit outputs; float32 models run the definition",
}

_SAMPLE_ROWS = (1, 16, 64, 2048)
_SAMPLE_WIDTH = 4096
_SAMPLE_GROUP = 128

_PACKAGES = ("rotaquant", "torch", "triton", "transformers")


@dataclass(frozen=True)
class Operation:
    """An operation, what runs it, and why; `kernels` tells which kernel serves how many tokens, where it depends."""

    name: str
    task: str
    implementation: Implementation
    kernels: Mapping[str, str]
    why: str


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device and what runs on it; memory in bytes. Of a CPU neither capability nor memory is told."""

    device: str
    name: str
    capability: Capability | None
    memory_bytes: int | None
    multiprocessors: int | None
    plan_file: PlanFileState | None
    operations: tuple[Operation, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """What `rotaquant doctor` tells: versions by name (`None`: not there), devices, paths by compute capability."""

    versions: Mapping[str, str | None]
    devices: tuple[Device, ...]
    paths: tuple[Paths, ...]


def examine() -> Diagnosis:
    """Look at this machine; nothing is compiled and no model is touched."""
    if torch.cuda.is_available():
        devices = tuple(_gpu(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
    else:
        devices = (_cpu(),)
    return Diagnosis(versions(), devices, tuple(paths(capability) for capability in CAPABILITIES))


def versions() -> dict[str, str | None]:
    """Versions of what the kernels depend on; `None` for what is not there or does not tell."""
    found = {package: _version(package) for package in _PACKAGES}
    found["triton"] = tuned_plans.triton_version()
    return {**found, "python": platform.python_version(), "cuda": torch.version.cuda, "driver": _driver()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The newest CUDA that the driver serves, where torch can ask it."""
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)
    number = ask() if ask is not None and torch.cuda.is_available() else 0
    return f"serves CUDA up to {number // 1000}.{number % 1000 // 10}" if number else None


# --- devices ---------------------------------------------------------------------------------------------------


def _cpu() -> Device:
    reason = no_gpu_reason()
    operations = tuple(Operation(name, task, DEFINITION, {}, reason) for name, (task, _) in OPERATIONS.items())
    return Device(
        device="cpu",
        name=platform.machine() or "CPU",
        capability=None,
        memory_bytes=None,
        multiprocessors=None,
        plan_file=None,
        operations=operations,
        notes=(),
    )


def no_gpu_reason() -> str:
    """Why there is no CUDA device to run kernels on."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"no CUDA device: this torch ({torch.__version__}) is built for the CPU"
    return "no CUDA device: torch sees none"


def _gpu(device: torch.device) -> Device:
    properties = torch.cuda.get_device_properties(device)
    capability = device_features.capability(device)
    kind = tuned_plans.device_kind(device)
    return Device(
        device=str(device),
        name=properties.name,
        capability=capability,
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        plan_file=None if kind is None else tuned_plans.state(kind),
        operations=tuple(_operation(name, device, capability) for name in OPERATIONS),
        notes=_notes(capability),
    )


def _notes(capability: Capability | None) -> tuple[str, ...]:
    if capability is None:
        return ("this is no NVIDIA device: the kernels are neither built for it nor measured on it",)
    if capability < OLDEST:
        return (f"the kernels are built for {architecture_name(OLDEST)} and later",)
    if capability not in MEASURED:
        return (f"the kernels are built for {architecture_name(capability)}, but not measured on it",)
    return ()


# --- operations ------------------------------------------------------------------------------------------------


def _operation(name: str, device: torch.device, capability: Capability | None) -> Operation:
    task, registered = OPERATIONS[name]
    if not has_kernel(registered):
        return Operation(name, task, DEFINITION, {}, "it has no kernel of its own; torch's run it")
    missing = triton_missing()
    if missing is not None:
        return Operation(name, task, DEFINITION, {}, missing)
    if name not in _PRODUCTS:
        return Operation(name, task, KERNEL, {}, _LIMITS.get(name, "for all but float64 inputs"))
    kernels = product_kernels(device, _PRODUCTS[name])
    return Operation(name, task, KERNEL, kernels, _why_these(kernels[str(_SAMPLE_ROWS[-1])], capability))


def product_kernels(device: torch.device, packed: bool) -> dict[str, str]:
    """Which kernel multiplies how many tokens, for a layer of 4096 inputs and outputs, tuned plans included."""
    plane = _SAMPLE_WIDTH // 2 if packed else _SAMPLE_WIDTH
    found = {}
    for tokens in _SAMPLE_ROWS:
        problem = Problem(tokens=tokens, outputs=_SAMPLE_WIDTH, plane=plane, packed=packed)
        found[str(tokens)] = _kernel(problem, device)
    groups = _SAMPLE_WIDTH // _SAMPLE_GROUP
    grouped = Problem(tokens=_SAMPLE_ROWS[-1], outputs=_SAMPLE_WIDTH, plane=plane, packed=packed, groups=groups)
    found["groups"] = _kernel(grouped, device)
    return found


def _kernel(problem: Problem, device: torch.device) -> str:
    return (tuned_plans.lookup(problem, device, OUT_BYTES) or choose(problem, device, OUT_BYTES)).kernel


def _why_these(kernel_of_many: str, capability: Capability | None) -> str:
    if capability is None:
        return "no NVIDIA device: neither a copy engine nor PTX is assumed"
    engine = "a" if has_copy_engine(capability) else "no"
    return (
        f"{architecture_name(capability)} has {engine} tensor copy engine: the {kernel_of_many} kernel is used for "
        f"many tokens; int8 products by {matrix_instruction(capability)}; only the tile kernel knows group scales"
    )
