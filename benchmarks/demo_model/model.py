# mypy: allow-subclassing-any
"""The whole model: trunk, MTP layer, language-model head, and the loss that trains them together.

Modules and parameters are made in a fixed order, so that a seed gives the same initial weights on every run.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Config
from .layers import Attention, GatedDeltaNet, RMSNorm, linear
from .moe import MixtureOfExperts


class Losses(NamedTuple):
    """Mean losses of one batch, all differentiable."""

    next_token: Tensor  # scalar, nats
    drafts: Tensor  # [chain], nats: the first, second, ... chained MTP draft
    balance: Tensor  # scalar, summed over every pass through a mixture of experts


class Layer(nn.Module):
    """One pre-norm layer: attention or Gated DeltaNet, then the mixture of experts."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = GatedDeltaNet(config)
        else:
            self.self_attn = Attention(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MixtureOfExperts(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mixer = self.linear_attn if self.kind == "linear_attention" else self.self_attn
        x = x + mixer(self.input_layernorm(x))
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance


class MTP(nn.Module):
    """Multi-token prediction: from token t+1 and the hidden state of t to the hidden state that predicts t+2.

    Its output is normed and may be fed back as the hidden state of the next draft.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = linear(2 * config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, "full_attention")])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        x, balance = self.layers[0](self.fc(both))
        return self.norm(x), balance


class Trunk(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, kind) for kind in config.layer_types])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed_tokens(ids)  # [B, T, D]
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).sum()


class Model(nn.Module):
    """The model to train. Matrices start with standard deviation 1/sqrt(inputs), the embedding with 0.02."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.mtp = MTP(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token: [B, T] -> [B, T, vocabulary]."""
        hidden, _ = self.model(ids)
        return self.lm_head(hidden)

    def hidden_states(self, ids: Tensor, chain: int) -> tuple[list[Tensor], Tensor]:
        """The final hidden states of the trunk and of ``chain`` drafts, [B, T, D] each; the balance loss.

        ids: [B, T + chain]. Row t of draft s has seen tokens up to t + s and predicts token t + s + 1; every
        draft is given the true tokens, and the trunk's or the previous draft's hidden state.
        """
        length = ids.shape[1] - chain
        hidden, balance = self.model(ids[:, :length])
        states = [hidden]
        for s in range(1, chain + 1):
            embedding = self.model.embed_tokens(ids[:, s : length + s])
            hidden, extra = self.mtp(embedding, hidden)
            states.append(hidden)
            balance = balance + extra
        return states, balance

    def loss(self, ids: Tensor, chain: int = 2) -> Losses:
        """Losses of next-token prediction and of ``chain`` chained drafts. ids: [B, T + 1 + chain]."""
        length = ids.shape[1] - 1 - chain
        states, balance = self.hidden_states(ids[:, :-1], chain)
        losses = []
        for s, hidden in enumerate(states):
            logits = self.lm_head(hidden).float()
            target = ids[:, s + 1 : length + s + 1]
            losses.append(F.cross_entropy(logits.flatten(0, 1), target.flatten()))
        return Losses(losses[0], torch.stack(losses[1:]), balance)
