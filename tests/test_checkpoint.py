"""Checkpoints: what was saved comes back bit for bit, and a file that is none is refused in words."""

import errno
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from scrlearn import checkpoint, files
from scrlearn.checkpoint import FORMAT, digest, load_checkpoint, read_meta, save_checkpoint
from scrlearn.errors import CheckpointError, ScrlearnError

STATE = {
    "network": {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.tensor([1.5, -0.0])},
    "memory": {"images": torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2), "labels": torch.tensor([3, 4])},
    "velocity": {"0": torch.zeros(0, 3)},
    "half": torch.tensor([1.0, 2.0]).bfloat16(),
    "met": torch.tensor([True, False]),
    "seen": torch.tensor(7),
    "empty": {},
    "steps": 12,
    "rate": 0.1,
    "name": "scr",
    "nothing": None,
    "list": [1, [2, 3]],
}


@pytest.fixture
def path(tmp_path):
    save_checkpoint(tmp_path / "a.scr", STATE, {"kind": "test", "classes": ["cat", "Käse"]})
    return tmp_path / "a.scr"


def same(a, b):
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and a == b


# ---------------------------------------------------------------- round trip


def test_nested_state_comes_back_as_it_was(path):
    state, meta = load_checkpoint(path)
    assert same(state, STATE)
    assert meta == read_meta(path) == {"kind": "test", "classes": ["cat", "Käse"]}
    assert digest(state) == digest(STATE)


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.lists(st.integers(0, 255), max_size=4).map(lambda values: torch.tensor(values, dtype=torch.uint8)),
    st.lists(st.floats(width=32, allow_nan=False), max_size=4).map(lambda values: torch.tensor(values)),
)


states = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, max_size=3))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(names, states, max_size=4))
def test_any_nested_state_comes_back(state):
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder) / "b.scr", state, {})
        loaded, _ = load_checkpoint(Path(folder) / "b.scr")
    assert same(loaded, state)
    assert digest(loaded) == digest(state)


def test_names_with_dots_do_not_fall_together(tmp_path):
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1), "b#1": torch.ones(2)}, "a.b#1": torch.ones(3)}
    save_checkpoint(tmp_path / "c.scr", state, {})
    assert same(load_checkpoint(tmp_path / "c.scr")[0], state)


def test_views_of_one_tensor_and_strided_ones_are_saved_as_they_look(tmp_path):
    whole = torch.arange(24.0).view(2, 3, 2, 2)
    state = {
        "part": whole[1],
        "whole": whole,
        "again": whole,
        "turned": whole.transpose(0, 1),
        "last": whole.to(memory_format=torch.channels_last),
        "weight": torch.nn.Parameter(whole),
    }
    save_checkpoint(tmp_path / "d.scr", state, {})
    loaded, _ = load_checkpoint(tmp_path / "d.scr")
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    whole.fill_(0)
    assert loaded["part"].any()


def test_reading_what_a_file_says_of_itself_reads_no_tensor(path, monkeypatch):
    class Watched:
        def __init__(self, *args, **kwargs):
            self.file = checkpoint_open(*args, **kwargs)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def metadata(self):
            return self.file.metadata()

        def get_tensor(self, name):
            raise AssertionError(f"{name} was read")

        keys = get_tensor

    checkpoint_open = checkpoint.safe_open
    monkeypatch.setattr(checkpoint, "safe_open", Watched)
    assert read_meta(path)["kind"] == "test"


# ---------------------------------------------------------------- files that are none


def with_header(path, header):
    save_file({"x": torch.zeros(2)}, path, metadata={"scrlearn": header})
    return path


def refused(path, message):
    for read in (load_checkpoint, read_meta):
        with pytest.raises(CheckpointError, match=message) as caught:
            read(path)
        assert str(path) in str(caught.value)
        assert isinstance(caught.value, ScrlearnError)


def test_a_version_of_the_future_says_what_to_do(tmp_path):
    header = json.dumps({"format": FORMAT + 1, "quite": "different"})
    refused(with_header(tmp_path / "a.scr", header), rf"format {FORMAT + 1}.*reads up to {FORMAT}.*newer version")


@pytest.mark.parametrize("header", ["null", "[]", "3", "{}", '{"format": "1"}', '{"format": null}', '{"format": true}'])
def test_a_header_of_another_program(tmp_path, header):
    refused(with_header(tmp_path / "a.scr", header), "not written by scrlearn")


