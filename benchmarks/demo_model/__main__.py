"""``python -m benchmarks.demo_model <command>``: each command reads what the one before it wrote."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from strata_mlx.errors import InputError, StrataError

from . import data
from .config import Config, Recipe

WORK = Path("benchmarks/out/demo_model")

DESCRIPTION = """\
Make the demo model again: a 36-million-parameter mixture of experts for Python source.

  corpus    gather the Python sources of the standard library and of installed packages
  prepare   learn a tokenizer from them and write them as tokens
  train     train the model (PyTorch; meant for one CUDA GPU)
  export    write it in the Hugging Face layout
  evaluate  measure it on text that it was not trained on
  check     verify training, export and MTP wiring on this machine
"""

EPILOG = f"""\
Run in the repository's root, in this order; the defaults fit together (everything goes to {WORK}):

  python -m benchmarks.demo_model corpus
  python -m benchmarks.demo_model prepare
  python -m benchmarks.demo_model train
  python -m benchmarks.demo_model export
  python -m benchmarks.demo_model evaluate --text path/to/site-packages/mlx_lm

`<command> --help` explains each option. All but corpus and prepare need PyTorch 2.10 or newer.
"""


def require_torch() -> None:
    """One clear error where PyTorch is missing; it is no dependency of strata-mlx."""
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise InputError(f"this command needs PyTorch 2.10 or newer (pip install torch): {error}") from error


def corpus(options: argparse.Namespace) -> None:
    held_out = data.HELD_OUT | set(options.hold_out)
    gathered = data.gather(options.root or data.default_roots(), options.text, held_out)
    print(
        f"{options.text}: {gathered.documents} documents, {gathered.characters / 1e6:.1f} M characters, "
        f"from {len(gathered.packages)} packages"
    )
    for reason, count in gathered.left_out.most_common():
        print(f"  left out, {reason}: {count}")


def prepare(options: argparse.Namespace) -> None:
    tokens = data.prepare(options.text, options.data, Config().vocab_size, options.tokenizer)
    print(f"{options.data}: {tokens} tokens, {Recipe().tokens / tokens:.1f} passes in the default training run")


def train(options: argparse.Namespace) -> None:
    require_torch()
    from .export import load
    from .train import Run, Trainer, describe
    from .train import train as run_training

    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        sequence=options.sequence,
        learning_rate=options.learning_rate,
        balance_weight=options.balance_weight,
        seed=options.seed,
    )
    run = Run(options.device, options.compile, options.seconds, options.log_every, options.save_every)
    model = None
    if options.start_from:
        data.require_same_tokenizer(options.data, options.start_from)
        model = load(options.start_from)
    config = model.config if model else Config()
    trainer = Trainer(config, recipe, run.pick_device(), model)
    losses = run_training(options.data, options.out, trainer, run)
    print(f"{options.out}: step {trainer.step} of {recipe.steps}")
    if losses is not None:
        print(describe(trainer.step, losses))
    if trainer.step < recipe.steps:
        print("give the same command again to go on")


def export(options: argparse.Namespace) -> None:
    require_torch()
    from .export import export as write
    from .train import load_trained

    names = write(load_trained(options.out), options.data / "tokenizer.json", options.model)
    print(f"{options.model}: {', '.join(names)}")


def evaluate(options: argparse.Namespace) -> None:
    require_torch()
    from .evaluate import measure, read_text, windows
    from .export import load

    chain = 3
    texts = read_text(options.text)
    ids = windows(texts, options.model / "tokenizer.json", options.sequence + 1 + chain, options.windows)
    report = measure(load(options.model), ids, chain)
    print(f"perplexity {report.perplexity:.2f} over {report.positions} positions (float32)")
    rows = zip(report.draft_losses, report.agreement, report.agreement_so_far, strict=True)
    for s, (loss, agreed, so_far) in enumerate(rows, 1):
        print(
            f"draft {s}: loss {loss:.3f}, equal to the trunk's greedy token {agreed:.1%}, "
            f"with all drafts before it {so_far:.1%}"
        )


def check(options: argparse.Namespace) -> None:
    require_torch()
    from .check import run_checks

    for verified in run_checks(options.model):
        print(f"ok: {verified}", flush=True)


def positive(text: str) -> int:
    """An option's type: a whole number above zero."""
    value = int(text)
    if value <= 0:
        raise ValueError(f"{value} is not positive")
    return value


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_model",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable[[argparse.Namespace], None], help_text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            run.__name__,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        sub.set_defaults(run=run)
        return sub

    _add_data_options(command)
    _add_training_options(command)
    _add_model_options(command)
    return parser


