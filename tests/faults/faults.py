#!/usr/bin/env python3
"""Checks that the fast tests are sharp: plants faults in a copy of the tree, and one of its tests must find each.

faults.py [--list] [NAME ...]
NAME: only these faults of faults.toml. --list prints the faults and checks their texts, and builds nothing.
The copy is build/faults/tree. JOBS: processes of the build, and tests at a time. Exits with 0 if all faults were found,
1 if some were missed, 2 for a wrong entry or name, 3 if the copy cannot be built or its tests fail without a fault.
"""
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
TREE = ROOT / "build/faults/tree"
TABLE = "tests/faults/faults.toml"
HEADER = "sdk/include/zr/planted_fault.hpp"  # in the include path of all sources; only the copy has it
HEADER_TEXT = """\
#pragma once

#include <cstdlib>
#include <cstring>

#pragma GCC visibility push(hidden)
namespace zr_faults {
inline bool is_planted(const char* name) {
  const char* const chosen = std::getenv("ZR_PLANTED_FAULT");
  return chosen && std::strcmp(chosen, name) == 0;
}
}  // namespace zr_faults
#pragma GCC visibility pop
"""
JOBS = os.environ.get("JOBS") or str(os.cpu_count() or 1)


@dataclass(frozen=True)
class Fault:
    """An entry of faults.toml, which says what its keys mean."""
    name: str
    does: str
    cut: bool
    file: str
    original: str
    faulty: str
    programs: list[str]
    tests: str

    def planted(self) -> str:
        """The faulty text, whose guard reads the environment once."""
        guard = f'([] {{ static const bool planted = zr_faults::is_planted("{self.name}"); return planted; }}())'
        return self.faulty.replace("PLANTED", guard)


@dataclass(frozen=True)
class Result:
    """The tests that ran, and those of them that failed."""
    tests: list[str]
    failed: list[str]
    output: str


def fail(code: int, problem: str, remedy: str) -> NoReturn:
    print(f"faults: error: {problem}\n  remedy: {remedy}", file=sys.stderr)
    sys.exit(code)


def read_table() -> list[Fault]:
    entries = tomllib.loads((ROOT / TABLE).read_text(encoding="utf-8"))["fault"]
    keys = {field.name for field in fields(Fault)}
    for entry in entries:
        if set(entry) != keys or "PLANTED" not in entry["faulty"]:
            fail(2, f"{TABLE}: entry '{entry.get('name')}' has other keys than {sorted(keys)}, or no PLANTED in faulty",
                 "correct the entry")
    faults = [Fault(**entry) for entry in entries]
    if len({fault.name for fault in faults}) != len(faults):
        fail(2, f"{TABLE}: two entries have the same name", "rename one of them")
    return faults


def with_faults(file: str, faults: list[Fault]) -> str:
    """The text of a file in the copy; problems with the entries of the file end the program."""
    path = ROOT / file
    original = path.read_text(encoding="utf-8") if path.is_file() else ""
    text = original
    for fault in faults:
        times = original.count(fault.original)
        if times != 1 or text.count(fault.original) != 1:
            fail(2, f"{TABLE}: the original text of '{fault.name}' occurs {times} times in {file}, or overlaps another",
                 "copy the text that the file has now to the entry, with enough of its lines that it occurs once; if "
                 "the code is gone, plant another mistake there")
        text = text.replace(fault.original, fault.planted())
    return '#include "zr/planted_fault.hpp"\n' + text


def planted_files(faults: list[Fault]) -> dict[str, str]:
    """The texts of the files in the copy that the tree does not have like this."""
    texts = {HEADER: HEADER_TEXT}
    for file in dict.fromkeys(fault.file for fault in faults):
        texts[file] = with_faults(file, [fault for fault in faults if fault.file == file])
    return texts


def write(file: str, data: bytes, mode: int) -> None:
    """Writes a file of the copy, unless it has these contents: then Ninja compiles it again."""
    path = TREE / file
    if path.is_symlink() or not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(data)
    if path.stat().st_mode & 0o777 != mode:
        path.chmod(mode)


