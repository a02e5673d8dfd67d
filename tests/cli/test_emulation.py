"""From presets to the durations of emulated workers, and what a recipe may ask for."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from digenrl.cli.check import inspect
from digenrl.cli.emulation import GENERATION_S, emulation_of
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.ids import WorkerId
from digenrl.runtime.emulated import Durations, Emulation
from digenrl.runtime.train import train
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.modes import MODES, Mode, Options, schedule_of
from digenrl.simulation.presets import preset, presets
from digenrl.simulation.run import simulate
from digenrl.simulation.source import load_source
from digenrl.trace.record import TraceWriter

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
APART = ("cluster.placement=disaggregated", "cluster.emulate=hunyuanvideo-32gpu")


def recipe(*changes: str) -> Recipe:
    return load_recipe(QUICKSTART, changes)


def emulated(*changes: str) -> Emulation:
    found = emulation_of(recipe(*APART, *changes))
    assert found is not None
    return found


def of(name: str, *changes: str) -> Durations:
    return emulated(*changes).costs.durations[WorkerId(name)]


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ablation", ROOT / "benchmarks" / "ablation.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_written_as_a_recipe_takes_what_the_simulator_takes_for_it(ablation: ModuleType, name: str, mode: Mode) -> None:
    found = preset(name)
    written = ablation.emulated_recipe(found, mode, steps=3, time_scale=0.5)
    inspect(written)
    emulation = emulation_of(written)
    assert emulation is not None and emulation.preset == name
    schedule = schedule_of(mode, found.model, found.layout, Options(steps=3))
    costs, workers = schedule.costs, emulation.costs.durations
    assert set(workers) == set(schedule.settings.workers)
    first, trainer = workers[schedule.settings.generators[0]], workers[schedule.settings.trainer]
    assert (first.generate, first.score, first.sync) == (costs.generate[0], costs.score[0] if costs.score else None, costs.sync)
    assert (trainer.update, trainer.optimizer, trainer.sync) == (costs.update, costs.optimizer, costs.sync)
    if mode in ("tag", "tcss"):
        assert (trainer.generate, trainer.switch_in, trainer.switch_out) == (costs.tag, costs.switch_in, costs.switch_out)
    work = found.model.workload
    micro_batches = -(-work.prompts_per_step // written.groups_in_micro_batch)
    assert micro_batches == schedule.settings.micro_batches
    assert emulation.costs.samples_per_micro_batch == written.groups_in_micro_batch * work.num_generations
    wanted = (schedule.settings.tag, schedule.settings.max_stale_fraction)
    assert (written.tag, written.schedule.max_stale_fraction) == wanted


def test_the_recipe_says_how_a_step_is_cut_and_how_many_devices_there_are() -> None:
    base = of("generator-0", "cluster.generators.0.ranks=4")
    assert of("generator-0", "cluster.generators.0.ranks=2").generate == pytest.approx(2 * base.generate)
    assert of("generator-0", "cluster.generators.0.ranks=4", "rollout.num_generations=24").generate == pytest.approx(
        2 * base.generate
    )
    one = of("generator-0", "cluster.generators.0.ranks=4", "schedule.groups_per_micro_batch=1")
    assert one.generate == pytest.approx(base.generate / 3)
    assert of("trainer", "train.timestep_batch_size=1").update == pytest.approx(4 * of("trainer").update, rel=0.1)


def test_unlike_pools_have_unlike_durations() -> None:
    pools = "cluster.generators=[{replicas: 2, ranks: 4}, {replicas: 1, ranks: 2}]"
    workers = emulated(pools).costs.durations
    slow, fast = workers[WorkerId("generator-2")], workers[WorkerId("generator-1")]
    assert slow.generate == pytest.approx(2 * fast.generate)
    assert slow.score == pytest.approx(2 * fast.score)
    assert workers[WorkerId("generator-0")] == fast


def test_scorers_of_their_own_score_and_generators_do_not() -> None:
    workers = emulated("cluster.scorers={placement: pool, replicas: 2}").costs.durations
    assert set(workers) == {"generator-0", "scorer-0", "scorer-1", "trainer"}
    assert workers[WorkerId("generator-0")].score == 0 < workers[WorkerId("scorer-1")].score
    assert of("driver", "cluster.scorers.placement=driver").score > 0


def test_without_a_time_scale_a_micro_batch_is_generated_in_half_a_second() -> None:
    found = emulated().costs
    assert found.time_scale * found.durations[WorkerId("generator-0")].generate == pytest.approx(GENERATION_S)
    assert emulated("cluster.emulate={preset: flux1-32gpu, time_scale: 0.25}").costs.time_scale == 0.25


def test_known_durations_are_those_that_the_workers_take() -> None:
    assert emulated().known is None
    known = emulated("cluster.emulate={preset: flux1-32gpu, time_scale: 0.1, durations: known}")
    assert known.known is not None
    worker, trainer = (known.costs.plan(WorkerId(name), 0).durations for name in ("generator-0", "trainer"))
    assert known.known.generate == (round(1e6 * worker.generate),)
    assert (known.known.update, known.known.tag) == (round(1e6 * trainer.update), round(1e6 * trainer.generate))


def test_the_section_may_be_written_as_the_presets_name_alone() -> None:
    short, long = recipe(*APART), recipe(APART[0], "cluster.emulate={preset: hunyuanvideo-32gpu}")
    assert short == long
    assert load_recipe(QUICKSTART, ["cluster.emulate=null"]).cluster.emulate is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["cluster.emulate=hunyuan"], r"no preset 'hunyuan'"),
        (["cluster.emulate=hunyuanvideo-32gpu", "cluster.placement=inline"], r"cluster\.emulate needs worker processes"),
        (["cluster.emulate=hunyuanvideo-32gpu", "cluster.weight_transport=broadcast"], r"broadcast is not emulated"),
        (
            ["cluster.emulate={preset: hunyuanvideo-32gpu, deaths: [{worker: generator-7, at_command: 2}]}"],
            r"deaths\.0\.worker: there is no worker 'generator-7'",
        ),
        (["cluster.emulate={preset: hunyuanvideo-32gpu, jiter: 0.1}"], r"jiter"),
        (["cluster.emulate={preset: hunyuanvideo-32gpu, time_scale: 0}"], r"time_scale"),
    ],
)
def test_what_cannot_be_emulated_is_refused_before_anything_is_started(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        inspect(recipe("cluster.placement=disaggregated", *changes))


def test_a_recipe_that_emulates_is_never_trained_in_earnest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="asks for emulated workers"):
        train(recipe(*APART, f"run.output_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


def test_a_recorded_emulation_stays_one_when_it_is_simulated(tmp_path: Path) -> None:
    schedule = schedule_of("gap", preset("flux1-32gpu").model, preset("flux1-32gpu").layout, Options(steps=2))
    with TraceWriter(tmp_path / "trace.jsonl", schedule.settings, source="emulation") as writer:
        simulate(schedule.settings, schedule.costs, None, writer)
    assert "of an emulated run" in load_source(str(tmp_path / "trace.jsonl")).label


def test_dataclasses_of_durations_and_costs_name_the_same_kinds_of_work() -> None:
    simulated = {field.name for field in dataclasses.fields(SimulationCosts)} - {"tag", "evaluate", "last_share"}
    assert {field.name for field in dataclasses.fields(Durations)} == simulated
