"""Compiled kernels: kept on disk, made again when anything differs, and arguments as C has them."""

import ctypes

import pytest
import torch

from scrlearn.models import nvrtc

CODE = b"\x7fELF machine\ncode"


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that notes what it is asked for, and a cache of its own."""
    asked = []

    def compile_(text, file, name, architecture):
        asked.append((text, name, architecture))
        return CODE, b"_Z" + name.encode()

    monkeypatch.setattr(nvrtc, "_compile", compile_)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return asked


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "some.cu"
    path.write_text("__global__ void f() {}")
    return path


def test_compiled_once(compiler, source):
    for _ in range(3):
        assert nvrtc._compiled(source, "f<1>", (9, 0)) == (CODE, b"_Zf<1>")
    assert len(compiler) == 1


def test_compiled_again_when_anything_differs(compiler, source):
    nvrtc._compiled(source, "f<1>", (9, 0))
    nvrtc._compiled(source, "f<2>", (9, 0))
    nvrtc._compiled(source, "f<1>", (8, 0))
    source.write_text("__global__ void f() { }")
    nvrtc._compiled(source, "f<1>", (9, 0))
    assert len(set(compiler)) == len(compiler) == 4


def test_says_once_that_it_takes_time(compiler, source, caplog):
    nvrtc._say_that_it_takes_time.cache_clear()
    with caplog.at_level("INFO", "scrlearn"):
        for name in ("f<1>", "f<2>"):
            nvrtc._compiled(source, name, (9, 0))
    assert len(caplog.messages) == 1
    assert "Preparing kernels" in caplog.messages[0]


def test_says_nothing_where_all_is_there(compiler, source, caplog):
    nvrtc._compiled(source, "f<1>", (9, 0))
    nvrtc._say_that_it_takes_time.cache_clear()
    with caplog.at_level("INFO", "scrlearn"):
        nvrtc._compiled(source, "f<1>", (9, 0))
    assert not caplog.messages


def test_a_file_that_is_included_is_a_part_of_the_source(compiler, source):
    shared = source.with_name("shared.cuh")
    source.write_text('// a kernel\n#include "shared.cuh"\nint b;\n')
    for text in ("int a;\n", "int aa;\n"):
        shared.write_text(text)
        nvrtc._compiled(source, "f<1>", (9, 0))
    assert [text for text, *_ in compiler] == [b"// a kernel\nint a;\n\nint b;\n", b"// a kernel\nint aa;\n\nint b;\n"]


@pytest.mark.parametrize("content", [b"", b"no name here", b"_Zf\nnot machine code"])
def test_a_damaged_file_is_made_again(compiler, source, content):
    nvrtc._compiled(source, "f<1>", (9, 0))
    (kept,) = nvrtc.cache_folder().iterdir()
    kept.write_bytes(content)
    for _ in range(2):
        assert nvrtc._compiled(source, "f<1>", (9, 0)) == (CODE, b"_Zf<1>")
    assert len(compiler) == 2


def test_no_place_to_keep_it(compiler, source, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert nvrtc._compiled(source, "f<1>", (9, 0)) == (CODE, b"_Zf<1>")
    assert len(compiler) == 2


def test_arguments():
    tensor = torch.zeros(3)
    assert nvrtc.as_c(tensor).value == tensor.data_ptr()
    assert isinstance(nvrtc.as_c(3), ctypes.c_int)
    assert nvrtc.as_c(0.5).value == 0.5
    assert isinstance(nvrtc.as_c(0.5), ctypes.c_float)


def test_a_missing_library_is_named():
    with pytest.raises(nvrtc.CompilerError, match=r"no libnothing\.so\.1 on this machine"):
        nvrtc._library("libnothing.so.1", "libnothing.so")
