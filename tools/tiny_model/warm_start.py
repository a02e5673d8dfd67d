"""Beginning from a finished model: its weights where both have a part, fresh ones where only the new model has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from components import Network
from diffusers import AutoencoderKL, SD3Transformer2DModel
from torch import nn
from transformers import CLIPTextModelWithProjection, CLIPTokenizer


def start_from(folder: Path, network: Network) -> None:
    """Copy the transformer's and the two CLIP encoders' weights from a shapes pipeline into ``network``.

    Token embeddings go by the token's text, for vocabularies may differ, and positions from the first on. A T5 encoder is not
    copied. Raises SystemExit where the models do not fit.
    """
    old: Any = SD3Transformer2DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32)
    try:
        network.transformer.load_state_dict(old.state_dict())
    except RuntimeError as error:
        raise SystemExit(f"--start-from {folder}: its transformer has another shape: {error}") from error
    text = network.text
    for name, encoder in (("text_encoder", text.clip_1), ("text_encoder_2", text.clip_2)):
        old_encoder = CLIPTextModelWithProjection.from_pretrained(folder / name, dtype=torch.float32)
        old_tokens = CLIPTokenizer.from_pretrained(folder / name.replace("text_encoder", "tokenizer")).get_vocab()
        _copy_clip(old_encoder, old_tokens, encoder, text.clip_tokenizer.get_vocab())


def autoencoder_of(folder: Path) -> AutoencoderKL:
    """The folder's autoencoder, to be used as it is."""
    return AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32).eval().requires_grad_(False)


@torch.no_grad()
def _copy_clip(old: nn.Module, old_tokens: dict[str, int], new: nn.Module, new_tokens: dict[str, int]) -> None:
    source = dict(old.named_parameters())
    for name, parameter in new.named_parameters():
        if name.endswith("token_embedding.weight"):
            for token, row in new_tokens.items():
                if token in old_tokens:
                    parameter[row] = source[name][old_tokens[token]]
        elif name.endswith("position_embedding.weight"):
            parameter.copy_(source[name][: len(parameter)])
        else:
            parameter.copy_(source[name])
