"""The paper's ablation with real processes: naive = 1, a batch-axis pipeline, GAP, +TSP, +TAG, +TCSS, colocated, colocated+TSP.

With --emulate the real driver, scheduler, executor and Ray actors run a preset of the simulator, with workers that sleep for its
durations: how close the real system comes to what the simulator says of the same schedules. The bars: a step takes at most
1.05 times the simulated one, and speed-ups over naive are within 5 % of the simulated ones.

Without it the shipped tiny model is trained on this machine, a generator and a trainer of one core each, and the modes are
compared with what `digenrl plan` makes of a measured run. TSP is off where a pass holds one pair for each sample of a group. One
generator rank has no batch axis, so that mode is left out there.

Modes alternate, repeat by repeat; ratios are taken within a repeat, of the median step of the steady state (all but the first and
the last), from the run's own trace. Simulated runs are as long and are looked at in the same way.

    python benchmarks/ablation.py [--emulate hunyuanvideo-32gpu] [--steps N] [--repeats N] [--modes gap tcss ...] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from digenrl.cli.emulation import emulation_of
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.simulation.modes import MODES, Mode, Options, schedule_of
from digenrl.simulation.plan import plan
from digenrl.simulation.presets import Preset, preset
from digenrl.simulation.run import simulate
from digenrl.simulation.source import load_source
from digenrl.trace.record import read_trace
from digenrl.trace.spans import spans
from digenrl.trace.utilization import Utilization, utilization

QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
STEP_BAR, SPEEDUP_BAR = 1.05, 0.05
GENERATION_S = 1.0
"""Real seconds of a micro-batch's generation with GAP; a command is on its way for some milliseconds."""
STALE = Options().max_stale_fraction
PROFILED: Mode = "tag"
"""The mode whose trace is the measured profile: every kind of work is in it."""

Runs = dict[Mode, list[Utilization]]


def changes_of(mode: Mode) -> list[str]:
    """What a recipe says to be of a mode, apart from sizes. From each of the ladder to the next, one thing changes."""
    if mode in ("colocated", "colocated+tsp"):
        return ["cluster.placement=colocated"]
    tag = "bts_plus" if mode in ("tag", "tcss") else "never"
    stale = STALE if mode == "tcss" else 0
    cut = {"naive": "none", "batch_axis": "batch_axis"}.get(mode, "generation_axis")
    return [
        "cluster.placement=disaggregated",
        f"schedule.micro_batching={cut}",
        f"schedule.tag={tag}",
        f"schedule.max_stale_fraction={stale}",
    ]


def has_tsp(mode: Mode) -> bool:
    return mode in ("tsp", "tag", "tcss", "colocated+tsp")


def emulated_recipe(found: Preset, mode: Mode, *, steps: int, time_scale: float, durations: str = "measured") -> Recipe:
    """A preset's devices, sizes and one of the modes, as a user would write them."""
    work, layout = found.model.workload, found.layout
    replicas, ranks = (1, layout.replicas * layout.ranks) if mode == "naive" else (layout.replicas, layout.ranks)
    groups = 1 if mode == "batch_axis" else layout.groups_per_micro_batch
    trainer = layout.devices if mode.startswith("colocated") else layout.trainer_ranks
    changes = [
        *_quiet(steps),
        "data.stratify_by=null",
        f"rollout.prompts_per_step={work.prompts_per_step}",
        f"rollout.num_generations={work.num_generations}",
        f"schedule.groups_per_micro_batch={groups}",
        f"train.timestep_batch_size={'all' if has_tsp(mode) else 1}",
        f"cluster.generators.0={{replicas: {replicas}, ranks: {ranks}}}",
        f"cluster.trainer.ranks={trainer}",
        f"cluster.emulate={{preset: {found.name}, time_scale: {time_scale!r}, durations: {durations}}}",
        *changes_of(mode),
    ]
    return load_recipe(QUICKSTART, changes)


