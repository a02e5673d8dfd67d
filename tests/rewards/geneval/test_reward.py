"""The reward ``geneval`` with tiny random detectors and a tiny CLIP: what they see reaches the rules unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from digenrl.config.loader import load_reward
from digenrl.config.settings.geneval import COLORS, GenEvalSettings
from digenrl.errors import ConfigError, RunFailed
from digenrl.rewards.clip import Clip
from digenrl.rewards.compose import WeightedRewards
from digenrl.rewards.geneval.detector import Detector, box_of
from digenrl.rewards.geneval.reward import ColorNamer, GenEvalReward, cut_out
from digenrl.rewards.geneval.rules import Found
from tests.rewards.services import pictures
from tests.rewards.tiny_networks import make_clip, make_detector

IMAGES = [sample.image for sample in pictures(5, size=40)]
METADATA = {"tag": "single_object", "include": [{"class": "tv remote", "count": 1, "color": "red"}]}
SAMPLES = [replace(sample, metadata=METADATA) for sample in pictures(5, size=40)]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    make_clip(folder)
    return folder


@pytest.fixture(scope="module", params=["mask2former", "detr"])
def detector(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    make_detector(folder, request.param)
    return folder


def settings(detector: Path, clip: Path) -> list[str]:
    paths = [f"detector_path={detector}", f"clip_path={clip}", "device=cpu", "self_test=false"]
    return [*paths, "threshold=0", "counting_threshold=0", "forward_batch_size=2"]


def found_alone(folder: Path, image: np.ndarray[Any, Any]) -> list[tuple[str, float]]:
    """Class and certainty, from the raw numbers of the network, asked about one image."""
    from transformers import AutoImageProcessor, AutoModelForObjectDetection, Mask2FormerForUniversalSegmentation

    masks = folder.name.startswith("mask2former")
    model: Any = (Mask2FormerForUniversalSegmentation if masks else AutoModelForObjectDetection).from_pretrained(folder).eval()
    with torch.no_grad():
        output = model(**AutoImageProcessor.from_pretrained(folder, backend="pil")(images=[image], return_tensors="pt"))
    names = ["person", "stop sign", "tv remote"]
    if not masks:
        best = output.logits[0].softmax(-1)[:, :-1].max(-1)
        return sorted((names[place], value) for value, place in zip(*map(torch.Tensor.tolist, best), strict=True))
    chances = output.class_queries_logits[0].softmax(-1)[:, :-1].flatten()
    grids = torch.nn.functional.interpolate(output.masks_queries_logits, (384, 384), mode="bilinear")[0]
    answers = []
    for place in chances.argsort(descending=True)[: len(grids)].tolist():
        grid = grids[place // 3]
        if (grid > 0).any():
            answers.append((names[place % 3], float(chances[place] * grid[grid > 0].sigmoid().mean())))
    return sorted(answers)


def test_a_detector_names_what_it_finds_in_each_image(detector: Path) -> None:
    made = Detector(str(detector), least=0.0)
    for image in (*IMAGES[:3], pictures(1, size=56)[0].image):
        objects = made.find(image)
        wanted = found_alone(detector, image)
        assert sorted(each.label for each in objects) == sorted(label for label, _ in wanted)
        np.testing.assert_allclose(sorted(each.score for each in objects), sorted(score for _, score in wanted), atol=1e-4)
        for each in objects:
            assert (each.mask is not None) == detector.name.startswith("mask2former")
            if each.mask is not None:
                assert each.mask.shape == image.shape[:2] and each.box == box_of(each.mask)


def test_the_box_of_a_mask_ends_beyond_its_last_pixels() -> None:
    mask = np.zeros((10, 12), dtype=bool)
    mask[2:5, 7:9] = True
    assert box_of(mask) == (7, 2, 9, 5)


def test_an_object_is_cut_out_and_grey_beside_its_mask() -> None:
    image = np.full((10, 12, 3), 7, dtype=np.uint8)
    mask = np.zeros((10, 12), dtype=bool)
    mask[2:5, 7:9], mask[4, 8] = True, False
    part = cut_out(image, Found(label="a", score=1, box=box_of(mask), mask=mask))
    assert part.shape == (3, 2, 3) and (part[2, 1] == 0x99).all() and (part[:2] == 7).all()
    assert cut_out(image, Found(label="a", score=1, box=(-3, -2, 4.4, 5.6))).shape == (6, 4, 3)
    assert cut_out(image, Found(label="a", score=1, box=(30, 30, 40, 40))).shape == (1, 1, 3)


def test_a_color_is_the_one_whose_texts_lie_nearest_in_clips_space(clip: Path) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    model: Any = CLIPModel.from_pretrained(clip).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(clip), CLIPImageProcessorPil.from_pretrained(clip)

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    objects = tuple(Found(label="dog", score=1, box=(n, n, n + 20, n + 15)) for n in range(0, 20, 4))
    texts = [[f"a photo of a {c} dog", f"a photo of a {c}-colored dog", f"a photo of a {c} object"] for c in COLORS]
    with torch.no_grad():
        read = [tokenizer(each, padding="max_length", max_length=16, truncation=True, return_tensors="pt") for each in texts]
        colors = torch.stack([unit(unit(model.get_text_features(**each).pooler_output).mean(0)) for each in read])
        crops = [Image.fromarray(IMAGES[0]).crop([int(edge) for edge in each.box]) for each in objects]
        seen = unit(model.get_image_features(**processor(crops, return_tensors="pt")).pooler_output)
    wanted = [COLORS[place] for place in (seen @ colors.T).argmax(-1).tolist()]
    namer = ColorNamer(Clip.load(str(clip), None, GenEvalSettings(device="cpu")))
    assert namer.colors(IMAGES[0], "dog", objects) == wanted


def test_a_sample_is_judged_by_what_was_found_in_its_own_image(detector: Path, clip: Path) -> None:
    rewards = WeightedRewards.from_recipe([load_reward("geneval", [*settings(detector, clip), "read=soft"])])
    scored = rewards.score(SAMPLES)
    alone = [rewards.score([sample]).totals[0] for sample in SAMPLES]
    assert scored.totals.tolist() == alone == scored.parts["geneval/soft"].tolist()
    assert set(scored.totals.tolist()) <= {0.0, 0.5, 1.0}
    strict = WeightedRewards.from_recipe([load_reward("geneval", settings(detector, clip))]).score(SAMPLES)
    assert strict.totals.tolist() == (scored.totals == 1).astype(float).tolist() == scored.parts["geneval/strict"].tolist()


def test_what_nobody_can_find_stops_the_run_and_is_never_a_score(detector: Path, clip: Path) -> None:
    rewards = WeightedRewards.from_recipe([load_reward("geneval", settings(detector, clip))])
    for metadata, wrong in (
        ({"tag": "a", "include": [{"class": "unicorn", "count": 1}]}, "'unicorn'.*does not know"),
        ({}, "no `tag`"),
    ):
        with pytest.raises(RunFailed, match=wrong):
            rewards.score([replace(SAMPLES[0], metadata=metadata)])


def test_a_drawn_stop_sign_is_looked_for_at_the_start(detector: Path, clip: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fails its self-test"):
        WeightedRewards.from_recipe([load_reward("geneval", [*settings(detector, clip), "self_test=true"])])
    make_detector(tmp_path, "detr", classes=["dog"])
    made = GenEvalReward(GenEvalSettings(detector_path=str(tmp_path), clip_path=str(clip), device="cpu"))
    assert made.self_test() is None


def test_a_detector_that_is_not_there_is_refused_and_the_error_says_what_to_fetch(clip: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded") as caught:
        WeightedRewards.from_recipe([load_reward("geneval", settings(Path("nobody/no-such-detector"), clip))])
    assert "hf download nobody/no-such-detector" in caught.value.fix
