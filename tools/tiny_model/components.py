"""The parts of the tiny Stable Diffusion 3, untrained, and the pipeline that they make.

Invariants: every word of a caption is one token to all three text encoders; ``TextEncoders.forward`` gives what
``StableDiffusion3Pipeline.encode_prompt`` gives for the same tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from digenrl.rewards.shapes.scene import CATEGORIES, all_scenes, caption

TEXT_TOKENS = 10
"""The longest caption has 8 words; CLIP frames it with two tokens and T5 ends it with one."""
PIPELINE_T5_TOKENS = 256
"""What the pipeline pads T5's tokens to unless ``max_sequence_length`` says otherwise; it masks no padding."""
CLIP_WIDTH = 64
JOINT_WIDTH = 2 * CLIP_WIDTH
"""Width of the text that the transformer reads: the two CLIP encoders side by side, and T5."""
LATENT_SHAPE = (4, 16, 16)
_WORD_END = "</w>"


def all_captions() -> list[str]:
    """The empty caption, then each caption of the shapes world once, in a fixed order."""
    return ["", *(caption(scene) for category in CATEGORIES for scene in all_scenes(category))]


class TextEncoders(nn.Module):
    """Two CLIP encoders and a T5 encoder with their tokenizers."""

    def __init__(self) -> None:
        super().__init__()
        self.clip_tokenizer = clip_tokenizer()
        self.t5_tokenizer = t5_tokenizer()
        self.clip_1 = _clip_encoder(self.clip_tokenizer)
        self.clip_2 = _clip_encoder(self.clip_tokenizer)
        self.t5 = _t5_encoder(len(self.t5_tokenizer))

    def tokenize(self, captions: Sequence[str], t5_tokens: int) -> tuple[Tensor, Tensor]:
        """Token ids for CLIP, [captions, TEXT_TOKENS], and for T5, [captions, t5_tokens]."""
        padded = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        clip_ids = self.clip_tokenizer(list(captions), max_length=TEXT_TOKENS, **padded).input_ids
        return clip_ids, self.t5_tokenizer(list(captions), max_length=t5_tokens, **padded).input_ids

    def forward(self, clip_ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Text [B, clip + t5 tokens, JOINT_WIDTH] and pooled text [B, JOINT_WIDTH]."""
        first, second = (clip(clip_ids, output_hidden_states=True) for clip in (self.clip_1, self.clip_2))
        clip_text = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
        text = torch.cat([clip_text, self.t5(t5_ids)[0]], dim=1)
        return text, torch.cat([first.text_embeds, second.text_embeds], dim=-1)


class Network(nn.Module):
    """All that flow matching trains: the transformer and the text encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = _transformer()
        self.text = TextEncoders()


def autoencoder() -> AutoencoderKL:
    """4 latent channels at half the size, without attention: 0.16 M parameters."""
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def pipeline_of(network: Network, vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """The diffusers pipeline that runs these very modules."""
    text = network.text
    pipeline = StableDiffusion3Pipeline(
        transformer=network.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=1.0),
        vae=vae,
        text_encoder=text.clip_1,
        tokenizer=text.clip_tokenizer,
        text_encoder_2=text.clip_2,
        tokenizer_2=text.clip_tokenizer,
        text_encoder_3=text.t5,
        tokenizer_3=text.t5_tokenizer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def clip_tokenizer() -> CLIPTokenizer:
    """Byte pairs merged until each word is one token; other text falls into letters."""
    merges = byte_pair_merges(_words())
    letters = [chr(code) for code in range(33, 127)]
    pieces = [*letters, *(letter + _WORD_END for letter in letters), *(left + right for left, right in merges)]
    vocabulary = list(dict.fromkeys([*pieces, "<|startoftext|>", "<|endoftext|>"]))
    return CLIPTokenizer(
        vocab={piece: index for index, piece in enumerate(vocabulary)}, merges=merges, model_max_length=TEXT_TOKENS
    )


def t5_tokenizer() -> T5TokenizerFast:
    """A unigram vocabulary of the captions' words, then letters for any other text.

    Its own limit is the short length that the model is trained with mostly; a pipeline that asks for more gets it.
    """
    word_start = "\u2581"
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [(word_start + word, -2.0) for word in _words()]
    letters = [(chr(code), -10.0) for code in range(33, 127)]
    return T5TokenizerFast(vocab=[*special, *words, (word_start, -10.0), *letters], extra_ids=0, model_max_length=TEXT_TOKENS)


def byte_pair_merges(words: Sequence[str]) -> list[tuple[str, str]]:
    """Merges after which each word is one piece: the most frequent pair first, of equals the last in the alphabet.

    Not by the library's trainer, which takes equally frequent pairs in an order that changes from call to call.
    """
    pieces = [[*word[:-1], word[-1] + _WORD_END] for word in words]
    merges = []
    while pairs := Counter(pair for word in pieces for pair in pairwise(word)):
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        pieces = [_merged(word, best) for word in pieces]
    return merges


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    result: list[str] = []
    for piece in word:
        if result and (result[-1], piece) == pair:
            result[-1] += piece
        else:
            result.append(piece)
    return result


def _words() -> list[str]:
    return sorted({word for text in all_captions() for word in text.split()})


def _clip_encoder(tokenizer: Any) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_WIDTH,
        intermediate_size=2 * CLIP_WIDTH,
        projection_dim=CLIP_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_act="quick_gelu",
    )
    return CLIPTextModelWithProjection(config)


def _t5_encoder(vocabulary: int) -> T5EncoderModel:
    config = T5Config(
        vocab_size=vocabulary,
        d_model=JOINT_WIDTH,
        d_kv=32,
        d_ff=JOINT_WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="relu",
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5EncoderModel(config)


def _transformer() -> SD3Transformer2DModel:
    """4 layers of width 128; a patch of 4 makes 16 image tokens: 2.31 M parameters."""
    return SD3Transformer2DModel(
        sample_size=LATENT_SHAPE[-1],
        patch_size=4,
        in_channels=LATENT_SHAPE[0],
        out_channels=LATENT_SHAPE[0],
        num_layers=4,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=JOINT_WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=JOINT_WIDTH,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
