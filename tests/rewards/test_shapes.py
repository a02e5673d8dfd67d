"""The shapes reward: what is drawn is recognised, and nothing that is wrong, surplus or missing gets full marks."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from pydantic import ValidationError

import digenrl
from digenrl.config.settings.rewards import ShapesSettings
from digenrl.errors import ConfigError
from digenrl.ids import SampleId
from digenrl.rewards.base import RewardSample
from digenrl.rewards.shapes.render import render, render_float, to_uint8
from digenrl.rewards.shapes.reward import ShapesReward
from digenrl.rewards.shapes.scene import CATEGORIES, Placement, Scene, all_scenes, caption, is_held_out, random_layout
from digenrl.rewards.shapes.verifier import find_objects, judge, verify

SHIPPED = Path(digenrl.__file__).parent / "assets" / "shapes"
MAKE_PROMPTS = Path(__file__).resolve().parents[2] / "tools" / "tiny_model" / "make_prompts.py"

RED_CIRCLE = Placement(shape="circle", color="red", x=10, y=10, radius=5)
BLUE_SQUARE = Placement(shape="square", color="blue", x=22, y=22, radius=5)
ONE_RED_CIRCLE = Scene("color", (("circle", "red"),))
CIRCLE_AND_SQUARE = Scene("two_objects", (("circle", "red"), ("square", "blue")))


def random_scenes(count: int, rng: np.random.Generator) -> list[Scene]:
    scenes_of = {category: all_scenes(category) for category in CATEGORIES}
    drawn = []
    for index in range(count):
        choices = scenes_of[CATEGORIES[index % len(CATEGORIES)]]
        drawn.append(choices[rng.integers(len(choices))])
    return drawn


def share_verified(scenes: list[Scene], images: list[np.ndarray]) -> float:
    return float(np.mean([verify(image, scene).strict for scene, image in zip(scenes, images, strict=True)]))


def test_every_rendered_scene_is_verified() -> None:
    rng = np.random.default_rng(1)
    scenes = random_scenes(1000, rng)
    images = [render(random_layout(scene, rng), background=rng.uniform(0.9, 1.0)) for scene in scenes]
    assert share_verified(scenes, images) == 1.0


@pytest.mark.parametrize("noise", ["uniform", "normal"])
def test_three_percent_of_noise_changes_no_verdict(noise: str) -> None:
    rng = np.random.default_rng(2)
    scenes = random_scenes(500, rng)
    draw = {
        "uniform": lambda shape: rng.uniform(-0.03, 0.03, shape),
        "normal": lambda shape: rng.normal(0, 0.03, shape),
    }
    images = []
    for scene in scenes:
        clean = render_float(random_layout(scene, rng))
        images.append(to_uint8(clean + draw[noise](clean.shape)))
    assert share_verified(scenes, images) == 1.0


def test_the_picture_may_be_twice_as_large() -> None:
    rng = np.random.default_rng(3)
    scenes = random_scenes(100, rng)
    assert share_verified(scenes, [render(random_layout(scene, rng), size=64) for scene in scenes]) == 1.0


def test_a_blank_image_scores_nothing() -> None:
    verdict = verify(render(()), ONE_RED_CIRCLE)
    assert (verdict.strict, verdict.soft) == (0.0, 0.0)


def test_every_object_too_many_costs_more() -> None:
    places = [(9, 9), (23, 9), (9, 23), (23, 23)]
    circles = [replace(RED_CIRCLE, x=x, y=y, radius=4) for x, y in places]
    soft = [verify(render(circles[:count]), ONE_RED_CIRCLE).soft for count in (1, 2, 3, 4)]
    assert soft[0] == 1.0
    assert soft[1] < 0.5
    assert soft[1] > soft[2] > soft[3] > 0.0
    assert verify(render(circles[:2]), ONE_RED_CIRCLE).strict == 0.0


def test_every_missing_object_costs_more() -> None:
    places = [(9, 9), (23, 9), (9, 23)]
    circles = [replace(RED_CIRCLE, x=x, y=y, radius=4) for x, y in places]
    three = Scene("counting", (("circle", "red"),) * 3)
    soft = [verify(render(circles[:count]), three).soft for count in (3, 2, 1, 0)]
    assert soft[0] == 1.0
    assert soft[1] < 0.5
    assert soft == sorted(soft, reverse=True)
    assert len(set(soft)) == 4


@pytest.mark.parametrize("depth", [80, 120, 200], ids=lambda depth: f"{depth}_of_255_darker")
def test_a_single_speck_spoils_an_image(depth: int) -> None:
    image = render([RED_CIRCLE])
    assert verify(image, ONE_RED_CIRCLE).strict == 1.0
    image[25, 25] -= np.uint8(depth)
    verdict = verify(image, ONE_RED_CIRCLE)
    assert verdict.strict == 0.0
    assert verdict.soft < 0.5


def test_speckle_earns_less_than_a_wrong_colour() -> None:
    speckled = render([RED_CIRCLE])
    speckled[20:31:3, 3:31:3] = (220, 30, 40)
    wrong_colour = render([replace(RED_CIRCLE, color="green")])
    assert verify(speckled, ONE_RED_CIRCLE).soft < 0.1 < verify(wrong_colour, ONE_RED_CIRCLE).soft


def test_merged_objects_are_not_two() -> None:
    merged = render([replace(RED_CIRCLE, x=12, y=16), replace(BLUE_SQUARE, x=19, y=16)])
    assert len(find_objects(merged)) == 1
    verdict = verify(merged, CIRCLE_AND_SQUARE)
    assert verdict.strict == 0.0
    assert verdict.soft < 0.5


def test_a_wrong_shape_costs_half_of_the_attributes() -> None:
    verdict = verify(render([replace(RED_CIRCLE, shape="square")]), ONE_RED_CIRCLE)
    assert (verdict.strict, verdict.soft) == (0.0, pytest.approx(0.65))  # 0.7 / 2 for the colour, 0.3 for the count


def test_a_colour_that_the_caption_does_not_name_costs_more_than_a_swapped_one() -> None:
    off_prompt = verify(render([replace(RED_CIRCLE, color="purple"), BLUE_SQUARE]), CIRCLE_AND_SQUARE)
    swapped = verify(render([replace(RED_CIRCLE, color="blue"), BLUE_SQUARE]), CIRCLE_AND_SQUARE)
    assert off_prompt.strict == swapped.strict == 0.0
    assert off_prompt.soft < swapped.soft < 0.9


def reconstructed(images: list[np.ndarray]) -> list[np.ndarray]:
    """What the shipped model's autoencoder makes of pictures."""
    vae = AutoencoderKL.from_pretrained(SHIPPED / "model" / "vae", torch_dtype=torch.float32).eval()
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        again = vae.decode(vae.encode(pixels).latent_dist.mean).sample
    return [to_uint8(image) for image in (again.permute(0, 2, 3, 1).numpy() / 2 + 0.5)]


