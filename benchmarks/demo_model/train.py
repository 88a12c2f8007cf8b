"""Training: AdamW on random windows of the token file, with checkpoints from which a run resumes exactly."""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from strata_mlx.errors import Fault, InputError

from .config import Config, Recipe
from .data import read_tokens
from .model import Losses, Model

CHECKPOINT = "state.pt"
SAMPLING_SEED = 1000  # of the window offsets; the recipe's seed is added


@dataclass(frozen=True)
class Run:
    """How a run is carried out; nothing here changes what is learnt."""

    device: str = "auto"
    compile: bool = True  # on CUDA only
    seconds: int | None = None  # stop after this long, with a checkpoint
    log_every: int = 50
    save_every: int = 500

    def pick_device(self) -> str:
        if self.device == "auto":
            return "cuda" if torch.cuda.is_available() else "cpu"
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("PyTorch finds no CUDA device: use --device cpu, or install a CUDA build of PyTorch")
        return self.device


class Trainer:
    """Model, optimiser, random state and step counter: all that a checkpoint holds."""

    def __init__(self, config: Config, recipe: Recipe, device: str, model: Model | None = None) -> None:
        torch.manual_seed(recipe.seed)
        self.config = config
        self.recipe = recipe
        self.device = device
        self.model = (model or Model(config)).to(device)
        self.loss = self.model.loss
        self.optimizer = self._make_optimizer()
        self.generator = torch.Generator(device="cpu").manual_seed(SAMPLING_SEED + recipe.seed)
        self.step = 0

    def _make_optimizer(self) -> torch.optim.AdamW:
        """Weight decay on matrices, expert stacks and convolutions; none on the embedding and on vectors."""
        decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            (decayed if parameter.dim() >= 2 and "embed" not in name else plain).append(parameter)
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        fused = self.device == "cuda"
        return torch.optim.AdamW(groups, lr=self.recipe.learning_rate, betas=(0.9, 0.95), fused=fused)

    def sample(self, tokens: Tensor) -> Tensor:
        """The next batch: windows at random offsets, [batch, window]. tokens: [N], on the device."""
        window = self.recipe.window
        offsets = torch.randint(0, tokens.numel() - window + 1, (self.recipe.batch,), generator=self.generator)
        rows = offsets.to(self.device)[:, None] + torch.arange(window, device=self.device)
        return tokens[rows].long()

    def update(self, ids: Tensor) -> Losses:
        """One optimiser step on a batch; bfloat16 matrix products on CUDA, float32 elsewhere."""
        rate = self.recipe.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device == "cuda"):
            losses: Losses = self.loss(ids, len(self.recipe.draft_weights))
            weights = torch.tensor(self.recipe.draft_weights, device=self.device)
            drafts = (weights * losses.drafts).sum()
            total = losses.next_token + drafts + self.recipe.balance_weight * losses.balance
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return losses

    def save(self, path: Path) -> None:
        """Write a checkpoint; one that was there before stays whole until the new one is complete."""
        state = {
            "config": asdict(self.config),
            "recipe": asdict(self.recipe) | {"draft_weights": list(self.recipe.draft_weights)},
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "step": self.step,
        }
        partial = path.with_name(path.name + ".partial")
        try:
            torch.save(state, partial)
        except RuntimeError as error:  # so torch reports a full disk
            raise Fault(f"cannot write {partial}: {error}") from error
        partial.replace(path)

    def resume(self, path: Path) -> None:
        """Take up a checkpoint; raises InputError if it is of another architecture or recipe."""
        state = read_checkpoint(path, self.device)
        for what, ours in (("config", asdict(self.config)), ("recipe", asdict(self.recipe))):
            for name, value in ours.items():
                theirs = state[what].get(name)
                if (tuple(theirs) if isinstance(theirs, list) else theirs) != value:
                    raise InputError(
                        f"{path} was trained with {name} = {theirs}, not {value}: "
                        "give the same options to go on with it, or name another --out folder"
                    )
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())
        self.step = state["step"]


def read_checkpoint(path: Path, device: str = "cpu") -> dict[str, Any]:
    """The contents of a checkpoint that Trainer.save wrote."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: run `train` first, or name another folder")
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        complete = state.keys() >= {"config", "recipe", "model", "optimizer", "generator", "step"}
    except Exception as error:  # torch.load raises many kinds on a file that is not its own
        raise InputError(f"{path} is broken, or no checkpoint: delete it to begin anew") from error
    if not complete:
        raise InputError(f"{path} is not a checkpoint of `train`: delete it to begin anew")
    return state


def load_trained(folder: Path) -> Model:
    """The model of the checkpoint in a training folder, on the CPU."""
    state = read_checkpoint(folder / CHECKPOINT)
    model = Model(Config(**state["config"]))
    model.load_state_dict(state["model"])
    return model


def train(data: Path, out: Path, trainer: Trainer, run: Run) -> Losses | None:
    """Train until the recipe's last step or the time limit, from the checkpoint in ``out`` if there is one.

    Writes ``out/state.pt`` every ``save_every`` steps and at the end. Returns the losses of the last step
    (None if no step was left to do).
    """
    recipe, path = trainer.recipe, out / CHECKPOINT
    ids = read_tokens(data, recipe.window, trainer.config.vocab_size)
    tokens = torch.from_numpy(ids.astype(np.int32)).to(trainer.device)
    if path.exists():
        trainer.resume(path)
    out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    if run.compile and trainer.device == "cuda":
        trainer.loss = torch.compile(trainer.model.loss)
    losses, last_saved = None, trainer.step
    deadline = time.monotonic() + run.seconds if run.seconds else float("inf")
    with tqdm(total=recipe.steps, initial=trainer.step, desc="training", unit="step") as bar:
        while trainer.step < recipe.steps and time.monotonic() < deadline:
            losses = trainer.update(trainer.sample(tokens))
            bar.update()
            if trainer.step % run.log_every == 0 or trainer.step == recipe.steps:
                bar.write(describe(trainer.step, losses))
            if trainer.step % run.save_every == 0:
                trainer.save(path)
                last_saved = trainer.step
    if trainer.step > last_saved:
        trainer.save(path)
    return losses


def describe(step: int, losses: Losses) -> str:
    drafts = ", ".join(f"{loss:.3f}" for loss in losses.drafts.tolist())
    next_token, balance = losses.next_token.item(), losses.balance.item()
    return f"step {step}: loss {next_token:.4f}, drafts {drafts}, balance {balance:.3f}"
