"""``digenrl train --replay``: the record of a run on two pools is followed in one process, TAG and stale work included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from digenrl.cli.main import main
from digenrl.config.loader import load_recipe
from digenrl.driver import drive
from digenrl.ids import WorkerId
from digenrl.runtime.build import Start, schedule_settings
from digenrl.scheduling.commands import Generate
from digenrl.scheduling.scheduler import Scheduler
from digenrl.simulation.costs import SimulationCosts
from digenrl.simulation.executor import SimulatedExecutor
from digenrl.trace.record import TraceWriter, read_trace

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
SMALL = (
    "rollout.prompts_per_step=4",
    "rollout.num_generations=3",
    "rollout.forward_batch_size=3",
    "rollout.num_inference_steps=3",
    "algorithm.sde_window_size=1",
    "algorithm.sde_window_range=[0, 2]",
    "schedule.groups_per_micro_batch=1",
    "schedule.max_stale_fraction=0.5",
    "schedule.tag=greedy",
    "cluster.placement=disaggregated",
    "train.steps=2",
    "eval=null",
    "log.tensorboard=false",
    "log.sample_freq=0",
)
COSTS = SimulationCosts(generate=(1.0, 1.3), score=(0.1, 0.1), update=0.4, tag=1.0, optimizer=0.6, sync=0.1)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A run folder whose trace has stale work and TAG: the schedule of such a run, on the virtual clock."""
    folder = tmp_path / "recorded"
    folder.mkdir()
    recipe = load_recipe(QUICKSTART, SMALL)
    generators = (WorkerId("generator-0"), WorkerId("generator-1"))
    settings = schedule_settings(recipe, Start(), generators=generators, trainer=WorkerId("trainer"))
    with TraceWriter(folder / "trace.jsonl", settings) as writer:
        drive(Scheduler(settings), SimulatedExecutor(settings, COSTS), writer, command_timeout_s=1)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.to_plain()), encoding="utf-8")
    return folder


def test_a_record_with_stale_work_and_tag_is_followed_in_one_process(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [c for entry in read_trace(recorded / "trace.jsonl").entries for c in entry.commands if isinstance(c, Generate)]
    assert any(c.worker == "trainer" for c in made)
    assert any(c.policy_version < c.micro_batch.step for c in made)
    digests = []
    for name in ("first", "second"):
        changes = ["cluster.placement=inline", f"run.output_dir={tmp_path / name}"]
        monkeypatch.setattr(sys, "argv", ["digenrl", "train", "--replay", str(recorded), *changes])
        with pytest.raises(SystemExit) as caught:
            main()
        assert not caught.value.code
        digests.append(json.loads((tmp_path / name / "summary.json").read_text(encoding="utf-8"))["digests"])
    assert digests[0] == digests[1]
