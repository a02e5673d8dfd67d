"""Vision-language models of the Qwen family (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), asked about pictures.

Pictures are prepared by transformers' Qwen2VLImageProcessorPil, which needs no torchvision, and the text is put together from
the tokenizer's chat template.

Invariant: what is computed for a question does not depend on the questions beside it. Questions of one shape (their number of
tokens, rounded up, and their pictures' sizes) share forward passes of one size, and a pass that lacks some repeats the last.
"""

from __future__ import annotations

import json
import math
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
IMAGE_MARK, VIDEO_MARK = "<|image_pad|>", "<|video_pad|>"
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
    """[pictures, 3] int64: each one's patches in time, height and width. A video is one picture."""

    @property
    def shape(self) -> tuple[object, ...]:
        """What questions of one forward pass have in common."""
        return -(-len(self.ids) // _LENGTHS), tuple(self.grids.flatten().tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The questions of one forward pass, padded on the left."""

    places: Sequence[int]
    """Of the questions, in the list that was given. There may be more rows: the last question again."""
    ids: Tensor
    """[rows, L] int64."""
    attended: Tensor
    """[rows, L] int64: 0 where a row is padded."""
    pixels: Tensor
    grids: Tensor

    def to(self, device: torch.device) -> Pass:
        """The same on a device."""
        ids, attended, pixels, grids = (each.to(device) for each in (self.ids, self.attended, self.pixels, self.grids))
        return Pass(places=self.places, ids=ids, attended=attended, pixels=pixels, grids=grids)


class QwenVlInputs:
    """Tokenizer and picture processor of a model."""

    def __init__(self, path: str, *, max_pixels: int, min_pixels: int | None = None, words: Sequence[str] = ()) -> None:
        """path: folder or hub id. Sizes of pictures are brought between the bounds; min_pixels: the model's own if not given.

        words: tokens that a model was given beside the tokenizer's.
        """
        from transformers import AutoTokenizer
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.tokenizer.add_tokens(list(words), special_tokens=True)
        self._template = self.tokenizer.chat_template or _template_file(path)
        self._images: Any = Qwen2VLImageProcessorPil.from_pretrained(path)
        smallest = self._images.size["shortest_edge"] if min_pixels is None else min_pixels
        self._bounds = {"shortest_edge": min(smallest, max_pixels), "longest_edge": max_pixels}

    def question(self, frames: NDArray[np.uint8], text: str, *, system: str = "") -> Question:
        """Frames [n, H, W, 3], each a picture, and what is asked about them, as one message of the user."""
        seen = self._images(images=[Image.fromarray(frame) for frame in frames], size=self._bounds, return_tensors="pt")
        pixels, grids = seen["pixel_values"].float(), seen["image_grid_thw"]
        ids = self._ids([{"type": "image"}] * len(frames), IMAGE_MARK, grids, text, system)
        return Question(ids=ids, pixels=pixels, grids=grids)

    def video_question(self, frames: NDArray[np.uint8], text: str) -> Question:
        """The frames [F, H, W, 3] of one video, two of which make a patch in time; of an odd number the last comes twice."""
        processor = self._images
        both, patch, merge = processor.temporal_patch_size, processor.patch_size, processor.merge_size
        height, width = fitting(frames.shape[1], frames.shape[2], patch * merge, **self._bounds)
        resized = [np.asarray(Image.fromarray(each).resize((width, height), Image.Resampling.BICUBIC)) for each in frames]
        resized += [resized[-1]] * (-len(resized) % both)
        mean, std = (np.array(each, dtype=np.float32) for each in (processor.image_mean, processor.image_std))
        values = torch.from_numpy((np.stack(resized).astype(np.float32) / 255 - mean) / std).permute(0, 3, 1, 2)
        time, rows, columns = len(values) // both, height // patch, width // patch
        # Patches that the model merges into one token stand together.
        blocks = values.reshape(time, both, 3, rows // merge, merge, patch, columns // merge, merge, patch)
        pixels = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(time * rows * columns, -1)
        grids = torch.tensor([[time, rows, columns]])
        return Question(ids=self._ids([{"type": "video"}], VIDEO_MARK, grids, text, ""), pixels=pixels, grids=grids)

    def passes(self, questions: Sequence[Question], size: int) -> Iterator[Pass]:
        """The questions in forward passes of ``size`` rows, those of one shape together."""
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
                yield Pass(
                    places=[places[row] for row in batch.rows[: batch.count].tolist()],
                    ids=ids,
                    attended=attended,
                    pixels=torch.cat([row.pixels for row in rows]),
                    grids=torch.cat([row.grids for row in rows]),
                )

    def _ids(self, pictures: list[dict[str, str]], mark: str, grids: Tensor, text: str, system: str) -> Tensor:
        messages: list[dict[str, object]] = [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        asked = self.tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        pieces = asked.split(mark)
        if len(pieces) != len(pictures) + 1:
            raise ValueError(f"the chat template has {len(pieces) - 1} marks {mark} for {len(pictures)} pictures")
        counts = (grids.prod(-1) // self._images.merge_size**2).tolist()
        whole = pieces[0] + "".join(mark * count + piece for count, piece in zip(counts, pieces[1:], strict=True))
        ids: Tensor = self.tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"][0]
        return ids


def fitting(height: int, width: int, factor: int, *, shortest_edge: int, longest_edge: int) -> tuple[int, int]:
    """Sides that ``factor`` divides, in about the same ratio, with a number of pixels between the two bounds."""
    tall, wide = (max(factor, round(side / factor) * factor) for side in (height, width))
    if tall * wide > longest_edge:
        scale = math.sqrt(height * width / longest_edge)
        tall, wide = (max(factor, math.floor(side / scale / factor) * factor) for side in (height, width))
    elif tall * wide < shortest_edge:
        scale = math.sqrt(shortest_edge / (height * width))
        tall, wide = (math.ceil(side * scale / factor) * factor for side in (height, width))
    return tall, wide


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