def test_a_foreign_safetensors_file(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    refused(tmp_path / "a.safetensors", "not written by scrlearn")
    save_file({"weight": torch.zeros(2)}, tmp_path / "b.safetensors", metadata={"format": "pt"})
    refused(tmp_path / "b.safetensors", "not written by scrlearn")


@pytest.mark.parametrize("header", ["{", "not json", '{"format": 1', "[" * 100_000])
def test_a_header_that_is_no_json(tmp_path, header):
    refused(with_header(tmp_path / "a.scr", header), "is no checkpoint")


@pytest.mark.parametrize(
    "header",
    [
        {"format": 1},
        {"format": 1, "meta": {}},
        {"format": 1, "meta": [], "values": {}},
        {"format": 1, "meta": {}, "values": []},
    ],
)
def test_a_header_that_is_not_complete(tmp_path, header):
    refused(with_header(tmp_path / "a.scr", json.dumps(header)), "damaged")


@pytest.mark.parametrize("values", [{"a": {"tensor": "y"}}, {"a": {}}, {"a": 3}, {"a": {"dict": 3}}, {"a": None}])
def test_a_header_that_names_what_is_not_there(tmp_path, values):
    with_header(tmp_path / "a.scr", json.dumps({"format": 1, "meta": {}, "values": values}))
    with pytest.raises(CheckpointError, match="damaged"):
        load_checkpoint(tmp_path / "a.scr")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file(path, share):
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    refused(path, "is no checkpoint, or a part of it is missing")


class Trap:
    """A pickle that would leave a trace when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("way", ["pickle", "torch"])
def test_a_pickle_is_refused_and_never_run(tmp_path, way):
    trap, trace = tmp_path / "a.scr", tmp_path / "trace"
    if way == "pickle":
        trap.write_bytes(pickle.dumps(Trap(trace)))
    else:
        torch.save(Trap(trace), trap)
    refused(trap, "is no checkpoint")
    assert not trace.exists()


def test_other_things_with_that_name(tmp_path):
    refused(tmp_path / "missing.scr", "There is no checkpoint at")
    (tmp_path / "folder.scr").mkdir()
    refused(tmp_path / "folder.scr", "There is no checkpoint at")
    (tmp_path / "picture.scr").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))
    refused(tmp_path / "picture.scr", "is no checkpoint")
    (tmp_path / "huge.scr").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}")  # a header longer than any disk
    refused(tmp_path / "huge.scr", "is no checkpoint")


# ---------------------------------------------------------------- saving


def test_a_full_disk_keeps_the_old_file(path, monkeypatch):
    old = path.read_bytes()

    def full(temporary, data, mode):
        temporary.write_bytes(bytes(data)[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "_write_and_sync", full)
    with pytest.raises(OSError, match="no space left") as caught:
        save_checkpoint(path, {"x": torch.zeros(10_000)}, {})
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]
    assert same(load_checkpoint(path)[0], STATE)


def test_a_file_that_the_system_will_not_take_keeps_the_old_one(path):
    """A real failure in the middle of the bytes: the process may not write files of more than 1,000 bytes."""
    pytest.importorskip("resource", reason="limits on a process are a Unix thing")
    program = (
        "import resource, sys, torch; from scrlearn.checkpoint import save_checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: save_checkpoint(sys.argv[1], {'x': torch.zeros(100_000)}, {})\n"
        "except OSError as error: sys.exit(error.errno)\n"
    )
    old = path.read_bytes()
    finished = subprocess.run([sys.executable, "-B", "-c", program, str(path)], check=False)
    assert finished.returncode == errno.EFBIG
    assert path.read_bytes() == old
    assert os.listdir(path.parent) == [path.name]


def test_a_state_that_cannot_be_saved_leaves_the_old_file(path):
    old = path.read_bytes()
    for state, meta in (({"x": object()}, {}), ({}, {"x": {1, 2}})):
        with pytest.raises(TypeError):
            save_checkpoint(path, state, meta)
        assert path.read_bytes() == old


# ---------------------------------------------------------------- digest


def changed(**changes):
    return digest({**STATE, **changes})


def test_the_digest_is_that_of_the_values_not_of_the_memory_behind_them():
    again = {
        name: value.clone() if torch.is_tensor(value) else dict(value) if isinstance(value, dict) else value
        for name, value in reversed(STATE.items())
    }
    assert digest(again) == digest(STATE)
    turned = torch.arange(6.0).view(2, 3).T.contiguous().T
    assert not turned.is_contiguous()
    assert changed(network={**STATE["network"], "layer.weight": turned}) == digest(STATE)


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 13},
        {"steps": 12.0},
        {"rate": 0.1 + 1e-16},
        {"name": "er"},
        {"nothing": 0},
        {"list": [1, [3, 2]]},
        {"seen": torch.tensor(8)},
        {"seen": torch.tensor([7])},
        {"seen": torch.tensor(7, dtype=torch.int32)},
        {"seen": 7},
        {"met": torch.tensor([True, True])},
        {"half": torch.tensor([1.0, 2.015625]).bfloat16()},
        {"velocity": {"0": torch.zeros(0, 4)}},
        {"velocity": {"1": torch.zeros(0, 3)}},
        {"network": {"layer.weight": torch.arange(6.0).view(3, 2), "layer.bias": torch.tensor([1.5, -0.0])}},
        {"network": {"layer.weight": torch.arange(6.0).view(2, 3), "layer.bias": torch.tensor([1.5, 0.0])}},
        {"network": {"layer": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.tensor([1.5, -0.0])}}},
        {"more": 1},
    ],
    ids=str,
)
def test_the_digest_notices_every_change(changes):
    assert changed(**changes) != digest(STATE)


def test_one_bit_in_a_large_tensor_changes_the_digest():
    large = torch.rand(1000, 100)
    before = digest({"x": large})
    large.view(torch.int32)[500, 50] ^= 1
    assert digest({"x": large}) != before
