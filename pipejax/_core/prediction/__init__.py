"""Predicts the parameters to which the gradients in flight will lead."""

from ._expand import expanded as expanded
from ._expand import has_sums as has_sums
from ._mean import Mean as Mean
from ._rule import Kind as Kind
from ._rule import Own as Own
from ._rule import Update as Update
from ._rule import along as along
from ._rule import anchored as anchored
from ._rule import changed as changed
from ._rule import kind_of as kind_of
from ._rule import like as like
from ._rule import predicted as predicted
from ._slopes import CODE as CODE
from ._slopes import Slopes as Slopes
from ._slopes import of_words as of_words
from ._slopes import to_words as to_words
from ._slopes import word_form as word_form
