"""Tests that `meta`, the extras and the step of a checkpoint belong together."""

import json

import pytest

from pipejax.checkpoint import _meta
from pipejax.checkpoint._fault import DamagedError

from .helpers import init, train_step

EXTRAS = {"position": 3, "order": [1, 2]}


@pytest.fixture(scope="module")
def meta():
    state = init(train_step(1))
    made = _meta.meta_of(state, 5, EXTRAS, {"step": "00"})
    return json.loads(json.dumps(made))  # as a file returns it


def test_saved_meta_is_whole(meta):
    _meta.check_whole(meta, EXTRAS, 5)


def test_step_or_extras_of_another_save_are_damage(meta):
    with pytest.raises(DamagedError, match="its contents are those of step 5"):
        _meta.check_whole(meta, EXTRAS, 6)
    other = {**EXTRAS, "position": 4}
    with pytest.raises(DamagedError, match="`extras` are not what was saved"):
        _meta.check_whole(meta, other, 5)


def test_changed_or_missing_meta_entry_is_damage(meta):
    for key, value in meta.items():
        without = {name: x for name, x in meta.items() if name != key}
        for changed in (without, {**without, key: [value]}, {**without, "x": value}):
            with pytest.raises(DamagedError, match="`meta` is not what was saved"):
                _meta.check_whole(changed, EXTRAS, 5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "`meta` is missing, unless another program"),
        ("{", "`meta` cannot be read: Expecting property name"),
        (b"\xff\xff\xff\xff\xff", "`meta` cannot be read"),
        ("[1]", "`meta` must be an object, and is list"),
    ],
)
def test_unreadable_meta_file_is_damage(tmp_path, text, says):
    (tmp_path / "meta").mkdir()
    if text is not None:
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "meta" / "metadata").write_bytes(content)
    with pytest.raises(DamagedError, match=f"^{says}"):
        _meta.read(tmp_path)


def test_earlier_versions_are_told_apart_from_damage(tmp_path, meta):
    former = {name: value for name, value in meta.items() if name != "version"}
    for other in (former, former | {"version": 0}):
        with pytest.raises(ValueError, match="must have the form that this version of"):
            _meta.check_version(tmp_path, other)
    for present in (meta, {name: meta[name] for name in meta if name != "digest"}):
        _meta.check_version(tmp_path, present)
