"""Makes views of images: random views for augmentation, and fixed views for tests.

Random numbers are arguments, so that a batch is a function of its number.
"""

import math

import numpy as np

CROP, _SHORTER_SIDE = 224, 256  # the usual test view of ImageNet
_PAD = 4  # pixels around a 32 x 32 image before it is cropped (He et al. 2016)

Draws = np.ndarray | None  # five in [0, 1) for each image; None: no augmentation


def pad_crop_flip(images: np.ndarray, draws: np.ndarray) -> np.ndarray:
    """Pads images by 4 zeros, crops them to their size at random, and mirrors half.

    Args:
      images: The images, uint8 [b, H, W, C].
      draws: Random numbers in [0, 1), [b, 5]: top, left, two unused numbers, flip.
    """
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (_PAD, _PAD), (_PAD, _PAD), (0, 0)))
    result = np.empty_like(images)
    for i, (top, left) in enumerate((draws[:, :2] * (2 * _PAD + 1)).astype(int)):
        view = padded[i, top : top + height, left : left + width]
        result[i] = view[:, ::-1] if draws[i, 4] < 0.5 else view
    return result


def crop_resize(image: np.ndarray, draws: Draws) -> np.ndarray:
    """Resizes a box of an image to 224 x 224 pixels.

    Args:
      image: The image, uint8 [H, W, C].
      draws: Random numbers in [0, 1), [5], that choose the box: area (8 % to 100 %),
        aspect (3/4 to 4/3), top, left, flip. A side that is longer than the image is
        cut to the image, and the box is not drawn again. With `None`, the box is the
        centre crop of 224 x 224 after the shorter side has been resized to 256.
    """
    from PIL import Image

    height, width, channels = image.shape
    if draws is None:
        box_h = box_w = min(height, width) * CROP / _SHORTER_SIDE
        place = np.array([0.5, 0.5])
    else:
        area = height * width * (0.08 + 0.92 * draws[0])
        aspect = (4 / 3) ** (2 * draws[1] - 1)
        box_h = min(height, math.sqrt(area / aspect))
        box_w = min(width, math.sqrt(area * aspect))
        place = draws[2:4]
    top, left = place * (height - box_h, width - box_w)
    picture = Image.fromarray(image if channels > 1 else image[..., 0])
    box = (left, top, left + box_w, top + box_h)
    resized = picture.resize((CROP, CROP), Image.Resampling.BILINEAR, box)
    view = np.asarray(resized).reshape(CROP, CROP, channels)
    return view[:, ::-1] if draws is not None and draws[4] < 0.5 else view
