"""Devices that are not there, and the precision nearest to one that a device does not have."""

import ctypes
import resource
import subprocess
import sys

import pytest
import torch

from scrlearn import devices
from scrlearn.devices import keep_freed_memory, nearest_precision, resolve_device
from scrlearn.errors import InputError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:99"])
def test_no_such_device(name):
    with pytest.raises(InputError, match=name):
        resolve_device(name)


def test_a_number_beyond_the_last_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("cuda") == torch.device("cuda")
    with pytest.raises(InputError, match="sees 2 of them"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("there", [True, False])
def test_the_nearest_precision(there, monkeypatch):
    monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: there)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: there)
    for device in (CPU, torch.device("cuda")):
        assert nearest_precision("bf16", device) == ("bf16" if there else "fp32")
        assert nearest_precision("fp32", device) == "fp32"
    assert nearest_precision("tf32", torch.device("cuda")) == "tf32"
    assert nearest_precision("tf32", CPU) == "fp32"


def test_a_card_is_woken_beside_other_work(monkeypatch):
    begun = []

    class Fake:
        def __init__(self, target, args, kwargs, daemon):
            self.call = target, args, kwargs, daemon

        def start(self):
            begun.append(self.call)

    monkeypatch.setattr(devices.threading, "Thread", Fake)
    devices.wake("cpu")
    assert begun == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    devices.wake("auto")
    assert begun == [(torch.zeros, (1,), {"device": torch.device("cuda")}, True)]


PAGES_FETCHED = """
import resource, sys, torch
from scrlearn.devices import keep_freed_memory
print(keep_freed_memory() if sys.argv[1] == "keep" else None)
for step in range(30):
    if step == 20:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    a = torch.ones(10_000_000)  # 40 MB
    del a
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""


def test_freed_memory_is_kept():
    """Blocks that come and go with every step are fetched from the system once, not every time."""
    found = {}
    for how in ("keep", "give back"):
        done = subprocess.run([sys.executable, "-c", PAGES_FETCHED, how], capture_output=True, text=True, check=True)
        can, fetched = done.stdout.split()
        found[how] = int(fetched)
        if how == "keep" and can == "False":
            pytest.skip("this C library does not say how much freed memory it keeps")
    assert found["give back"] > 10 * 40_000_000 / resource.getpagesize() / 600  # a huge page is 512 of them
    assert found["keep"] < found["give back"] / 5


def test_a_c_library_that_cannot_keep_memory(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not keep_freed_memory()
