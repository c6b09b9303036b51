"""Where the two ranks of a run are: on this machine, or one on each of two hosts.

The hosts are network namespaces (tests/simulators/network_hosts.sh), which need root. Each run has its own, so that no
process and no connection of an earlier run remains. They are removed when it ends, also after Ctrl-C, SIGTERM or
SIGHUP.
"""
import json
import os
import shlex
import signal
import socket
import subprocess

ROOT = os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../.."))
SCRIPT = f"{ROOT}/tests/simulators/network_hosts.sh"
LAUNCHER = f"{ROOT}/build/bin/zeroth"
RATE = "10gbit"
PROBE_S = 2


class Unavailable(Exception):
    pass


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class OneHost:
    interface, address, ranks_per_host = "lo", "127.0.0.1", 2
    keys, environment = {}, {}

    def __init__(self):
        self.port = free_port()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def on_rank(self, _, command):
        return command

    def launch(self, program):
        return [LAUNCHER, "launch", "-n", "2", "--", *program]


class TwoHosts:
    """Exist within `with`. The link moves 10 Gbit/s in each direction; TCP's congestion control is reno."""
    interface, address, ranks_per_host, port = "eth0", "10.77.0.1", 1, 29500
    keys = {"communicator": "auto", "peers.interface": interface}
    environment = {"OMPI_MCA_plm_rsh_agent": f"{SCRIPT} run", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                   "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "ZR_STORE": f"{address}:29600"}

    def __init__(self):
        self.name = f"zrp{os.getpid()}x"

    def __enter__(self):
        try:
            self._script("up", self.name, "2")
            self._script("rate", self.name, "2", RATE)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        """Ends all processes on the hosts. Signals do not interrupt it."""
        handlers = {number: signal.signal(number, signal.SIG_IGN)
                    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        subprocess.run([SCRIPT, "down", self.name, "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                       start_new_session=True, check=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def on_rank(self, rank, command):
        return [SCRIPT, "run", f"{self.name}{rank}", *map(shlex.quote, command)]

    def launch(self, program):
        return self.on_rank(0, [LAUNCHER, "launch", "--hosts", f"{self.name}0,{self.name}1", "--", *program])

    def _script(self, *words):
        done = subprocess.run([SCRIPT, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable("cannot create network namespaces, the hosts of HOSTS=2: "
                              f"`network_hosts.sh {' '.join(words)}`: {(done.stderr or done.stdout).strip()}; remedy: "
                              "run it as root, on a machine that permits them (in a container: CAP_NET_ADMIN)")


HOSTS = {1: OneHost, 2: TwoHosts}


def link_speed():
    """What iperf3 moves from one host to the other, and in each direction while it does so in both; in Gbit/s."""
    with TwoHosts() as hosts:
        return {"one_way": min(probe(hosts, [])), "both_ways": min(probe(hosts, ["--bidir"]))}


def probe(hosts, options):
    """Gbit/s of each direction that iperf3 uses."""
    server = hosts.on_rank(0, ["iperf3", "--server", "--one-off", "--forceflush"])
    client = hosts.on_rank(1, ["iperf3", "--client", hosts.address, "--time", str(PROBE_S), "--omit", "1", "--json",
                               *options])
    with subprocess.Popen(server, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            while "listening" not in (line := process.stdout.readline()):
                if not line:
                    raise Unavailable("iperf3 does not start; remedy: .ci/setup hosts")
            done = subprocess.run(client, capture_output=True, text=True, check=False)
            end = json.loads(done.stdout)["end"]
            return [end[sums]["bits_per_second"] / 1e9 for sums in ("sum_received", "sum_received_bidir_reverse")
                    if sums in end]
        except (ValueError, KeyError) as e:
            raise Unavailable(f"iperf3 cannot measure the link: {(done.stdout or done.stderr).strip()}; remedy: "
                              "check that no firewall drops packets of 10.77.0.0/24") from e
        finally:
            process.kill()
