"""Python programs as processes: how they start, fail, are interrupted, and end."""

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

ZEROTH = os.path.join(os.environ["ZR_BIN"], "zeroth")

MODEL = """
import sys
import torch
import zeroth

def config(**more):
    return {
        "strategy": "zero3", "optimizer": "adamw", "job.threads": 1, "train.steps": 3, "train.seed": 3,
        "train.global_batch": 2, "train.micro_batch": 1, "communicator.share_weights": False, **more,
    }

def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

def train(engine, model):
    while not engine.done:
        generator = torch.Generator().manual_seed(engine.step_index * 10 + engine.micro_index)
        engine.backward(model(torch.randn(4, 8, generator=generator)).pow(2).mean())
        engine.step()
    return engine.weights_hash()
"""


class Programs(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

    def script(self, text, name="train.py"):
        file = self.folder / name
        file.write_text(f"#!{sys.executable}\n{MODEL}\n{textwrap.dedent(text)}")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    def run_program(self, *command, code=0, **variables):
        result = subprocess.run(
            list(map(str, command)), cwd=self.folder, capture_output=True, text=True, timeout=120,
            env={**os.environ, **variables}, check=False,
        )  # fmt: skip
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        return result

    def test_import_does_nothing(self):
        text = """
            import os, signal, sys, threading
            import torch
            before = (signal.getsignal(signal.SIGINT), sys.excepthook, threading.active_count(),
                      torch.get_num_threads(), torch._tensor_str._str, set(os.environ))
            import zeroth
            after = (signal.getsignal(signal.SIGINT), sys.excepthook, threading.active_count(), torch.get_num_threads(),
                     torch._tensor_str._str, set(os.environ))
            assert before == after
            assert "libzeroth" not in open("/proc/self/maps").read()
            assert not torch.cuda.is_initialized()
        """
        file = self.folder / "plain.py"
        file.write_text(textwrap.dedent(text))
        self.run_program(sys.executable, file)

    def test_after_close_torch_is_as_before(self):
        script = self.script("""
            import signal
            def state():
                return (signal.getsignal(signal.SIGINT), torch._tensor_str._str, torch.is_grad_enabled())
            before = state()
            model = net()
            engine = zeroth.Engine(model, config())
            train(engine, model)
            engine.release()
            assert state() == before
            plain = net()
            for p, q in zip(model.parameters(), plain.parameters()):
                assert p.data_ptr() and p.grad is None and type(p) is type(q)
            torch.optim.AdamW(model.parameters()).step()
            loss = model(torch.ones(2, 8)).sum()
            loss.backward()
            assert all(p.grad is not None for p in model.parameters())
            assert repr(model[0].weight).startswith("Parameter containing:\\ntensor([[")
        """)
        self.run_program(sys.executable, script)

    def test_every_launcher_gives_the_same_bits(self):
        script = self.script("""
            model = net()
            with zeroth.Engine(model, config()) as engine:
                digest = train(engine, model)
                print(f"hash {digest} of {engine.world} ranks", flush=True)
        """)
        outputs = [
            self.run_program(*command, script).stdout
            for command in (
                [sys.executable],
                [ZEROTH, "launch", "-n", "2", "--", sys.executable],
                [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"],
            )
        ]
        hashes = {line.split()[-4] for text in outputs for line in text.splitlines() if "hash " in line}
        self.assertEqual(len(hashes), 1, outputs)
        self.assertIn("of 2 ranks", outputs[1])
        self.assertIn("of 2 ranks", outputs[2])

    def test_commands_take_a_python_program(self):
        self.script("""
            program = zeroth.Program.from_arguments(keys=[zeroth.Key("model.width", 16, "of the hidden layer", min=1)])
            width = program.integer("model.width")
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))
            with zeroth.Engine(model, program) as engine:
                train(engine, model)
                print("trained", width, engine.world, flush=True)
        """)
        (self.folder / "job.toml").write_text(
            'strategy = "zero2"\noptimizer = "adamw"\n[job]\nprogram = "train.py"\nranks = 2\n[train]\nsteps = 2\n'
            "global_batch = 2\nmicro_batch = 1\n"
        )
        plan = self.run_program(ZEROTH, "plan", "job.toml", "model.width=32").stdout
        self.assertIn("321 parameters", plan)
        explained = self.run_program(ZEROTH, "explain", "job.toml").stdout
        self.assertIn("of the hidden layer", explained)
        trained = self.run_program(ZEROTH, "train", "job.toml", "model.width=24").stdout
        self.assertIn("trained 24 2", trained)
        help_ = self.run_program(sys.executable, "train.py", "--help").stdout
        self.assertIn("model.width = 16", help_)

    def test_an_exception_of_one_rank_reaches_the_others(self):
        script = self.script("""
            model = net()
            engine = zeroth.Engine(model, config(**{"train.steps": 50}))
            engine.backward(model(torch.ones(4, 8)).pow(2).mean())
            engine.step()
            if engine.rank == 1:
                raise LookupError("of rank 1")
            try:
                train(engine, model)
            except zeroth.PeerLostError as error:
                print("rank 0 got:", error, flush=True)
                raise
        """)
        result = self.run_program(ZEROTH, "launch", "-n", "2", "--", sys.executable, script, code=1)
        self.assertIn("LookupError: of rank 1", result.stderr)
        self.assertRegex(result.stdout, "rank 0 got: .*rank 1 .*ended by an exception")
        self.assertFalse(list(self.folder.glob("runs/*/*/summary.json")))

    def test_interrupts_end_a_wait(self):
        address = f"127.0.0.1:{29000 + os.getpid() % 2000}"
        script = self.script(f"""
            import os, time
            model, rank = net(), int(sys.argv[1])
            where = zeroth.Rendezvous(rank, 2, {address!r}, "secret")
            engine = zeroth.Engine(model, config(**{{"train.steps": 50}}), rendezvous=where)
            if rank == 1:
                time.sleep(60)
            print("pid", os.getpid(), flush=True)
            try:
                train(engine, model)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            engine.close()
            print("alive", torch.ones(2).sum().item(), flush=True)
        """)
        ranks = [
            subprocess.Popen([sys.executable, script, str(rank)], cwd=self.folder, stdout=subprocess.PIPE, text=True,
                             stderr=subprocess.DEVNULL)
            for rank in (0, 1)
        ]  # fmt: skip
        try:
            for line in ranks[0].stdout:
                if line.startswith("pid"):
                    break
            time.sleep(1)  # it waits for rank 1 then
            begin = time.monotonic()
            ranks[0].send_signal(signal.SIGINT)
            rest = ranks[0].stdout.read()
            self.assertIn("interrupted", rest)
            self.assertIn("alive 2.0", rest)
            self.assertLess(time.monotonic() - begin, 10)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
                process.stdout.close()

    def test_ends_of_a_process(self):
        for end in ("", "sys.exit(0)", "del engine", "engine.close()", "engine.close(); engine.close()"):
            script = self.script(f"""
                model = net()
                engine = zeroth.Engine(model, config(), name="a")
                engine.set_schedule(lambda index: 1e-3)
                train(engine, model)
                {end}
            """)
            result = self.run_program(sys.executable, script)
            self.assertNotIn("terminate", result.stderr)
        summary = json.loads(next(self.folder.glob("runs/train/a/*/summary.json")).read_text())
        self.assertEqual(summary["steps"], 3)

    def test_errors_are_in_the_words_of_python(self):
        script = self.script("""
            model = net()
            for config_, words in (
                ({"train.stepz": 3}, ["zeroth.Program", "train.stepz", "train.steps"]),
                ("missing.toml", ["missing.toml"]),
                ({"train": {"steps": "three"}}, ["train.steps"]),
                ({"train.steps": object()}, ["train.steps is a object"]),
            ):
                try:
                    zeroth.Engine(model, config_)
                    raise AssertionError(config_)
                except zeroth.UserError as error:
                    assert all(word in str(error) for word in words) and "zr::" not in str(error), error
                    assert error.exit_code == 2 and isinstance(error, zeroth.Error) and isinstance(error, RuntimeError)
            with zeroth.Engine(model, config()) as engine:
                try:
                    engine.backward(torch.ones(1))
                    raise AssertionError
                except zeroth.UserError as error:
                    assert "torch.no_grad()" in str(error) and "engine.evaluation()" in str(error), error
                    assert "::" not in str(error), error
            try:
                engine.step()
                raise AssertionError
            except zeroth.UserError as error:
                assert "closed" in str(error)
        """)
        self.run_program(sys.executable, script)

    def test_another_torch_is_one_clear_message(self):
        script = self.script("""
            torch.__version__ = "2.15.0+cpu"
            try:
                zeroth.Engine(net(), config())
            except zeroth.EnvironmentError as error:
                print(error)
        """)
        text = self.run_program(sys.executable, script).stdout
        self.assertIn("zeroth was built for torch 2.11, but this environment has torch 2.15.0+cpu", text)

    def test_fork_and_workers(self):
        script = self.script("""
            import multiprocessing, os

            class Data(torch.utils.data.Dataset):
                def __len__(self):
                    return 6
                def __getitem__(self, index):
                    return torch.full((8,), float(index))

            def main():
                model = net()
                hashes = []
                for context in ("fork", "spawn"):
                    with zeroth.Engine(net(), config(), name=context) as engine:
                        loader = engine.loader(Data(), num_workers=2, multiprocessing_context=context)
                        for batch in loader:
                            engine.backward(engine.model(batch).pow(2).mean())
                            engine.step()
                        hashes.append(engine.weights_hash())
                        child = os.fork()
                        if child == 0:
                            os._exit(0)
                        os.waitpid(child, 0)
                assert len(set(hashes)) == 1

            if __name__ == "__main__":
                main()
        """)
        self.run_program(sys.executable, script)


if __name__ == "__main__":
    unittest.main(verbosity=2)
