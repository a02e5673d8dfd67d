"""What all tests share: one thread, no network, tiny models that are built once, and small recipes."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from digenrl.algorithms.base import GroupAdvantages, RewardTable
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.config.loader import recipe_from_plain
from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.data.prompts import Prompt
from digenrl.diffusion.noise_schedule import NoiseSchedule
from digenrl.diffusion.trajectory import Trajectory
from digenrl.ids import SampleId
from digenrl.models.base import Conditioning, ModelAdapter
from digenrl.testing.tiny_pipelines import BUILDERS, build_sd3
from digenrl.testing.tiny_videos import build_hunyuan_video, build_wan
from digenrl.training.policy import Policy
from digenrl.training.trainer import Trainer
from digenrl.workers.generator import Generator

PROMPTS = tuple(
    Prompt(text=text)
    for text in ("a red circle", "two blue squares", "a green triangle left of a dog", "nothing", "rain", "an owl at night")
)

RecipeMaker = Callable[..., Recipe]


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """Runs set process-wide switches; no test sees those of another."""
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tiny_sd3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny SD3 with all three text encoders. Read only."""
    return build_sd3(tmp_path_factory.mktemp("models") / "sd3")


@pytest.fixture(scope="session")
def tiny_sd3_without_t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny SD3 whose third text encoder is left out. Read only."""
    return build_sd3(tmp_path_factory.mktemp("models") / "sd3_without_t5", with_t5=False)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory, tiny_sd3: Path) -> Callable[[str], Path]:
    """A function that gives the tiny folder of one of tests.families, built when it is first asked for. Read only."""
    built = {"sd3": tiny_sd3}

    def folder(name: str) -> Path:
        if name not in built:
            built[name] = BUILDERS[name](tmp_path_factory.mktemp("models") / name)
        return built[name]

    return folder


@pytest.fixture(scope="session")
def tiny_recipe(tiny_sd3: Path) -> RecipeMaker:
    """A function that makes a small recipe; each argument is a section whose keys replace the defaults."""

    def make(**overrides: Any) -> Recipe:
        plain: dict[str, Any] = {
            "run": {"device": "cpu", "seed": 11},
            "model": {"type": "sd3", "path": str(tiny_sd3), "max_sequence_length": 8},
            "data": {"prompts": "builtin:shapes/train.jsonl"},
            "rollout": {
                "prompts_per_step": 2,
                "num_generations": 3,
                "num_inference_steps": 4,
                "height": 32,
                "width": 32,
                "forward_batch_size": 3,
            },
            "algorithm": {"type": "flow_grpo"},
            "rewards": [{"type": "jpeg"}],
            "train": {"steps": 4, "learning_rate": 1e-3},
        }
        for section, keys in overrides.items():
            both_are_sections = isinstance(keys, Mapping) and isinstance(plain.get(section), Mapping)
            plain[section] = {**plain[section], **keys} if both_are_sections else keys
        return recipe_from_plain(plain)

    return make


@pytest.fixture(scope="session")
def tiny_videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models of videos, by model.type. Read only."""
    folder = tmp_path_factory.mktemp("models")
    return {"wan": build_wan(folder / "wan"), "hunyuan_video": build_hunyuan_video(folder / "hunyuan_video")}


@pytest.fixture(scope="session")
def video_recipe(tiny_recipe: RecipeMaker, tiny_videos: dict[str, Path]) -> RecipeMaker:
    """A function that makes a small recipe of a family; further arguments as for tiny_recipe."""

    def make(family: str, **overrides: Any) -> Recipe:
        model = {"type": family, "path": str(tiny_videos[family]), "max_sequence_length": 32}
        rollout = {"num_frames": 5, "forward_batch_size": 3}
        sections = {"model": model, "rollout": rollout}
        for section, keys in sections.items():
            keys.update(overrides.pop(section, {}))
        return tiny_recipe(**sections, **overrides)

    return make


@dataclass
class Rig:
    """Real parts of one process, wired the way runtime/build.py does it."""

    recipe: Recipe
    adapter: ModelAdapter
    policy: Policy
    algorithm: Any
    schedule: NoiseSchedule
    trainer: Trainer
    generator: Generator

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        return PROMPTS[: self.recipe.rollout.prompts_per_step]

    def samples(self, step: int = 0) -> list[SampleId]:
        rollout = self.recipe.rollout
        return [SampleId(step, p, s) for p in range(rollout.prompts_per_step) for s in range(rollout.num_generations)]

    def conditioning(self) -> Conditioning:
        return self.generator.encode(self.prompts)

    def trajectory(self, samples: list[SampleId] | None = None, step: int = 0) -> Trajectory:
        samples = self.samples(step) if samples is None else samples
        rows = torch.tensor([s.prompt for s in samples])
        return self.generator.generate(samples, self.conditioning(), rows, self.policy.version)

    def advantages(self, *rewards: list[float]) -> list[GroupAdvantages]:
        return self.algorithm.advantages(RewardTable(total=np.array(rewards, dtype=np.float64)))

    def gradient(self) -> dict[str, torch.Tensor]:
        """Summed gradient so far, by name; zeros where none has arrived."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for name, p in self.policy.parameters.items()
        }


@pytest.fixture(scope="session")
def make_rig(tiny_recipe: RecipeMaker) -> Callable[..., Rig]:
    """A function that loads the tiny model and wires trainer and generator around it; arguments as for tiny_recipe."""

    def make(recipe: Recipe | None = None, *, make_algorithm: Callable[[Recipe], Any] | None = None, **overrides: Any) -> Rig:
        recipe = tiny_recipe(**overrides) if recipe is None else recipe
        adapter = component_class("model", recipe.model.type, where="test").load(recipe, torch.device(recipe.run.device))
        algorithm = make_algorithm(recipe) if make_algorithm else FlowGRPO(recipe.algorithm.settings, recipe)
        policy = Policy(adapter, recipe, needs_reference=algorithm.needs_reference)
        rollout = recipe.rollout
        schedule = adapter.noise_schedule(rollout.num_inference_steps, rollout.height, rollout.width)
        return Rig(
            recipe=recipe,
            adapter=adapter,
            policy=policy,
            algorithm=algorithm,
            schedule=schedule,
            trainer=Trainer(policy, algorithm, recipe, schedule),
            generator=Generator(policy, algorithm, recipe, schedule),
        )

    return make
