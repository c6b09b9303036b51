"""Tests the table of `make peers`: ratios, targets and texts; and that its programs compile. Standard library only."""
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import table  # noqa: E402


def system(*rates, peak=1000.0, loss=2.5, first=1.0):
    return {"setting": "", "error": None, "rounds": [
        {"tokens_per_s": rate, "peak_mib": peak, "communication_mib": 1.0, "loss": loss, "first_s": first}
        for rate in rates]}


def case(size, dtype, **systems):
    return {"size": size, "dtype": dtype, "steps": 20, "systems": systems}


def text(*cases):
    return table.render({"about": {"torch": "2"}, "cases": list(cases)})


class Table(unittest.TestCase):
    def test_the_ceiling_has_a_ratio_and_no_say_about_losses(self):
        said = text(case("S", "fp32", plain=system(200, loss=9.0), ddp=system(100), zero0=system(190)))
        self.assertIn("zero0 tokens/s of plain's                  0.950\n", said)
        self.assertIn("zero0 tokens/s of ddp's                    1.900", said)
        self.assertIn("loss: all agree to five digits", said)

    def test_a_ratio_is_to_the_best_peer_of_the_row_and_a_median_of_rounds(self):
        made = case("S", "fp32", ddp=system(100, 200, 100), deepspeed0=system(10, 10, 10), zero0=system(120, 220, 110))
        self.assertEqual(table.ratio(made, "zero0", table.CLASSES["zero0"], "tokens_per_s"), (1.1, "ddp"))
        self.assertIn("zero0 tokens/s of ddp's                    1.100   target: at least 1.12   MISSED", text(made))

    def test_a_mark_that_is_met_is_told_without_a_word(self):
        said = text(case("S", "fp32", ddp=system(100), zero0=system(113)))
        self.assertIn("1.130   target: at least 1.12\n", said)
        self.assertIn("0 of 2 targets missed", said)

    def test_memory_is_held_against_the_smallest_peer(self):
        made = case("M", "bf16", fsdp2_keep=system(1, peak=900), fsdp2_reshard=system(1, peak=1000),
                    zero3=system(1, peak=600))
        self.assertIn("zero3 peak memory of fsdp2_keep's          0.667   target: at most 0.6   MISSED", text(made))

    def test_the_first_step_has_a_mark_on_s_only(self):
        self.assertIn("zero1 first step, s                        1.600   target: at most 1.5   MISSED",
                      text(case("S", "bf16", zero1=system(1, first=1.6))))
        self.assertNotIn("first step, s", text(case("M", "bf16", zero1=system(1, first=1.6))))

    def test_who_ends_at_another_loss_is_named(self):
        made = case("S", "fp32", ddp=system(1), torch_zero1=system(1), zero0=system(1, loss=2.50001),
                    deepspeed3=system(1, loss=2.51))
        self.assertEqual(list(table.apart(made)[0]), ["deepspeed3"])
        self.assertIn("deepspeed3 DIFFERS: 2.510000", text(made))
        made["systems"]["deepspeed3"] = system(1, loss=float("nan"))
        self.assertEqual(list(table.apart(made)[0]), ["deepspeed3"])

    def test_a_system_that_failed_has_a_row_that_says_so_and_stops_nothing(self):
        failed = {"setting": "", "error": "ImportError: no deepspeed", "rounds": []}
        said = text(case("S", "fp32", deepspeed0=failed, ddp=system(100), zero0=system(200)))
        self.assertIn("FAILED: ImportError: no deepspeed", said)
        self.assertIn("zero0 tokens/s of ddp's", said)

    def test_without_peers_there_is_no_ratio(self):
        self.assertNotIn("of ddp's", text(case("S", "fp32", zero0=system(200))))


class Programs(unittest.TestCase):
    def test_they_compile(self):
        for name in sorted(os.listdir(HERE)):
            if name.endswith(".py"):
                with open(os.path.join(HERE, name), encoding="utf-8") as source:
                    compile(source.read(), name, "exec")

    def test_torch_is_pinned_as_the_build_pins_it(self):
        with open(os.path.join(HERE, "../../../.ci/torch.txt"), encoding="utf-8") as pins:
            pinned = next(line.split()[0] for line in pins if line.startswith("torch=="))
        with open(os.path.join(HERE, "requirements.txt"), encoding="utf-8") as wanted:
            self.assertIn(pinned, wanted.read().split())


if __name__ == "__main__":
    unittest.main()
