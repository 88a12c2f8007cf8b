"""What a person with PyTorch can verify in seconds on a CPU, before and after a training run."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from strata_mlx.errors import Fault

from .config import Config, Recipe
from .evaluate import measure, read_text, windows
from .export import export, load
from .layers import gated_delta
from .layout import read_config
from .model import Model
from .train import Trainer

Check = Callable[[Path], str]

TINY = Config(
    vocab_size=259,  # bytes and the special tokens
    hidden_size=32,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=32,
)
TINY_RECIPE = Recipe(steps=20, batch=4, sequence=64, learning_rate=1e-2, warmup_steps=4)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Fault(message)


def check_recurrence(_: Path) -> str:
    """The chunked gated delta rule is the recurrence that it stands for."""
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 150)  # two chunks and a part of one

    def draw(*sizes: int) -> Tensor:
        return torch.randn(*shape, *sizes, generator=generator)

    k = torch.nn.functional.normalize(draw(16), dim=-1)
    q, v, log_decay, beta = draw(16), draw(8), -draw().abs() / 4, draw().sigmoid()
    state = torch.zeros(*shape[:2], 16, 8)
    outputs = []
    for t in range(shape[2]):
        state = state * log_decay[:, :, t, None, None].exp()
        remembered = (k[:, :, t, None] @ state)[:, :, 0]
        update = beta[:, :, t, None] * (v[:, :, t] - remembered)
        state = state + k[:, :, t, :, None] * update[:, :, None]
        outputs.append((q[:, :, t, None] @ state)[:, :, 0])
    difference = (gated_delta(q, k, v, log_decay, beta) - torch.stack(outputs, 2)).abs().max().item()
    expect(difference < 1e-4, f"the chunked gated delta rule is off by {difference:.1e}")
    return f"the chunked gated delta rule equals its recurrence: largest difference {difference:.1e}"


def check_causality(_: Path) -> str:
    """Row t of draft s sees the tokens up to t + s, all that it should and no later one."""
    chain, changed = 2, 50
    torch.manual_seed(0)
    model = Model(TINY)
    before = torch.randint(0, 256, (1, 80 + chain))
    after = before.clone()
    after[0, changed] = (after[0, changed] + 1) % 256
    with torch.no_grad():
        pairs = zip(model.hidden_states(before, chain)[0], model.hidden_states(after, chain)[0], strict=True)
    for s, (one, other) in enumerate(pairs):
        moved = (one - other).abs().amax(-1)[0] > 1e-4
        first = int(moved.int().argmax())
        expect(bool(moved.any()), f"draft {s} does not see its tokens")
        expect(first == changed - s, f"draft {s} sees token {changed} in row {first}, not in row {changed - s}")
    return "row t of the trunk sees tokens up to t, of the first draft up to t + 1, of the second up to t + 2"


def check_training(_: Path) -> str:
    """A few steps reduce the loss, and an interrupted run ends with the weights of an uninterrupted one."""
    text = "\n".join(read_text([Path(__file__).parent]))
    tokens = torch.tensor(list(text.encode()), dtype=torch.int32)
    whole = Trainer(TINY, TINY_RECIPE, "cpu")
    losses = [whole.update(whole.sample(tokens)).next_token.item() for _ in range(TINY_RECIPE.steps)]
    expect(losses[-1] < losses[0] - 1, f"the loss went from {losses[0]:.2f} only to {losses[-1]:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state.pt")
        first_half = Trainer(TINY, TINY_RECIPE, "cpu")
        for _step in range(TINY_RECIPE.steps // 2):
            first_half.update(first_half.sample(tokens))
        first_half.save(path)
        second_half = Trainer(TINY, TINY_RECIPE, "cpu")
        second_half.resume(path)
        while second_half.step < TINY_RECIPE.steps:
            second_half.update(second_half.sample(tokens))
    pairs = zip(whole.model.parameters(), second_half.model.parameters(), strict=True)
    same = all(torch.equal(one, other) for one, other in pairs)
    expect(same, "a resumed run ends with other weights than an uninterrupted one")
    return (
        f"{TINY_RECIPE.steps} steps of a tiny model: loss {losses[0]:.2f} to {losses[-1]:.2f}; "
        "a run resumed half-way ends with the same weights"
    )


def check_round_trip(folder: Path) -> str:
    """Loading the folder and exporting it again gives the same files, byte for byte."""
    shards = {path.name for path in folder.glob("*.safetensors")}
    with tempfile.TemporaryDirectory() as parent:
        again = Path(parent, "model")
        names = export(load(folder), folder / "tokenizer.json", again)
        for name in names:
            there = folder / name
            expect(there.is_file(), f"{folder} has no {name}")
            expect(there.read_bytes() == (again / name).read_bytes(), f"{there} is not what `export` writes")
    expect(shards <= set(names), f"{folder} has shards that `export` does not write: {shards - set(names)}")
    return f"{len(names)} files are byte for byte what `export` writes, {len(shards)} shards among them"


def check_drafts(folder: Path) -> str:
    """The MTP layer of the folder predicts as it is wired here, and only so."""
    model = load(folder)
    ids = windows(read_text([Path(__file__).parent]), folder / "tokenizer.json", 260, 8)
    right = measure(model, ids)
    half = read_config(folder).hidden_size
    fc = model.mtp.fc.weight.data
    model.mtp.fc.weight.data = torch.cat([fc[:, half:], fc[:, :half]], 1)  # as if [hidden, embedding]
    swapped = measure(model, ids)
    losses = ", ".join(f"{loss:.2f}" for loss in right.draft_losses)
    first, without = right.draft_losses[0], swapped.draft_losses[0]
    expect(
        first + 1 < without,
        f"the first draft's loss is {first:.2f}, and {without:.2f} with embedding and hidden state swapped: "
        "the MTP layer is untrained, or wired in another way",
    )
    return (
        f"{right.positions} positions of this package's source: perplexity {right.perplexity:.2f}, "
        f"losses of the drafts {losses}; with embedding and hidden state swapped {without:.2f}"
    )


CHECKS: tuple[Check, ...] = (
    check_recurrence,
    check_causality,
    check_training,
    check_round_trip,
    check_drafts,
)


def run_checks(folder: Path) -> Iterator[str]:
    """Yield what each check verified, on one thread; raises Fault at the first that fails."""
    read_config(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for check in CHECKS:
            yield check(folder)
    finally:
        torch.set_num_threads(threads)