Command = Callable[[Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]


def _add_data_options(command: Command) -> None:
    sub = command(corpus, "gather Python sources, held-out packages and duplicates left out")
    sub.add_argument("--text", type=Path, default=WORK / "corpus.txt", help="file to write")
    sub.add_argument(
        "--root",
        type=Path,
        action="append",
        metavar="FOLDER",
        help="folder of packages to take instead of this Python's own; may be given several times",
    )
    sub.add_argument(
        "--hold-out",
        action="append",
        default=[],
        metavar="PACKAGE",
        help=f"leave out this one too, besides {', '.join(sorted(data.HELD_OUT))}",
    )
    sub = command(prepare, "learn the tokenizer and write tokenizer.json and tokens.bin")
    sub.add_argument("--text", type=Path, default=WORK / "corpus.txt", help="file that `corpus` wrote")
    sub.add_argument("--data", type=Path, default=WORK / "data", metavar="FOLDER", help="folder to write")
    sub.add_argument("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json to use, not a new one")


def _add_training_options(command: Command) -> None:
    recipe = Recipe()
    sub = command(train, "train, from the checkpoint in --out if there is one")
    add = sub.add_argument
    add("--data", type=Path, default=WORK / "data", metavar="FOLDER", help="folder that `prepare` wrote")
    add("--out", type=Path, default=WORK / "checkpoint", metavar="FOLDER", help="folder of the checkpoint")
    add("--start-from", type=Path, metavar="FOLDER", help="begin with the weights of an exported model")
    add("--steps", type=positive, default=recipe.steps, help="length of the whole run and its schedule")
    add("--batch", type=positive, default=recipe.batch, help="windows per step")
    add("--sequence", type=positive, default=recipe.sequence, help="positions per window")
    add("--learning-rate", type=float, default=recipe.learning_rate, help="the highest one")
    add("--balance-weight", type=float, default=recipe.balance_weight, help="of the load-balance loss")
    add("--seed", type=int, default=recipe.seed, help="of the initial weights and the windows")
    add("--seconds", type=positive, help="stop with a checkpoint after this long; the same command goes on")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto takes CUDA if it is there")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="use torch.compile on CUDA")
    add("--log-every", type=positive, default=50, metavar="STEPS", help="between lines of losses")
    add("--save-every", type=positive, default=500, metavar="STEPS", help="between checkpoints")


def _add_model_options(command: Command) -> None:
    sub = command(export, "write the trained model in the Hugging Face layout")
    sub.add_argument("--out", type=Path, default=WORK / "checkpoint", help="folder that `train` wrote")
    sub.add_argument("--data", type=Path, default=WORK / "data", help="folder with the tokenizer")
    sub.add_argument("--model", type=Path, default=WORK / "model", help="new folder to write")

    sub = command(evaluate, "measure perplexity and drafts on held-out text")
    sub.add_argument("--model", type=Path, default=WORK / "model", help="folder that `export` wrote")
    sub.add_argument("--text", type=Path, nargs="+", required=True, help="Python files or folders of them")
    sub.add_argument("--sequence", type=positive, default=254, help="positions per window")
    sub.add_argument("--windows", type=positive, default=60, help="windows at most, spread over the text")

    sub = command(check, "verify training, export and MTP wiring; about ten seconds on a CPU")
    sub.add_argument("--model", type=Path, default=WORK / "model", help="folder that `export` wrote")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0, 2 for the user's mistakes, 1 for faults, each with one line on stderr."""
    options = build_parser().parse_args(arguments)
    try:
        options.run(options)
    except StrataError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