def copy_tree(texts: dict[str, str]) -> None:
    """Makes the copy equal to the tree, apart from `texts`."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, check=True,
                            capture_output=True, text=True).stdout
    files = [file for file in listed.split("\0") if file and (ROOT / file).exists()]
    for file in files:
        source = ROOT / file
        data = texts[file].encode() if file in texts else source.read_bytes()
        write(file, data, source.stat().st_mode & 0o777)
    write(HEADER, texts[HEADER].encode(), 0o644)
    kept = {TREE / file for file in [*files, HEADER]}
    for folder, folders, names in os.walk(TREE):
        if Path(folder) == TREE and "build" in folders:
            folders.remove("build")
        for name in names:
            if Path(folder) / name not in kept:
                (Path(folder) / name).unlink()
    for name in ("deps", "data"):  # what .ci/setup downloads
        link = TREE / "build" / name
        link.parent.mkdir(exist_ok=True)
        if (ROOT / "build" / name).exists() and not link.is_symlink():
            link.symlink_to(os.path.relpath(ROOT / "build" / name, link.parent))


def build(programs: list[str]) -> None:
    log = TREE.parent / "configure.log"
    with log.open("w", encoding="utf-8") as out:
        configured = subprocess.run(["cmake", "--preset", "dev", "-DZR_SLOW_TESTS=OFF"], cwd=TREE, stdout=out,
                                    stderr=subprocess.STDOUT, check=False)
    if configured.returncode != 0:
        fail(3, f"CMake cannot configure the copy:\n{log.read_text(encoding='utf-8')}",
             "make setup; if make build fails too, correct that first")
    # zr_training: all plug-ins, some of which unit tests load without naming them.
    built = subprocess.run(["cmake", "--build", "build", "-j", JOBS, "--target", "zr_training", *programs], cwd=TREE,
                           check=False)
    if built.returncode != 0:
        fail(3, "the copy cannot be compiled", "see the first error above; if make build has none, correct the entry")


def run_tests(tests: str, fault: str | None) -> Result:
    environment = {name: value for name, value in os.environ.items() if name != "ZR_PLANTED_FAULT"}
    if fault:
        environment["ZR_PLANTED_FAULT"] = fault
    command = ["ctest", "--test-dir", "build", "-j", JOBS, "-R", tests, "-E", "SLOW_", "-LE", "slow$",
               "--output-on-failure"]
    done = subprocess.run(command + (["--stop-on-failure"] if fault else []), cwd=TREE, env=environment, check=False,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    lines = re.findall(r"^ *\d+/\d+ Test +#\d+: (.+?) \.+ *(Passed|[\w ]*\*\*\*\w+)", done.stdout, re.MULTILINE)
    ran = [(name.split("  # GetParam()")[0], how) for name, how in lines if not how.endswith("***Skipped")]
    return Result([name for name, how in ran], [name for name, how in ran if how != "Passed"], done.stdout)


def check_without_faults(faults: list[Fault]) -> None:
    result = run_tests("|".join(dict.fromkeys(fault.tests for fault in faults)), None)
    if result.failed:
        print(result.output)
        fail(3, f"without a fault, {len(result.failed)} tests of the copy fail: {' '.join(result.failed)}",
             "make test; correct what it finds, or what PLANTED changes although it is false")
    for fault in faults:
        if not any(re.search(fault.tests, name) for name in result.tests):
            fail(2, f"{TABLE}: tests of '{fault.name}' matches no fast test that ran: {fault.tests}",
                 "name tests without SLOW_ of its programs")


def is_found(fault: Fault) -> bool:
    begin = time.monotonic()
    result = run_tests(fault.tests, fault.name)
    seconds = time.monotonic() - begin
    if result.failed:
        print(f"{fault.name}: found by {result.failed[0]}, {seconds:.0f} s", flush=True)
    else:
        print(f"{fault.name}: MISSED by {len(result.tests)} tests ({fault.tests}), {seconds:.0f} s", flush=True)
    return bool(result.failed)


def main(arguments: list[str]) -> int:
    lists = "--list" in arguments
    names = [argument for argument in arguments if argument != "--list"]
    table = read_table()
    if unknown := [name for name in names if name not in {fault.name for fault in table}]:
        fail(2, f"there is no fault '{unknown[0]}'", "tests/faults/faults.py --list prints the names")
    chosen = [fault for fault in table if not names or fault.name in names]
    texts = planted_files(table)  # always all: another choice then compiles nothing again
    if lists:
        for fault in chosen:
            print(f"{fault.name} ({fault.file}; {fault.tests})\n    {fault.does}")
        print(f"{len(chosen)} faults, {sum(fault.cut for fault in chosen)} of them in code whose tests were cut")
        return 0
    for program in ("git", "cmake", "ctest"):
        if not shutil.which(program):
            fail(3, f"{program} was not found", "make setup")
    copy_tree(texts)
    build(list(dict.fromkeys(program for fault in chosen for program in fault.programs)))
    check_without_faults(chosen)
    found = sum(is_found(fault) for fault in chosen)
    print(f"{found} found, {len(chosen) - found} missed")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
