from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from digenrl.errors import ConfigError
from digenrl.simulation.run import SimulationResult, simulate
from digenrl.simulation.source import Loaded, load_source
from digenrl.trace.record import TraceWriter

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
INLINE = "cluster.placement=inline"
COSTS: dict[str, Any] = {
    "costs": {"generate": [10.0, 12.5], "score": 0.5, "update": 3.0, "tag": 10.0, "switch_in": 0.5, "switch_out": 0.25},
    "schedule": {"steps": 4, "micro_batches": 8, "tag": "bts_plus", "max_stale_fraction": 0.25},
}


def write(folder: Path, plain: Any, name: str = "costs.yaml") -> str:
    path = folder / name
    path.write_text(plain if isinstance(plain, str) else yaml.safe_dump(plain, sort_keys=False))
    return str(path)


def run(loaded: Loaded) -> SimulationResult:
    return simulate(loaded.settings, loaded.costs, loaded.disturbance, samples_per_step=loaded.samples_per_step)


def with_(**sections: Any) -> dict[str, Any]:
    return {name: {**COSTS.get(name, {}), **given} for name, given in {"costs": {}, "schedule": {}, **sections}.items()}


def test_a_costs_file_says_everything_about_a_run(tmp_path: Path) -> None:
    loaded = load_source(write(tmp_path, COSTS))
    settings = loaded.settings
    assert (settings.steps, settings.micro_batches, settings.tag, settings.stale_quota) == (4, 8, "bts_plus", 2)
    assert settings.generators == ("generator-0", "generator-1")
    assert settings.scoring == "generator"
    assert loaded.costs.score == (0.5, 0.5)
    assert loaded.samples_per_step is None
    assert len(run(loaded).step_times_s) == 4


def test_one_number_stands_for_all_replicas_and_no_score_means_inline(tmp_path: Path) -> None:
    path = write(tmp_path, {"costs": {"generate": 10, "update": 3}, "schedule": {"micro_batches": 8}, "cluster": {"replicas": 3}})
    loaded = load_source(path)
    assert loaded.costs.generate == (10.0, 10.0, 10.0)
    assert loaded.settings.scoring == "inline"
    assert loaded.settings.tag == "never"


def test_scorers_of_their_own_are_counted_from_their_durations(tmp_path: Path) -> None:
    path = write(tmp_path, with_(costs={"score": [0.5, 0.5, 0.5]}, schedule={"scoring": "pool", "tag": "greedy"}))
    assert load_source(path).settings.scorers == ("scorer-0", "scorer-1", "scorer-2")


def test_overrides_and_steps_change_any_source(tmp_path: Path) -> None:
    loaded = load_source(write(tmp_path, COSTS), ["costs.update=1e-3", "schedule.tag=never"], steps=2)
    assert (loaded.costs.update, loaded.settings.tag, loaded.settings.steps) == (1e-3, "never", 2)


def test_a_mode_replaces_the_schedule_of_a_costs_file(tmp_path: Path) -> None:
    path = write(tmp_path, {"costs": COSTS["costs"], "schedule": {"micro_batches": 8, "tsp_factor": 2}})
    naive, gap, tsp = (run(load_source(path, [f"schedule.mode={mode}"])).step_time_s for mode in ("naive", "gap", "tsp"))
    assert naive > gap > tsp
    assert load_source(path, ["schedule.mode=colocated"]).settings.one_pool


def test_a_disturbance_is_read_and_then_plans_are_made_from_estimates(tmp_path: Path) -> None:
    noise = {"jitter": 0.1, "straggler_share": 0.1, "seed": 3, "incidents": [{"at_s": 5, "worker": "generator-1"}]}
    loaded = load_source(write(tmp_path, with_(disturbance=noise)))
    assert loaded.disturbance.incidents[0].worker == "generator-1"
    assert loaded.settings.costs is None
    assert run(loaded) == run(loaded)
    assert load_source(write(tmp_path, COSTS)).settings.costs is not None
    assert load_source(write(tmp_path, COSTS), ["schedule.durations=measured"]).settings.costs is None


def test_a_preset_grows_with_its_workload_and_keeps_its_mode() -> None:
    nominal = load_source("hunyuanvideo-32gpu")
    assert nominal.mode == "tcss"
    assert nominal.samples_per_step == 48 * 16
    larger = load_source("hunyuanvideo-32gpu", ["workload.height=720", "workload.num_frames=101"])
    assert run(larger).step_time_s > 2 * run(nominal).step_time_s
    assert load_source("hunyuanvideo-32gpu", ["schedule.mode=naive"]).settings.micro_batches == 1
    assert load_source("hunyuanvideo-32gpu", ["cluster.replicas=2", "cluster.ranks=8"]).settings.generators[1:] == (
        "generator-1",
    )


