"""What is trained (Config) and how (Recipe), and the ``config.json`` that a Config stands for."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from strata_mlx.errors import CheckpointError, InputError

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
)  # the vocabulary's last ids
MAX_VOCAB = 65536  # a token of the training file is two bytes


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(message)


@dataclass(frozen=True)
class Config:
    """The architecture, named as in the family's ``config.json``. Raises InputError if sizes disagree."""

    vocab_size: int = 8192
    hidden_size: int = 256
    num_hidden_layers: int = 8
    full_attention_interval: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    partial_rotary_factor: float = 0.25
    rope_theta: float = 10000.0
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    num_experts: int = 128
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 32
    shared_expert_intermediate_size: int = 128
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind, wanted = ("integer", int) if field.type is int else ("number", (int, float))
            good = isinstance(value, wanted) and not isinstance(value, bool) and value > 0
            _require(
                good,
                f"{field.name} must be a positive {kind}, not {value!r}",
            )
        _require(
            256 + len(SPECIAL_TOKENS) <= self.vocab_size <= MAX_VOCAB,
            f"vocab_size must lie between {256 + len(SPECIAL_TOKENS)} and {MAX_VOCAB}, not {self.vocab_size}",
        )
        self._require_multiple("num_attention_heads", "num_key_value_heads")
        self._require_multiple("linear_num_value_heads", "linear_num_key_heads")
        _require(
            self.num_experts_per_tok <= self.num_experts,
            f"num_experts_per_tok ({self.num_experts_per_tok}) exceeds num_experts ({self.num_experts})",
        )
        _require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0 and self.rotary_dim <= self.head_dim,
            f"head_dim * partial_rotary_factor must be even and at most head_dim, not {self.rotary_dim}",
        )

    def _require_multiple(self, many: str, few: str) -> None:
        larger, smaller = getattr(self, many), getattr(self, few)
        _require(larger % smaller == 0, f"{many} ({larger}) must be a multiple of {few} ({smaller})")

    @property
    def rotary_dim(self) -> int:
        """How many of the ``head_dim`` components RoPE turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def eos_token_id(self) -> int:
        return self.vocab_size - len(SPECIAL_TOKENS)

    @property
    def layer_types(self) -> list[str]:
        """Every ``full_attention_interval``-th layer attends; the others are Gated DeltaNet."""
        return [
            "linear_attention" if (i + 1) % self.full_attention_interval else "full_attention"
            for i in range(self.num_hidden_layers)
        ]

    def to_hf(self) -> dict[str, Any]:
        """The contents of ``config.json``."""
        return asdict(self) | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "hidden_act": "silu",
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "intermediate_size": 512,  # of dense MLP layers, of which there are none
            "tie_word_embeddings": False,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "num_nextn_predict_layers": 1,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": self.eos_token_id,
            "use_cache": True,
            "initializer_range": 0.02,
            "router_aux_loss_coef": 0.001,
            "layer_types": self.layer_types,
        }

    @classmethod
    def from_hf(cls, values: Mapping[str, Any]) -> "Config":
        """The inverse of ``to_hf``; raises CheckpointError where the file describes something else."""
        missing = [field.name for field in fields(cls) if field.name not in values]
        if missing:
            raise CheckpointError(f"config.json lacks {', '.join(missing)}")
        try:
            config = cls(**{field.name: values[field.name] for field in fields(cls)})
        except InputError as error:
            raise CheckpointError(f"config.json: {error}") from error
        for name, wanted in config.to_hf().items():
            if values.get(name, wanted) != wanted:
                raise CheckpointError(
                    f"config.json has {name} = {values[name]!r}, but the demo model has {wanted!r}: "
                    "only folders written by `export` can be read here"
                )
        return config


@dataclass(frozen=True)
class Recipe:
    """How the model is trained. The defaults see 213 M tokens; raises InputError on a value out of range."""

    steps: int = 3250
    batch: int = 64
    sequence: int = 1024
    learning_rate: float = 2e-3
    warmup_steps: int = 200
    balance_weight: float = 0.003
    draft_weights: tuple[float, ...] = (0.3, 0.15)  # of the MTP losses, one per chained draft
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "sequence", "learning_rate"):
            _require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        for name in ("warmup_steps", "balance_weight", "seed"):
            _require(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")

    @property
    def tokens(self) -> int:
        """Positions that the whole run learns from."""
        return self.steps * self.batch * self.sequence

    @property
    def window(self) -> int:
        """Tokens of one training sample: a sequence, its next token, and one more per chained draft."""
        return self.sequence + 1 + len(self.draft_weights)

    def rate(self, step: int) -> float:
        """Learning rate of the given step: linear warm-up, flat to 60 % of the run, linear down to 2 %."""
        progress = step / self.steps
        warmup = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        decay = 1.0 if progress < 0.6 else max(0.02, (1 - progress) / 0.4)
        return self.learning_rate * warmup * decay