def test_what_the_autoencoder_makes_of_a_rendered_scene_is_verified() -> None:
    rng = np.random.default_rng(6)
    scenes = random_scenes(250, rng)
    images = [render(random_layout(scene, rng), background=rng.uniform(0.9, 1.0)) for scene in scenes]
    assert share_verified(scenes, reconstructed(images)) == 1.0


def one_too_many(layout: list[Placement]) -> np.ndarray:
    return render([*layout, replace(layout[0], x=25, y=7, radius=4)])


def speckled(layout: list[Placement]) -> np.ndarray:
    image = render(layout)
    image[2:31:7, 2:31:7] = (250, 130, 20)
    return image


def merged(layout: list[Placement]) -> np.ndarray:
    return render([layout[0], replace(layout[1], x=layout[0].x + 7, y=layout[0].y + 2)])


def on_a_coloured_ground(layout: list[Placement]) -> np.ndarray:
    image = render(layout)
    image[(image > 230).all(axis=-1)] = (160, 190, 255)
    return image


def striped(layout: list[Placement]) -> np.ndarray:
    image = render(layout)
    inside = (image[..., 2] > 200) & (image[..., 0] < 100)
    inside[:, ::2] = False
    image[inside] = (250, 130, 20)
    return image


ADVERSARIES = {
    "blank": lambda layout: render(()),
    "one_object_too_many": one_too_many,
    "one_object_missing": lambda layout: render(layout[:1]),
    "speckle": speckled,
    "merged_shapes": merged,
    "off_prompt_colour": lambda layout: render([layout[0], replace(layout[1], color="purple")]),
    "coloured_ground": on_a_coloured_ground,
    "stripes": striped,
}


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_adversarial_picture_passes_or_comes_near_the_right_one(adversary: str) -> None:
    layout = [replace(RED_CIRCLE, x=8, y=20, radius=5), replace(BLUE_SQUARE, x=23, y=24, radius=5)]
    right = verify(render(layout), CIRCLE_AND_SQUARE)
    assert (right.strict, right.soft) == (1.0, 1.0)
    verdict = verify(ADVERSARIES[adversary](layout), CIRCLE_AND_SQUARE)
    assert verdict.strict == 0.0
    assert verdict.soft < 0.75 if adversary in ("off_prompt_colour", "stripes") else verdict.soft < 0.4


