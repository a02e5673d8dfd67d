"""What a step costs on n devices, from FLOPs and bytes: a model, two kinds of device and a workload in, seconds out.

Assumptions (public model sizes are from the models' published configurations; everything else is assumed where it says so):

1.  One transformer pass over N tokens takes 2 x parameters x N FLOPs, and 4 x layers x N^2 x width for attention.
2.  N = text tokens + latent frames x (height / (VAE x patch)) x (width / (VAE x patch)); latent frames = 1 + (frames - 1) / VAE
    in time, rounded up.
3.  Classifier-free guidance is further passes, in generation and in training alike (as DigenRL trains).
4.  Devices reach a fixed share of their bf16 peak, one for generation and one for training (assumed); in generation a forward
    pass also costs as much as ``overhead_tokens`` further tokens (launches, weight reads: small batches of small images lose).
5.  g(n): the samples of a micro-batch are spread over the n ranks of a replica, rounded up, and each rank rounds up to whole
    forward batches, as DigenRL pads them. That is the only loss of generator scaling: no communication between ranks.
6.  Forward and backward cost 3 forward passes, 4 with gradient checkpointing; LoRA saves one of them (no weight gradients).
7.  t(n): (sample, denoising step) pairs are spread over the n trainer ranks, rounded up.
8.  Without TSP every pair is a pass of its own, and a pass has a cost of its own (gathering sharded weights, launches) which
    does not grow with resolution. TSP shares it among the trained steps of a sample. How large it is follows from the measured
    gain of TSP at one or two timestep fractions (``tsp``); between them it is interpolated, beyond them held.
9.  Scoring: VAE decoding at a number of FLOPs per pixel and frame, and one pass of the reward model per sample, at the share of
    generation; samples over ranks rounded up.
10. Switching the trainer's mode moves the weights in bf16 once over the link, less the share that a rank holds.
11. The optimizer step reads and writes 16 bytes per trained parameter, sharded over the ranks, at the memory's bandwidth, and
    reduces 4 bytes of gradient over the link.
12. Weight sync moves the trained parameters once over the link; all replicas load at once. A colocated pool does the same, from
    its training shards into its generating copy.
13. Encoding is one pass of the text encoder per prompt, over the ranks of one replica.
14. A pool made of both kinds of device goes at the pace of the slower.
15. Memory: a generating rank holds the weights in bf16 and the reward model; a training rank its share of weights (2 bytes per
    parameter) and of trained state (16 bytes per trained parameter), and with TAG all weights in bf16 too; either needs
    ``activation_gib`` beside that (assumed).
16. ``scales`` correct each kind of work by a constant factor, so that measured numbers come out at one size (presets.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

Pool = Literal["generators", "trainer", "all"]
"""Whose devices work: ``all`` is one pool that does everything in turn."""

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """Sizes of a generator, of its VAE and of what scores it."""

    parameters: float
    layers: int
    width: int
    text_tokens: int
    vae_spatial: int = 8
    vae_temporal: int = 1
    patch: int = 2
    cfg_passes: int = 1
    trained_parameters: float
    """All of them for full fine-tuning, the adapters for LoRA."""
    checkpointing: bool = True
    decode_flops_per_pixel: float = 1e7
    """Of the VAE's decoder, per pixel and frame (assumed; about what Stable Diffusion's has)."""
    reward_parameters: float = 0.0
    reward_tokens: int = 0
    """Tokens of one sample for the reward model."""
    text_parameters: float = 0.0

    @property
    def training_passes(self) -> int:
        """Forward passes that one forward and backward pass costs."""
        return (4 if self.checkpointing else 3) - (self.trained_parameters < self.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One kind of GPU. Defaults are an 80 GB H100 (public data sheet); shares and the link's speed are assumed."""

    tflops: float = 989.0
    """Peak in bf16."""
    generation_share: float = 0.4
    training_share: float = 0.4
    overhead_tokens: float = 0.0
    memory_gib: float = 80.0
    memory_gb_s: float = 3350.0
    link_gb_s: float = 50.0
    """Between devices of different nodes, per device."""
    activation_gib: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one RL step asks for; names as in a recipe."""

    height: int
    width: int
    num_frames: int = 1
    num_inference_steps: int
    timestep_fraction: float
    """Share of the denoising steps that is trained."""
    prompts_per_step: int
    num_generations: int
    groups_per_micro_batch: int
    forward_batch_size: int = 1

    @property
    def trained_steps(self) -> int:
        """Denoising steps trained per sample: int(T f), never the last, at least one."""
        asked = int(self.num_inference_steps * self.timestep_fraction + 1e-9)
        return max(1, min(asked, self.num_inference_steps - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors on each kind of work (assumption 16)."""

    generate: float = 1.0
    score: float = 1.0
    update: float = 1.0
    switch: float = 1.0
    optimizer: float = 1.0
    sync: float = 1.0
    encode: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of every kind of work. ``groups`` is a number of prompt groups, ``ranks`` a number of devices."""

    model: ModelProfile
    workload: Workload
    generators: DeviceProfile = field(default_factory=DeviceProfile)
    trainers: DeviceProfile = field(default_factory=DeviceProfile)
    nominal: Workload
    """The workload at which ``tsp`` and ``scales`` were measured."""
    tsp: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    """(timestep fraction, gain of TSP) at the nominal workload, ascending."""
    scales: Scales = field(default_factory=Scales)

    @property
    def groups(self) -> int:
        """Prompt groups of one step."""
        return self.workload.prompts_per_step

    @property
    def samples_per_group(self) -> int:
        """Samples of one prompt."""
        return self.workload.num_generations

    @property
    def mixed(self) -> bool:
        """Whether generators and trainer are different kinds of device."""
        return self.generators != self.trainers

    def generate(self, groups: int, ranks: int, pool: Pool) -> float:
        """All denoising steps of some prompt groups on n devices: g(n)."""
        device, size = self._device(pool), self.workload.forward_batch_size
        batches = math.ceil(math.ceil(groups * self.samples_per_group / ranks) / size)
        tokens = _tokens(self.model, self.workload) * size
        loss = 1 + device.overhead_tokens / tokens
        flops = batches * size * self.workload.num_inference_steps * _pass_flops(self.model, self.workload)
        return self.scales.generate * loss * flops / _rate(device, device.generation_share)

    def score(self, groups: int, ranks: int, pool: Pool) -> float:
        """Decoding and rewards of some prompt groups."""
        device, work, model = self._device(pool), self.workload, self.model
        decode = work.height * work.width * work.num_frames * model.decode_flops_per_pixel
        flops = decode + 2 * model.reward_parameters * model.reward_tokens
        samples = math.ceil(groups * self.samples_per_group / ranks)
        return self.scales.score * samples * flops / _rate(device, device.generation_share)

    def update(self, groups: int, ranks: int, pool: Pool, *, tsp: bool) -> float:
        """Forward and backward passes of some prompt groups: t(n)."""
        device, steps = self._device(pool), self.workload.trained_steps
        pairs = math.ceil(groups * self.samples_per_group * steps / ranks)
        passes = math.ceil(pairs / steps) if tsp else pairs
        nominal = _pass_flops(self.model, self.nominal)
        of_pass = self._pass_share()
        of_pair = (1 - of_pass) * _pass_flops(self.model, self.workload) / nominal
        seconds = self.model.training_passes * nominal / _rate(device, device.training_share)
        return self.scales.update * seconds * (pairs * of_pair + passes * of_pass)

    def switch(self, ranks: int) -> tuple[float, float]:
        """Turning a trainer of n ranks to generation, and back."""
        moved = 2 * self.model.parameters * (1 - 1 / ranks)
        seconds = self.scales.switch * moved / (1e9 * self.trainers.link_gb_s)
        return seconds, seconds

    def optimizer(self, ranks: int, pool: Pool) -> float:
        """One optimizer step on n ranks."""
        device, trained = self._device(pool), self.model.trained_parameters / ranks
        return self.scales.optimizer * trained * (2 * 16 / (1e9 * device.memory_gb_s) + 4 / (1e9 * device.link_gb_s))

    def sync(self) -> float:
        """Publishing or loading a version."""
        link = min(self.generators.link_gb_s, self.trainers.link_gb_s)
        return self.scales.sync * 2 * self.model.trained_parameters / (1e9 * link)

    def encode(self, ranks: int, pool: Pool) -> float:
        """Text encoding of one step."""
        device = self._device(pool)
        flops = 2 * self.model.text_parameters * self.model.text_tokens * math.ceil(self.groups / ranks)
        return self.scales.encode * flops / _rate(device, device.generation_share)

    def memory_gib(self, pool: Pool, ranks: int, *, tag: bool = False) -> float:
        """Memory that each of the n devices of a pool needs; ``tag``: the trainer also generates."""
        model = self.model
        training = (2 * model.parameters + 16 * model.trained_parameters) / ranks
        held = {
            "generators": 2 * (model.parameters + model.reward_parameters),
            "trainer": training + (2 * model.parameters if tag else 0),
            "all": training + 2 * (model.parameters + model.reward_parameters),
        }[pool]
        return held / GIB + self._device(pool).activation_gib

    def fits(self, pool: Pool, ranks: int, *, tag: bool = False) -> bool:
        """Whether the devices of a pool have the memory for it."""
        return self.memory_gib(pool, ranks, tag=tag) <= self._device(pool).memory_gib

    def _device(self, pool: Pool) -> DeviceProfile:
        if pool == "generators":
            return self.generators
        if pool == "trainer":
            return self.trainers
        return min(self.generators, self.trainers, key=lambda device: device.tflops * device.generation_share)

    def _pass_share(self) -> float:
        """Share of a lone pair's time, at the nominal size, that belongs to the pass and not to the pair (assumption 8)."""
        points = [(fraction, _share(gain, self.nominal, fraction)) for fraction, gain in self.tsp]
        at = self.workload.timestep_fraction
        for (low, share), (high, next_share) in pairwise(points):
            if low <= at <= high:
                return share + (next_share - share) * (at - low) / (high - low)
        return points[0][1] if at < points[0][0] else points[-1][1]


def _share(gain: float, nominal: Workload, fraction: float) -> float:
    """Solves gain = 1 / (1 - p + p / K) for p."""
    steps = max(1, int(nominal.num_inference_steps * fraction + 1e-9))
    return (1 - 1 / gain) / (1 - 1 / steps) if steps > 1 else 0.0


def _tokens(model: ModelProfile, work: Workload) -> int:
    cell = model.vae_spatial * model.patch
    frames = 1 + math.ceil((work.num_frames - 1) / model.vae_temporal)
    return model.text_tokens + frames * math.ceil(work.height / cell) * math.ceil(work.width / cell)


def _pass_flops(model: ModelProfile, work: Workload) -> float:
    """One denoising step of one sample, guidance included."""
    tokens = _tokens(model, work)
    return model.cfg_passes * (2 * model.parameters * tokens + 4 * model.layers * tokens**2 * model.width)


def _rate(device: DeviceProfile, share: float) -> float:
    return 1e12 * device.tflops * share