def test_a_recipe_runs_in_turn_on_one_worker_or_on_the_cluster_that_is_asked_for() -> None:
    alone = load_source(str(QUICKSTART), ["train.steps=3", INLINE])
    assert alone.settings.one_pool
    assert "not measured" in alone.label
    # 108 samples x (8 x 0.95 + 2.2) ms and 324 pairs x 2.9 ms, then optimizer and sync.
    assert run(alone).step_time_s == pytest.approx(108 * (8 * 0.95e-3 + 2.2e-3) + 324 * 2.9e-3 + 0.01, rel=1e-3)
    both = load_source(str(QUICKSTART), ["train.steps=3", "cluster.placement=disaggregated"])
    assert not both.settings.one_pool
    assert run(both).step_time_s < run(alone).step_time_s
    assert load_source(str(QUICKSTART), ["rollout.height=64"], steps=3).settings.steps == 3


COLOCATED = ("train.steps=3", "cluster.placement=colocated")


def test_a_colocated_recipe_has_the_trainer_s_ranks_as_all_of_its_devices() -> None:
    unlike = "cluster.generators=[{replicas: 2, ranks: 2}, {ranks: 3}]"  # which colocated does not use
    alone, four = (load_source(str(QUICKSTART), [*COLOCATED, unlike, f"cluster.trainer.ranks={n}"]) for n in (1, 4))
    assert (alone.layout.devices, four.layout.devices) == (1, 4)
    assert "one worker that does everything in turn" in alone.label and "4 devices that do everything in turn" in four.label
    assert run(alone).step_time_s == run(load_source(str(QUICKSTART), ["train.steps=3", INLINE])).step_time_s
    # 108 samples and 324 pairs on four devices, each of which pads its 9 samples of a micro-batch to a forward batch of 36.
    generated, updated = 27 * (8 * 0.95e-3 * 4 + 1.6e-3 * 4 + 0.6e-3), 81 * 2.9e-3
    assert run(four).step_time_s == pytest.approx(generated + updated + 0.01, rel=1e-3)


def test_the_schedule_of_a_colocated_recipe_is_the_one_that_train_gives_its_only_worker() -> None:
    found = load_source(str(QUICKSTART), [*COLOCATED, "schedule.update_order=index"]).settings
    assert found.one_pool and found.generators == ("pool",)
    assert (found.update_after, found.update_order, found.scoring) == ("step", "index", "generator")
    assert (found.tag, found.stale_quota, found.micro_batches) == ("never", 0, 3)


def test_a_colocated_recipe_is_compared_with_two_pools_by_naming_a_mode_that_has_them() -> None:
    layout = load_source(str(QUICKSTART), [*COLOCATED, "cluster.generators.0.replicas=2", "schedule.mode=gap"]).layout
    assert (layout.replicas, layout.trainer_ranks) == (2, 1)


@pytest.mark.parametrize("mode", ["naive", "batch_axis", "gap", "tsp", "colocated", "colocated+tsp"])
def test_a_mode_without_tag_has_none_although_the_recipe_s_pools_would(mode: str) -> None:
    loaded = load_source(str(QUICKSTART), ["train.steps=3", "cluster.placement=disaggregated", f"schedule.mode={mode}"])
    assert loaded.settings.tag == "never"
    assert run(loaded).step_time_s > 0


def trace(tmp_path: Path, loaded: Loaded) -> str:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path, loaded.settings, source="simulation") as writer:
        simulate(loaded.settings, loaded.costs, loaded.disturbance, writer)
    return str(path)


def test_the_trace_of_a_run_gives_its_durations_back(tmp_path: Path) -> None:
    original = load_source(write(tmp_path, with_(costs={"encode": 0.3, "optimizer": 0.2, "sync": 0.1})))
    again = load_source(trace(tmp_path, original))
    assert again.costs == original.costs
    assert again.settings == original.settings
    assert run(again) == run(original)


