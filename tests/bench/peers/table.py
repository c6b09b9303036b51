"""Renders the measured results as a table. Standard library only; table_test.py tests it.

measured: {"about": {line: text}, "cases": [{"size", "dtype", "steps", "systems": {name: {"setting", "error", "rounds":
[{"tokens_per_s", "peak_mib", "communication_mib", "loss", "first_s"}]}}}]}
A case on two hosts also has "hosts" and, per round, "link": [{"one_way", "both_ways"}] in Gbit/s, and its rounds of a
system have "step_ms" and "sent_mib", of the host that sends more.

Columns on two hosts: "comm MiB" is counted by the hosts' network interfaces, for all systems, from the end of step 3 to
the end of the last; for Zeroth to the end of the last but one, because the last step also contains the gather of
weights that each other step leaves to the next one. The clock includes it. "wire ms" is how long the link takes for
the bytes that a host sends in a step, at the speed of both directions at once, which iperf3 measures before each round.
"plain_wire" is "plain" while each rank sends the other as many bytes per step as under zero0, from two threads that
compute nothing. Both hosts are on one machine, so its cores also do the work of the link: this shows what is left.
"""
from statistics import median

# Zeroth's strategies and the peers that shard the same state; a ratio compares with the best peer.
CLASSES = {"zero0": ["ddp", "deepspeed0"], "zero1": ["torch_zero1", "deepspeed1"],
           "zero2": ["fsdp2_keep", "deepspeed2"], "zero3": ["fsdp2_reshard", "deepspeed3"]}
# The required ratios.
RATE = {("S", "fp32"): {"zero0": 1.12, "zero1": 1.2, "zero2": 1.3, "zero3": 1.35},
        ("M", "bf16"): {"zero0": 1.4, "zero1": 1.8, "zero2": 1.7, "zero3": 1.8}}
MEMORY = {("M", "fp32"): {"zero1": 0.8, "zero2": 0.8, "zero3": 0.6},
          ("M", "bf16"): {"zero1": 0.8, "zero2": 0.8, "zero3": 0.6}}
MEMORY_PEERS = {**CLASSES, "zero3": ["fsdp2_keep", "fsdp2_reshard"]}
FIRST_STEP = {"S": 1.5}
# On two hosts, for each size and dtype.
RATE_ON_HOSTS = {"zero0": 1.0, "zero1": 1.15, "zero2": 1.15, "zero3": 1.25}
OF_LIMIT = 0.9
CEILING = "plain"  # two processes that exchange nothing
WIRE = "plain_wire"  # the same, which send each other as much as zero0, on two hosts
DIGITS = 1e-5  # losses must agree to five digits


def middle(system, key):
    return median(round_[key] for round_ in system["rounds"])


def ran(system):
    return system is not None and not system.get("error") and bool(system["rounds"])


def ratio(case, ours, peers, key):
    """The median over rounds of ours / theirs for the best peer: (ratio, peer), or None."""
    systems, found = case["systems"], []
    if not ran(systems.get(ours)):
        return None
    for peer in peers:
        if ran(systems.get(peer)):
            rounds = zip(systems[ours]["rounds"], systems[peer]["rounds"])
            found.append((median(a[key] / b[key] for a, b in rounds), peer))
    if not found:
        return None
    return max(found) if key == "peak_mib" else min(found)


def on_hosts(case):
    return case.get("hosts", 1) > 1


def wire_ms(case, name):
    """Per round: how long the link takes for what a system sends in a step."""
    return [r["sent_mib"] * 2**20 * 8 / (1e6 * link["both_ways"])
            for r, link in zip(case["systems"][name]["rounds"], case["link"])]


def of_limit(case, ours):
    """The median over rounds of limit / step, and what the limit is: (ratio, name), or None."""
    systems = case["systems"]
    if not ran(systems.get(ours)) or not ran(systems.get(CEILING)):
        return None
    plain = [r["step_ms"] for r in systems[CEILING]["rounds"]]
    wire, steps = wire_ms(case, ours), [r["step_ms"] for r in systems[ours]["rounds"]]
    return (median(max(p, w) / step for p, w, step in zip(plain, wire, steps)),
            "wire" if median(wire) > median(plain) else CEILING)


def at_least(name, got, wanted):
    return name, got, wanted and f"at least {wanted}", wanted is None or got >= wanted


def marks_on_hosts(case):
    rows = []
    for ours, peers in CLASSES.items():
        got = ratio(case, ours, peers, "tokens_per_s")
        if got:
            rows.append(at_least(f"{ours} tokens/s of {got[1]}'s", got[0], RATE_ON_HOSTS[ours]))
        got = of_limit(case, ours)
        if got:
            rows.append(at_least(f"{ours} tokens/s of the limit's ({got[1]})", got[0], OF_LIMIT))
        got = ratio(case, ours, [WIRE], "tokens_per_s")
        if got:
            rows.append(at_least(f"{ours} tokens/s of {WIRE}'s", got[0], None))
    return rows


