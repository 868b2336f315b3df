"""The page for people with images of their own: its code runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from scrlearn import OnlineClassifier

PAGE = Path(__file__).parent.parent / "docs" / "your-images.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def encoder() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))


def mirror(x, generator):
    return x.flip(-1)


@pytest.fixture
def names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (12, 8, 8), dtype=np.uint8)
    labels = ["cat", "dog"] * 6
    return {
        "OnlineClassifier": OnlineClassifier,
        "images": images,
        "labels": labels,
        "new_images": images[:3],
        "new_labels": labels[:3],
        "floats_from_0_to_1": images / 255,
        "make_encoder": encoder,
        "my_augmentation": mirror,
    }


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[0][:40] for block in BLOCKS])
def test_block(block, names):
    if "import timm" in block:
        timm = pytest.importorskip("timm")
        assert hasattr(timm.data, "resolve_model_data_config")
        block = block.replace("pretrained=True", "pretrained=False")  # no weights are fetched in a test
    own = {"encoder": encoder(), "augment": mirror} if "own.scr" in block else {}
    names["clf"] = OnlineClassifier(memory_size=20, **own).partial_fit(names["images"], names["labels"])
    exec(compile(block, str(PAGE), "exec"), names)
    clf = names["clf"]
    if not clf.__sklearn_is_fitted__() and clf.image_size != (224, 224):
        clf.partial_fit(names["images"], names["labels"])
        assert {*clf.predict(names["images"])} <= {"cat", "dog"}


def test_the_page_has_code():
    assert len(BLOCKS) >= 10
