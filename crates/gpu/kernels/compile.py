#!/usr/bin/env python3
"""Compiles code.cu to PTX with NVRTC, which needs no GPU and no driver.

    compile.py FOLDER [--write]

FOLDER has libnvrtc.so.11.2 of CUDA 11.8 (PyPI: nvidia-cuda-nvrtc-cu11==11.8.89): PTX of an older release loads in every
newer driver. Prints the PTX, or writes code.ptx beside code.cu.
"""
import ctypes
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
OPTIONS = [b"--gpu-architecture=compute_80", b"--std=c++14"]


def compile_ptx(folder):
    # The compiler looks for its builtins by name: they must be loaded already.
    for name in ("libnvrtc-builtins.so.11.8", "libnvrtc.so.11.2"):
        nvrtc = ctypes.CDLL(str(pathlib.Path(folder) / name), mode=ctypes.RTLD_GLOBAL)
    program = ctypes.c_void_p()
    source = (HERE / "code.cu").read_bytes()
    check(nvrtc, nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"code.cu", 0, None, None))
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    if result != 0:
        sys.exit(text(nvrtc, program, "ProgramLog").decode())
    return text(nvrtc, program, "PTX")


def text(nvrtc, program, what):
    size = ctypes.c_size_t()
    check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    check(nvrtc, getattr(nvrtc, f"nvrtcGet{what}")(program, buffer))
    return buffer.value


def check(nvrtc, result):
    if result != 0:
        nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        sys.exit(nvrtc.nvrtcGetErrorString(result).decode())


def main():
    ptx = compile_ptx(sys.argv[1])
    if "--write" in sys.argv[2:]:
        (HERE / "code.ptx").write_bytes(ptx)
    else:
        sys.stdout.buffer.write(ptx)


main()
