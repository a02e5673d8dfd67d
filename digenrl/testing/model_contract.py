"""What every model adapter has to do, as assertions that say what is wrong: the built-in families pass them, and so should yours.

Everything runs on the CPU in a few seconds, so use a tiny model. Whether the adapter draws what the original pipeline draws it
cannot know: compare the two yourself, as docs/howto/add_model.md shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.config.registry import component_class
from digenrl.config.schema import Recipe
from digenrl.errors import ProtocolError
from digenrl.models.base import ALL_PARTS, Conditioning, Guidance, ModelAdapter, Part, concatenate

PROMPTS = ("a red circle", "", "a red circle", "\u674e\u660e draws \U0001f98a {caf\u00e9} 100%", "two blue squares " * 200)
"""With an empty, a doubled, a foreign and an endless one."""
_ROUNDING = 1e-4
"""Largest difference, relative to the whole, of a float32 forward pass from the same one in another batch shape."""


def check_model(recipe: Recipe) -> None:
    """Assert the contract of the adapter that ``recipe.model`` names, at the recipe's size and guidance. Needs no GPU.

    Raises AssertionError with what is wrong, and ConfigError where the model or the recipe cannot be used at all.
    """
    load = component_class("model", recipe.model.type, where="model.type").load
    cpu = torch.device("cpu")
    before = _random_states()
    adapter: ModelAdapter = load(recipe, cpu)
    _check_loaded(adapter)
    text = _check_text(adapter)
    _check_shapes(adapter, recipe)
    _check_predictions(adapter, recipe, text)
    _check_gradients(adapter, recipe, text)
    _check_pictures(adapter, recipe)
    _check_parts(lambda parts: load(recipe, cpu, parts), adapter, recipe, text)
    assert _random_states() == before, (
        "loading, encoding, predicting or decoding changes global random state (torch, random): draw from a generator of your own"
    )


def _check_loaded(adapter: ModelAdapter) -> None:
    network = adapter.transformer
    assert isinstance(network, nn.Module), f"transformer must be the network as a torch module; it is a {type(network).__name__}"
    trained = [name for name, parameter in network.named_parameters() if parameter.requires_grad]
    assert not trained, f"load must freeze all weights; {len(trained)} want a gradient, for example {trained[:1]}"
    assert not network.training, "load must put the network into eval mode: dropout would make rollout and training differ"
    assert isinstance(adapter.device, torch.device), "device must be the torch.device that load was given"
    assert isinstance(adapter.truncated_prompts, set), "truncated_prompts must be a set of prompts"
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    for target in adapter.default_lora_targets:
        assert any(name == target or name.endswith(f".{target}") for name in linear), (
            f"default_lora_targets: {target!r} is the end of no linear layer's name; there are {linear[:5]}, ..."
        )
    classes = {type(module).__name__ for module in network.modules()}
    assert adapter.sharded_blocks, "sharded_blocks must name the repeated layers: FSDP would gather the whole network at once"
    absent = set(adapter.sharded_blocks) - classes
    assert not absent, f"sharded_blocks: the network has no module of class {sorted(absent)}"


def _check_text(adapter: ModelAdapter) -> Conditioning:
    """Returns the encoded PROMPTS."""
    text = adapter.encode_prompts(PROMPTS, ["ugly"] * len(PROMPTS))
    assert text.tensors, "encode_prompts must return at least one tensor"
    for name, tensor in text.tensors.items():
        assert len(tensor) == len(PROMPTS), f"{name}: the first dimension must be the prompt; its shape is {tuple(tensor.shape)}"
        assert bool(torch.isfinite(tensor.float()).all()), f"{name} is not finite for one of {PROMPTS[:4]} or a long prompt"
        assert torch.equal(tensor[0], tensor[2]), f"{name}: the same prompt twice in a batch is encoded to different numbers"
        assert not tensor.requires_grad, f"{name} wants a gradient: encode under torch.no_grad()"
    again = adapter.encode_prompts(PROMPTS, ["ugly"] * len(PROMPTS))
    other = adapter.encode_prompts(PROMPTS[:2], ["", ""])
    for name, tensor in text.tensors.items():
        assert torch.equal(tensor, again.tensors[name]), f"{name}: encoding the same prompts twice gives different numbers"
        assert tensor.shape[1:] == other.tensors[name].shape[1:], (
            f"{name}: shapes {tuple(tensor.shape)} and {tuple(other.tensors[name].shape)} cannot be joined; pad every prompt to "
            "one length, whatever it is encoded with"
        )
    joined = concatenate([text, other])
    assert len(joined) == len(PROMPTS) + 2, "encoded prompts must join along the first dimension"
    differs = [name for name, tensor in text.tensors.items() if not torch.equal(tensor[0], tensor[1])]
    assert differs, "two different prompts are encoded to the same numbers"
    return text


def _check_shapes(adapter: ModelAdapter, recipe: Recipe) -> None:
    shape = adapter.latent_shape(*_size(recipe), recipe.rollout.num_frames)
    assert all(isinstance(side, int) and side > 0 for side in shape), f"latent_shape must be positive integers; it is {shape}"
    for steps in (2, recipe.rollout.num_inference_steps):
        schedule = adapter.noise_schedule(steps, *_size(recipe))
        assert schedule.num_steps == steps, f"noise_schedule({steps}, ...) has {schedule.num_steps} steps"
        assert 0 < float(schedule.sigmas[0]) <= 1, f"sigmas must begin at 1 or a little less; the first is {schedule.sigmas[0]}"
        again = adapter.noise_schedule(steps, *_size(recipe))
        assert torch.equal(schedule.sigmas, again.sigmas), "noise_schedule must be the same every time"


@torch.no_grad()
def _check_predictions(adapter: ModelAdapter, recipe: Recipe, text: Conditioning) -> None:
    guidance, latents, timesteps = _inputs(adapter, recipe)
    rows = torch.zeros(4, dtype=torch.int64)
    together = adapter.predict(latents, timesteps, text.select(rows), guidance)
    assert together.shape == latents.shape, f"predict gives {tuple(together.shape)} for latents of {tuple(latents.shape)}"
    assert together.dtype == torch.float32, f"predict must answer in float32, whatever it computes in; it is {together.dtype}"
    assert bool(torch.isfinite(together).all()), "predict is not finite for standard normal latents"
    for row in range(4):
        one = torch.tensor([row])
        alone = adapter.predict(latents[one], timesteps[one], text.select(rows[one]), guidance)
        error = _distance(alone, together[one])
        assert error < _ROUNDING, (
            f"row {row} of a batch of different timesteps is not what it is alone (off by {error:.1e}): every row must be "
            "computed with its own timestep"
        )
    turned = torch.tensor([3, 2, 1, 0])
    after = adapter.predict(latents[turned], timesteps[turned], text.select(rows), guidance)
    assert torch.equal(after, together[turned]), "a row's prediction depends on its place in the batch or on its neighbours"
    spoilt = latents.clone()
    spoilt[1] = float("nan")
    kept = torch.tensor([0, 2, 3])
    after = adapter.predict(spoilt, timesteps, text.select(rows), guidance)
    assert torch.equal(after[kept], together[kept]), "a NaN in one row's latents changes other rows: a bad sample would spoil all"
    others = {
        "the timestep": adapter.predict(latents, timesteps.flip(0), text.select(rows), guidance),
        "the prompt": adapter.predict(latents, timesteps, text.select(rows + 1), guidance),
        "the latents": adapter.predict(latents.flip(0), timesteps, text.select(rows), guidance),
    }
    if guidance.true_cfg_scale > 1:
        others["true_cfg_scale"] = adapter.predict(latents, timesteps, text.select(rows), Guidance(1.0, guidance.embedded))
    for what, other in others.items():
        assert _distance(other, together) > _ROUNDING, f"{what} has no effect on the prediction"


def _check_gradients(adapter: ModelAdapter, recipe: Recipe, text: Conditioning) -> None:
    guidance, latents, timesteps = _inputs(adapter, recipe)
    network = adapter.transformer.requires_grad_(True)
    try:
        answer = adapter.predict(latents, timesteps, text.select(torch.zeros(4, dtype=torch.int64)), guidance)
        assert answer.requires_grad, "predict cuts the graph: nothing could be trained (torch.no_grad, detach or .data inside?)"
        torch.autograd.backward(answer.square().mean())
        gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    finally:
        network.requires_grad_(False)
        network.zero_grad(set_to_none=True)
    broken = [name for name, gradient in gradients.items() if gradient is not None and not torch.isfinite(gradient).all()]
    assert not broken, f"the gradient of {len(broken)} weights is not finite, for example {broken[0]}"
    reached = [name for name, gradient in gradients.items() if gradient is not None and bool(gradient.any())]
    assert 2 * len(reached) > len(gradients), f"only {len(reached)} of {len(gradients)} weights have a gradient"


@torch.no_grad()
def _check_pictures(adapter: ModelAdapter, recipe: Recipe) -> None:
    latents = _inputs(adapter, recipe)[1]
    pictures = adapter.decode(latents)
    frames = recipe.rollout.num_frames
    wanted = (len(latents), *((frames,) if frames > 1 else ()), 3, *_size(recipe))
    found = tuple(pictures.shape)
    assert found == wanted, f"decode gives {found}; {'[B, num_frames, 3' if frames > 1 else '[B, 3'}, height, width] is {wanted}"
    assert pictures.dtype == torch.float32, f"decode must give float32; it is {pictures.dtype}"
    assert float(pictures.min()) >= 0 and float(pictures.max()) <= 1, "decode must give pixels in [0, 1]"
    assert torch.equal(pictures, adapter.decode(latents)), "decoding the same latents twice gives different pixels"


def _check_parts(
    load: Callable[[frozenset[Part]], ModelAdapter], whole: ModelAdapter, recipe: Recipe, text: Conditioning
) -> None:
    guidance, latents, timesteps = _inputs(whole, recipe)
    four = text.select(torch.zeros(4, dtype=torch.int64))
    uses: dict[Part, Callable[[ModelAdapter], Any]] = {
        "text_encoders": lambda adapter: adapter.encode_prompts(PROMPTS, ["ugly"] * len(PROMPTS)).tensors,
        "transformer": lambda adapter: {"prediction": adapter.predict(latents, timesteps, four, guidance)},
        "vae": lambda adapter: {"pictures": adapter.decode(latents)},
    }
    for part in sorted(ALL_PARTS):
        some = load(frozenset((part,)))
        for sizes in ("latent_shape", "noise_schedule"):
            of_latents = sizes == "latent_shape"
            arguments = (*_size(recipe), recipe.rollout.num_frames) if of_latents else (3, *_size(recipe))
            ours, wanted = (getattr(each, sizes)(*arguments) for each in (some, whole))
            same = ours == wanted if of_latents else torch.equal(ours.sigmas, wanted.sigmas)
            assert same, f"{sizes} is another one where only {part!r} is loaded: read the configs of absent components, too"
        for other, use in uses.items():
            if other == part:
                with torch.no_grad():
                    alone, together = use(some), use(whole)
                assert all(torch.equal(alone[name], together[name]) for name in together), (
                    f"what {part!r} computes depends on whether other parts are loaded"
                )
                continue
            try:
                with torch.no_grad():
                    use(some)
            except ProtocolError:
                continue
            raise AssertionError(f"loaded with {part!r} alone, the adapter does the work of {other!r}: raise part_not_loaded")


def _inputs(adapter: ModelAdapter, recipe: Recipe) -> tuple[Guidance, Tensor, Tensor]:
    """The recipe's guidance, and latents and timesteps of 4 rows."""
    shape = adapter.latent_shape(*_size(recipe), recipe.rollout.num_frames)
    latents = torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))
    timesteps = adapter.noise_schedule(4, *_size(recipe)).timesteps
    return Guidance(recipe.rollout.true_cfg_scale, recipe.rollout.guidance_scale), latents, timesteps


def _size(recipe: Recipe) -> tuple[int, int]:
    return recipe.rollout.height, recipe.rollout.width


def _distance(ours: Tensor, wanted: Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


def _random_states() -> tuple[bytes, str]:
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate())
