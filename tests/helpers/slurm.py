"""A real Slurm on this machine: its controller, and a slurmd for each of its nodes, all in a folder of their own.

It needs root and the packages of `INSTALL`, and leaves the machine's own Slurm, if there is one, alone. Nodes have
more cores and GPUs than the machine, so that the scripts of every site fit; nothing confines a job (no cgroups). The
queue is looked at every two seconds, not every half minute, and who is to end is killed after five, not thirty.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil


INSTALL = "apt-get install -y --no-install-recommends slurm-wlm munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo")
LONGEST = 540.0  # seconds that anything is waited for: who waits asks again and again
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0,bf_interval=2
KillWait=5
GresTypes=gpu
MinJobAge=86400
ReturnToService=2
SlurmdParameters=config_overrides
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=288 Gres=gpu:{gpus} Feature=gpu\n"


def why_not() -> str | None:
    """Why there can be no Slurm here, and what to do about it."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"there is no {', '.join(lacking)}: {INSTALL}"
    return "the daemons of Slurm need root" if os.geteuid() != 0 else None


def wait_for(what: Callable[[], object], why: str) -> object:
    """Asks until the answer is not empty, and returns it.

    Raises:
        TimeoutError: It was empty for `LONGEST` seconds.
    """
    end = time.monotonic() + LONGEST
    while not (found := what()):
        if time.monotonic() > end:
            raise TimeoutError(f"waited {LONGEST:.0f} s for {why}")
        time.sleep(0.2)
    return found


class Slurm:
    """Slurm's programs, asked as a user asks them; `slurm()` starts it."""

    def __init__(self, folder: Path, nodes: int, gpus: int) -> None:
        host = socket.gethostname()
        self.folder = folder
        # The first node has the machine's own name, so that ranks find it by the name that Slurm gives.
        self.nodes = [host, *(f"{host}-{number}" for number in range(2, nodes + 1))]
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen] = {}
        controller, *ports = _free_ports(nodes + 1)
        text = SETTINGS.format(host=host, controller=controller, folder=folder)
        for name, port in zip(self.nodes, ports, strict=True):
            text += NODE.format(name=name, host=host, port=port, gpus=gpus)
        text += f"PartitionName=batch Nodes={','.join(self.nodes)} Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(text)
        # A device of a job is a file; these are empty.
        for number in range(gpus):
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/gpu[0-{gpus - 1}]\n")
        (folder / "state").mkdir()

    def start(self) -> None:
        """Starts all daemons, and waits until every node is idle."""
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        own = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        files = [f"--{option}={self.folder / name}" for option, name in own.items()]
        self._begin("munged", "munged", "--foreground", f"--key-file={key}", *files)
        wait_for((self.folder / "munge.socket").exists, "munged")
        self._begin("slurmctld", "slurmctld", "-D", "-i")
        for name in self.nodes:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, and wait until the node is idle."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._begin(name, "slurmd", "-D", "-N", name)
        self.wait_until_idle(name)

    def kill_node(self, name: str) -> None:
        """Kill the slurmd of a node, have the controller notice it now, not in minutes, and kill what ran there."""
        self._daemons.pop(name).kill()
        self("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=killed")
        for process in self._ranks_on(name):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def wait_until_idle(self, *names: str) -> None:
        """Wait until these nodes are free and nothing of a job is left on them."""
        for name in names:
            wait_for(lambda name=name: self._state(name) == "idle" and not self._ranks_on(name), f"node {name}")

    def stop(self) -> None:
        """Kills every daemon, and what jobs have started."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and parent.name().startswith("slurmstepd"):  # it hides its environment
                    parent.kill()
                process.kill()

    def __call__(self, *words: object, **environment: object) -> str:
        """Runs a program, and returns what it prints.

        Raises:
            ValueError: It failed; the message has what it said.
        """
        given = self.environment | {name: str(value) for name, value in environment.items()}
        command = [str(word) for word in words]
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=LONGEST, check=False)
        if done.returncode:
            raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What Slurm knows of a job, such as JobState, Restarts and ExitCode; of an array that of its last task."""
        words = self("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of these states, and returns what `job` says.

        Raises:
            AssertionError: It ended in another way.
        """
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY"}

        def found() -> dict[str, str] | None:
            job = self.job(number)
            if job["JobState"] in ended - set(states):
                raise AssertionError(f"job {number} is {job['JobState']}, {job['ExitCode']}, not {states}")
            return job if job["JobState"] in states else None

        return wait_for(found, f"job {number} to be {states}")

    def _processes(self) -> list[psutil.Process]:
        """All that daemons and jobs have started: they have this Slurm's settings in their environment."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return found

    def _ranks_on(self, name: str) -> list[psutil.Process]:
        """Processes of jobs on a node."""
        found = []
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURMD_NODENAME") == name and "SLURM_JOB_ID" in process.environ():
                    found.append(process)
        return found

    def _state(self, name: str) -> str:
        """Of a node, as sinfo has it; empty while there is no controller to ask."""
        try:
            return self("sinfo", "--noheader", f"--nodes={name}", "--format=%T").strip()
        except ValueError:
            return ""

    def _begin(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "a", encoding="utf-8") as log:
            self._daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)


@contextlib.contextmanager
def slurm(nodes: int = 2, gpus: int = 8) -> Iterator[Slurm]:
    """A Slurm for as long as the block lasts; its nodes are idle when it begins."""
    # Not in pytest's folder, whose path may be longer than that of a socket can be.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    folder.chmod(0o755)  # munged wants every user to come to its socket
    made = Slurm(folder, nodes, gpus)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _path() -> str:
    """Where daemons lie, too."""
    return f"{os.environ['PATH']}:/usr/local/sbin:/usr/sbin"


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
