"""A model's experts as single linears, where transformers keeps them stacked in parameters of three dimensions.

Stacked `gate_up_proj[i]` and `down_proj[i]` become the linears `gate_up.{i}` and `down.{i}`, `[out, in]` whichever way
round they were stacked, so that rotating, quantizing and saving know linears alone.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rotaquant.architectures import Architecture, Experts
from rotaquant.runtime.gated_mlp import activation_of, has_hooks
from rotaquant.runtime.linear import QuantizedLinear


class SeparateExperts(nn.Module):
    """The experts of one block as linears, with the gating and the arguments of the stock module they came from.

    `gate_up_proj` and `down_proj` are empty tensors that guard the checkpoint: a loader that does not know this format
    meets a shape mismatch there and stops, where it would otherwise run with random experts.
    """

    gate_up: nn.ModuleList
    down: nn.ModuleList
    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(self, stock: nn.Module, experts: Experts) -> None:
        super().__init__()
        source: Any = stock
        self.count = experts.count
        self.is_transposed = bool(source.is_transposed)
        for kind in ("gate_up", "down"):
            weights = getattr(source, f"{kind}_proj")
            biases = getattr(source, f"{kind}_proj_bias") if source.has_bias else None
            slices = (_linear(weights, biases, index, self.is_transposed) for index in range(experts.count))
            self.add_module(kind, nn.ModuleList(slices))
            device = "cpu" if weights.is_meta else weights.device
            self.register_buffer(f"{kind}_proj", torch.empty(0, dtype=weights.dtype, device=device))
        # The stock module gates, each family in its own way. In a tuple, and without its parameters, it is no part of
        # the module tree: no state dict, cast or walk over modules meets it.
        gating = copy.copy(stock)
        gating._parameters = {}
        self._gating = (gating,)
        gates: Any = gating
        self.activation = activation_of(gates._apply_gate)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Tokens `[n, hidden]` through the experts `[n, k]` chosen for them, summed by their weights `[n, k]`.

        The index `count` chooses no expert.
        """
        output = torch.zeros_like(hidden_states)
        # Sorted by expert, stably, from a list that runs over tokens first: the order in which stock sums.
        chosen = top_k_index.T.flatten()
        order = chosen.argsort(stable=True)
        tokens = order % max(1, hidden_states.shape[0])
        weights = top_k_weights.T.flatten()[order].unsqueeze(-1)
        start = 0
        # One transfer from the device for all experts, where asking each for its tokens would wait for it every time.
        for index, count in enumerate(torch.bincount(chosen, minlength=self.count + 1).tolist()[: self.count]):
            if count == 0:
                continue
            stretch = slice(start, start + count)
            start += count
            rows = tokens[stretch]
            weighted = self._expert(index, hidden_states[rows]) * weights[stretch]
            output.index_add_(0, rows, weighted.to(output.dtype))
        return output

    def _expert(self, index: int, x: Tensor) -> Tensor:
        """Tokens `[n, hidden]` through one expert."""
        gate_up, down = self.gate_up[index](x), self.down[index]
        # The gate's copy runs it wherever it is not the kernels' own, or someone watches what goes into down.
        if self.activation is not None and isinstance(down, QuantizedLinear) and not has_hooks(down):
            if down.gates_on_kernels(gate_up) and not torch.is_autocast_enabled(x.device.type):
                gate, up = gate_up.chunk(2, dim=-1)
                return down.forward_gated(gate, up, self.activation)
        gating: Any = self._gating[0]
        return down(gating._apply_gate(gate_up))

    def extra_repr(self) -> str:
        """The number of experts, for `print(model)`."""
        return f"count={self.count}"


def _linear(weights: Tensor, biases: Tensor | None, index: int, transposed: bool) -> nn.Linear:
    """One expert's slice of stacked parameters as a linear that shares their memory where the layout allows it."""
    weight = weights[index].T.contiguous() if transposed else weights[index]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=biases is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    if biases is not None:
        linear.bias = nn.Parameter(biases[index].detach(), requires_grad=False)
    return linear


def unstack_experts(model: PreTrainedModel, architecture: Architecture) -> None:
    """Replace the experts module of every block that has one by `SeparateExperts`."""
    for block in architecture.blocks:
        if block.experts is not None:
            path = f"{block.path}.{block.experts.path}"
            model.set_submodule(path, SeparateExperts(model.get_submodule(path), block.experts))
