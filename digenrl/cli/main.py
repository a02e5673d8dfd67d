"""``digenrl``: verbs, exit codes, and how errors are shown.

Exit codes: 0; 2, yours to mend (a recipe, a file, a command line); 3, the run failed; 4, a service that scores stays away, so
that the run can go on once it is back.
"""

from __future__ import annotations

import io
import sys
import traceback
from typing import Annotated, Literal

import typer

from digenrl.errors import ConfigError, DigenError, RewardUnavailable

OK, YOURS_TO_MEND, RUN_FAILED, REWARD_UNAVAILABLE = 0, 2, 3, 4

app = typer.Typer(
    name="digenrl",
    help="Online reinforcement learning for image and video generators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

RecipePath = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a built-in recipe by name: quickstart.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE ...]", help="Changes to it: train.steps=3")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A recipe; left out with --resume RUN.")] = None,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="RUN|auto", help="Go on with a run; auto: with the one in run.output_dir, if there is one."),
    ] = None,
    replay: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE", help="Follow the trace.jsonl of a run: the same order and versions, and so the same numbers."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT|auto", help="Ray cluster to run on; without it, one is started on this machine."),
    ] = None,
) -> None:
    """Train as a recipe says; the run folder holds metrics, samples, trace, checkpoints and a summary."""
    from digenrl.cli.train import run

    run(recipe, overrides or [], resume=resume, replay=replay, address=address)


@app.command()
def check(recipe: RecipePath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe without loading a model, and print the arithmetic of a step."""
    from digenrl.cli.check import run

    run(recipe, overrides or [], as_json=as_json)


@app.command()
def show(
    kind: Annotated[str | None, typer.Argument(help="recipe, recipes, algorithm, model or reward")] = None,
    name: Annotated[str | None, typer.Argument(help="A component's name, a section of the recipe, or a built-in recipe.")] = None,
) -> None:
    """List components, or the settings of one; `show recipe` lists every key of a recipe, `show recipes` the built-in ones."""
    from digenrl.cli.show import run

    run(kind, name)


@app.command()
def digest(run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")]) -> None:
    """SHA-256 of a run's parameters, optimizer state and averaged weights, as JSON."""
    from digenrl.cli.digest import run

    run(run_folder)


RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN_OR_MODEL", help="A run's folder, a model folder, a hub id, or builtin:shapes.")
]
Weights = Annotated[Literal["ema", "raw"] | None, typer.Option(help="Averaged or raw weights; averaged where the run has them.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; the run's by default.")]


@app.command()
def export(
    run_folder: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="New or empty folder.")],
    weights: Weights = None,
) -> None:
    """Write a run's weights for diffusers, LoRA or full, with a model card."""
    from digenrl.cli.export import run

    run(run_folder, out, weights=weights)


@app.command()
def sample(
    source: RunOrModel,
    prompt: Annotated[list[str], typer.Option("--prompt", help="A prompt; may be given several times.")],
    num: Annotated[int, typer.Option(help="Pictures of each prompt.", min=1)] = 1,
    out: Annotated[
        str | None, typer.Option(metavar="FILE_OR_FOLDER", help="x.png, x-000.png..., x.mp4, or a folder; sample.png by default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the noise; the run's eval.seed by default.", min=0)] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps (ODE).", min=1)] = None,
    weights: Weights = None,
    height: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(help="Frames of a video; 1 is an image.", min=1)] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second of a video.")] = None,
    true_cfg_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 is none.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Embedded guidance of distilled models.")] = None,
    device: Device = None,
) -> None:
    """Draw pictures or videos with a run or a model, as its evaluation draws them."""
    from digenrl.cli.sample import run

    run(
        source,
        prompts=prompt,
        seed=seed,
        num=num,
        out=out,
        steps=steps,
        weights=weights,
        height=height,
        width=width,
        num_frames=num_frames,
        fps=fps,
        true_cfg_scale=true_cfg_scale,
        guidance_scale=guidance_scale,
        device=device,
    )


@app.command("eval")
def evaluate(
    source: RunOrModel,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="Prompts; the recipe's eval.prompts by default.")] = None,
    recipe: Annotated[str | None, typer.Option(metavar="RECIPE", help="Rewards and eval settings; needed for a model.")] = None,
    as_json: AsJson = False,
    out: Annotated[str | None, typer.Option(metavar="FOLDER", help="Default: RUN/eval-step-N, or ./eval-NAME.")] = None,
    weights: Weights = None,
    device: Device = None,
) -> None:
    """Score one picture or video of every prompt: means by reward and category, scores.jsonl, a picture sheet, videos."""
    from digenrl.cli.evaluate import run

    run(source, prompts=prompts, recipe=recipe, as_json=as_json, out=out, weights=weights, device=device)


