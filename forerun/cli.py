"""The command line: a group whose commands are imported only when one of them is called."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from forerun import __version__
from forerun.errors import ForerunError


@dataclass(frozen=True)
class LazyCommand:
    """Where a command lives ("module:function"), and its line in the list of commands."""

    target: str
    help: str

    def load(self) -> click.Command:
        """Imports the command."""
        module, _, function = self.target.partition(":")
        command = getattr(importlib.import_module(module), function)
        assert isinstance(command, click.Command)
        return command


COMMANDS = {
    "compile": LazyCommand(
        "forerun.compiler.cli:compile_command", "Compile a target and its drafter into a bundle."
    ),
    "generate": LazyCommand(
        "forerun.runtime.cli:generate_command", "Answer one prompt with a bundle."
    ),
    "bench": LazyCommand(
        "forerun.runtime.cli:bench_command", "Measure plain and speculative decoding side by side."
    ),
    "predict": LazyCommand(
        "forerun.runtime.measure_cli:predict_command",
        "Say what speculation should gain, from a few numbers.",
    ),
    "profile": LazyCommand(
        "forerun.runtime.measure_cli:profile_command",
        "Say where a step's time goes, and what became of the ideal speedup.",
    ),
    "tune": LazyCommand(
        "forerun.runtime.tune_cli:tune_command",
        "Fit a bundle's draft trees to this machine, by measurement.",
    ),
    "verify": LazyCommand(
        "forerun.runtime.cli:verify_command", "Certify that a bundle is lossless on this machine."
    ),
    "inspect": LazyCommand("forerun.runtime.cli:inspect_command", "Print what a bundle holds."),
    "serve": LazyCommand(
        "forerun.runtime.serve_cli:serve_command", "Serve a bundle with OpenAI's API."
    ),
    "doctor": LazyCommand(
        "forerun.runtime.cli:doctor_command", "Say what this machine can build and run."
    ),
    "swap": LazyCommand(
        "forerun.compiler.cli:swap_command", "Replace a bundle's drafter without compiling again."
    ),
    "synthesize": LazyCommand(
        "forerun.training.synthesize_cli:synthesize_command",
        "Let a target answer prompts, as training data.",
    ),
    "train": LazyCommand(
        "forerun.training.cli:train_command", "Train a drafter on a target's answers."
    ),
    "simulate": LazyCommand(
        "forerun.training.cli:simulate_command",
        "Play a drafter on a target's answers: tau without compiling.",
    ),
}


class LazyGroup(click.Group):
    """A group over a registry of lazy commands; it turns failures into one line and a status."""

    def __init__(self, *args: Any, registry: dict[str, LazyCommand], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.registry = registry

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The registry's names, in its order: the order of use."""
        return list(self.registry)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Imports the command of that name."""
        lazy = self.registry.get(cmd_name)
        return lazy.load() if lazy else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, lazy.help) for name, lazy in self.registry.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command: 1 and one line for a failure, 130 for Ctrl-C, 2 for wrong usage."""
        try:
            return super().invoke(ctx)
        except ForerunError as error:
            _fail(ctx, f"error: {' '.join(str(error).split())}", 1)
        except ModuleNotFoundError as error:
            if not error.name or error.name.partition(".")[0] == "forerun":
                raise
            line = f"error: the package {error.name!r} is not installed: install the extra"
            _fail(ctx, f"{line} of forerun that brings it (cpu, cuda, compile, rtx, trt, serve)", 1)
        except KeyboardInterrupt:
            _fail(ctx, "interrupted", 130)


def _fail(ctx: click.Context, line: str, status: int) -> NoReturn:
    click.echo(line, err=True)
    ctx.exit(status)


@click.group(
    cls=LazyGroup,
    registry=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="forerun")
def main() -> None:
    """Compile a language model and its drafter into one speculative step, and run it."""
