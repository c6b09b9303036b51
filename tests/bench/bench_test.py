"""Tests what `make bench` prints while it runs (.ci/bench), with programs that only write a row."""
import json
import os
import shutil
import stat
import subprocess
import tempfile
import unittest

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.ci/bench")
PROGRAM = """#!/usr/bin/env python3
import json, sys
rows = json.load(open(sys.argv[1]))
rows.append({"name": "row", "value": 1, "unit": "s", "reference": "r", "reference_value": 1, "ratio": 1, "target": 0})
json.dump(rows, open(sys.argv[1], "w"))
"""


class BenchTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)
        os.makedirs(f"{self.folder}/.ci")
        os.makedirs(f"{self.folder}/build/bin")
        shutil.copy(BENCH, f"{self.folder}/.ci/bench")
        for name in ("bench_first", "bench_second"):
            with open(f"{self.folder}/build/bin/{name}", "w", encoding="utf-8") as out:
                out.write(PROGRAM)
            os.chmod(out.name, stat.S_IRWXU)

    def printed(self):
        done = subprocess.run([f"{self.folder}/.ci/bench"], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)
        return [line for line in done.stdout.splitlines() if line.startswith("bench: ")]

    def test_numbers_the_programs(self):
        self.assertEqual(self.printed(), ["bench: 1 of 2: bench_first", "bench: 2 of 2: bench_second"])

    def test_prints_the_remaining_time_if_it_is_known_from_the_last_run(self):
        self.printed()
        with open(f"{self.folder}/build/bench_times.json", "w", encoding="utf-8") as out:
            json.dump({"bench_first": 65, "bench_second": 10.2}, out)
        self.assertEqual(self.printed()[0], "bench: 1 of 2: bench_first, 1 min 5 s in its last run; 1 min 15 s left")


if __name__ == "__main__":
    unittest.main()
