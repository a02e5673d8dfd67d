"""``digenrl``: verbs, exit codes, and how errors are shown.

Exit codes: 0; 2, yours to mend (a recipe, a file, a command line); 3, the run failed.
"""

from __future__ import annotations

import io
import sys
import traceback
from typing import Annotated

import typer

from digenrl.errors import ConfigError, DigenError

OK, YOURS_TO_MEND, RUN_FAILED = 0, 2, 3

app = typer.Typer(
    name="digenrl",
    help="Online reinforcement learning for image and video generators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe, for example recipes/quickstart.yaml.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Changes to it: train.steps=3")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None) -> None:
    """Train as a recipe says; the run folder holds metrics, samples, trace, weights and a summary."""
    from digenrl.cli.train import run

    run(recipe, overrides or [])


@app.command()
def check(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe without loading a model, and print the arithmetic of a step."""
    from digenrl.cli.check import run

    run(recipe, overrides or [], as_json=as_json)


@app.command()
def show(
    kind: Annotated[str | None, typer.Argument(help="recipe, algorithm, model or reward")] = None,
    name: Annotated[str | None, typer.Argument(help="A component's name, or a section of the recipe.")] = None,
) -> None:
    """List components, or the documented settings of one; `show recipe` lists every key of a recipe."""
    from digenrl.cli.show import run

    run(kind, name)


@app.command()
def digest(run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A finished run's folder.")]) -> None:
    """SHA-256 of a run's parameters, optimizer state and averaged weights, as JSON."""
    from digenrl.cli.digest import run

    run(run_folder)


def main() -> None:
    """Entry point: a user's own mistakes are shown without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prompt in Chinese on a terminal of another encoding is shown escaped; it must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except DigenError as error:
        _show(error)
        sys.exit(YOURS_TO_MEND if isinstance(error, ConfigError) else RUN_FAILED)
    except Exception:
        traceback.print_exc()
        sys.exit(RUN_FAILED)


def _show(error: DigenError) -> None:
    if error.__cause__ is not None and not isinstance(error, ConfigError):
        traceback.print_exception(error.__cause__)
    print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
