# mypy: allow-subclassing-any
"""Norms, gated attention and Gated DeltaNet, in training form: whole sequences, no caches.

Shapes: B sequences of T tokens, hidden size D; H heads of size d. Attributes are named as
in the checkpoint.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config

CHUNK = 64  # positions that the gated delta rule handles in parallel


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False)


def normalised(x: Tensor, eps: float) -> Tensor:
    """``x`` in float32, divided by its root mean square over the last axis."""
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """RMSNorm whose weight is stored around zero: the scale is ``1 + weight``."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return (normalised(x, self.eps) * (1 + self.weight)).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm with a plain weight, times SiLU of a gate; the norm of Gated DeltaNet's output."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return (normalised(x, self.eps) * self.weight * F.silu(gate.float())).to(gate.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with normed queries and keys, partial RoPE and a sigmoid output gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, 2 * queries)  # per head: query, then gate
        self.k_proj = linear(config.hidden_size, keys)
        self.v_proj = linear(config.hidden_size, keys)
        self.o_proj = linear(queries, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        exponents = torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim
        self.register_buffer("frequencies", 1.0 / config.rope_theta**exponents, persistent=False)

    def rope(self, x: Tensor) -> Tensor:
        """Turn the first ``rotary_dim`` components by position, first half against second: [B, H, T, d]."""
        positions = torch.arange(x.shape[2], device=x.device).float()
        angles = positions[:, None] * self.frequencies  # [T, rotary_dim / 2]
        cos, sin = angles.cos(), angles.sin()
        half = self.config.rotary_dim // 2
        first = x[..., :half].float()
        second = x[..., half : 2 * half].float()
        rest = x[..., 2 * half :]
        turned_first = (first * cos - second * sin).to(x.dtype)
        turned_second = (first * sin + second * cos).to(x.dtype)
        return torch.cat([turned_first, turned_second, rest], -1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        q, gate = self.q_proj(x).view(batch, length, heads, -1).chunk(2, -1)  # [B, T, H, d] each
        k = self.k_proj(x).view(batch, length, kv_heads, -1)
        v = self.v_proj(x).view(batch, length, kv_heads, -1).transpose(1, 2)
        q = self.rope(self.q_norm(q).transpose(1, 2)).to(v.dtype)
        k = self.rope(self.k_norm(k).transpose(1, 2)).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # [B, H, T, d]
        y = y.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(y * torch.sigmoid(gate.reshape(batch, length, -1)))


def gated_delta(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule over whole sequences, in float32, chunk by chunk.

    Per head the state S (key size x value size) follows, with decay a_t = exp(log_decay_t),
    ``S_t = a_t S_{t-1} + k_t beta_t (v_t - k_t^T a_t S_{t-1})^T``, and the output is ``q_t^T S_t``. Within a
    chunk the updates are solved together as one unit-triangular system (Yang et al. 2024, "Gated Delta
    Networks: Improving Mamba2 with Delta Rule").

    q, k: [B, H, T, d_k]; v: [B, H, T, d_v]; log_decay, beta: [B, H, T]. Returns [B, H, T, d_v].
    """
    batch, heads, length, key_size = q.shape
    value_size = v.shape[-1]
    padding = -length % CHUNK  # zeros at the end change nothing before them
    chunks = (length + padding) // CHUNK

    def chunked(x: Tensor) -> Tensor:
        widths = (0, 0, 0, padding) if x.dim() == 4 else (0, padding)
        return F.pad(x.float(), widths).unflatten(2, (chunks, CHUNK))

    q, k, v, log_decay, beta = (chunked(x) for x in (q, k, v, log_decay, beta))  # [B, H, n, C, ...]
    total = log_decay.cumsum(-1)  # log decay from the chunk's start to each position
    causal = torch.ones(CHUNK, CHUNK, device=q.device, dtype=torch.bool).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -1e9).exp()  # [B, H, n, C, C]

    # Each update, before the state at the chunk's start is known: `fresh - seen @ S`.
    weighted_k = k * beta[..., None]
    weighted_v = v * beta[..., None]
    system = (weighted_k @ k.transpose(-1, -2) * between).tril(-1) + torch.eye(CHUNK, device=q.device)
    right = torch.cat([weighted_v, weighted_k * total.exp()[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    fresh, seen = solved.split([value_size, key_size], -1)

    attention = (q @ k.transpose(-1, -2)) * between
    q_decayed = q * total.exp()[..., None]
    k_decayed = k * (total[..., -1:] - total).exp()[..., None]
    chunk_decay = total[..., -1].exp()[..., None, None]
    state = torch.zeros(batch, heads, key_size, value_size, device=q.device)
    outputs = []
    for i in range(chunks):
        update = fresh[:, :, i] - seen[:, :, i] @ state
        outputs.append(q_decayed[:, :, i] @ state + attention[:, :, i] @ update)
        state = state * chunk_decay[:, :, i] + k_decayed[:, :, i].transpose(-1, -2) @ update
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length]


class GatedDeltaNet(nn.Module):
    """Linear attention by the gated delta rule, behind a short causal convolution."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        value_heads = config.linear_num_value_heads
        self.keys = config.linear_num_key_heads * config.linear_key_head_dim
        self.values = value_heads * config.linear_value_head_dim
        channels = 2 * self.keys + self.values
        self.in_proj_qkvz = linear(config.hidden_size, 2 * self.keys + 2 * self.values)
        self.in_proj_ba = linear(config.hidden_size, 2 * value_heads)
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(value_heads))
        self.A_log = nn.Parameter(torch.log(torch.linspace(0.5, 8, value_heads)))
        self.norm = GatedRMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = linear(self.values, config.hidden_size)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v side by side [B, T, channels], output gate [B, T, H, d_v], beta and decay inputs [B, T, H].

        The projections hold, per key head, that head's q and k and the v, z, b and a of its value heads.
        """
        batch, length, _ = x.shape
        key_heads, heads = self.config.linear_num_key_heads, self.config.linear_num_value_heads
        d_k, d_v = self.config.linear_key_head_dim, self.config.linear_value_head_dim
        group = heads // key_heads
        qkvz = self.in_proj_qkvz(x).view(batch, length, key_heads, -1)
        q, k, v, z = qkvz.split([d_k, d_k, group * d_v, group * d_v], -1)
        b, a = self.in_proj_ba(x).view(batch, length, key_heads, -1).split([group, group], -1)
        mixed = torch.cat([part.reshape(batch, length, -1) for part in (q, k, v)], -1)
        z = z.reshape(batch, length, heads, d_v)
        return mixed, z, b.reshape(batch, length, heads), a.reshape(batch, length, heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        key_heads, heads = self.config.linear_num_key_heads, self.config.linear_num_value_heads
        d_k, d_v = self.config.linear_key_head_dim, self.config.linear_value_head_dim
        mixed, z, b, a = self.project(x)
        padded = F.pad(mixed.transpose(1, 2), (self.config.linear_conv_kernel_dim - 1, 0))
        mixed = F.silu(self.conv1d(padded)).transpose(1, 2)  # [B, T, channels]
        q, k, v = mixed.split([self.keys, self.keys, self.values], -1)
        q = q.reshape(batch, length, key_heads, d_k).float()
        k = k.reshape(batch, length, key_heads, d_k).float()
        q = q * torch.rsqrt(q.pow(2).sum(-1, keepdim=True) + 1e-6) * d_k**-0.5
        k = k * torch.rsqrt(k.pow(2).sum(-1, keepdim=True) + 1e-6)
        q = q.repeat_interleave(heads // key_heads, 2).transpose(1, 2)  # [B, H, T, d_k]
        k = k.repeat_interleave(heads // key_heads, 2).transpose(1, 2)
        v = v.reshape(batch, length, heads, d_v).transpose(1, 2)  # [B, H, T, d_v]
        log_decay = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
        beta = torch.sigmoid(b.float())
        y = gated_delta(q, k, v, log_decay.transpose(1, 2), beta.transpose(1, 2))
        y = self.norm(y.transpose(1, 2).to(x.dtype), z)  # [B, T, H, d_v]
        return self.out_proj(y.reshape(batch, length, -1))