def real_recipe(mode: Mode, *, steps: int, tiny: bool = False) -> Recipe:
    """The quickstart in one of the modes, on two cores."""
    small = ["rollout.prompts_per_step=6", "rollout.num_generations=4", "rollout.num_inference_steps=4"]
    small += ["rollout.forward_batch_size=4", "schedule.groups_per_micro_batch=1"]
    small += ["algorithm.sde_window_size=2", "algorithm.sde_window_range=[0, 3]"]
    recipe = load_recipe(QUICKSTART, [*_quiet(steps), *changes_of(mode), *(small if tiny else [])])
    pairs = "all" if has_tsp(mode) else recipe.rollout.num_generations
    ranks = 2 if mode.startswith("colocated") else 1
    # What two ranks share: a model as small as this is held whole by each, and half a micro-batch fills a forward pass.
    share = recipe.groups_in_micro_batch * recipe.rollout.num_generations // 2
    changes = ["cluster.trainer.shard=1", f"rollout.forward_batch_size={share}"]
    changes += [f"train.timestep_batch_size={pairs}", f"cluster.trainer.ranks={ranks}"]
    return load_recipe(QUICKSTART, [*_quiet(steps), *changes_of(mode), *(small if tiny else []), *changes])


def _quiet(steps: int) -> list[str]:
    """A run of so many steps that does nothing but train."""
    return [f"train.steps={steps}", "train.save_freq=0", "eval=null", "log.sample_freq=0", "log.tensorboard=false"]


def run_all(recipes: Mapping[Mode, Recipe], repeats: int, folder: Path, say: Callable[[str], None]) -> Runs:
    """Every mode, ``repeats`` times in turn, on one private cluster."""
    from digenrl.runtime.ray.environment import prepare

    prepare(private=True)
    from digenrl.runtime.ray.session import RaySession
    from digenrl.runtime.train import train

    runs: Runs = {mode: [] for mode in recipes}
    with RaySession(None):
        for repeat in range(repeats):
            for mode, recipe in recipes.items():
                path = folder / f"{mode}-{repeat}"
                placed = recipe.model_copy(update={"run": recipe.run.model_copy(update={"output_dir": str(path)})})
                with contextlib.redirect_stdout(sys.stderr):
                    train(placed, emulation=emulation_of(placed))
                runs[mode].append(utilization(spans(read_trace(path / "trace.jsonl"))))
                say(f"{mode}, repeat {repeat + 1} of {repeats}: {statistics.median(steady(runs[mode][-1])):.3f} s a step")
    return runs


def steady(use: Utilization) -> list[float]:
    """Seconds of the steps in the steady state; of all where there are fewer than three."""
    times = [step.seconds for step in use.steps]
    return times[1:-1] or times


