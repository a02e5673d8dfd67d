"""The sums that ``check`` prints, against a slow and obvious way to count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.config.arithmetic import padding_advice, step_arithmetic
from digenrl.config.checks import check_recipe
from digenrl.config.loader import load_recipe, recipe_from_plain
from digenrl.config.schema import Recipe
from digenrl.scheduling.micro_batches import cut_into_micro_batches

ROOT = Path(__file__).parents[2]
BATCH_AXIS = "schedule.micro_batching=batch_axis"
Write = Callable[[str | bytes], Path]


def recipe_of(
    prompts: int,
    generations: int,
    per_micro_batch: int,
    forward: int,
    steps: int = 8,
    fraction: float = 0.5,
    pairs: object = "all",
) -> Recipe:
    return recipe_from_plain(
        {
            "model": {"path": "builtin:shapes"},
            "data": {"prompts": "x.txt"},
            "rollout": {
                "prompts_per_step": prompts,
                "num_generations": generations,
                "num_inference_steps": steps,
                "height": 32,
                "width": 32,
                "forward_batch_size": forward,
            },
            "algorithm": {"type": "flow_grpo", "timestep_fraction": fraction},
            "rewards": [{"type": "shapes"}],
            "train": {"steps": 1, "timestep_batch_size": pairs},
            "schedule": {"groups_per_micro_batch": per_micro_batch},
        }
    )


def test_the_quickstart_s_sums_are_the_promised_ones() -> None:
    first, second = step_arithmetic(load_recipe(ROOT / "recipes" / "quickstart.yaml")).lines()
    assert first.startswith("9 prompts x 12 = 108 samples")
    assert second == "3 of 8 denoising steps trained = 36 pairs a group, 9 forward batches, padding 0 %"
    assert first.endswith("in 3 micro-batches; 8 denoising steps x 3 forward batches, padding 0 %")


def test_uneven_sizes_are_padded_and_the_share_is_told() -> None:
    sums = step_arithmetic(recipe_of(prompts=5, generations=6, per_micro_batch=2, forward=8, pairs=5))
    # Micro-batches of 12, 12 and 6 samples: 2 + 2 + 1 forward batches of 8 rows for 30 samples.
    assert sums.rollout_forward_batches == 5
    assert sums.rollout_padding == pytest.approx(1 - 30 / 40)
    # 6 samples x 4 steps = 24 pairs a group: 5 forward batches of 5 rows.
    assert sums.trained_steps == 4
    assert sums.training_forward_batches == 25
    assert sums.training_padding == pytest.approx(1 - 24 / 25)
    assert sums.lines() == (
        "5 prompts x 6 = 30 samples in 3 micro-batches; 8 denoising steps x 5 forward batches, padding 25 %",
        "4 of 8 denoising steps trained = 24 pairs a group, 25 forward batches, padding 4 %",
    )


def test_colocated_ranks_share_a_micro_batch_and_the_generators_of_the_recipe_count_for_nothing() -> None:
    changes = ["rollout.forward_batch_size=9", "cluster.trainer.ranks=4", "cluster.generators=[{ranks: 5}, {ranks: 7}]"]
    recipe = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["cluster.placement=colocated", *changes])
    # 36 samples of a micro-batch are 9 on each of four ranks.
    assert (step_arithmetic(recipe).rollout_forward_batches, step_arithmetic(recipe).rollout_padding) == (12, 0)
    assert padding_advice(recipe) is None
    along = load_recipe(ROOT / "recipes" / "quickstart.yaml", ["cluster.placement=colocated", *changes, BATCH_AXIS])
    check_recipe(along)
    assert along.groups_in_micro_batch == 9  # three groups for each of four ranks, of nine prompts


def test_a_training_batch_is_at_most_one_prompt_group() -> None:
    sums = step_arithmetic(recipe_of(prompts=3, generations=4, per_micro_batch=3, forward=4, pairs=1000))
    assert sums.timestep_batch_size == sums.pairs_per_group == 16
    assert sums.training_forward_batches == 3
    assert sums.training_padding == 0


@settings(max_examples=200, deadline=None, database=None)
@given(
    prompts=st.integers(1, 12),
    generations=st.integers(1, 9),
    per_micro_batch=st.integers(1, 12),
    forward=st.integers(1, 40),
    fraction=st.floats(0.01, 1),
    pairs=st.integers(1, 80) | st.just("all"),
)
def test_the_sums_are_those_of_counting_one_by_one(
    prompts: int, generations: int, per_micro_batch: int, forward: int, fraction: float, pairs: object
) -> None:
    per_micro_batch = min(per_micro_batch, prompts)
    recipe = recipe_of(prompts, generations, per_micro_batch, forward, fraction=fraction, pairs=pairs)
    sums = step_arithmetic(recipe)
    batches = rows = 0
    for micro_batch in cut_into_micro_batches(prompts, per_micro_batch):
        left = len(micro_batch.prompts) * generations
        while left > 0:
            batches, rows, left = batches + 1, rows + forward, left - forward
    assert sums.micro_batches == len(cut_into_micro_batches(prompts, per_micro_batch))
    assert (sums.samples, sums.rollout_forward_batches) == (prompts * generations, batches)
    assert sums.rollout_padding == pytest.approx(1 - prompts * generations / rows)
    group = generations * sums.trained_steps
    size = group if pairs == "all" else min(pairs, group)
    per_group = len(range(0, group, size))
    assert (sums.pairs, sums.training_forward_batches) == (prompts * group, prompts * per_group)
    assert sums.training_padding == pytest.approx(1 - group / (per_group * size))

    advice = padding_advice(recipe)
    assert (advice is None) == (sums.rollout_padding == 0)
    if advice is not None:
        better = int(advice.partition("=")[2].split()[0])
        assert better != forward
        assert step_arithmetic(recipe_of(prompts, generations, per_micro_batch, better)).rollout_padding == 0


@pytest.mark.parametrize(
    ("prompts", "generations", "per_micro_batch", "forward", "advised"),
    [
        (9, 12, 3, 32, 36),  # the micro-batch itself is nearest
        (9, 12, 3, 16, 18),  # as a ratio 18 is nearer than 12
        (8, 13, 1, 6, 13),  # not 1, although 6 - 1 < 13 - 6: single samples waste far more than padding does
        (5, 6, 2, 8, 6),  # the last micro-batch is half a one: 12 would pad it
        (4, 4, 1, 100, 4),
    ],
)
def test_the_advice_is_the_nearest_size_that_pads_no_micro_batch(
    prompts: int, generations: int, per_micro_batch: int, forward: int, advised: int
) -> None:
    advice = padding_advice(recipe_of(prompts, generations, per_micro_batch, forward))
    assert advice == f"rollout.forward_batch_size={advised} divides the samples of every micro-batch: no padding"


def test_the_largest_sizes_allowed_are_counted_at_once() -> None:
    recipe = recipe_of(prompts=10**6, generations=10**6, per_micro_batch=999_999, forward=999_983)
    assert step_arithmetic(recipe).samples == 10**12
    assert padding_advice(recipe)


def test_a_user_s_algorithm_that_says_nothing_trains_all_steps_but_the_last(
    write: Write, text: str, tmp_path: Path, own_module: Callable[[str, str], None]
) -> None:
    own_module(
        "own_algo",
        "from pydantic import BaseModel\n\nclass Mine:\n    class Settings(BaseModel):\n        clip_range: float = 0.1\n",
    )
    recipe = load_recipe(write(text.replace("type: flow_grpo", "type: own_algo:Mine")))
    assert step_arithmetic(recipe).trained_steps == 7


def test_only_the_samples_that_an_algorithm_chooses_count_as_trained() -> None:
    changes = ["algorithm={type: dance_grpo, best_of_n: 4}", "rollout.num_generations=12"]
    found = step_arithmetic(load_recipe(ROOT / "recipes" / "quickstart.yaml", changes))
    assert found.pairs_per_group == found.timestep_batch_size == 4 * found.trained_steps
