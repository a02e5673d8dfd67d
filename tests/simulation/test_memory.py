"""The estimate of memory: sums by hand, what changes it and what does not, and the nearest setting that fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from digenrl.cli import check
from digenrl.config.loader import load_recipe
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.simulation.memory import GIB, check_memory, holders, memory_of, memory_table, nearest_fit, room_of
from digenrl.simulation.model_sizes import PUBLISHED, ModelSizes, sizes_of
from digenrl.simulation.plan import plan
from digenrl.simulation.source import load_source

RECIPES = Path(__file__).parents[2] / "recipes"
WAN, HUNYUAN = (str(RECIPES / f"{name}.yaml") for name in ("wan21_14b_flow_grpo", "hunyuanvideo_dance_grpo"))


def recipe_of(name: str, *changes: str) -> tuple[Recipe, ModelSizes]:
    recipe = load_recipe(name, list(changes))
    sizes = sizes_of(recipe)
    assert sizes is not None
    return recipe, sizes


def held(name: str, *changes: str) -> dict[str, dict[str, float]]:
    """GiB by holder and part."""
    recipe, sizes = recipe_of(name, *changes)
    memories = [memory_of(recipe, sizes, holder) for holder in holders(recipe)]
    return {m.holder.name: {part: size / GIB for part, size in (m.held | m.passing).items()} | {"all": m.gib} for m in memories}


def test_full_fine_tuning_is_sixteen_bytes_a_parameter_over_the_ranks_and_two_a_generator() -> None:
    found = held(HUNYUAN)
    parameters = 12_821_012_544 / GIB
    trainer, generator = found["trainer"], found["generator"]
    assert trainer["weights"] + trainer["gradients"] + trainer["optimizer"] == pytest.approx(16 * parameters / 16)
    assert trainer["gathered"] == pytest.approx(2 * 4 * parameters / 60)
    assert generator["weights"] == pytest.approx(2 * parameters)
    tokens = 256 + 14 * 30 * 30
    assert trainer["training"] == pytest.approx(tokens * 561_000 / GIB)
    assert set(trainer) == {"weights", "gradients", "optimizer", "gathered", "training", "generating", "all"}
    longest = max(trainer["training"], trainer["generating"])
    parts = sum(trainer[part] for part in ("weights", "gradients", "optimizer", "gathered"))
    assert trainer["all"] == pytest.approx(parts + longest + 2)


def test_adapters_leave_the_frozen_weights_in_the_compute_type_and_train_little() -> None:
    found = held(WAN)["trainer"]
    adapters = 64 * 3_276_800 / GIB
    assert found["weights"] == pytest.approx((2 * 14_288_491_584 / GIB + 4 * adapters) / 16)
    assert found["optimizer"] == pytest.approx(8 * adapters / 16)
    assert held(WAN, "model.dtype=float32")["generator"]["weights"] == pytest.approx(2 * held(WAN)["generator"]["weights"])


@pytest.mark.parametrize(
    ("change", "holder", "part", "grows"),
    [
        ("rollout.num_frames=53", "trainer", "training", True),
        ("rollout.height=512", "generator", "decoding", True),
        ("rollout.forward_batch_size=4", "generator", "decoding", True),
        ("model.vae_slicing=true", "generator", "decoding", False),
        ("train.timestep_batch_size=1", "trainer", "training", False),
        ("model.gradient_checkpointing=false", "trainer", "training", True),
        ("rollout.true_cfg_scale=1", "trainer", "training", False),
        ("model.offload=true", "generator", "all", False),
        ("train.accumulate=unsharded", "trainer", "all", True),
        ("cluster.trainer.ranks=32", "trainer", "all", False),
        ("cluster.trainer.shard=8", "trainer", "all", True),
        ("train.ema={decay: 0.9}", "trainer", "all", True),
    ],
)
def test_each_setting_moves_what_it_should(change: str, holder: str, part: str, grows: bool) -> None:
    before, after = held(WAN)[holder][part], held(WAN, change)[holder][part]
    assert (after > before) if grows else (after < before)


def test_a_network_that_is_held_together_is_divided_by_its_ranks() -> None:
    recipe, sizes = recipe_of(WAN, "cluster.generators=[{ranks: 4, shard: 4}]")
    lora = recipe.model.lora
    assert lora is not None
    generator = memory_of(recipe, sizes, holders(recipe)[0])
    whole = 2 * sizes.transformer + 4 * sizes.lora_per_rank * lora.rank
    assert generator.held["weights"] == whole / 4
    assert generator.held["gathered"] == 2 * whole / sizes.layers


def test_tiles_bound_what_decoding_takes_of_large_videos() -> None:
    large = ("rollout.height=720", "rollout.width=1280", "rollout.num_frames=81")
    assert held(WAN, *large, "model.vae_tiling=true")["generator"]["decoding"] < held(WAN, *large)["generator"]["decoding"] / 2


def test_one_process_and_one_pool_hold_everything() -> None:
    for placement, name in (("inline", "worker"), ("colocated", "pool")):
        found = held(WAN, f"cluster.placement={placement}", "schedule.tag=never")
        assert list(found) == [name]
        assert {"weights", "optimizer", "text encoders", "VAE", "training"} <= set(found[name])
    assert held(WAN, "cluster.scorers.placement=pool")["scorer"].keys() == {"VAE", "decoding", "all"}


def test_every_shipped_recipe_of_a_published_model_fits_the_device_that_it_names() -> None:
    looked_at = 0
    for path in sorted(RECIPES.glob("*.yaml")):
        recipe = load_recipe(path)
        check_memory(recipe)
        looked_at += sizes_of(recipe) is not None
    assert looked_at >= 3


def test_what_does_not_fit_is_refused_with_the_nearest_setting_that_does() -> None:
    with pytest.raises(ConfigError) as caught:
        check_memory(load_recipe(WAN, ["model.gradient_checkpointing=false", "cluster.device_memory_gib=25"]))
    assert "Wan2.1 14B does not fit: a rank of the generator" in caught.value.what
    tight = [
        "model.gradient_checkpointing=false",
        "rollout.num_frames=53",
        "rollout.height=480",
        "rollout.width=480",
        "cluster.device_memory_gib=48",
    ]
    recipe, sizes = recipe_of(WAN, *tight)
    changes = nearest_fit(recipe, sizes)
    assert changes is not None
    assert "model.gradient_checkpointing=true" in changes
    with pytest.raises(ConfigError) as caught:
        check_memory(recipe)
    assert " ".join(changes) in caught.value.fix
    words = [word for change in changes for word in change.split()]
    check_memory(load_recipe(WAN, [*tight, *words]))
    for word in changes:
        fewer = [w for change in changes if change != word for w in change.split()]
        with pytest.raises(ConfigError):
            check_memory(load_recipe(WAN, [*tight, *fewer]))


def test_full_fine_tuning_that_fits_nowhere_else_is_offered_adapters() -> None:
    recipe, sizes = recipe_of(HUNYUAN, "cluster.placement=inline", "cluster.device_memory_gib=80")
    changes = nearest_fit(recipe, sizes)
    assert changes is not None
    assert "'model.lora={rank: 32, alpha: 64}'" in changes


def test_where_nothing_helps_that_is_said() -> None:
    recipe, sizes = recipe_of(WAN, "cluster.device_memory_gib=16")
    assert nearest_fit(recipe, sizes) is None
    with pytest.raises(ConfigError, match="No setting was found that fits"):
        check_memory(recipe)


def test_nothing_is_refused_where_the_device_or_the_model_is_not_known(tiny_recipe: Any) -> None:
    check_memory(load_recipe(WAN, ["cluster.device_memory_gib=null", "rollout.num_frames=801"]))
    tiny = tiny_recipe(cluster={"device_memory_gib": 0.1})
    assert sizes_of(tiny) is None
    assert room_of(tiny) is None
    check_memory(tiny)


def test_a_folder_with_the_layers_of_a_published_model_is_that_model(tmp_path: Path) -> None:
    (tmp_path / "transformer").mkdir()
    config = '{"num_layers": 30, "num_attention_heads": 12, "attention_head_dim": 128}'
    (tmp_path / "transformer/config.json").write_text(config, encoding="utf-8")
    recipe = load_recipe(WAN)
    folder = recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": str(tmp_path)})})
    assert sizes_of(folder) is next(sizes for sizes in PUBLISHED if sizes.name == "Wan2.1 1.3B")


def test_check_and_plan_show_the_estimate(capsys: pytest.CaptureFixture[str]) -> None:
    check.run(WAN, [], as_json=False)
    shown = capsys.readouterr().out
    assert "memory of a device of the 80 GiB that it has, estimated for Wan2.1 14B:\n  generator 4" in shown
    recipe, _ = recipe_of(WAN)
    table = memory_table(recipe)
    assert table[0].endswith("Wan2.1 14B at 256 x 256 x 5 frames:")
    assert [line[:30].strip() for line in table[2:4]] == ["as the recipe says", "LoRA of rank 64, checkpointing"]
    found = plan(load_source(WAN, ["schedule.micro_batching=none"]), 8)
    assert found.lines()[-len(table) :] == table


def test_a_plan_leaves_out_what_does_not_fit() -> None:
    room = "cluster.device_memory_gib"
    asked = ["schedule.micro_batching=none", "rollout.prompts_per_step=2"]
    everything = plan(load_source(HUNYUAN, [*asked, f"{room}=null"]), 6).sweep
    some = plan(load_source(HUNYUAN, [*asked, f"{room}=50"]), 6).sweep
    assert some.candidates < everything.candidates
    assert "colocated" in everything.baselines
    assert "colocated" not in some.baselines, "text encoders, VAE and a sixth of all state on each"
    with pytest.raises(ConfigError, match="Nothing fits on 2 devices"):
        plan(load_source(HUNYUAN, [*asked, f"{room}=60"]), 2)
