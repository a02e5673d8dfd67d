"""What a worker process does and refuses, without Ray around it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.errors import ConfigError, ProtocolError
from digenrl.ids import SampleId
from digenrl.runtime.ray.host import WorkerHost
from digenrl.runtime.ray.wire import pack, pack_trajectory, unpack, unpack_trajectories
from digenrl.testing.tiny_pipelines import build_sd3
from digenrl.training.digest import digest, digests

CPU = torch.device("cpu")
PROMPTS = [Prompt(text="a red circle"), Prompt(text="two blue squares")]
SAMPLES = tuple(SampleId(0, prompt, sample) for prompt in range(2) for sample in range(3))
ONE_PROMPT_EACH = [PROMPTS[sample.prompt] for sample in SAMPLES]

MakeRecipe = Callable[..., Recipe]


def host(recipe: Recipe, *roles: Any, **settings: Any) -> WorkerHost:
    return WorkerHost(recipe, frozenset(roles), CPU, **settings)


def pool(recipe: Recipe) -> tuple[WorkerHost, WorkerHost]:
    """A generator that scores, and a trainer; both at version 0."""
    generator, trainer = host(recipe, "encode", "generate", "score"), host(recipe, "generate", "train")
    generator.load(*trainer.publish())
    return generator, trainer


def advantages(trainer: WorkerHost) -> list[Any]:
    return trainer.built.algorithm.advantages(np.array([[0.0, 1.0, 3.0], [2.0, 5.0, 1.0]]))


def state_of(trainer: WorkerHost) -> dict[str, str]:
    """Digests of weights, optimizer and accumulated gradient."""
    held = trainer.built.trainer
    assert held is not None
    gradient = {n: p.grad for n, p in held.policy.parameters.items() if p.grad is not None}
    assert gradient, "nothing was accumulated"
    return {**digests(held.weights()), "gradient": digest(gradient)}


def test_a_fresh_generator_refuses_to_generate_until_it_has_loaded_the_version(tiny_recipe: MakeRecipe) -> None:
    recipe = tiny_recipe()
    generator = host(recipe, "encode", "generate", "score")
    _, text = generator.encode(PROMPTS)
    with pytest.raises(ProtocolError, match="version -1 is held"):
        generator.generate(SAMPLES, 0, text)
    trainer = host(recipe, "generate", "train")
    generator.load(*trainer.publish())
    generator.generate(SAMPLES, 0, text)
    with pytest.raises(ProtocolError, match="version 0 is held"):
        generator.generate(SAMPLES, 1, text)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"lora": {"rank": 4, "alpha": 8.0}}, "algorithm": {"type": "flow_grpo", "kl_beta": 0.01}},
        # The generator holds rounded weights, the trainer rounds its own in every pass.
        {"model": {"dtype": "bfloat16"}},
        {"model": {"dtype": "bfloat16", "lora": {"rank": 4, "alpha": 8.0}}},
    ],
)
def test_a_trainer_that_helps_to_generate_leaves_gradient_weights_and_optimizer_alone(
    changes: dict[str, Any], tiny_recipe: MakeRecipe
) -> None:
    generator, trainer = pool(tiny_recipe(**changes))
    _, text = generator.encode(PROMPTS)
    _, trajectory, _ = generator.generate(SAMPLES, 0, text)
    trainer.accumulate((0, 1), advantages(trainer), False, text, trajectory)
    trainer.optimizer_step()
    generator.load(*trainer.publish())
    _, trajectory, latents = generator.generate(SAMPLES, 1, text)
    trainer.accumulate((0, 1), advantages(trainer), False, text, trajectory)
    before = state_of(trainer)
    trainer.switch(generating=True)
    _, helped, helped_latents = trainer.generate(SAMPLES, 1, text)
    trainer.switch(generating=False)
    assert state_of(trainer) == before
    assert torch.equal(unpack(helped_latents), unpack(latents)), "the helper's samples are the generator's"
    assert torch.equal(unpack(helped.tensors["log_probs"]), unpack(trajectory.tensors["log_probs"]))


def test_the_trainer_does_not_generate_while_it_trains_nor_train_while_it_generates(tiny_recipe: MakeRecipe) -> None:
    generator, trainer = pool(tiny_recipe())
    _, text = generator.encode(PROMPTS)
    _, trajectory, _ = generator.generate(SAMPLES, 0, text)
    with pytest.raises(ProtocolError, match="training mode"):
        trainer.generate(SAMPLES, 0, text)
    trainer.switch(generating=True)
    with pytest.raises(ProtocolError, match="generating mode"):
        trainer.accumulate((0, 1), advantages(trainer), False, text, trajectory)
    with pytest.raises(ProtocolError, match="generating mode"):
        trainer.optimizer_step()


def test_what_two_ranks_generate_is_what_one_generates(tiny_recipe: MakeRecipe) -> None:
    generator, _ = pool(tiny_recipe())
    _, text = generator.encode(PROMPTS)
    _, whole, latents = generator.generate(SAMPLES, 0, text)
    for cut in range(1, len(SAMPLES)):
        parts = [generator.generate(share, 0, text) for share in (SAMPLES[:cut], SAMPLES[cut:])]
        joined, wanted = unpack_trajectories([part[1] for part in parts]), unpack_trajectories([whole])
        assert joined.samples == SAMPLES
        assert torch.equal(joined.log_probs, wanted.log_probs)
        assert torch.equal(joined.final_latents, unpack(latents))


def test_the_answers_that_reach_the_driver_do_not_grow_with_the_resolution(tmp_path: Path, tiny_recipe: MakeRecipe) -> None:
    sizes = {}
    for side in (32, 64):
        recipe = tiny_recipe(rollout={"height": side, "width": side}, model={"path": str(build_sd3(tmp_path / str(side)))})
        generator, trainer = pool(recipe)
        cut_off, text = generator.encode(PROMPTS)
        seconds, trajectory, latents = generator.generate(SAMPLES, 0, text)
        pieces = generator.score(SAMPLES, ONE_PROMPT_EACH, (), latents)
        trainer.accumulate((0, 1), advantages(trainer), False, text, trajectory)
        report = trainer.optimizer_step()
        manifest, *buckets = trainer.publish()
        answers = (
            cut_off,
            type(seconds),
            pieces.rewards.totals,
            sorted(pieces.rewards.parts),
            manifest.num_bytes,
            report.outcome,
        )
        sizes[side] = [len(pickle.dumps(answer)) for answer in answers]
        assert pieces.pictures.size == 0
        assert sum(bucket.nbytes for bucket in buckets) > 100 * sum(sizes[side])
    assert sizes[32] == sizes[64]


def test_tensors_of_any_kind_arrive_as_they_were_sent() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        sent = (torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
        arrived = unpack(pack(sent.t()))  # not contiguous
        assert arrived.dtype == dtype
        assert torch.equal(arrived, sent.t())
        assert torch.equal(unpack(pack(sent), rows=[2, 0, 2]), sent[[2, 0, 2]])


def test_a_trajectory_arrives_in_memory_of_its_own(tiny_recipe: MakeRecipe) -> None:
    generator, _ = pool(tiny_recipe())
    _, text = generator.encode(PROMPTS)
    _, packed, _ = generator.generate(SAMPLES, 0, text)
    first = unpack_trajectories([packed])
    first.latents.zero_()
    assert float(unpack_trajectories([packed]).latents.abs().sum()) > 0
    assert pack_trajectory(unpack_trajectories([packed])).samples == SAMPLES


def test_a_trainer_that_does_not_see_the_run_folder_is_refused(tmp_path: Path, tiny_recipe: MakeRecipe) -> None:
    trainer = host(tiny_recipe(), "generate", "train")
    probe = tmp_path / "probe"
    with pytest.raises(ConfigError, match="does not see the run folder"):
        trainer.check_folder(str(probe), "token")
    probe.write_text("other")
    with pytest.raises(ConfigError, match="share"):
        trainer.check_folder(str(probe), "token")
    probe.write_text("token")
    trainer.check_folder(str(probe), "token")


def test_a_generator_holds_trained_weights_in_the_dtypes_that_they_travel_in(tiny_recipe: MakeRecipe) -> None:
    generator, trainer = pool(tiny_recipe(model={"dtype": "bfloat16"}))
    for worker, linear in ((generator, torch.bfloat16), (trainer, torch.float32)):
        policy = worker.built.policy
        assert policy is not None
        assert policy.parameters["transformer_blocks.0.attn.to_q.weight"].dtype == linear
        assert policy.parameters["transformer_blocks.0.attn.norm_q.weight"].dtype == torch.float32


def test_videos_travel_as_latents_and_come_back_as_the_frames_that_were_asked_for(video_recipe: MakeRecipe) -> None:
    generator, trainer = pool(video_recipe("wan", train={"timestep_batch_size": 3}))
    _, text = generator.encode(PROMPTS)
    _, trajectory, latents = generator.generate(SAMPLES, 0, text)
    pieces = generator.score(SAMPLES, ONE_PROMPT_EACH, (0, 2), latents)
    assert pieces.pictures.shape == (2, 5, 32, 32, 3)
    assert len(pieces.rewards.totals) == len(SAMPLES)
    none = generator.score(SAMPLES, ONE_PROMPT_EACH, (), latents)
    assert none.pictures.shape == (0, 5, 32, 32, 3), "so that parts of several ranks can be joined"
    trainer.accumulate((0, 1), advantages(trainer), False, text, trajectory)
    assert trainer.optimizer_step().metrics["logprob_abs_diff"] == 0.0
