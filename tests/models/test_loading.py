"""Bad model folders: a clear error, no code run, no weight made up."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from digenrl.config.schema import Recipe
from digenrl.errors import ConfigError
from digenrl.models.loading import own_memory
from digenrl.models.sd3 import SD3Adapter

RecipeMaker = Callable[..., Recipe]
TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
CLIP = "text_encoder/model.safetensors"


def refused(make: RecipeMaker, folder: Path, match: str, **model: Any) -> ConfigError:
    with pytest.raises(ConfigError, match=match) as caught:
        SD3Adapter.load(make(model={"path": str(folder), **model}), torch.device("cpu"))
    assert caught.value.fix
    return caught.value


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, tiny_recipe: RecipeMaker) -> None:
    refused(tiny_recipe, tmp_path / "nothing", "nothing")


def test_a_folder_without_a_model_index_is_refused(tmp_path: Path, tiny_recipe: RecipeMaker) -> None:
    refused(tiny_recipe, tmp_path, "model_index.json")


def test_a_folder_of_another_pipeline_is_refused(edited_model: Callable[..., Path], tiny_recipe: RecipeMaker) -> None:
    refused(tiny_recipe, edited_model("model_index.json", _class_name="FluxPipeline"), "FluxPipeline")


@pytest.mark.parametrize("component", ["transformer", "vae", "scheduler", "text_encoder", "tokenizer_2", "text_encoder_3"])
def test_a_missing_component_is_named(component: str, copied_model: Path, tiny_recipe: RecipeMaker) -> None:
    shutil.rmtree(copied_model / component)
    refused(tiny_recipe, copied_model, component)


@pytest.mark.parametrize("component", ["text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "tokenizer_3"])
def test_an_index_that_leaves_out_what_reading_prompts_needs_is_refused(
    component: str, edited_model: Callable[..., Path], tiny_recipe: RecipeMaker
) -> None:
    refused(tiny_recipe, edited_model("model_index.json", **{component: [None, None]}), component)


@pytest.mark.parametrize("file", [TRANSFORMER, CLIP, "text_encoder_3/model.safetensors", "vae/config.json"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "gone"])
def test_a_damaged_file_is_an_error_that_names_the_model(
    file: str, damage: str, copied_model: Path, tiny_recipe: RecipeMaker
) -> None:
    path = copied_model / file
    if damage == "cut":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif damage == "garbage":
        path.write_bytes(b"\x00\x01 not a model")
    else:
        path.unlink()
    refused(tiny_recipe, copied_model, r"model\.path")


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        (TRANSFORMER, "transformer_blocks.1.attn.to_q.weight"),
        (TRANSFORMER, "proj_out.bias"),
        ("vae/diffusion_pytorch_model.safetensors", "decoder.conv_out.weight"),
        (CLIP, "text_projection.weight"),
        ("text_encoder_3/model.safetensors", "encoder.final_layer_norm.weight"),
    ],
)
def test_a_weight_that_the_file_lacks_is_never_made_up(
    file: str, tensor: str, copied_model: Path, tiny_recipe: RecipeMaker
) -> None:
    weights = load_file(copied_model / file)
    del weights[tensor]
    save_file(weights, copied_model / file, metadata={"format": "pt"})
    refused(tiny_recipe, copied_model, tensor.split(".")[-2])


@pytest.mark.parametrize("tokenizer", ["tokenizer", "tokenizer_3"])
def test_a_tokenizer_without_its_vocabulary_is_refused(tokenizer: str, copied_model: Path, tiny_recipe: RecipeMaker) -> None:
    (copied_model / tokenizer / "tokenizer.json").unlink()
    refused(tiny_recipe, copied_model, f"{tokenizer} knows")


def test_weights_of_another_size_are_refused(edited_model: Callable[..., Path], tiny_recipe: RecipeMaker) -> None:
    refused(tiny_recipe, edited_model("transformer/config.json", attention_head_dim=16), "shape")


@pytest.mark.parametrize(("file", "pickled"), [(TRANSFORMER, "diffusion_pytorch_model.bin"), (CLIP, "pytorch_model.bin")])
def test_a_pickled_weight_file_is_refused_and_never_run(
    file: str, pickled: str, copied_model: Path, tmp_path: Path, tiny_recipe: RecipeMaker
) -> None:
    marker = tmp_path / "it_ran"

    class Attack:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {marker}",)

    (copied_model / file).unlink()
    bad = (copied_model / file).parent / pickled
    torch.save({"weight": Attack()}, bad)
    refused(tiny_recipe, copied_model, r"model\.path")
    assert not marker.exists()
    torch.load(bad, weights_only=False)
    assert marker.exists(), "the file would have run, had anybody loaded it"


def test_python_code_inside_a_model_folder_is_refused_and_never_run(
    edited_model: Callable[..., Path], tmp_path: Path, tiny_recipe: RecipeMaker
) -> None:
    marker = tmp_path / "it_ran"
    folder = edited_model("model_index.json", vae=["evil", "Evil"])
    (folder / "vae" / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass Evil: pass\n", encoding="utf-8")
    refused(tiny_recipe, folder, r"model\.path")
    assert not marker.exists()


def test_no_text_tokens_for_a_third_encoder_that_is_there_are_refused(tiny_sd3: Path, tiny_recipe: RecipeMaker) -> None:
    refused(tiny_recipe, tiny_sd3, "max_sequence_length", max_sequence_length=0)


def test_a_loaded_model_is_frozen_in_eval_mode_and_in_its_own_memory(tiny_recipe: RecipeMaker) -> None:
    adapter = SD3Adapter.load(tiny_recipe(), torch.device("cpu"))
    assert not adapter.transformer.training
    assert not any(parameter.requires_grad for parameter in adapter.transformer.parameters())
    assert all(parameter.data_ptr() % 64 == 0 for parameter in adapter.transformer.parameters())


def test_own_memory_keeps_values_and_ties() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    before = module[0].weight.detach().clone()
    address = module[0].weight.data_ptr()
    own_memory(module)
    assert torch.equal(module[0].weight, before)
    assert module[0].weight.data_ptr() != address
    assert module[1].weight is module[0].weight


def test_the_tiny_model_is_the_same_every_time_and_changes_no_random_state(tmp_path: Path, tiny_sd3: Path) -> None:
    from digenrl.testing.tiny_pipelines import build_sd3

    state = torch.get_rng_state()
    again = build_sd3(tmp_path / "again")
    assert torch.equal(torch.get_rng_state(), state)
    for file in sorted(tiny_sd3.rglob("*.safetensors")):
        assert (again / file.relative_to(tiny_sd3)).read_bytes() == file.read_bytes()
    other = build_sd3(tmp_path / "other", seed=1, num_layers=1)
    assert (other / TRANSFORMER).read_bytes() != (tiny_sd3 / TRANSFORMER).read_bytes()
    assert json.loads((other / "transformer" / "config.json").read_text(encoding="utf-8"))["num_layers"] == 1
