# mypy: allow-subclassing-any
"""The mixture-of-experts block: softmax router, top-k experts of equal shape, one gated shared expert."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .layers import linear


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = linear(size, inner)
        self.up_proj = linear(size, inner)
        self.down_proj = linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def grouped_matmul(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply consecutive groups of rows by a matrix each: rows up to ``ends[e]`` belong to expert e.

    x: [N, I]; weights: [E, I, O]; ends: [E], int32. Returns [N, O].
    """
    if x.is_cuda:
        return F.grouped_mm(x, weights, offs=ends)
    groups = []
    start = 0
    for expert, end in enumerate(ends.tolist()):
        groups.append(x[start:end] @ weights[expert])
        start = end
    return torch.cat(groups)


class MixtureOfExperts(nn.Module):
    """Returns the block's output and its load-balance loss (1.0 where all experts are used alike).

    ``experts_gate_up`` [E, D, 2F] and ``experts_down`` [E, F, D] hold the experts in one tensor each; the
    checkpoint has them apart and transposed (see ``export``).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        experts, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate = linear(size, experts)
        self.experts_gate_up = nn.Parameter(torch.randn(experts, size, 2 * inner) * size**-0.5)
        self.experts_down = nn.Parameter(torch.randn(experts, inner, size) * inner**-0.5 * 0.3)
        self.shared_expert = MLP(size, config.shared_expert_intermediate_size)
        self.shared_expert_gate = linear(size, 1)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities of all experts [N, E], the top-k's renormalised weights and ids [N, K]; float32."""
        with torch.autocast(x.device.type, enabled=False):
            probabilities = torch.softmax(F.linear(x.float(), self.gate.weight), -1)
        weights, chosen = probabilities.topk(self.config.num_experts_per_tok, -1)
        return probabilities, weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])  # [N, D]
        probabilities, weights, chosen = self.route(x)
        picks = chosen.reshape(-1)  # [N * K]
        order = picks.argsort(stable=True)  # picks sorted by expert
        counts = torch.zeros(self.config.num_experts, device=x.device, dtype=torch.long)
        counts = counts.scatter_add(0, picks, torch.ones_like(picks))
        ends = counts.cumsum(0).to(torch.int32)
        token = order // self.config.num_experts_per_tok

        dtype = torch.bfloat16 if x.is_cuda else x.dtype  # what the CUDA grouped matmul takes
        hidden = grouped_matmul(x[token].to(dtype), self.experts_gate_up.to(dtype), ends)
        gate, up = hidden.chunk(2, -1)
        y = grouped_matmul((F.silu(gate) * up).to(dtype), self.experts_down.to(dtype), ends)
        y = y * weights.reshape(-1)[order, None].to(dtype)
        out = torch.zeros(x.shape, device=x.device, dtype=torch.float32).index_add(0, token, y.float())
        out = out + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)

        share = counts.float() / picks.numel()
        balance = self.config.num_experts * (share * probabilities.mean(0)).sum()
        return out.to(x.dtype).view(shape), balance
