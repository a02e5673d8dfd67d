"""The rebuild of the shipped model: its parts fit diffusers' pipeline, and an interruption changes no number."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from build import save_model
from components import PIPELINE_T5_TOKENS, TEXT_TOKENS, Network, all_captions, autoencoder, pipeline_of
from diffusers import DiffusionPipeline
from files import Table, load_tensors, save_folder, save_tensors
from flow_training import Dataset, FlowTraining, Plan, batch_size, images_before
from optimizer import orthogonalised
from pictures import CATEGORY_WEIGHTS, draw_examples, near_misses
from seeds import generator, weights_of
from warm_start import start_from

from digenrl.rewards.shapes.scene import CATEGORIES, Scene, all_scenes, caption, is_held_out
from digenrl.rewards.shapes.verifier import verify

PLAN = Plan(images=10_000, decay_images=4000)
SCENES = {caption(scene): scene for category in CATEGORIES for scene in all_scenes(category)}


@pytest.fixture(scope="module")
def network() -> Network:
    with weights_of(0, "test"):
        return Network().eval()


@pytest.fixture(scope="module")
def folder(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_model(path, network, autoencoder())
    return path


def dataset() -> Dataset:
    random = generator(0, "dataset")
    latents = torch.randn((200, 4, 16, 16), generator=random).half()
    return Dataset(latents=latents, captions=torch.randint(len(all_captions()), (200,), generator=random))


def test_every_word_of_a_caption_is_one_token_to_every_text_encoder(network: Network) -> None:
    text = network.text
    for words in (text.split() for text in all_captions()):
        assert len(text.clip_tokenizer(" ".join(words)).input_ids) == len(words) + 2 <= TEXT_TOKENS
        assert len(text.t5_tokenizer(" ".join(words)).input_ids) == len(words) + 1 <= TEXT_TOKENS


def test_tokens_have_the_same_numbers_each_time() -> None:
    first, second = (Network().text for _ in range(2))
    assert first.clip_tokenizer.get_vocab() == second.clip_tokenizer.get_vocab()
    assert first.t5_tokenizer.get_vocab() == second.t5_tokenizer.get_vocab()


def test_different_captions_have_different_tokens(network: Network) -> None:
    clip_ids, t5_ids = network.text.tokenize(all_captions(), TEXT_TOKENS)
    assert len({tuple(row) for row in clip_ids.tolist()}) == len({tuple(row) for row in t5_ids.tolist()}) == 1606


@pytest.mark.parametrize("t5_tokens", [TEXT_TOKENS, PIPELINE_T5_TOKENS])
def test_text_is_encoded_as_the_pipeline_encodes_it(network: Network, t5_tokens: int) -> None:
    captions = ["a red circle", "", "an orange triangle left of an orange circle"]
    with torch.no_grad():
        text, pooled = network.text(*network.text.tokenize(captions, t5_tokens))
        expected, _, expected_pooled, _ = pipeline_of(network, autoencoder()).encode_prompt(
            captions, None, None, do_classifier_free_guidance=False, max_sequence_length=t5_tokens
        )
    assert torch.equal(text, expected)
    assert torch.equal(pooled, expected_pooled)


@pytest.mark.parametrize("more", [{}, {"max_sequence_length": TEXT_TOKENS}, {"guidance_scale": 1.0}])
def test_the_saved_folder_loads_and_draws_without_further_arguments(folder: Path, more: dict[str, float]) -> None:
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline("a red circle", height=32, width=32, num_inference_steps=1, **more).images
    assert image.size == (32, 32)


def test_the_saved_folder_is_small_enough_to_ship(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) <= 6_000_000


def test_a_run_that_goes_on_takes_the_same_steps_as_one_that_was_never_interrupted(tmp_path: Path) -> None:
    whole = FlowTraining(dataset(), seed=3)
    expected = [whole.train_step(PLAN) for _ in range(4)]
    begun = FlowTraining(dataset(), seed=3)
    losses = [begun.train_step(PLAN) for _ in range(2)]
    begun.save(tmp_path / "checkpoint.safetensors")
    goes_on = FlowTraining(dataset(), seed=3)
    goes_on.load(tmp_path / "checkpoint.safetensors")
    losses += [goes_on.train_step(PLAN) for _ in range(2)]
    assert losses == expected
    ends = zip(goes_on.average.parameters(), whole.average.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in ends)


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    FlowTraining(dataset(), seed=3).save(tmp_path / "checkpoint.safetensors")
    with pytest.raises(SystemExit, match="--seed 3"):
        FlowTraining(dataset(), seed=4).load(tmp_path / "checkpoint.safetensors")


def test_images_are_counted_as_batches_have_them() -> None:
    assert [images_before(step) for step in range(61)] == [sum(map(batch_size, range(step))) for step in range(61)]
    assert Counter(map(batch_size, range(60))) == {64: 57, 16: 3}


def test_the_learning_rate_warms_up_stays_and_falls_by_images() -> None:
    factors = [PLAN.factor(seen) for seen in (0, 1999, 4000, 6000, 8000, 9999, 10_000)]
    assert factors == pytest.approx([1 / 4000, 0.5, 1.0, 1.0, 0.5, 0.03, 0.03])
    assert Plan(images=10_000, decay_images=4000, peak=0.5).factor(8000) == pytest.approx(0.25)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 16), (2, 16, 4)])
def test_orthogonalised_matrices_keep_their_directions_and_lose_their_scales(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=generator(0, "matrices"))
    left, before, right = torch.linalg.svd(matrices, full_matrices=False)
    after = torch.linalg.svdvals(orthogonalised(matrices))
    assert before.max() / before.min() > 2
    assert after.min() > 0.3 and after.max() < 1.4
    assert torch.nn.functional.cosine_similarity(orthogonalised(matrices).flatten(1), (left @ right).flatten(1)).min() > 0.95


def test_the_same_seed_draws_the_same_examples_and_another_one_others() -> None:
    first, again, other = (draw_examples(30, seed=seed) for seed in (1, 1, 2))
    assert [example.caption for example in first] == [example.caption for example in again]
    assert all(np.array_equal(one.image, two.image) for one, two in zip(first, again, strict=True))
    assert [example.caption for example in first] != [example.caption for example in other]


def test_held_out_captions_are_not_drawn_and_harder_categories_are_drawn_more_often() -> None:
    scenes = [SCENES[example.caption] for example in draw_examples(1500, seed=0)]
    assert not [scene for scene in scenes if is_held_out(scene) and scene.category != "single"]
    counts = Counter(scene.category for scene in scenes)
    total = sum(CATEGORY_WEIGHTS.values())
    assert all(abs(counts[name] / 1500 - weight / total) < 0.05 for name, weight in CATEGORY_WEIGHTS.items())


@pytest.mark.parametrize(("share", "low", "high"), [(0.0, 0.0, 0.0), (0.3, 0.2, 0.4), (1.0, 1.0, 1.0)])
def test_the_asked_share_of_pictures_shows_something_else(share: float, low: float, high: float) -> None:
    drawn = draw_examples(200, seed=5, wrong_captions=share)
    wrong = np.mean([verify(example.image, SCENES[example.caption]).strict == 0 for example in drawn])
    assert low <= wrong <= high


@pytest.mark.parametrize("category", CATEGORIES)
def test_near_misses_are_other_scenes_that_lack_little(category: str) -> None:
    for scene in all_scenes(category)[::40]:
        misses = near_misses(scene)
        assert misses and scene not in misses
        assert all(isinstance(miss, Scene) and abs(len(miss.objects) - len(scene.objects)) <= 1 for miss in misses)


def test_beginning_from_a_model_copies_all_but_the_third_text_encoder(folder: Path, network: Network) -> None:
    with weights_of(1, "test"):
        other = Network()
    untouched = other.text.t5.shared.weight.clone()
    start_from(folder, other)
    old, new = network.state_dict(), other.state_dict()
    copied = [name for name in old if not name.startswith("text.t5.")]
    assert all(torch.allclose(old[name], new[name], atol=2e-3) for name in copied)
    assert torch.equal(other.text.t5.shared.weight, untouched)


def test_a_folder_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    save_folder(tmp_path / "vae", lambda path: (path / "old").touch())

    def fails(path: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        save_folder(tmp_path / "vae", fails)
    assert (tmp_path / "vae" / "old").exists()


def test_tensors_come_back_with_their_notes(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x.safetensors", {"a": torch.arange(3)}, {"step": "7"})
    tensors, notes = load_tensors(tmp_path / "x.safetensors")
    assert tensors["a"].tolist() == [0, 1, 2]
    assert notes == {"step": "7"}


def test_a_table_goes_on_without_the_rows_that_are_done_again(tmp_path: Path) -> None:
    for keep_below, rows in ((0, range(4)), (2, range(2, 3))):
        table = Table(tmp_path / "losses.csv", ("step", "loss"), keep_below=keep_below)
        for step in rows:
            table.append(step, keep_below)
        table.close()
    with (tmp_path / "losses.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["step", "loss"], ["0", "0"], ["1", "0"], ["2", "2"]]
