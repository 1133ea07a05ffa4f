"""Loads image-classification data without TensorFlow, and batches it with Grain.

`digits` comes with scikit-learn. Any other name is that of a folder that TensorFlow
Datasets (TFDS) has prepared in a random-access format. Nothing is downloaded.
"""

from ._batches import Batch as Batch
from ._batches import steps_per_epoch as steps_per_epoch
from ._batches import test_batches as test_batches
from ._batches import train_batches as train_batches
from ._dataset import TITLES as TITLES
from ._dataset import Dataset as Dataset
from ._dataset import normalise as normalise
from ._images import Draws as Draws
from ._images import crop_resize as crop_resize
from ._images import pad_crop_flip as pad_crop_flip
from ._load import load as load
from ._sources import ImagesAndLabels as ImagesAndLabels
from ._sources import InMemory as InMemory
from ._sources import Streamed as Streamed
from ._tfds import DatasetNotFoundError as DatasetNotFoundError
