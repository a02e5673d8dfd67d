"""Exports: plain diffusers (and peft) load them and compute what the trainer computes; nothing else is promised by a file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import StableDiffusion3Pipeline
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from digenrl.cli import export
from digenrl.config.builtin import resolve
from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.models import model_card
from digenrl.models.base import Guidance, ModelAdapter
from digenrl.runtime.saved_run import OpenOptions, open_model
from digenrl.testing.tiny_runs import build_run
from digenrl.training.checkpoint import load_newest

RecipeMaker = Callable[..., Recipe]
SAME = 1e-6
"""Largest difference of a loaded export from the trainer: the issue's; measured 0."""
KINDS = ("lora-t5", "full-t5", "lora-bare", "full-shapes")
"""How it was trained, and what: the tiny SD3 with and without T5, and the shipped model."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny_recipe: RecipeMaker, tiny_sd3_without_t5: Path) -> dict[str, Path]:
    """A run of each kind, those with LoRA with alpha != rank. Read only."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for kind in KINDS:
        what, base = kind.split("-")
        model: dict[str, Any] = {
            "t5": {},
            "bare": {"path": str(tiny_sd3_without_t5), "max_sequence_length": 0},
            "shapes": {"path": "builtin:shapes", "max_sequence_length": 10},
        }[base]
        lora = {"rank": 4, "alpha": 16} if what == "lora" else None
        evaluation = {"prompts": "builtin:shapes/heldout.jsonl", "num_inference_steps": 3}
        recipe = tiny_recipe(model={**model, "lora": lora}, train={"ema": {"decay": 0.9}}, eval=evaluation)
        made[kind] = build_run(folder / kind, recipe)
    return made


