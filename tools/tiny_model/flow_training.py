"""Rectified flow on cached latents: transformer and text encoders learn to tell noise minus picture.

Invariants: a batch, its noise and its times depend on the seed and the step alone, and the learning rate on the images seen
so far and the plan; so a run that goes on from a checkpoint takes the very steps of one that was never interrupted.
The pipeline masks no padding, so the model is trained with it: mostly at the short length that the quickstart uses, and every
20th batch, a smaller one, at the length that the pipeline uses when told nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from components import LATENT_SHAPE, PIPELINE_T5_TOKENS, TEXT_TOKENS, Network, all_captions
from diffusers import AutoencoderKL
from files import Table, load_tensors, save_tensors
from optimizer import HiddenMatrixOptimizer
from pictures import draw_examples
from progress import Deadline, Progress
from seeds import generator, weights_of
from torch import Tensor
from torch.nn import functional
from vae_training import pixels_of

_BATCH = 64
_LONG_BATCH = 16
_LONG_EVERY = 20
_DROPPED_CAPTIONS = 0.1
_EMA_DECAY = 0.997
_WARMUP_IMAGES = 4000
_FINAL_FACTOR = 0.03
_EXAMPLES_PER_DRAW = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One schedule of the learning rate: warm up, stay, fall linearly."""

    images: int
    """To train on in all, examples counted as often as they are seen."""
    decay_images: int
    """The last ones of them, over which the learning rate falls to 3 %. Until they begin, both numbers may be changed."""
    peak: float = 1.0
    """Factor for the learning rates at their highest; a model that is trained already wants less than 1."""

    def factor(self, seen: int) -> float:
        """What to multiply the learning rates with when so many images have been seen."""
        warm = min(1.0, (seen + 1) / _WARMUP_IMAGES)
        left = (self.images - seen) / self.decay_images
        return self.peak * warm * min(1.0, max(_FINAL_FACTOR, left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Pictures as latents, and captions as numbers."""

    latents: Tensor
    """[N, 4, 16, 16] float16, scaled as the transformer takes them."""
    captions: Tensor
    """[N] int64, places in ``all_captions()``."""


def batch_size(step: int) -> int:
    """How many images the batch of a step has."""
    return _LONG_BATCH if _is_long(step) else _BATCH


def images_before(step: int) -> int:
    """How many images the steps before this one have seen."""
    long = step // _LONG_EVERY
    return (step - long) * _BATCH + long * _LONG_BATCH


@torch.no_grad()
def encode_examples(output: Path, vae: AutoencoderKL, *, seed: int, count: int) -> Dataset:
    """Draw examples, encode them and keep them in ``examples.safetensors``; or read them from there."""
    path = output / "examples.safetensors"
    if not path.exists():
        place = {text: index for index, text in enumerate(all_captions())}
        latents, captions = [], []
        for start in range(0, count, _EXAMPLES_PER_DRAW):
            drawn = draw_examples(min(_EXAMPLES_PER_DRAW, count - start), seed=seed * 1_000_003 + start + 1)
            with torch.autocast("cpu", torch.bfloat16):
                encoded = vae.encode(pixels_of(drawn)).latent_dist.mean.float()
            latents.append(((encoded - vae.config.shift_factor) * vae.config.scaling_factor).half())
            captions.extend(place[example.caption] for example in drawn)
        save_tensors(path, {"latents": torch.cat(latents), "captions": torch.tensor(captions)})
    return Dataset(**load_tensors(path)[0])


class FlowTraining:
    """The network, its moving average and its optimizer, after some number of steps."""

    def __init__(self, dataset: Dataset, *, seed: int, prepare: Callable[[Network], None] | None = None) -> None:
        """prepare: changes the random initial weights in place."""
        with weights_of(seed, "network"):
            self._network = Network().train()
            if prepare is not None:
                prepare(self._network)
            self.average = Network().eval().requires_grad_(False)
        self.average.load_state_dict(self._network.state_dict())
        self.step = 0
        self._dataset = dataset
        self._seed = seed
        self._optimizer = HiddenMatrixOptimizer(self._network)
        captions = all_captions()
        self._ids = {length: self._network.text.tokenize(captions, length) for length in (TEXT_TOKENS, PIPELINE_T5_TOKENS)}

    @property
    def images(self) -> int:
        """How many images have been seen."""
        return images_before(self.step)

    def train_step(self, plan: Plan) -> float:
        """One update of the network and its average. Returns the loss."""
        loss = self._loss()
        loss.backward()
        self._optimizer.step(plan.factor(self.images))
        self.step += 1
        decay = min(_EMA_DECAY, self.step / (self.step + 9))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self._network.parameters()), 1 - decay)
        return loss.item()

    def save(self, path: Path) -> None:
        """Write a checkpoint from which ``load`` goes on exactly."""
        tensors = {f"network.{name}": tensor for name, tensor in self._network.named_parameters()}
        tensors |= {f"average.{name}": tensor for name, tensor in self.average.named_parameters()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in self._optimizer.state().items()}
        save_tensors(path, tensors, {"step": str(self.step), "seed": str(self._seed)})

    def load(self, path: Path) -> None:
        """Go on from a checkpoint. Raises SystemExit where it was made with another seed."""
        tensors, notes = load_tensors(path)
        if int(notes["seed"]) != self._seed:
            raise SystemExit(
                f"{path} was made with --seed {notes['seed']}, not {self._seed}: give that seed or another --output."
            )
        with torch.no_grad():
            for prefix, module in (("network", self._network), ("average", self.average)):
                for name, parameter in module.named_parameters():
                    parameter.copy_(tensors[f"{prefix}.{name}"])
        prefix = "optimizer."
        self._optimizer.load_state({name[len(prefix) :]: value for name, value in tensors.items() if name.startswith(prefix)})
        self.step = int(notes["step"])

    def _loss(self) -> Tensor:
        """Squared error of the predicted velocity, noise - latents, at random times."""
        random = generator(self._seed, "flow", self.step)
        size = batch_size(self.step)
        chosen = torch.randint(len(self._dataset.latents), (size,), generator=random)
        latents = self._dataset.latents[chosen].float()
        kept = torch.rand(size, generator=random) >= _DROPPED_CAPTIONS
        captions = self._dataset.captions[chosen] * kept
        # Half of the times are uniform, half logit-normal: what stands where is decided in the middle.
        times = torch.rand(size, generator=random)
        times[size // 2 :] = torch.sigmoid(torch.randn(size - size // 2, generator=random))
        noise = torch.randn((size, *LATENT_SHAPE), generator=random)
        noisy = torch.lerp(latents, noise, times.view(-1, 1, 1, 1))
        clip_ids, t5_ids = self._ids[PIPELINE_T5_TOKENS if _is_long(self.step) else TEXT_TOKENS]
        with torch.autocast("cpu", torch.bfloat16):
            text, pooled = self._network.text(clip_ids[captions], t5_ids[captions])
            velocity = self._network.transformer(noisy, text, pooled, times * 1000, return_dict=False)[0]
        return functional.mse_loss(velocity.float(), noise - latents)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """What happens every so often besides training."""

    save_every_s: float
    evaluate_every_s: float
    evaluate: Callable[[Network], str]
    """What to tell about the average so far."""


def train(training: FlowTraining, output: Path, *, plan: Plan, rhythm: Rhythm, deadline: Deadline) -> bool:
    """Train until the plan is fulfilled, or the deadline passes: then False. Either way a checkpoint is left.

    A second checkpoint is left where the learning rate begins to fall: from there a longer plan can go on.
    """
    losses = Table(output / "losses.csv", ("step", "images", "loss"), keep_below=training.step)
    progress = Progress("flow", total_images=plan.images, done_images=training.images)
    saved = evaluated = time.monotonic()
    while training.images < plan.images and not deadline.passed():
        before = training.images
        if before < plan.images - plan.decay_images <= before + batch_size(training.step):
            training.save(output / "before_decay.safetensors")
        step = training.step
        loss = training.train_step(plan)
        losses.append(step, before, f"{loss:.6f}")
        progress.tell(training.images, loss)
        now = time.monotonic()
        if now - saved > rhythm.save_every_s:
            losses.flush()
            training.save(output / "checkpoint.safetensors")
            saved = now
        if now - evaluated > rhythm.evaluate_every_s:
            print(f"flow: {training.images:,} images: {rhythm.evaluate(training.average)}", flush=True)
            evaluated = time.monotonic()
    losses.close()
    training.save(output / "checkpoint.safetensors")
    return training.images >= plan.images


def _is_long(step: int) -> bool:
    return step % _LONG_EVERY == _LONG_EVERY - 1
