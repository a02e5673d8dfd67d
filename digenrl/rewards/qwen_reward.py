"""A Qwen2-VL whose language head is replaced by one that gives numbers, read at tokens of their own (HPSv3, VideoReward).

Deviation of both from Qwen2-VL that their weights were trained with: positions count on through pictures (one axis, not three),
because the authors' forward pass embeds pictures itself and leaves positions to the language model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from digenrl.rewards.neural import by_row, load_exactly
from digenrl.rewards.qwen_vl import Pass

PLACEHOLDER = "{text_prompt}"
_HEAD = "rm_head."
_LORA = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


class QwenRewardNetwork(nn.Module):
    """Backbone in its own type, head in float32."""

    def __init__(self, backbone: Any, head: nn.Module, *, marks: Sequence[int], pictures: int) -> None:
        """backbone: transformers' Qwen2VLModel. marks: ids of the tokens to be read at. pictures: id of a picture's token."""
        super().__init__()
        self.backbone = backbone.eval().requires_grad_(False)
        self.head = head.eval().requires_grad_(False)
        self._marks = tuple(marks)
        self._pictures = pictures

    @torch.no_grad()
    def forward(self, batch: Pass) -> Tensor:
        """[rows, marks, numbers of the head] float32. Raises ValueError where a question has not each mark once."""
        read_at = torch.stack([batch.ids == mark for mark in self._marks], dim=1)
        if not bool((read_at.sum(-1) == 1).all()):
            raise ValueError("a question must have each of the tokens once at which its numbers are read")
        embedded = self.backbone.get_input_embeddings()(batch.ids)
        seen = self.backbone.visual(batch.pixels.to(embedded.dtype), grid_thw=batch.grids).pooler_output
        embedded = embedded.masked_scatter((batch.ids == self._pictures)[..., None], seen.to(embedded.dtype))
        positions = (batch.attended.cumsum(-1) - 1).clamp(min=0).expand(3, -1, -1)
        hidden = self.backbone.language_model(
            inputs_embeds=embedded, attention_mask=batch.attended, position_ids=positions, use_cache=False
        ).last_hidden_state
        read = hidden[:, None].expand(-1, len(self._marks), -1, -1)[read_at].float()
        return by_row(self.head, read.reshape(len(batch.ids), len(self._marks), -1))


def reward_network(
    tensors: Mapping[str, Tensor], head: nn.Module, base_path: str, tokenizer: Any, *, words: Sequence[str], mark: str, dtype: Any
) -> QwenRewardNetwork:
    """From published tensors, with the names of transformers before or since 4.52. base_path: whose configuration counts.

    Raises ValueError where a tensor is missing or too much, or the tokenizer has another number of tokens than the weights.
    """
    from transformers import Qwen2VLConfig, Qwen2VLModel

    load_exactly(head, {name.removeprefix(_HEAD): value for name, value in tensors.items() if name.startswith(_HEAD)})
    backbone = {name: value for name, value in map(_backbone, tensors.items()) if name}
    rows = len(backbone["language_model.embed_tokens.weight"])
    if rows != len(tokenizer):
        raise ValueError(f"the tokenizer of {base_path!r} has {len(tokenizer)} tokens with {list(words)}, and the weights {rows}")
    config = Qwen2VLConfig.from_pretrained(base_path)
    config.text_config.vocab_size = rows
    model, report = Qwen2VLModel.from_pretrained(None, config=config, state_dict=backbone, dtype=dtype, output_loading_info=True)
    wrong = {kind: sorted(map(str, names))[:3] for kind, names in report.items() if names}
    if wrong:
        raise ValueError(f"the tensors are not those of a Qwen2-VL like {base_path!r}: {wrong}")
    marks = tokenizer.convert_tokens_to_ids(list(words))
    return QwenRewardNetwork(model, head, marks=marks, pictures=tokenizer.convert_tokens_to_ids(mark))


def merged(tensors: Mapping[str, Tensor], *, rank: int, alpha: float, rank_stabilized: bool) -> dict[str, Tensor]:
    """PEFT's names taken off and its LoRA added to the weights: W + scale B A, with scale = alpha / rank (or its root)."""
    scale = alpha / (math.sqrt(rank) if rank_stabilized else rank)
    plain = {name.removeprefix("base_model.model."): value for name, value in tensors.items()}
    halves = {(match[1], match[2]): value for name, value in plain.items() if (match := _LORA.fullmatch(name))}
    found: dict[str, Tensor] = {}
    for name, value in plain.items():
        if _LORA.fullmatch(name):
            continue
        module = name.partition(".base_layer.")[0]
        if (module, "A") in halves and name.endswith(".base_layer.weight"):
            update = halves[module, "B"].float() @ halves[module, "A"].float()
            found[f"{module}.weight"] = value.float() + scale * update
        else:
            found[name.replace(".base_layer.", ".")] = value
    return found


def read_template(path: str, words: Sequence[str]) -> str:
    """What a model is asked. Raises ValueError where the file has not the placeholder and each of ``words`` once."""
    text = Path(path).expanduser().read_bytes().decode("utf-8")
    wrong = [part for part in (PLACEHOLDER, *words) if text.count(part) != 1]
    if wrong:
        raise ValueError(f"{path} must have {' and '.join(wrong)} once, and has {[text.count(part) for part in wrong]}")
    return text


def _backbone(named: tuple[str, Tensor]) -> tuple[str, Tensor]:
    """A tensor with the name that Qwen2VLModel has for it; an empty name for what it does not have."""
    name, value = named
    if name.startswith((_HEAD, "lm_head.")):
        return "", value
    inner = name.removeprefix("model.")
    if inner.startswith(("visual.", "language_model.")):
        return inner, value
    return f"language_model.{inner}", value
