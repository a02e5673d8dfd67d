"""Vision-language models of the Qwen family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), asked about pictures.

Pictures are prepared by transformers' Qwen2VLImageProcessorPil, which needs no torchvision, and the text is put together from
the tokenizer's chat template.

Invariant: what is computed for a question does not depend on the questions beside it. Questions of one shape (their number of
tokens, rounded up, and their pictures' sizes) share forward passes of one size, and a pass that lacks some repeats the last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from digenrl.diffusion.batching import row_batches
from digenrl.rewards.neural import reading

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
IMAGE_MARK = "<|image_pad|>"
_LENGTHS = 64
"""Numbers of tokens are rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One sample as the model takes it."""

    ids: Tensor
    """[L] int64."""
    pixels: Tensor
    """[patches of all pictures, numbers of a patch] float32."""
    grids: Tensor
    """[pictures, 3] int64: each one's patches in time, height and width."""

    @property
    def shape(self) -> tuple[object, ...]:
        """What questions of one forward pass have in common."""
        return -(-len(self.ids) // _LENGTHS), tuple(self.grids.flatten().tolist())


class QwenVlInputs:
    """Tokenizer and picture processor of a model."""

    def __init__(self, path: str, *, min_pixels: int | None = None, max_pixels: int) -> None:
        """path: folder or hub id. Sizes of pictures are brought between the bounds; min_pixels: the model's own if not given."""
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self._template = self.tokenizer.chat_template or _template_file(path)
        self._images: Any = Qwen2VLImageProcessorPil.from_pretrained(path)
        smallest = self._images.size["shortest_edge"] if min_pixels is None else min_pixels
        self._bounds = {"shortest_edge": min(smallest, max_pixels), "longest_edge": max_pixels}

    def question(self, frames: NDArray[np.uint8], text: str, *, system: str = "") -> Question:
        """Frames [n, H, W, 3] and what is asked about them, as one message of the user."""
        seen = self._images(images=[Image.fromarray(frame) for frame in frames], size=self._bounds, return_tensors="pt")
        grids = seen["image_grid_thw"]
        content = [{"type": "image"}] * len(frames) + [{"type": "text", "text": text}]
        messages: list[dict[str, object]] = [{"role": "user", "content": content}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        asked = self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        pieces = asked.split(IMAGE_MARK)
        if len(pieces) != len(frames) + 1:
            raise ValueError(f"the chat template has {len(pieces) - 1} marks {IMAGE_MARK} for {len(frames)} pictures")
        marks = (grids.prod(-1) // self._images.merge_size**2).tolist()
        whole = pieces[0] + "".join(IMAGE_MARK * count + piece for count, piece in zip(marks, pieces[1:], strict=True))
        ids = self.tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return Question(ids=ids, pixels=seen["pixel_values"].float(), grids=grids)

    def passes(self, questions: Sequence[Question], size: int) -> Iterator[tuple[list[int], dict[str, Tensor]]]:
        """Places of the questions of each forward pass, and the model's arguments; tokens are padded on the left."""
        image_id = self.tokenizer.convert_tokens_to_ids(IMAGE_MARK)
        for shape in dict.fromkeys(question.shape for question in questions):
            places = [place for place, question in enumerate(questions) if question.shape == shape]
            length = _LENGTHS * max(-(-len(questions[place].ids) // _LENGTHS) for place in places)
            for batch in row_batches(len(places), size):
                rows = [questions[places[row]] for row in batch.rows.tolist()]
                ids = torch.full((size, length), self.tokenizer.pad_token_id)
                attended = torch.zeros_like(ids)
                for place, row in enumerate(rows):
                    ids[place, -len(row.ids) :] = row.ids
                    attended[place, -len(row.ids) :] = 1
                yield (
                    [places[row] for row in batch.rows[: batch.count].tolist()],
                    {
                        "input_ids": ids,
                        "attention_mask": attended,
                        "mm_token_type_ids": (ids == image_id).int(),
                        "pixel_values": torch.cat([row.pixels for row in rows]),
                        "image_grid_thw": torch.cat([row.grids for row in rows]),
                    },
                )


def load_qwen_vl(path: str, *, dtype: torch.dtype) -> Any:
    """The model with its language head. Raises ValueError for another family."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    family = AutoConfig.from_pretrained(path).model_type
    if family not in FAMILIES:
        raise ValueError(f"it is a {family}, not one of {', '.join(FAMILIES)}")
    # Never the .bin of an old repository, which is a pickle.
    model = AutoModelForImageTextToText.from_pretrained(path, use_safetensors=True, dtype=dtype)
    return model.eval().requires_grad_(False)


def plain_text(prompt: str) -> str:
    """A prompt as nothing but a text: a mark such as <|image_pad|> in it would open a picture that is not there."""
    return prompt.replace("<|", "< |")


def dtype_of(setting: str, device: torch.device) -> torch.dtype:
    """The type that a setting names; ``auto`` is bfloat16 on a GPU."""
    if setting == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    found = getattr(torch, setting)
    assert isinstance(found, torch.dtype), f"{setting} is not a type of torch's"
    return found


def reading_qwen_vl(what: str, path: str) -> Any:
    """As ``reading``, for a model of this family."""
    return reading(
        what,
        needs="It needs config.json, safetensors, a tokenizer with a chat template and preprocessor_config.json; a hub id, a "
        "network.",
        fix=f"Fetch it where there is a network (hf download {path} --local-dir FOLDER), and set path=FOLDER.",
    )


def _template_file(path: str) -> str:
    """Of older repositories, whose tokenizer does not know its template."""
    from transformers.utils.hub import cached_file

    found = cached_file(path, "chat_template.json")
    with open(found, encoding="utf-8") as file:
        template = json.load(file)["chat_template"]
    if not isinstance(template, str):
        raise ValueError("chat_template.json holds no template")
    return template