def test_the_trace_of_a_resumed_run_is_simulated_from_where_it_went_on(tmp_path: Path) -> None:
    whole = load_source(write(tmp_path, COSTS))
    resumed = dataclasses.replace(whole.settings, first_version=2, stale_claims=(0,), save_at=(3, 4), evaluate_at=(4,))
    path = trace(tmp_path, dataclasses.replace(whole, settings=resumed))
    result = run(load_source(path))
    assert (len(result.step_times_s), len(result.tags), result.stale) == (2, 2, (1, 2))
    assert load_source(path, steps=3).settings.save_at == (3,)
    with pytest.raises(ConfigError, match=r"schedule.steps \(2\) leaves nothing to simulate"):
        load_source(path, steps=2)


def test_the_durations_of_a_noisy_trace_are_near_the_true_ones(tmp_path: Path) -> None:
    noisy = load_source(write(tmp_path, with_(schedule={"steps": 40}, disturbance={"jitter": 0.1, "straggler_share": 0.02})))
    found = load_source(trace(tmp_path, noisy)).costs
    assert found.generate == pytest.approx((10.0, 12.5), rel=0.1)
    assert found.update == pytest.approx(3.0, rel=0.1)


def test_a_partial_last_micro_batch_does_not_spoil_a_traces_means(tmp_path: Path) -> None:
    found = load_source(
        trace(tmp_path, load_source(write(tmp_path, with_(costs={"last_share": 0.25}, schedule={"tag": "never"}))))
    )
    assert found.costs.generate == (10.0, 12.5)
    assert found.costs.last_share == pytest.approx(0.25, rel=0.2)