def marks(case):
    """Rows of (name, value, target, whether it is met)."""
    if on_hosts(case):
        return marks_on_hosts(case)
    rows, key = [], (case["size"], case["dtype"])
    for ours, peers in CLASSES.items():
        got = ratio(case, ours, peers, "tokens_per_s")
        if got:
            rows.append(at_least(f"{ours} tokens/s of {got[1]}'s", got[0], RATE.get(key, {}).get(ours)))
        got = ratio(case, ours, [CEILING], "tokens_per_s")
        if got:
            rows.append(at_least(f"{ours} tokens/s of {CEILING}'s", got[0], None))
    for ours, peers in MEMORY_PEERS.items():
        wanted = MEMORY.get(key, {}).get(ours)
        got = ratio(case, ours, peers, "peak_mib")
        if got:
            rows.append((f"{ours} peak memory of {got[1]}'s", got[0], wanted and f"at most {wanted}",
                         wanted is None or got[0] <= wanted))
    for ours in CLASSES:
        if case["size"] in FIRST_STEP and ran(case["systems"].get(ours)):
            got, wanted = middle(case["systems"][ours], "first_s"), FIRST_STEP[case["size"]]
            rows.append((f"{ours} first step, s", got, f"at most {wanted}", got <= wanted))
    return rows


def apart(case):
    """Systems whose final loss differs from the median: {name: loss}; and the median."""
    losses = {name: [r["loss"] for r in system["rounds"]] for name, system in case["systems"].items()
              if ran(system) and name not in (CEILING, WIRE)}
    if not losses:
        return {}, None
    agreed = median(median(of_one) for of_one in losses.values())
    far = {name: max(of_one, key=lambda loss: abs(loss - agreed)) for name, of_one in losses.items()}
    return {name: loss for name, loss in far.items() if not abs(loss - agreed) <= DIGITS * abs(agreed)}, agreed


def cells_of(case, name):
    """The row of a system that ran: texts, without its name and its setting."""
    system = case["systems"][name]
    rates, idle = [r["tokens_per_s"] for r in system["rounds"]], system["rounds"][0].get("idle_mib")
    times = [f"{middle(system, 'step_ms'):.1f}", f"{median(wire_ms(case, name)):.1f}"] if on_hosts(case) else []
    return [f"{median(rates):.0f}", f"{100 * (max(rates) - min(rates)) / median(rates):.0f} %", *times,
            f"{middle(system, 'peak_mib'):.0f}", f"{idle:.0f}" if idle else "",
            f"{middle(system, 'communication_mib'):.1f}", f"{middle(system, 'loss'):.6f}",
            f"{middle(system, 'first_s'):.2f}"]


def systems_of(case):
    heads = ["tokens/s", "spread", *(["step ms", "wire ms"] if on_hosts(case) else []), "peak MiB", "idle MiB",
             "comm MiB", "loss", "first s"]
    rows = [("system", "setting", *heads, "")]
    for name, system in case["systems"].items():
        setting = system.get("setting") or ""
        failed = "" if ran(system) else "FAILED: " + (system.get("error") or "no run")
        rows.append((name, setting, *(len(heads) * "-" if failed else cells_of(case, name)), failed))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 1, len(widths) - 1)
    for row in rows:
        cells = [cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        yield ("  " + "  ".join(cells)).rstrip()


def lines_of(case):
    yield f"{case['size']} {case['dtype']}: {case['steps']} steps, values are medians over the rounds"
    if case.get("link"):
        one, both = (median(link[way] for link in case["link"]) for way in ("one_way", "both_ways"))
        yield f"  link (iperf3): {one:.2f} Gbit/s in one direction, {both:.2f} in each of both at once"
    yield from systems_of(case)
    far, agreed = apart(case)
    if agreed is not None:
        for name, loss in far.items():
            yield f"  loss: {name} DIFFERS: {loss:.6f}, the median is {agreed:.6f}"
        if not far:
            yield "  loss: all agree to five digits"
    for what, figure, mark, met in marks(case):
        yield f"  {what:<40} {figure:7.3f}" + (f"   target: {mark}" if mark else "") + ("" if met else "   MISSED")


def render(measured):
    lines = [f"{name}: {text}" for name, text in measured["about"].items()]
    for case in measured["cases"]:
        lines += ["", *lines_of(case)]
    wanted = [row for case in measured["cases"] for row in marks(case) if row[2]]
    lines += ["", f"{sum(not row[3] for row in wanted)} of {len(wanted)} targets missed"]
    return "\n".join(lines) + "\n"