def emulate(
    name: str,
    modes: Sequence[Mode] = MODES,
    *,
    steps: int,
    repeats: int,
    generation_s: float = GENERATION_S,
    durations: str = "measured",
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measured against simulated, mode by mode. generation_s: real seconds of one micro-batch's generation with GAP."""
    found = preset(name)
    model, layout = found.model, found.layout
    scale = generation_s / model.generate(layout.groups_per_micro_batch, layout.ranks, "generators")
    modes = list(dict.fromkeys(("naive", *modes)))
    recipes = {m: emulated_recipe(found, m, steps=steps, time_scale=scale, durations=durations) for m in modes}
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        runs = run_all(recipes, repeats, Path(folder), say)
    simulated = {mode: _simulated(found, mode, steps, durations) for mode in modes}
    report: dict[str, Any] = {}
    for mode, uses in runs.items():
        usual = [statistics.median(steady(use)) for use in uses]
        naive = [statistics.median(steady(use)) for use in runs["naive"]]
        gains = [base / step for base, step in zip(naive, usual, strict=True)]
        expected = simulated[mode] * scale
        wanted = simulated["naive"] / simulated[mode]
        report[mode] = {
            "step_s": spread([second for use in uses for second in steady(use)]),
            "simulated_step_s": expected,
            "over_simulated": spread([step / expected for step in usual]),
            "speedup_over_naive": spread(gains),
            "simulated_speedup_over_naive": wanted,
            "speedup_difference": spread([gain / wanted - 1 for gain in gains]),
            "tags_per_step": statistics.fmean(step.tags for use in uses for step in use.steps[1:-1] or use.steps),
            "stale_fraction": statistics.fmean(step.stale_fraction for use in uses for step in use.steps[1:-1] or use.steps),
        }
    return {
        "emulated": name,
        "assumptions": list(found.assumptions),
        "seconds_per_second_of_the_preset": scale,
        "durations": durations,
        "steps": steps,
        "repeats": repeats,
        "machine": machine(load),
        "modes": report,
        **dict(zip(("step_within_bar", "speedups_within_bar"), within(report.values()), strict=True)),
    }


def within(rows: Iterable[Mapping[str, Any]]) -> tuple[bool, bool]:
    """Whether all steps, and all speed-ups, are as near to the simulated ones as they should be; medians."""
    rows = list(rows)
    steps = all(row["over_simulated"]["median"] <= STEP_BAR for row in rows)
    return steps, all(abs(row["speedup_difference"]["median"]) <= SPEEDUP_BAR for row in rows)


def _simulated(found: Preset, mode: Mode, steps: int, durations: str) -> float:
    """Seconds of the median steady step of the preset, in a simulated run of as many steps whose searches know as much."""
    schedule = schedule_of(mode, found.model, found.layout, Options(steps=steps))
    settings = schedule.settings if durations == "known" else dataclasses.replace(schedule.settings, costs=None)
    times = simulate(settings, schedule.costs).step_times_s
    return statistics.median(times[1:-1] or times)


def train_tiny(
    modes: Sequence[Mode],
    *,
    steps: int,
    repeats: int,
    tiny: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The tiny model in every mode, and what the simulator makes of the one that was profiled."""
    modes = [mode for mode in dict.fromkeys(("naive", *modes, PROFILED)) if mode != "batch_axis"]
    recipes = {mode: real_recipe(mode, steps=steps, tiny=tiny) for mode in modes}
    samples = recipes["naive"].rollout.prompts_per_step * recipes["naive"].rollout.num_generations
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        runs = run_all(recipes, repeats, Path(folder), say)
        predicted = _predictions(Path(folder) / f"{PROFILED}-0" / "trace.jsonl", recipes, runs)
    report: dict[str, Any] = {}
    for mode, uses in runs.items():
        usual = [statistics.median(steady(use)) for use in uses]
        naive = [statistics.median(steady(use)) for use in runs["naive"]]
        report[mode] = {
            "step_s": spread([second for use in uses for second in steady(use)]),
            "samples_per_second": spread([samples / second for use in uses for second in steady(use)]),
            "speedup_over_naive": spread([base / step for base, step in zip(naive, usual, strict=True)]),
            "predicted_step_s": predicted["modes"].get(mode),
        }
    fastest = min(report, key=lambda mode: report[mode]["step_s"]["median"])
    return {
        "emulated": None,
        "steps": steps,
        "repeats": repeats,
        "samples_per_step": samples,
        "machine": machine(load),
        "modes": report,
        "fastest": fastest,
        "predicted_fastest": min(predicted["modes"], key=lambda mode: predicted["modes"][mode]),
        "plan": predicted["plan"],
    }


def _predictions(trace: Path, recipes: Mapping[Mode, Recipe], runs: Runs) -> dict[str, Any]:
    """What simulator and planner say on two devices, from one measured run alone, and how much slower updates are without TSP."""
    recipe = recipes[PROFILED]
    samples = recipe.groups_in_micro_batch * recipe.rollout.num_generations
    overrides = [f"schedule.samples_per_micro_batch={samples}", "cluster.ranks=1", "cluster.trainer_ranks=1"]
    if "gap" in runs and "tsp" in runs:
        factor = _update_s(runs["gap"]) / _update_s(runs["tsp"])
        overrides.append(f"schedule.tsp_factor={max(1.0, factor)!r}")
    loaded = load_source(str(trace), overrides)
    times: dict[str, float] = {}
    for mode in runs:
        schedule = schedule_of(mode, loaded.model, loaded.layout, Options(steps=8))
        times[mode] = simulate(schedule.settings, schedule.costs).step_time_s
    best = plan(loaded, loaded.layout.devices).sweep.rows[0]
    named = best.candidate.mode or (
        "tcss" if best.candidate.max_stale_fraction else "tag" if best.candidate.tag != "never" else "tsp"
    )
    described = {key: getattr(best.candidate.layout, key) for key in ("replicas", "ranks", "trainer_ranks")}
    return {"modes": times, "plan": {"mode": named, "predicted_step_s": best.step_time_s, **described}}


def _update_s(uses: Sequence[Utilization]) -> float:
    """Seconds that updates take in one step."""
    totals = [us for use in uses for pool in use.pools if pool.name == "trainer" for kind, us in pool.busy_us if kind == "update"]
    return sum(totals) / 1e6 / sum(len(use.steps) for use in uses)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def machine(load_before: float) -> dict[str, Any]:
    """What it was measured on, and how busy that was with other work."""
    return {"cores": len(os.sched_getaffinity(0)), "load_before": load_before, "load_after": os.getloadavg()[0]}


def table(report: Mapping[str, Any]) -> list[str]:
    """For people."""
    busy = report["machine"]
    where = f"{busy['cores']} cores, load {busy['load_before']:.1f} before and {busy['load_after']:.1f} after"
    if report["emulated"] is None:
        lines = [f"tiny model, {report['steps']} steps x {report['repeats']} repeats; {where}"]
        lines.append(f"{'':<16}{'step s':>24}{'samples/s':>12}{'over naive':>12}{'predicted':>12}")
        for mode, row in report["modes"].items():
            predicted = "-" if row["predicted_step_s"] is None else f"{row['predicted_step_s']:.3f}"
            lines.append(
                f"{mode:<16}{_range(row['step_s']):>24}{row['samples_per_second']['median']:>12.1f}"
                f"{row['speedup_over_naive']['median']:>12.2f}{predicted:>12}"
            )
        lines.append(f"fastest: {report['fastest']}; foretold: {report['predicted_fastest']}; the plan: {report['plan']['mode']}")
        return lines
    lines = [f"EMULATION of {report['emulated']}, {report['steps']} steps x {report['repeats']} repeats; {where}"]
    lines.append(f"{'':<16}{'step s':>24}{'simulated':>12}{'ratio':>8}{'over naive':>12}{'simulated':>12}{'off':>8}")
    for mode, row in report["modes"].items():
        lines.append(
            f"{mode:<16}{_range(row['step_s']):>24}{row['simulated_step_s']:>12.3f}{row['over_simulated']['median']:>8.3f}"
            f"{row['speedup_over_naive']['median']:>12.3f}{row['simulated_speedup_over_naive']:>12.3f}"
            f"{100 * row['speedup_difference']['median']:>+7.1f}%"
        )
    for what, held in (("steps", report["step_within_bar"]), ("speed-ups", report["speedups_within_bar"])):
        lines.append(f"{what} within {'1.05 x' if what == 'steps' else '5 % of'} the simulated: {'yes' if held else 'NO'}")
    return lines


def _range(values: Mapping[str, float]) -> str:
    return f"{values['median']:.3f} ({values['min']:.3f}-{values['max']:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--emulate", metavar="PRESET")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--generation-s", type=float, default=GENERATION_S, help="real seconds of a micro-batch's generation")
    parser.add_argument("--durations", choices=("measured", "known"), default="measured", help="what TAG's searches plan with")
    parser.add_argument("--tiny", action="store_true", help="without --emulate: a step of a few samples, to show that it runs")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    common: dict[str, Any] = {"steps": asked.steps, "repeats": asked.repeats, "say": lambda text: print(text, file=sys.stderr)}
    try:
        if asked.emulate is None:
            report = train_tiny(asked.modes, tiny=asked.tiny, **common)
        else:
            pace = {"generation_s": asked.generation_s, "durations": asked.durations}
            report = emulate(asked.emulate, asked.modes, **pace, **common)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=2) if asked.json else "\n".join(table(report)))
    return 0 if report["emulated"] is None or (report["step_within_bar"] and report["speedups_within_bar"]) else 1


if __name__ == "__main__":
    sys.exit(main())
