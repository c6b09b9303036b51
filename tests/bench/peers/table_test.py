"""Tests the table of `make peers` (ratios, targets, texts), how it uses hosts, and that its programs compile. Standard
library only."""
import os
import shlex
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import hosts  # noqa: E402
import table  # noqa: E402


def system(*rates, peak=1000.0, loss=2.5, first=1.0):
    return {"setting": "", "error": None, "rounds": [
        {"tokens_per_s": rate, "peak_mib": peak, "communication_mib": 1.0, "loss": loss, "first_s": first}
        for rate in rates]}


def case(size, dtype, **systems):
    return {"size": size, "dtype": dtype, "steps": 20, "systems": systems}


def on_hosts(step_ms, sent_mib=0.0, **more):
    """A system that ran on two hosts, one round per step time."""
    made = system(*(1000 / ms for ms in step_ms), **more)
    for round_, ms in zip(made["rounds"], step_ms):
        round_ |= {"step_ms": ms, "sent_mib": sent_mib}
    return made


def case_on_hosts(*both_ways, **systems):
    return {**case("S", "fp32", **systems), "hosts": 2,
            "link": [{"one_way": 9.5, "both_ways": speed} for speed in both_ways]}


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


class TableOfHosts(unittest.TestCase):
    def test_limit_is_the_step_of_plain_if_the_wire_is_faster(self):
        made = case_on_hosts(8.0, plain=on_hosts([90.0]), zero0=on_hosts([100.0], sent_mib=80))
        self.assertEqual(table.of_limit(made, "zero0"), (0.9, "plain"))
        self.assertIn("zero0 tokens/s of the limit's (plain)      0.900   target: at least 0.9\n", text(made))

    def test_limit_is_the_wire_if_plain_is_faster(self):
        made = case_on_hosts(8.388608, plain=on_hosts([10.0]), zero0=on_hosts([100.0], sent_mib=80))
        self.assertIn("zero0 tokens/s of the limit's (wire)       0.800   target: at least 0.9   MISSED", text(made))

    def test_plain_beside_the_wire_has_a_row_without_a_target(self):
        made = case_on_hosts(8.0, plain_wire=on_hosts([125.0]), zero0=on_hosts([100.0]))
        self.assertRegex(text(made), r"zero0 tokens/s of plain_wire's +1\.250\n")
        self.assertIn("0 of 0 targets missed", text(made))

    def test_each_round_uses_its_own_speed_of_the_link(self):
        made = case_on_hosts(8.388608, 16.777216, zero0=on_hosts([100.0, 100.0], sent_mib=80))
        self.assertEqual([round(ms, 6) for ms in table.wire_ms(made, "zero0")], [80.0, 40.0])

    def test_target_is_that_of_the_stage_for_every_size(self):
        for ours, peer, target in (("zero0", "ddp", 1.0), ("zero1", "torch_zero1", 1.15),
                                   ("zero2", "fsdp2_keep", 1.15), ("zero3", "fsdp2_reshard", 1.25)):
            said = text(case_on_hosts(8.0, **{ours: on_hosts([101.0]), peer: on_hosts([100.0])}))
            self.assertRegex(said, f"{ours} tokens/s of {peer}'s +0.990   target: at least {target}   MISSED")
            self.assertIn("1 of 1 targets missed", said)

    def test_rows_have_step_and_wire_times(self):
        said = text(case_on_hosts(8.388608, zero0=on_hosts([100.0], sent_mib=80)))
        self.assertRegex(said, "tokens/s +spread +step ms +wire ms +peak MiB")
        self.assertRegex(said, "zero0 +10 +0 % +100.0 +80.0 +1000")
        self.assertIn("link (iperf3): 9.50 Gbit/s in one direction, 8.39 in each of both at once", said)

    def test_failed_system_has_as_many_columns(self):
        failed = {"setting": "", "error": "no route", "rounds": []}
        self.assertRegex(text(case_on_hosts(8.0, ddp=failed, zero0=on_hosts([1.0]))), "ddp( +-){9} +FAILED: no route")


class Hosts(unittest.TestCase):
    """Without root: a script that records its arguments replaces network_hosts.sh."""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.use_script("")
        original = hosts.SCRIPT
        self.addCleanup(setattr, hosts, "SCRIPT", original)
        hosts.SCRIPT = f"{self.folder.name}/script"

    def use_script(self, command):
        with open(f"{self.folder.name}/script", "w", encoding="utf-8") as out:
            out.write(f'#!/bin/sh\necho "$@" >> {self.folder.name}/actions\n{command}\n')
        os.chmod(f"{self.folder.name}/script", 0o755)

    def actions(self):
        with open(f"{self.folder.name}/actions", encoding="utf-8") as lines:
            return [line.split()[0] for line in lines]

    def test_are_removed_after_a_failure_and_after_a_signal(self):
        for error in (RuntimeError, SystemExit, KeyboardInterrupt):
            with self.assertRaises(error), hosts.TwoHosts():
                raise error
        self.assertEqual(self.actions(), 3 * ["up", "rate", "down"])

    def test_are_removed_if_only_some_could_be_created(self):
        self.use_script('[ "$1" != rate ] || { echo "tc: not permitted" >&2; exit 2; }')
        with self.assertRaisesRegex(hosts.Unavailable, "tc: not permitted; remedy: run it as root"), hosts.TwoHosts():
            pass
        self.assertEqual(self.actions(), ["up", "rate", "down"])

    def test_commands_keep_their_words(self):
        with hosts.TwoHosts() as two:
            script, *words = two.on_rank(1, ["program", '{"key": "a b"}'])
        self.assertEqual(words[:2], ["run", f"{two.name}1"])
        self.assertEqual(shlex.split(" ".join(words[2:])), ["program", '{"key": "a b"}'])


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
