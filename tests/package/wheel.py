"""Checks a wheel of the Python package: its files, and what each ELF file in it needs. wheel.py FILE.whl

Fails with the name of the file, and of the library, folder or symbol that it should not need.
"""
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
import zipfile

ROOT = os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
PLUGINS = "zeroth/lib/zeroth/plugins/"
# Patterns of all files; a file that matches none is an error, and so is a pattern of FILES that matches no file.
FILES = ["zeroth/*.py", "zeroth/py.typed", "zeroth/bin/zeroth", "zeroth/bin/zeroth-conform",
         "zeroth/lib/libzeroth.so.0", "zeroth/lib/libzeroth_python.so", PLUGINS + "zr_communicator_*.so",
         PLUGINS + "zr_offload_*.so", PLUGINS + "zr_optimizer_*.so", PLUGINS + "zr_strategy_*.so",
         "*.dist-info/METADATA", "*.dist-info/RECORD", "*.dist-info/WHEEL", "*.dist-info/entry_points.txt",
         "*.dist-info/licenses/*"]
# What oneDNN needs, in the plug-in muon, and the plug-ins for CUDA devices, which need nvcc.
OPTIONAL = [PLUGINS + "libzdnn.so.2", PLUGINS + "libOpenCL.so.1", PLUGINS + "cuda/zr_*.so"]
SYSTEM = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
# Libraries outside the wheel that only some files need: those of the package torch, and OpenMPI, which users install.
TORCH = {"libtorch_cpu.so", "libc10.so", "libgomp.so.1"}
OUTSIDE = {"zeroth/lib/libzeroth.so.0": TORCH, "zeroth/lib/libzeroth_python.so": TORCH,
           PLUGINS + "zr_optimizer_muon.so": {"libgomp.so.1"}, PLUGINS + "libzdnn.so.2": {"libgomp.so.1"},
           PLUGINS + "zr_communicator_mpi.so": {"libmpi.so.40"},
           PLUGINS + "cuda/zr_communicator_mpi.so": {"libmpi.so.40"}}


def matches(path, pattern):
    """As fnmatch(), but `*` does not match a slash."""
    return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)


def problems_of_files(paths):
    for path in paths:
        if not any(matches(path, pattern) for pattern in FILES + OPTIONAL):
            yield f"{path}: does not belong in the wheel; see FILES in {__file__}"
    for pattern in FILES:
        if not any(matches(path, pattern) for path in paths):
            yield f"{pattern}: the wheel has no such file"


def problems_of_elf(path, file, glibc, inside):
    """Problems of the ELF file `file`, which is at `path` in the wheel. inside: the names of the wheel's libraries."""
    text = subprocess.run(["readelf", "-dSVW", file], check=True, capture_output=True, text=True).stdout
    for library in re.findall(r"\(NEEDED\).*\[(.*)\]", text):
        if library not in SYSTEM | inside | OUTSIDE.get(path, set()):
            yield f"{path}: needs the library {library}, which is neither in the wheel nor on every machine"
    for folders in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text):
        for folder in dict.fromkeys(folders.split(":")):
            target = os.path.normpath(folder.replace("$ORIGIN", os.path.dirname(path), 1))
            if not folder.startswith("$ORIGIN") or not re.match("(zeroth|torch)(/|$)", target):
                yield f"{path}: searches libraries in '{folder}', which is neither in the package zeroth nor in torch"
    for section in sorted(set(re.findall(r"[.]debug_info|[.]symtab", text))):
        yield f"{path}: is not stripped: it has the section {section}"
    for minor in sorted(set(re.findall(r"GLIBC_2[.](\d+)", text)), key=int):
        if int(minor) > glibc:
            yield f"{path}: needs GLIBC_2.{minor}, but the name of the wheel says 2.{glibc}"
    with open(file, "rb") as content:
        if ROOT.encode() in content.read():
            yield f"{path}: contains the path of the source folder, {ROOT}"


def problems_of(wheel, scratch):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch)
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    paths = [entry.filename for entry in entries]
    inside = {os.path.basename(path) for path in paths if ".so" in path}
    yield from problems_of_files(paths)
    tag = re.search(r"-py3-none-manylinux_2_(\d+)_\w+[.]whl$", wheel)
    if not tag:
        yield f"{os.path.basename(wheel)}: its name must end in -py3-none-manylinux_2_<glibc>_<machine>.whl"
    for entry in entries:
        file = os.path.join(scratch, entry.filename)
        with open(file, "rb") as content:
            if content.read(4) == b"\x7fELF":
                yield from problems_of_elf(entry.filename, file, int(tag[1]) if tag else 0, inside)
        if entry.filename.startswith("zeroth/bin/") and not entry.external_attr >> 16 & 0o100:
            yield f"{entry.filename}: is not executable"


with tempfile.TemporaryDirectory() as scratch_folder:
    problems = list(problems_of(sys.argv[1], scratch_folder))
if problems:
    sys.exit("\n".join(f"wheel: error: {problem}" for problem in problems))
print(f"wheel: {os.path.relpath(sys.argv[1])} ({os.path.getsize(sys.argv[1]) / 1e6:.1f} MB)")