def test_stripes_of_red_and_yellow_are_no_orange() -> None:
    image = render([replace(RED_CIRCLE, color="yellow")])
    inside = image[..., 2] < 60
    inside[:, ::2] = False
    image[inside] = (220, 30, 40)
    (found,) = find_objects(image)
    assert (found.shape, found.color) == ("circle", None)


def test_a_blob_between_a_circle_and_a_triangle_is_neither() -> None:
    image = render([replace(RED_CIRCLE, radius=4)])
    upper = render([replace(RED_CIRCLE, shape="triangle", radius=4)])
    image[:10] = upper[:10]
    (found,) = find_objects(image)
    assert found.shape is None


def test_an_object_too_many_costs_more_than_one_too_few() -> None:
    places = [(9, 9), (23, 9), (9, 23), (23, 23)]
    circles = [replace(RED_CIRCLE, x=x, y=y, radius=4) for x, y in places]
    three = Scene("counting", (("circle", "red"),) * 3)
    too_few, too_many = (verify(render(circles[:count]), three).soft for count in (2, 4))
    assert too_many < too_few < 0.5


def test_swapped_colours_are_noticed() -> None:
    swapped = render([replace(RED_CIRCLE, color="blue"), replace(BLUE_SQUARE, color="red")])
    assert verify(render([RED_CIRCLE, BLUE_SQUARE]), CIRCLE_AND_SQUARE).strict == 1.0
    assert verify(swapped, CIRCLE_AND_SQUARE).strict == 0.0


@pytest.mark.parametrize(("x", "y", "right"), [(8, 16, "left of"), (24, 16, "right of"), (16, 8, "above"), (16, 24, "below")])
def test_only_the_right_relation_passes(x: float, y: float, right: str) -> None:
    circle = replace(RED_CIRCLE, x=x, y=y, radius=4)
    square = replace(BLUE_SQUARE, x=32 - x, y=32 - y, radius=4)
    for relation in ("left of", "right of", "above", "below"):
        verdict = verify(render([circle, square]), Scene("position", CIRCLE_AND_SQUARE.objects, relation))
        assert verdict.strict == float(relation == right)
        assert verdict.soft == pytest.approx(1.0 if relation == right else 0.65)


