"""What the commands about this machine tell on stdout: `doctor` and `tune`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rotaquant.console import _out, _print_fields, _table
from rotaquant.progress import human_size

if TYPE_CHECKING:
    from rotaquant.doctor import Device, Diagnosis, Operation
    from rotaquant.ops.dispatch import Paths
    from rotaquant.ops.product_plans import Plan
    from rotaquant.ops.tuned_plans import PlanFileState
    from rotaquant.tune import ShapeOutcome, TuningReport

# --- doctor ----------------------------------------------------------------------------------------------------


def print_diagnosis(found: Diagnosis) -> None:
    """Versions, then each device with what runs on it, then the paths of every compute capability."""
    _print_fields([(name, value or "not there") for name, value in found.versions.items()])
    for device in found.devices:
        sys.stdout.write("\n")
        _print_device(device)
    _print_paths(found.paths)


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """A diagnosis for `--json`; memory in bytes."""
    return {
        "versions": dict(found.versions),
        "devices": [_device_json(device) for device in found.devices],
        "paths": {_architecture(path.capability): _paths_json(path) for path in found.paths},
    }


def _print_device(device: Device) -> None:
    fields = [("device", device.device), ("name", device.name)]
    if device.capability is not None:
        fields.append(("compute capability", f"{_dotted(device.capability)} ({_architecture(device.capability)})"))
    if device.memory_bytes is not None:
        fields.append(("memory", human_size(device.memory_bytes)))
    if device.multiprocessors is not None:
        fields.append(("multiprocessors", str(device.multiprocessors)))
    if device.plan_file is not None:
        fields.append(("tuned plans", _plan_file_text(device.plan_file)))
    _print_fields([*fields, *(("note", note) for note in device.notes)])
    table = _table("operation", "what", "runs as", "why", text_columns=4)
    for operation in device.operations:
        table.add_row(Text(operation.name), Text(operation.task), Text(_runs_as(operation)), Text(operation.why))
    _out().print(table)


def _runs_as(operation: Operation) -> str:
    if not operation.kernels:
        return operation.implementation
    groups = operation.kernels.get("groups")
    by_rows = ", ".join(f"{kernel} ({rows})" for rows, kernel in operation.kernels.items() if rows != "groups")
    return f"{operation.implementation}, by tokens: {by_rows}" + (f"; with groups: {groups}" if groups else "")


def _plan_file_text(file: PlanFileState) -> str:
    if file.state == "absent":
        return f"none; `rotaquant tune` would write {file.path}"
    return file.reason or f"{file.plans} in use, from {file.path}"


def _print_paths(found: tuple[Paths, ...]) -> None:
    def yes(value: bool) -> str:
        return "yes" if value else "no"

    names = [_architecture(path.capability) for path in found]
    table = _table("path", *names, text_columns=len(names) + 1)
    rows = {
        "tensor copy engine (TMA)": [yes(path.copy_engine) for path in found],
        "programmatic dependent launch": [yes(path.early_launch) for path in found],
        "int8 tensor cores": [path.matrix_instruction for path in found],
        "shared memory of a program": [f"{path.shared_memory >> 10} KiB" for path in found],
        "kernels of products": [", ".join(path.kernels) for path in found],
        "state": ["measured" if path.measured else "built for, not measured" for path in found],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    _out().print(table)


def _device_json(device: Device) -> dict[str, Any]:
    fields = {**asdict(device), "capability": device.capability and _dotted(device.capability)}
    if device.plan_file is not None:
        fields["plan_file"] = {**asdict(device.plan_file), "path": str(device.plan_file.path)}
    return fields


def _paths_json(path: Paths) -> dict[str, Any]:
    return {name: value for name, value in asdict(path).items() if name != "capability"}


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _architecture(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"


# --- tune ------------------------------------------------------------------------------------------------------


def show_tuned_product(found: ShapeOutcome, left: int) -> None:
    """A line of progress on stderr."""
    outcome = found.outcome
    plan = "no plan" if outcome.plan is None else f"{_plan_text(outcome.plan)}, {_time_text(outcome.seconds)}"
    print(f"tuned: {_shape_text(found)}: {plan}; {left} left", file=sys.stderr, flush=True)


def print_tuning(report: TuningReport) -> None:
    """The plan of each product, its time against the standard plan's, and what became of the candidates."""
    table = _table("linears", "shape", "tokens", "plan", "time", "standard", "gain", "timed", text_columns=4)
    for found in report.results:
        outcome = found.outcome
        gain = "-"
        if outcome.seconds is not None and outcome.standard_seconds is not None:
            gain = f"{outcome.standard_seconds / outcome.seconds:.2f}x"
        table.add_row(
            Text("+".join(found.shape.linears)),
            f"{found.shape.outputs} x {found.shape.inputs}",
            str(outcome.problem.tokens),
            "-" if outcome.plan is None else _plan_text(outcome.plan),
            _time_text(outcome.seconds),
            _time_text(outcome.standard_seconds),
            gain,
            str(outcome.timed),
        )
    if report.results:
        _out().print(table)
    failed = sum(found.outcome.failed for found in report.results)
    wrong = [plan for found in report.results for plan in found.outcome.wrong]
    fields = [("device", report.device), ("kept in", str(report.file) if report.results else "nothing was tuned")]
    if failed:
        fields.append(("dropped", f"{failed} that did not compile or run"))
    fields += [("wrong", f"{_plan_text(plan)} gave a wrong result and is not used; please report it") for plan in wrong]
    if report.unfinished:
        fields.append(("unfinished", f"{report.unfinished} products; the same command goes on with them"))
    _print_fields(fields)


def tuning_json(report: TuningReport) -> dict[str, Any]:
    """A tuning run for `--json`; times in seconds."""
    return {
        "model": report.model,
        "device": report.device,
        "file": str(report.file),
        "unfinished": report.unfinished,
        "results": [
            {
                "linears": list(found.shape.linears),
                "outputs": found.shape.outputs,
                "inputs": found.shape.inputs,
                "weight_bits": 4 if found.shape.packed else 8,
                "groups": found.shape.groups,
                "tokens": found.outcome.problem.tokens,
                **{name: value for name, value in asdict(found.outcome).items() if name != "problem"},
            }
            for found in report.results
        ],
    }


def _shape_text(found: ShapeOutcome) -> str:
    shape, tokens = found.shape, found.outcome.problem.tokens
    each = f"{'+'.join(shape.linears)} {shape.outputs} x {shape.inputs}"
    return f"{each}, {tokens} token{'s' if tokens != 1 else ''}"


def _plan_text(plan: Plan) -> str:
    slices = f" in {plan.slices} slices" if plan.slices > 1 else ""
    return f"{plan.kernel} {plan.outputs}x{plan.tokens}x{plan.bytes}{slices}, {plan.warps} warps, {plan.stages} stages"


def _time_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f} us"