def test_the_trace_of_one_pool_stays_one_pool(tmp_path: Path) -> None:
    found = load_source(trace(tmp_path, load_source(str(QUICKSTART), [INLINE], steps=3)))
    assert found.settings.one_pool
    assert found.costs.generate[0] == pytest.approx(3 * 12 * 8 * 0.95e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("costs:\n  generate: 10\n  update: x\nschedule: {micro_batches: 8}\n", r"costs.update .*costs.yaml:3"),
        ("costs:\n  generate: [10,\n    -2]\n  update: 1\nschedule: {micro_batches: 8}\n", r"costs.generate\[1\].*costs.yaml:3"),
        ("costs:\n  generate: 10\n  updat: 1\nschedule: {micro_batches: 8}\n", r"costs.updat .*costs.yaml:3"),
        ("costs:\n  generate: 10\n  update: true\nschedule: {micro_batches: 8}\n", r"costs.update .*costs.yaml:3"),
        ("costs:\n  generate: 10\nschedule: {micro_batches: 8}\n", r"costs.update is missing"),
        ("costs: 3\nschedule: {micro_batches: 8}\n", r"costs cannot be 3.*costs.yaml:1"),
        ("costs: {generate: 1, update: 1}\n", r"schedule.micro_batches is missing"),
        ("costs: {generate: 1, update: 1}\nschedule:\n  micro_batches: 0\n", r"schedule.micro_batches .*costs.yaml:3"),
        ("costs: {generate: 1, update: 1}\nschedule:\n  micro_batches: true\n", r"schedule.micro_batches .*costs.yaml:3"),
        ("costs: {generate: 1, update: 1}\nschedule:\n  micro_batches: 4\n  tag: bst\n", r"schedule.tag .*costs.yaml:4"),
        (
            "costs: {generate: 1, update: 1}\nschedule:\n  micro_batches: 4\n  tag_static: 5\n",
            r"schedule.tag_static \(5\).*costs.yaml:4",
        ),
        (
            "costs: {generate: 1, update: 1}\nschedule:\n  micro_batches: 4\n  max_stale_fraction: 1.5\n",
            r"max_stale_fraction .*:4",
        ),
        ("costs: {generate: 1, update: 1}\nschedule:\n  micro_batches: 4\n  tag: greedy\n", r"costs.tag is missing"),
        ("costs: {generate: 1, update: 1}\nschedule: {micro_batches: 4}\ncluster:\n  replicas: 0\n", r"cluster.replicas .*:4"),
        (
            "costs: {generate: [1, 2], update: 1}\nschedule: {micro_batches: 4}\ncluster:\n  replicas: 3\n",
            r"cluster.replicas \(3\).*:4",
        ),
        ("costs: {generate: 1, update: 1, score: []}\nschedule: {micro_batches: 4}\n", r"costs.score is empty"),
        (
            "costs: {generate: 1, update: 1}\nschedule: {micro_batches: 4}\ndisturbance:\n  jitter: -1\n",
            r"disturbance.jitter .*:4",
        ),
        (
            "costs: {generate: 1, update: 1}\nschedule: {micro_batches: 4}\n"
            "disturbance:\n  incidents:\n  - {at_s: 1, worker: g}\n",
            r"disturbance.incidents.0.worker.*costs.yaml:5",
        ),
        ("costs: {generate: 1, update: 1}\nschedule: {micro_batches: 4}\nscedule: 3\n", r"scedule .*costs.yaml:3"),
        ("foo: 1\n", r"foo is not a known section"),
        ("", r"costs.yaml"),
        ("costs: {\n", r"costs.yaml:\d"),
    ],
)
def test_a_mistake_in_a_costs_file_is_named_with_its_line(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_source(write(tmp_path, text))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("workload.hight=3", "workload.hight is not a known key"),
        ("workload.prompts_per_step=2", "groups_per_micro_batch"),
        ("schedule.micro_batches=3", "schedule.micro_batches cannot be given here"),
        ("schedule.mode=tscc", "schedule.mode"),
        ("schedule=3", "schedule must be a mapping"),
        ("costs=3", "costs cannot be 3"),
        ("costs.tag=null", "costs.tag is missing"),
        ("cluster.trainer_ranks=0", "cluster.trainer_ranks"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_mistake_in_an_override_is_named_with_the_override(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_source("hunyuanvideo-32gpu", [override])


@pytest.mark.parametrize(
    "override", ["schedule=3", "schedule.mode=[1]", "train.stepz=3", "costs.update=-1", "cluster.replicas=0"]
)
def test_a_mistake_in_a_recipes_override_is_one_error(override: str) -> None:
    with pytest.raises(ConfigError, match=override.partition("=")[0]):
        load_source(str(QUICKSTART), [override])


@pytest.mark.parametrize("name", ["missing.yaml", "folder/missing", "missing.jsonl"])
def test_a_file_that_is_not_there_is_not_taken_for_a_preset(name: str) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        load_source(name)


def test_a_folder_is_not_a_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no file"):
        load_source(str(tmp_path))


def test_a_truncated_foreign_or_empty_trace_is_named_with_its_line(tmp_path: Path) -> None:
    good = Path(trace(tmp_path, load_source(write(tmp_path, COSTS)))).read_text()
    first = good.split("\n", 1)[0]
    stranger = json.dumps({"events": [], "commands": [{"type": "StopRun", "reason": "x"}]})
    for text, named in (
        (good[: len(good) - 20], r"cut.jsonl:\d+: this line is not JSON"),
        ('{"a": 1}\n', r"cut.jsonl:1: this is not a DigenRL trace"),
        ("", r"cut.jsonl:1: an empty file"),
        (first + "\n", r"cut.jsonl: .*no generate"),
        (f"{first}\n{stranger}\n", r"cut.jsonl: .*no generate"),
        (good.replace('"generator-1", "micro_batch"', '"generator-7", "micro_batch"'), r"cut.jsonl: 'generator-7'"),
    ):
        with pytest.raises(ConfigError, match=named):
            load_source(write(tmp_path, text, "cut.jsonl"))


def test_a_recipe_s_pools_are_the_layout_and_unlike_replicas_need_a_costs_file() -> None:
    pools = "cluster.generators=[{replicas: 2, ranks: 2}, {replicas: 1, ranks: 2}]"
    placed = ["train.steps=3", "cluster.placement=disaggregated", "cluster.trainer.ranks=3"]
    loaded = load_source(str(QUICKSTART), [*placed, pools])
    assert (loaded.layout.replicas, loaded.layout.ranks, loaded.layout.trainer_ranks) == (3, 2, 3)
    with pytest.raises(ConfigError, match="unlike replicas"):
        load_source(str(QUICKSTART), [*placed, "cluster.generators=[{ranks: 2}, {ranks: 4}]"])


@pytest.mark.parametrize(
    "incidents",
    [
        "[{at_s: 1, worker: generator-0, joins: true}]",
        "[{at_s: 1, worker: generator-0}, {at_s: 2, worker: generator-0}]",
        "[{at_s: 1, worker: generator-0}, {at_s: 1, worker: generator-0, joins: true}]",
    ],
)
def test_incidents_that_cannot_follow_each_other_are_the_user_s_to_mend(incidents: str, tmp_path: Path) -> None:
    path = write(tmp_path, with_())
    with pytest.raises(ConfigError, match=r"disturbance\.incidents\.\d: generator-0 cannot"):
        load_source(path, [f"disturbance.incidents={incidents}"])


def test_a_wrong_duration_on_the_command_line_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"command line, costs\.generate=-1"):
        load_source(write(tmp_path, with_()), ["costs.generate=-1"])