Source = Annotated[
    str,
    typer.Argument(metavar="RECIPE_OR_COSTS", help="A preset, a costs file (YAML), a run's trace.jsonl, or a recipe."),
]


@app.command()
def simulate(
    source: Source,
    overrides: Overrides = None,
    steps: Annotated[int | None, typer.Option(help="RL steps to simulate.", min=1)] = None,
    as_json: AsJson = False,
    trace: Annotated[str | None, typer.Option(metavar="FILE", help="Write the trace of the simulated run.")] = None,
) -> None:
    """Run the schedule on a virtual clock: step time, bubbles, TAG and staleness, before any GPU is rented."""
    from digenrl.cli.simulate import run

    run(source, overrides or [], steps=steps, as_json=as_json, trace=trace)


@app.command()
def plan(
    source: Source,
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option(help="Devices to share out.", min=1)] = 8,
    as_json: AsJson = False,
) -> None:
    """Compare placements, pool splits, micro-batches, TAG policies and staleness for a number of devices."""
    from digenrl.cli.plan import run

    run(source, overrides or [], devices=devices, as_json=as_json)


@app.command()
def trace(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A trace.jsonl of a run or a simulation.")],
    gantt: Annotated[str | None, typer.Option(metavar="OUT.svg", help="Draw a Gantt chart.")] = None,
    chrome: Annotated[str | None, typer.Option(metavar="OUT.json", help="Write a trace for ui.perfetto.dev.")] = None,
    utilization: Annotated[bool, typer.Option("--utilization", help="Busy and bubble shares, step times, staleness.")] = False,
    replay: Annotated[bool, typer.Option("--replay", help="Check that a fresh scheduler repeats every command.")] = False,
    as_json: AsJson = False,
) -> None:
    """Look at the record of a run: a timeline here, charts, sums, and the proof that it replays."""
    from digenrl.cli.trace import run

    run(file, gantt=gantt, chrome=chrome, utilization=utilization, replay=replay, as_json=as_json)


data = typer.Typer(help="Prompt files.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(data, name="data")


@data.command("import")
def data_import(
    kind: Annotated[str, typer.Argument(metavar="FORMAT", help="flow_grpo, flow_factory, dance_grpo or verl.")],
    file: Annotated[str, typer.Argument(metavar="FILE", help="Prompts of that trainer: txt, jsonl, json or parquet.")],
    out: Annotated[str, typer.Argument(metavar="OUT.jsonl", help="New prompt file.")],
) -> None:
    """Turn a prompt file of another trainer into one of ours."""
    from digenrl.cli.data_import import run

    run(kind, file, out)


@app.command("reward-serve")
def reward_serve(
    source: Annotated[str, typer.Argument(metavar="RECIPE_OR_REWARD", help="A recipe, or a reward: jpeg, my_rewards:Bright.")],
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(help="Port; 0: a free one, which is printed.", min=0, max=65535)] = 8300,
    host: Annotated[str, typer.Option(help="Address to listen at. Beyond this machine, a token is required.")] = "127.0.0.1",
    token_env: Annotated[
        str, typer.Option(help="Environment variable that holds the bearer token of those who may ask.")
    ] = "DIGENRL_REWARD_TOKEN",
    max_request_mib: Annotated[int, typer.Option(help="Largest request.", min=1, max=65536)] = 256,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; those beyond are told to come again.", min=1)] = 64,
) -> None:
    """Score for other machines over HTTP, for rewards of `type: remote`."""
    from digenrl.cli.reward_serve import run
    from digenrl.rewards.remote.server import Limits

    limits = Limits(request_bytes=max_request_mib * 2**20, waiting=max_waiting)
    run(source, overrides or [], host=host, port=port, token_env=token_env, limits=limits)


def main() -> None:
    """Entry point: a user's own mistakes are shown without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A prompt in Chinese on a terminal of another encoding is shown escaped; it must not end the run.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except DigenError as error:
        _show(error)
        sys.exit(_exit_code(error))
    except Exception:
        traceback.print_exc()
        sys.exit(RUN_FAILED)


def _exit_code(error: DigenError) -> int:
    if isinstance(error, ConfigError):
        return YOURS_TO_MEND
    return REWARD_UNAVAILABLE if isinstance(error, RewardUnavailable) else RUN_FAILED


def _show(error: DigenError) -> None:
    if error.__cause__ is not None and not isinstance(error, ConfigError):
        traceback.print_exception(error.__cause__)
    print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