def test_strict_is_one_exactly_when_soft_is_one() -> None:
    rng = np.random.default_rng(4)
    scenes = random_scenes(300, rng)
    images = [render(random_layout(scene, rng)) for scene in scenes]
    found = [find_objects(image) for image in images[:30]]
    verdicts = [judge(objects, scene) for objects in found for scene in scenes]
    assert {verdict.strict for verdict in verdicts} == {0.0, 1.0}
    assert all((verdict.strict == 1.0) == (verdict.soft == 1.0) for verdict in verdicts)
    assert all(0.0 <= verdict.soft <= 1.0 for verdict in verdicts)


def test_detected_objects_report_where_and_what_they_are_largest_first() -> None:
    square, circle = find_objects(render([replace(RED_CIRCLE, radius=4), BLUE_SQUARE]))
    assert (square.shape, square.color, circle.shape, circle.color) == ("square", "blue", "circle", "red")
    # The centre of pixel i lies at i + 0.5 canvas units.
    assert (circle.x + 0.5, circle.y + 0.5) == pytest.approx((10, 10), abs=0.1)
    assert circle.iou[0] > 0.95 > max(circle.iou[1:])
    assert square.area == 10 * 10  # 9.2 wide; the pixels at its edge are covered by more than half


def test_every_caption_is_unique_and_every_scene_survives_its_metadata() -> None:
    scenes = [scene for category in CATEGORIES for scene in all_scenes(category)]
    assert len({caption(scene) for scene in scenes}) == len(scenes) == 1605
    assert [Scene.from_metadata(json.loads(json.dumps(scene.to_metadata()))) for scene in scenes] == scenes


