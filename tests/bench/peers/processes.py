"""The processes of a run: starts them and waits for all of them. Standard library only."""
import contextlib
import os
import signal
import subprocess
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))
TIMEOUT = 1200


class Failed(Exception):
    pass


def end_all(processes):
    for p in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)
    for p in processes:  # not p.wait(), which hangs if a signal has interrupted p.poll()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(p.pid, 0)


def finish(processes, logs):
    """Waits for all; when one fails, ends the others and raises Failed with the last line of the first that failed."""
    end, failed = time.time() + TIMEOUT, None
    try:
        while failed is None and any(p.poll() is None for p in processes):
            failed = next((i for i, p in enumerate(processes) if p.poll() not in (None, 0)), None)
            if time.time() > end:
                failed = -1
            time.sleep(0.02)
        if failed is None:
            failed = next((i for i, p in enumerate(processes) if p.returncode), None)
    finally:  # leaves no process behind, also when interrupted
        end_all([p for p in processes if p.poll() is None])
    if failed is None:
        return
    if failed == -1:
        raise Failed(f"no result after {TIMEOUT} s; see {logs[0]}")
    with open(logs[failed], encoding="utf-8", errors="replace") as log:
        said = [line.strip() for line in log if line.strip()]
    errors = [line for line in said if "Error" in line or "error:" in line] or said or ["no output"]
    raise Failed(f"{errors[-1][:160]} (exit code {processes[failed].returncode}; {logs[failed]})")


def start(command, log, extra):
    with open(log, "w", encoding="utf-8") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True,
                                env={**os.environ, "OMP_NUM_THREADS": "1", **extra})
