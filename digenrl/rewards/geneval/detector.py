"""Detectors with fixed classes, through transformers: Mask2Former finds masks, and others (DETR, RT-DETR) boxes.

Names of classes become GenEval's, which differ from COCO's in three and from older lists in some more.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from digenrl.rewards.geneval.rules import Found
from digenrl.rewards.neural import reading

_MASKS = ("mask2former",)
_NAMES = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "aeroplane": "airplane",
    "motorbike": "motorcycle",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}


class Detector:
    """A network that finds objects."""

    def __init__(self, path: str, *, least: float) -> None:
        """least: how sure it must be of an object to name it at all. Raises ConfigError where the weights are not there."""
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForObjectDetection, Mask2FormerForUniversalSegmentation

        with reading(
            f"The detector {path!r}",
            needs="It needs config.json, model.safetensors and preprocessor_config.json of a Mask2Former or of another "
            "model that finds objects of fixed classes; a hub id, a network.",
            fix=f"Fetch it where there is a network (hf download {path} --local-dir FOLDER), and set detector_path=FOLDER.",
        ):
            self._finds_masks = AutoConfig.from_pretrained(path).model_type in _MASKS
            model_class = Mask2FormerForUniversalSegmentation if self._finds_masks else AutoModelForObjectDetection
            # Never the .bin of an old repository, which is a pickle.
            model = model_class.from_pretrained(path, use_safetensors=True, dtype=torch.float32)
            self._processor: Any = AutoImageProcessor.from_pretrained(path, backend="pil")
        self._model: Any = model.eval().requires_grad_(False)
        self._names = {int(number): _NAMES.get(name, name) for number, name in model.config.id2label.items()}
        self._least = least
        self._device = torch.device("cpu")

    @property
    def classes(self) -> frozenset[str]:
        """What it can find."""
        return frozenset(self._names.values())

    def to(self, device: torch.device | str) -> None:
        """Move the network."""
        self._device = torch.device(device)
        self._model.to(self._device)

    @torch.no_grad()
    def find(self, image: NDArray[np.uint8]) -> list[Found]:
        """The objects of an image [H, W, 3]. It is seen alone: in a batch, its place would change a convolution's last bits."""
        seen = self._processor(images=[image], return_tensors="pt").to(self._device)
        output, sizes = self._model(**seen), [image.shape[:2]]
        if self._finds_masks:
            (plain,) = self._processor.post_process_instance_segmentation(
                output, threshold=self._least, target_sizes=sizes, return_binary_maps=True
            )
            return self._of_masks(plain)
        (plain,) = self._processor.post_process_object_detection(output, threshold=self._least, target_sizes=sizes)
        return self._of_boxes(plain)

    def _of_masks(self, plain: dict[str, Any]) -> list[Found]:
        infos = plain["segments_info"]
        # Without an object there is no stack of masks, but an empty map.
        masks = plain["segmentation"].cpu().numpy().astype(bool) if infos else ()
        return [
            Found(label=self._names[info["label_id"]], score=float(info["score"]), box=box_of(mask), mask=mask)
            for info, mask in zip(infos, masks, strict=True)
        ]

    def _of_boxes(self, plain: dict[str, Tensor]) -> list[Found]:
        return [
            Found(label=self._names[label], score=score, box=(left, top, right, bottom))
            for label, score, (left, top, right, bottom) in zip(
                plain["labels"].tolist(), plain["scores"].tolist(), plain["boxes"].tolist(), strict=True
            )
        ]


def box_of(mask: NDArray[np.bool_]) -> tuple[float, float, float, float]:
    """The least box around a mask [H, W] that is somewhere true: left, top, and one beyond right and bottom."""
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