def test_captions_are_plain_english() -> None:
    orange = ("triangle", "orange")
    assert caption(Scene("single", (("circle", None),))) == "a circle"
    assert caption(Scene("counting", (orange,) * 4)) == "four orange triangles"
    assert caption(Scene("two_objects", (orange, ("circle", "red")))) == "an orange triangle and a red circle"
    assert caption(Scene("position", (("circle", "red"), orange), "left of")) == "a red circle left of an orange triangle"


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("category", {"category": "colour"}),
        ("relation", {"relation": "beside"}),
        ("relation", {"relation": "above"}),
        ("objects", {"objects": "a red circle"}),
        ("objects", {"objects": []}),
        ("objects", {"objects": [{"shape": "circle"}]}),
        ("objects[].shape", {"objects": [{"shape": "hexagon", "color": "red"}]}),
        ("objects[].color", {"objects": [{"shape": "circle", "color": "pink"}]}),
        ("objects[].color", {"objects": [{"shape": "circle", "color": None}]}),
    ],
)
def test_a_wrong_metadata_field_is_named(field: str, change: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as raised:
        Scene.from_metadata({**ONE_RED_CIRCLE.to_metadata(), **change})
    assert f"`{field}`" in raised.value.what


@pytest.mark.parametrize("field", ["category", "objects", "relation"])
def test_a_missing_metadata_field_is_named(field: str) -> None:
    metadata = ONE_RED_CIRCLE.to_metadata()
    del metadata[field]
    with pytest.raises(ConfigError, match=f"no field `{field}`"):
        Scene.from_metadata(metadata)


def sample(index: int, scene: Scene, image: np.ndarray) -> RewardSample:
    return RewardSample(id=SampleId(0, index, 0), prompt=caption(scene), metadata=scene.to_metadata(), image=image)


def test_rewards_are_keyed_by_id_whatever_the_order() -> None:
    reward = ShapesReward(ShapesSettings())
    images = [render(()), render([RED_CIRCLE]), render([RED_CIRCLE, BLUE_SQUARE]), render([BLUE_SQUARE])]
    samples = [sample(index, ONE_RED_CIRCLE, image) for index, image in enumerate(images)]
    scores = reward.score(samples)
    assert [scores[item.id].parts["strict"] for item in samples] == [0.0, 1.0, 0.0, 0.0]
    assert reward.score(samples[::-1]) == scores


def test_the_value_is_the_weighted_mean_of_both_verdicts() -> None:
    wrong_colour = sample(0, ONE_RED_CIRCLE, render([replace(RED_CIRCLE, color="blue")]))
    for strict_weight, soft_weight in ((0.5, 0.5), (3.0, 1.0), (0.0, 2.0), (1.0, 0.0)):
        reward = ShapesReward(ShapesSettings(strict_weight=strict_weight, soft_weight=soft_weight))
        score = reward.score([wrong_colour])[wrong_colour.id]
        assert score.parts == {"strict": 0.0, "soft": pytest.approx(0.475)}  # 0.7 / 4 for the shape, 0.3 for the count
        assert score.value == pytest.approx(0.475 * soft_weight / (strict_weight + soft_weight))


@pytest.mark.parametrize(("strict_weight", "soft_weight"), [(0.0, 0.0), (-1.0, 2.0), (1.0, float("inf"))])
def test_weights_without_a_mean_are_refused(strict_weight: float, soft_weight: float) -> None:
    with pytest.raises(ValidationError):
        ShapesSettings(strict_weight=strict_weight, soft_weight=soft_weight)


def test_a_prompt_without_a_scene_is_named_with_the_way_out() -> None:
    plain = RewardSample(id=SampleId(0, 0, 0), prompt="a corgi on the moon", metadata={}, image=render(()))
    with pytest.raises(ConfigError) as raised:
        ShapesReward(ShapesSettings()).score([plain])
    assert "a corgi on the moon" in raised.value.what
    assert "jsonl" in raised.value.fix
    assert all(field in raised.value.fix for field in ("prompt", "category", "objects", "relation"))


@pytest.mark.parametrize("weights", [{}, {"strict_weight": 0.0}, {"soft_weight": 0.0}])
def test_every_good_self_test_image_beats_every_bad_one(weights: dict[str, float]) -> None:
    reward = ShapesReward(ShapesSettings(**weights))
    good, bad = reward.self_test()
    scores = reward.score([*good, *bad])
    assert len(scores) == len(good) + len(bad) == 16
    assert min(scores[item.id].value for item in good) > max(scores[item.id].value for item in bad)


def read_jsonl(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (SHIPPED / name).read_text(encoding="utf-8").splitlines()]


def test_the_shipped_prompts_are_what_the_tool_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("make_prompts", MAKE_PROMPTS)
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    tool.write_prompts(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (SHIPPED / name).read_bytes()


def test_shipped_prompts_agree_with_their_scenes() -> None:
    for line in read_jsonl("train.jsonl") + read_jsonl("heldout.jsonl"):
        assert caption(Scene.from_metadata(line)) == line["prompt"]


def test_train_and_held_out_captions_are_disjoint_and_complete() -> None:
    train = [line["prompt"] for line in read_jsonl("train.jsonl")]
    held_out = {line["prompt"] for line in read_jsonl("heldout.jsonl")}
    assert len(set(train)) == len(train) == 1366
    assert not held_out & set(train)
    assert all(is_held_out(Scene.from_metadata(line)) for line in read_jsonl("heldout.jsonl"))


def test_held_out_prompts_take_turns_through_the_categories() -> None:
    assert [line["category"] for line in read_jsonl("heldout.jsonl")] == list(CATEGORIES) * 80


def test_the_held_out_rule_is_that_of_the_pretraining() -> None:
    # Counted with the code that pretrained the shipped model, plus "a square".
    held_out = Counter(category for category in CATEGORIES for scene in all_scenes(category) if is_held_out(scene))
    assert held_out == {"single": 1, "color": 3, "counting": 9, "two_objects": 39, "position": 187}
    assert {caption(scene) for scene in all_scenes("color") if is_held_out(scene)} == {
        "a red square",
        "a yellow triangle",
        "an orange triangle",
    }
