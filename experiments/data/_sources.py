"""Reads examples from arrays in memory, or from a TFDS folder on demand."""

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ._images import Draws, crop_resize, pad_crop_flip

ImagesAndLabels = tuple[np.ndarray, np.ndarray]  # uint8 [b, H, W, C], int32 [b]


@dataclasses.dataclass(frozen=True)
class InMemory:
    """Decoded examples: `images` are uint8 [N, H, W, C], and `labels` are int32 [N]."""

    images: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.labels[index])}

    def read(self, rows: np.ndarray, draws: Draws = None) -> ImagesAndLabels:
        """Returns images [b, H, W, C] and labels [b]; `draws` [b, 5] augment images."""
        images = self.images[rows]
        if draws is not None:
            images = pad_crop_flip(images, draws)
        return images, self.labels[rows]


@dataclasses.dataclass(frozen=True)
class Streamed:
    """Examples of a TFDS data source, decoded when they are read.

    If `crop` is true, the sizes of the images vary, and `read` takes a view of 224 x
    224 pixels of each image.
    """

    source: Any
    crop: bool

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.source[index]
        return {"image": example["image"], "label": int(example["label"])}

    def read(self, rows: np.ndarray, draws: Draws = None) -> ImagesAndLabels:
        """Returns images [b, H, W, C] and labels [b]; `draws` [b, 5] augment images."""
        each = [None] * len(rows) if draws is None else draws
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow releases the GIL
            examples = list(pool.map(self._view, rows.tolist(), each))
        images = np.stack([example["image"] for example in examples])
        if draws is not None and not self.crop:
            images = pad_crop_flip(images, draws)
        return images, np.array([e["label"] for e in examples], np.int32)

    def _view(self, row: int, draws: Draws) -> dict[str, Any]:
        example = self[row]
        if self.crop:
            example["image"] = crop_resize(example["image"], draws)
        return example
