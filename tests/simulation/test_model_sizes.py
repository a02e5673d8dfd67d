"""Sizes of published models against diffusers' and transformers' own classes, counted with tensors that have no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from digenrl.config.registry import component_class
from digenrl.simulation.model_sizes import PUBLISHED, ModelSizes

SD3 = {"attention_head_dim": 64, "joint_attention_dim": 4096, "pooled_projection_dim": 2048, "out_channels": 16}
MEDIUM = {**SD3, "num_layers": 24, "num_attention_heads": 24, "caption_projection_dim": 1536}
QK = {"qk_norm": "rms_norm"}
TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    # From the transformer/config.json of each model on the hub; diffusers' defaults where they are the published ones.
    "SD3 Medium": lambda: diffusers.SD3Transformer2DModel(**MEDIUM),
    "SD3.5 Medium": lambda: diffusers.SD3Transformer2DModel(**MEDIUM, **QK, dual_attention_layers=tuple(range(13))),
    "SD3.5 Large": lambda: diffusers.SD3Transformer2DModel(
        **SD3, **QK, num_layers=38, num_attention_heads=38, caption_projection_dim=2432
    ),
    "FLUX.1": lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True),
    "Qwen-Image": diffusers.QwenImageTransformer2DModel,
    "Wan2.1 1.3B": lambda: diffusers.WanTransformer3DModel(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    "Wan2.1 14B": diffusers.WanTransformer3DModel,
    "HunyuanVideo": diffusers.HunyuanVideoTransformer3DModel,
}


def t5(kind: str, vocab_size: int) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=vocab_size, d_model=4096, d_ff=10240, d_kv=64, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def clip(width: int, layers: int, heads: int, *, projected: bool) -> nn.Module:
    config = transformers.CLIPTextConfig(
        vocab_size=49408,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        projection_dim=width,
    )
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config)


def llama() -> nn.Module:
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    return transformers.LlamaModel(transformers.LlamaConfig(vocab_size=128320, num_key_value_heads=8, **sizes))


def image_vae() -> nn.Module:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    sizes = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}
    return diffusers.AutoencoderKL(**blocks, **sizes, use_quant_conv=False, use_post_quant_conv=False)


def count(make: Callable[[], nn.Module]) -> int:
    with FakeTensorMode():
        return sum(parameter.numel() for parameter in make().parameters())


def published(name: str) -> ModelSizes:
    return next(sizes for sizes in PUBLISHED if sizes.name == name)


@pytest.mark.parametrize("name", [sizes.name for sizes in PUBLISHED])
def test_parameters_adapters_layers_and_width_are_those_of_the_published_config(name: str) -> None:
    sizes = published(name)
    with FakeTensorMode():
        network: Any = TRANSFORMERS[name]()
    assert sizes.transformer == sum(parameter.numel() for parameter in network.parameters())
    config = network.config
    assert sizes.layers == config.num_layers + config.get("num_single_layers", 0)
    assert sizes.width == config.num_attention_heads * config.attention_head_dim
    targets = component_class("model", sizes.family, where="test").default_lora_targets
    per_rank = sum(
        module.in_features + module.out_features
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and name.endswith(tuple(f".{target}" for target in targets))
    )
    assert sizes.lora_per_rank == per_rank


@pytest.mark.slow
def test_text_encoders_and_vaes_are_counted_as_published() -> None:
    umt5, t5_xxl = count(lambda: t5("UMT5", 256384)), count(lambda: t5("T5", 32128))
    clip_l = count(lambda: clip(768, 12, 12, projected=False))
    clips = count(lambda: clip(768, 12, 12, projected=True)) + count(lambda: clip(1280, 32, 20, projected=True))
    assert published("Wan2.1 14B").text_encoders == published("Wan2.1 1.3B").text_encoders == umt5
    assert published("FLUX.1").text_encoders == clip_l + t5_xxl
    assert published("SD3 Medium").text_encoders == published("SD3.5 Large").text_encoders == clips + t5_xxl
    assert published("HunyuanVideo").text_encoders == count(llama) + clip_l
    assert published("SD3.5 Medium").vae == published("FLUX.1").vae == count(image_vae)
    assert published("Wan2.1 14B").vae == published("Qwen-Image").vae == count(diffusers.AutoencoderKLWan)
    assert published("HunyuanVideo").vae == count(diffusers.AutoencoderKLHunyuanVideo)


class Alive(TorchDispatchMode):
    """Bytes of the tensors that were made inside and are still there, and the most of them at once."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: dict[int, Any] = {id(p.untyped_storage()): p.untyped_storage() for p in network.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._known:
            return
        self.now += size
        self.most = max(self.most, self.now)

        def gone(_: Any) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)


def bytes_of_pass(sizes: ModelSizes, height: int, *, training: bool, checkpointing: bool) -> int:
    """At most at once in a pass of Wan with frozen weights; its latents want the gradient that adapters would want."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            network: Any = TRANSFORMERS[sizes.name]().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)
        if checkpointing:
            network.enable_gradient_checkpointing()
        latents = torch.zeros(1, 16, 9, height // 8, 52, dtype=torch.bfloat16, requires_grad=training)
        text = torch.zeros(1, 512, 4096, dtype=torch.bfloat16)
        alive = Alive(network)
        with alive, torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.set_grad_enabled(training):
            answer = network(latents, torch.tensor([500.0]), text, return_dict=False)[0]
            if training:
                answer.float().sum().backward()
    return alive.most


@pytest.mark.slow
@pytest.mark.parametrize(("training", "checkpointing"), [(True, False), (True, True), (False, False)])
def test_bytes_per_token_are_those_of_the_networks_passes(training: bool, checkpointing: bool) -> None:
    sizes = published("Wan2.1 1.3B")
    small, large = (bytes_of_pass(sizes, height, training=training, checkpointing=checkpointing) for height in (240, 480))
    found = (large - small) / (sizes.tokens(480, 416, 33) - sizes.tokens(240, 416, 33))
    said = sizes.generate_bytes
    if training:
        said = sizes.train_bytes_checkpointed if checkpointing else sizes.train_bytes
    # Adapters, which are not here, keep the inputs of their layers too.
    assert 0.75 * said < found < 1.05 * said