@pytest.fixture(scope="session")
def exports(runs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Exports of the averaged weights of all runs. Read only."""
    folder = tmp_path_factory.mktemp("exports")
    for kind, path in runs.items():
        export.run(str(path), str(folder / kind))
    return {kind: folder / kind for kind in runs}


@pytest.fixture(scope="session")
def bases(tiny_sd3: Path, tiny_sd3_without_t5: Path) -> dict[str, Path]:
    shapes = resolve("builtin:shapes", where="test")
    return {"lora-t5": tiny_sd3, "full-t5": tiny_sd3, "lora-bare": tiny_sd3_without_t5, "full-shapes": shapes}


def pipeline_of(folder: Path, *, with_t5: bool) -> Any:
    """Loaded as anybody would who has never heard of DigenRL."""
    empty = {} if with_t5 else {"text_encoder_3": None, "tokenizer_3": None}
    return StableDiffusion3Pipeline.from_pretrained(str(folder), dtype=torch.float32, **empty)


def plain_pipeline(kind: str, exported: Path, bases: dict[str, Path]) -> Any:
    with_t5 = not kind.endswith("bare")
    if kind.startswith("full"):
        return pipeline_of(exported, with_t5=with_t5)
    pipeline = pipeline_of(bases[kind], with_t5=with_t5)
    pipeline.load_lora_weights(str(exported))
    return pipeline


def inputs(adapter: ModelAdapter) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    latents = torch.randn(2, *adapter.latent_shape(32, 32), generator=torch.Generator().manual_seed(0))
    return latents, torch.tensor([900.0, 150.0]), adapter.encode_prompts(["a red circle", "two blue squares"], ["", ""]).tensors


@torch.no_grad()
def velocity_of(transformer: Any, adapter: ModelAdapter) -> Tensor:
    """Of a plain transformer, on the text of the adapter."""
    latents, timesteps, text = inputs(adapter)
    result: Tensor = transformer(
        hidden_states=latents,
        timestep=timesteps,
        encoder_hidden_states=text["prompt_embeds"],
        pooled_projections=text["pooled_prompt_embeds"],
        return_dict=False,
    )[0]
    return result


@torch.no_grad()
def trainers_velocity(run: Path, weights: Any) -> tuple[Tensor, ModelAdapter]:
    adapter = open_model(str(run), OpenOptions(weights=weights)).adapter
    latents, timesteps, _ = inputs(adapter)
    text = adapter.encode_prompts(["a red circle", "two blue squares"], ["", ""])
    return adapter.predict(latents, timesteps, text, Guidance()), adapter


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_plain_diffusers_reproduces_the_trainer_and_not_the_base(
    kind: str, runs: dict[str, Path], exports: dict[str, Path], bases: dict[str, Path]
) -> None:
    trained, adapter = trainers_velocity(runs[kind], "ema")
    loaded = velocity_of(plain_pipeline(kind, exports[kind], bases).transformer, adapter)
    base = velocity_of(pipeline_of(bases[kind], with_t5=not kind.endswith("bare")).transformer, adapter)
    assert distance(loaded, trained) <= SAME
    assert distance(base, trained) > 1e-2
    raw, _ = trainers_velocity(runs[kind], "raw")
    assert distance(raw, trained) > 1e-2


@pytest.mark.parametrize("kind", ["lora-t5", "full-shapes"])
def test_raw_weights_are_exported_when_asked_for(
    kind: str, runs: dict[str, Path], tmp_path: Path, bases: dict[str, Path]
) -> None:
    export.run(str(runs[kind]), str(tmp_path / "out"), weights="raw")
    trained, adapter = trainers_velocity(runs[kind], "raw")
    loaded = velocity_of(plain_pipeline(kind, tmp_path / "out", bases).transformer, adapter)
    assert distance(loaded, trained) <= SAME
    assert "raw weights" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_alpha_is_in_the_file_and_without_it_the_effect_would_be_another(
    runs: dict[str, Path], exports: dict[str, Path], tiny_sd3: Path
) -> None:
    file = exports["lora-t5"] / "pytorch_lora_weights.safetensors"
    with safe_open(file, "pt") as opened:
        header = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert (header["transformer.r"], header["transformer.lora_alpha"]) == (4, 16)
    trained, adapter = trainers_velocity(runs["lora-t5"], "ema")
    lost = pipeline_of(tiny_sd3, with_t5=True)
    lost.load_lora_weights(load_file(file))  # the tensors without the header
    assert distance(velocity_of(lost.transformer, adapter), trained) > 1e-2


def test_peft_loads_the_same_folder(runs: dict[str, Path], exports: dict[str, Path], tiny_sd3: Path) -> None:
    from peft import PeftModel

    trained, adapter = trainers_velocity(runs["lora-t5"], "ema")
    network = pipeline_of(tiny_sd3, with_t5=True).transformer
    loaded = PeftModel.from_pretrained(network, str(exports["lora-t5"]))
    assert distance(velocity_of(loaded, adapter), trained) <= SAME


def code_of(exported: Path, base: Path) -> dict[str, Any]:
    """What the code on the card defines, once the folder of a base that is on no hub is filled in."""
    card = (exported / "README.md").read_text(encoding="utf-8")
    code = card.partition("```python\n")[2].partition("```")[0]
    code = code.replace(f"base = {base.name!r}  # the folder of the base model", f"base = {str(base)!r}")
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_the_code_on_the_card_draws_a_picture(
    kind: str, exports: dict[str, Path], bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exports[kind])
    names = code_of(exports[kind], bases[kind])
    assert names["image"].size == (32, 32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_card_has_what_the_hub_and_a_reader_ask_for(kind: str, exports: dict[str, Path], bases: dict[str, Path]) -> None:
    card = (exports[kind] / "README.md").read_text(encoding="utf-8")
    header = yaml.safe_load(card.split("---\n")[1])
    is_lora, is_shipped = kind.startswith("lora"), kind.endswith("shapes")
    assert header["base_model"] == ("digenrl-tiny-shapes" if is_shipped else bases[kind].name)
    assert header["library_name"] == "diffusers"
    assert {"text-to-image", "digenrl"} | ({"lora"} if is_lora else set()) <= set(header["tags"])
    assert ("lora" in header["tags"]) == is_lora
    assert header["license"] == ("apache-2.0" if is_shipped else "other")
    assert "| reward | 0.2500 | 0.5000 |" in card
    assert "num_generations: 3" in card


@pytest.mark.parametrize("kind", KINDS)
def test_no_path_of_this_machine_is_in_an_export(kind: str, exports: dict[str, Path], bases: dict[str, Path]) -> None:
    for path in exports[kind].rglob("*"):
        if path.is_file():
            assert str(bases[kind].parent).encode() not in path.read_bytes(), path.name
            assert str(resolve("builtin:shapes", where="test")).encode() not in path.read_bytes(), path.name


def test_the_reward_curve_is_on_the_card_where_the_run_has_one(runs: dict[str, Path], tmp_path: Path) -> None:
    run = Path(shutil.copytree(runs["lora-bare"], tmp_path / "run"))
    (run / "reward.png").write_bytes(b"a picture")
    export.run(str(run), str(tmp_path / "out"))
    assert (tmp_path / "out" / "reward.png").read_bytes() == b"a picture"
    assert "(reward.png)" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("card", "wanted"),
    [
        (None, {"license": "other"}),
        ("# no header", {"license": "other"}),
        ("---\nlicense: mit\n---\n", {"license": "mit"}),
        ("---\nlicense: [unclosed\n---\n", {"license": "other"}),
        (
            "---\nlicense: other\nlicense_name: a-name\nlicense_link: LICENSE\n---\n",
            {"license": "other", "license_name": "a-name"},
        ),
        ("---\nlicense: other\nlicense_link: https://a.b/c\n---\n", {"license": "other", "license_link": "https://a.b/c"}),
    ],
)
def test_the_licence_is_the_one_of_the_bases_card(card: str | None, wanted: dict[str, str], tmp_path: Path) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card, encoding="utf-8")
    assert model_card.base_license(str(tmp_path)) == wanted


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 16}])
def test_a_run_in_bfloat16_is_exported_bit_for_bit_in_float32(
    lora: dict[str, int] | None, tiny_recipe: RecipeMaker, tmp_path: Path, tiny_sd3: Path
) -> None:
    run = build_run(tmp_path / "run", tiny_recipe(model={"lora": lora, "dtype": "bfloat16"}))
    export.run(str(run), str(tmp_path / "out"))
    trained = load_newest(run / "checkpoints")[0].weights["parameters"]
    file = "transformer/diffusion_pytorch_model.safetensors" if lora is None else "pytorch_lora_weights.safetensors"
    exported = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert len(exported) >= len(trained) > 0
    assert all(torch.equal(exported[name.replace(".default", "")], tensor) for name, tensor in trained.items())
    if lora is None:
        encoder = "text_encoder_3/model.safetensors"
        ours, base = (load_file(folder / encoder) for folder in (tmp_path / "out", tiny_sd3))
        assert all(torch.equal(ours[name], base[name]) for name in base)


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_sigma_shift_of_the_recipe_is_not_lost(
    lora: dict[str, int] | None, tiny_recipe: RecipeMaker, tmp_path: Path, tiny_sd3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(tmp_path / "run", tiny_recipe(model={"lora": lora, "flow_shift": 1.75}))
    export.run(str(run), str(tmp_path / "out"))
    monkeypatch.chdir(tmp_path / "out")
    assert code_of(tmp_path / "out", tiny_sd3)["pipeline"].scheduler.config.shift == 1.75


def test_a_folder_that_holds_something_is_left_alone(runs: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        export.run(str(runs["lora-bare"]), str(tmp_path))
    assert os.listdir(tmp_path) == ["mine"]


def test_an_export_that_fails_half_way_leaves_nothing(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def fails(_facts: Any) -> str:
        seen.append([path.name for path in tmp_path.rglob("pytorch_lora_weights.safetensors")])
        assert not (tmp_path / "out").exists()
        raise OSError("no space left on device")

    monkeypatch.setattr(model_card, "model_card", fails)
    with pytest.raises(OSError, match="no space"):
        export.run(str(runs["lora-bare"]), str(tmp_path / "out"))
    assert seen == [["pytorch_lora_weights.safetensors"]], "the weights had been written by then"
    assert os.listdir(tmp_path) == []


def test_a_bare_model_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes a run"):
        export.run("builtin:shapes", str(tmp_path / "out"))


def test_a_pickle_in_the_run_or_the_model_never_runs(runs: dict[str, Path], tiny_sd3: Path, tmp_path: Path) -> None:
    marker = tmp_path / "it_ran"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    run = Path(shutil.copytree(runs["full-t5"], tmp_path / "run"))
    model = Path(shutil.copytree(tiny_sd3, tmp_path / "model"))
    recipe = run / "recipe.yaml"
    recipe.write_text(recipe.read_text(encoding="utf-8").replace(str(tiny_sd3), str(model)), encoding="utf-8")
    checkpoint = next((run / "checkpoints").iterdir())
    places = [run / "pytorch_model.bin", checkpoint / "parameters.bin", checkpoint / "ema.pt", model / "pytorch_model.bin"]
    places += [model / "transformer" / "diffusion_pytorch_model.bin", model / "text_encoder" / "pytorch_model.bin"]
    for place in places:
        torch.save({"weight": Attack()}, place)
    export.run(str(run), str(tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("*.bin"))
    (model / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model\.path"):
        export.run(str(run), str(tmp_path / "again"))
    shutil.copyfile(places[0], checkpoint / "ema.safetensors")
    with pytest.raises(ConfigError, match=r"ema\.safetensors"):
        export.run(str(run), str(tmp_path / "again"))
    assert not marker.exists()
    torch.load(places[0], weights_only=False)
    assert marker.exists(), "the file would have run, had anybody loaded it"
