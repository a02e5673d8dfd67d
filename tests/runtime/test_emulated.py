"""What an emulated worker does, without Ray and without waiting."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys

import pytest

from digenrl.errors import ProtocolError
from digenrl.ids import SampleId, StepOutcome, WorkerId
from digenrl.runtime.emulated import (
    Death,
    Durations,
    EmulatedCosts,
    EmulatedHost,
    Scatter,
    StandIn,
    StandInManifest,
    WorkerPlan,
    reward_of,
)

G0 = WorkerId("generator-0")
ALL = Durations(
    encode=0.5, generate=8.0, score=0.25, update=2.0, switch_in=0.125, switch_out=0.375, optimizer=1.0, sync=0.75, save=3.0
)
EIGHT = tuple(SampleId(0, prompt, sample) for prompt in range(2) for sample in range(4))


class Clock:
    """Instead of sleeping and dying."""

    def __init__(self) -> None:
        self.slept: list[float] = []
        self.died_after: list[float] | None = None

    def die(self) -> None:
        self.died_after = list(self.slept)


def host(clock: Clock, **changes: object) -> EmulatedHost:
    plan = WorkerPlan(worker=G0, durations=ALL, samples_per_micro_batch=8)
    return EmulatedHost(dataclasses.replace(plan, **changes), sleep=clock.slept.append, die=clock.die)


def test_every_command_takes_its_own_duration_and_a_smaller_micro_batch_its_share() -> None:
    clock = Clock()
    worker = host(clock)
    worker.encode(())
    worker.generate(EIGHT, 0, {})
    worker.generate(EIGHT[:2], 0, {})
    worker.score(EIGHT[:4], (), (), None)
    worker.accumulate((0,), (), False, {}, StandIn(num_samples=4, policy_version=0), StandIn(num_samples=2, policy_version=0))
    worker.switch(True)
    worker.switch(False)
    assert worker.optimizer_step().outcome is StepOutcome.APPLIED
    worker.publish()
    worker.weights_digest()
    worker.save("", {}, 1)
    assert clock.slept == [0.5, 8.0, 2.0, 0.125, 1.5, 0.125, 0.375, 1.0, 0.75, 0.75, 3.0]


def test_samples_that_only_fill_up_are_made_and_not_handed_on() -> None:
    clock = Clock()
    seconds, made, _ = host(clock).generate(EIGHT, 0, {}, 6)
    assert (seconds, made.num_samples, clock.slept) == (8.0, 6, [8.0])


def test_staging_weights_takes_no_time_and_brings_the_bytes_that_are_asked_for() -> None:
    clock = Clock()
    manifest, bucket = host(clock, weight_bytes=1000).stage()  # type: ignore[misc]
    assert (bucket.nbytes, clock.slept) == (1000, [])
    assert host(clock).stage() == manifest


def test_a_reward_is_a_function_of_its_samples_id_alone() -> None:
    one, other = host(Clock()), host(Clock(), worker=WorkerId("generator-1"))
    forward = one.score(EIGHT, (), (), None).rewards.totals.tolist()
    backward = other.score(EIGHT[::-1], (), (), None).rewards.totals.tolist()
    assert forward == backward[::-1] == [reward_of(sample) for sample in EIGHT]
    assert len(set(forward)) == 8
    assert all(0 <= reward < 1 for reward in forward)


def test_another_version_than_the_one_held_is_refused() -> None:
    worker = host(Clock())
    worker.load(StandInManifest(version=3, digest="emulated-3"))
    worker.generate(EIGHT, 3, {})
    with pytest.raises(ProtocolError, match="holds version 3"):
        worker.generate(EIGHT, 4, {})


def test_both_sides_name_a_version_by_the_same_digest() -> None:
    trainer, generator = host(Clock()), host(Clock())
    trainer.optimizer_step()
    manifest = trainer.publish()
    assert manifest.version == 1
    assert generator.load(manifest) == manifest.digest == generator.weights_digest()[1]


def test_the_version_of_a_trainer_grows_with_the_last_update_of_a_rollout() -> None:
    trainer = host(Clock(), updates_per_rollout=2)
    trainer.optimizer_step()
    assert trainer.weights_digest()[0] == 0
    trainer.optimizer_step()
    assert trainer.weights_digest()[0] == 1


def test_a_trainer_generates_only_in_its_generating_mode_and_trains_only_out_of_it() -> None:
    trainer = host(Clock(), takes_turns=True)
    with pytest.raises(ProtocolError, match="training mode"):
        trainer.generate(EIGHT, 0, {})
    trainer.switch(True)
    trainer.generate(EIGHT, 0, {})
    for call in (
        trainer.optimizer_step,
        lambda: trainer.accumulate((0,), (), False, {}, StandIn(num_samples=8, policy_version=0)),
    ):
        with pytest.raises(ProtocolError, match="generating mode"):
            call()


@pytest.mark.parametrize("versions", [(0,), (3,), (1, 2)])
def test_a_trajectory_that_is_too_old_too_new_or_of_two_versions_is_refused(versions: tuple[int, ...]) -> None:
    trainer = host(Clock())
    trainer.optimizer_step()
    trainer.optimizer_step()
    parts = [StandIn(num_samples=4, policy_version=version) for version in versions]
    with pytest.raises(ProtocolError, match="at version 2"):
        trainer.accumulate((0,), (), False, {}, *parts)
    trainer.accumulate((0,), (), False, {}, StandIn(num_samples=8, policy_version=1))


def test_durations_scatter_around_the_nominal_one_and_repeat_themselves() -> None:
    scatter = Scatter(jitter=0.2, seed=1)
    factors = [scatter.factor(G0, 0, command) for command in range(2000)]
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=0.02)
    assert statistics.stdev(factors) == pytest.approx(0.2, abs=0.02)
    assert factors == [scatter.factor(G0, 0, command) for command in range(2000)]
    assert scatter.factor(G0, 0, 1) != scatter.factor(WorkerId("generator-1"), 0, 1)
    assert scatter.factor(G0, 0, 1) != scatter.factor(G0, 1, 1)


def test_stragglers_are_as_many_and_as_slow_as_asked_for() -> None:
    scatter = Scatter(straggler_share=0.1, straggler_factor=7.0)
    factors = [scatter.factor(G0, 0, command) for command in range(2000)]
    assert set(factors) == {1.0, 7.0}
    assert factors.count(7.0) == pytest.approx(200, abs=50)


def test_a_worker_dies_in_the_middle_of_the_command_that_was_named() -> None:
    clock = Clock()
    worker = host(clock, dies_at=2)
    worker.load(StandInManifest(version=0, digest="emulated-0"))
    assert clock.died_after is None
    worker.generate(EIGHT, 0, {})
    assert clock.died_after == [0.75, 4.0]


def test_only_the_first_process_of_a_worker_dies_and_only_of_that_worker() -> None:
    costs = EmulatedCosts(
        durations={G0: ALL, WorkerId("generator-1"): ALL},
        samples_per_micro_batch=8,
        time_scale=0.5,
        deaths=(Death(worker=G0, at_command=4),),
    )
    assert costs.plan(G0, 0).dies_at == 4
    assert costs.plan(G0, 1).dies_at is None
    assert costs.plan(WorkerId("generator-1"), 0).dies_at is None
    assert costs.plan(G0, 0).durations.generate == 4.0


def test_an_emulated_worker_and_all_that_it_is_sent_need_no_torch() -> None:
    modules = "digenrl.runtime.ray.emulated_actor, digenrl.algorithms.base, digenrl.data.prompts"
    code = f"import sys, {modules}; print(sorted({{'torch', 'diffusers', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
