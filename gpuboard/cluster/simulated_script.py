"""The scripts of the demo's cluster: jobs, leases and faults over time. Pure: seed → scripts.

They are played by gpuboard/agent/simulate/life.py. A part is written by hand, so that everything the board can show
appears within the first two minutes; the rest is random.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from gpuboard.agent.simulate.life import PIDS

PERIOD_S = 900.0
_GIB = 2**30
_HOUR = 3600.0
_DAY = 24 * _HOUR
PEOPLE = ("alice", "bob", "carol", "dave", "erin", "frank")
_FIRST_UID = 2000001  # beyond real uids, so that no simulated process counts as this user's
_COMMANDS = (
    ("python train.py --config vit_b16.yaml --lr 3e-4", "train", 0.72, 93),
    ("python finetune.py --model mistral-7b --lora 16", "train", 0.81, 88),
    ("python eval.py --checkpoint step_042000.pt", "train", 0.41, 71),
    ("python -m vllm.entrypoints.openai.api_server --port 8000", "serve", 0.90, 54),
    ("python sweep.py --trial 17 --epochs 40", "train", 0.33, 82),
    ("gmx mdrun -deffnm production -nb gpu", "train", 0.09, 96),
    ("python -m ipykernel_launcher -f kernel-5d1c.json", "notebook", 0.22, 35),
    ("python diffusion.py --resolution 512 --batch 32", "train", 0.77, 97),
)

_Shape = tuple[int, int, Mapping[str, Sequence[tuple[str, int]]]]
_Script = dict[str, Any]


def scripts(nodes: Mapping[str, _Shape], seed: int) -> dict[str, _Script]:
    """Return each node's script. ``nodes``: name → GPUs, bytes per GPU, MIG devices as in a description."""
    writer = _Writer(seed, nodes)
    _leases(writer)
    _faults(writer)
    _oddities(writer)
    for name in nodes:
        writer.fill(name)
    return writer.scripts


class _Writer:
    """Collects the scripts."""

    def __init__(self, seed: int, nodes: Mapping[str, _Shape]) -> None:
        self.dice = random.Random(seed)
        self.nodes = nodes
        self.scripts: dict[str, _Script] = {
            name: {"seed": seed + k, "period": PERIOD_S, "jobs": [], "claims": [], "faults": [], "hangs": []}
            for k, name in enumerate(nodes)
        }
        self._pid = PIDS + 17
        self._scripted: dict[str, set[str]] = {name: set() for name in nodes}  # GPUs without random jobs

    def job(
        self, node: str, gpus: str, user: str | None, what: tuple[str, float, int], *,
        start: float = -_DAY, until: float | None = None, shape: str = "train", **more: Any,
    ) -> None:  # fmt: skip
        """Add a job. ``gpus`` as ``"0 1 5/1"``; ``user`` None: its owner is hidden; ``what``: command, GiB and percent
        on each GPU."""
        command, memory, utilization = what
        who = {} if user is None else {"user": user, "uid": uid(user)}
        self._scripted[node].update(gpus.split())
        self._pid += 40 + self.dice.randrange(2000)
        self.scripts[node]["jobs"].append(
            {
                "gpus": gpus.split(), "from": start, "until": until, "command": command, "pid": self._pid,
                "memory": int(memory * _GIB), "utilization": utilization, "shape": shape, **who, **more,
            }
        )  # fmt: skip

    def lease(
        self, lease: str, user: str, gpus: Mapping[str, str], purpose: str, *,
        start: float = -_HOUR, until: float | None = None, for_s: float = 12 * _HOUR,
    ) -> None:  # fmt: skip
        """Add a lease over one or several nodes."""
        count = sum(len(on_node.split()) for on_node in gpus.values())
        for node, on_node in gpus.items():
            self._scripted[node].update(on_node.split())
            self.scripts[node]["claims"].append(
                {
                    "gpus": on_node.split(), "from": start, "until": until, "user": user, "uid": uid(user),
                    "lease": lease, "purpose": purpose, "for_s": for_s, "nodes": sorted(gpus), "count": count,
                }
            )  # fmt: skip

    def fault(
        self, node: str, gpus: str, start: float, until: float | None, *, xids: Sequence[int] = (), **reading: Any
    ) -> None:
        """Add values that readings have from ``start`` on, and the XIDs that the driver reports then."""
        self.scripts[node]["faults"].append(
            {"gpus": gpus.split(), "from": start, "until": until, "reading": reading, "xids": list(xids)}
        )

    def free(self, node: str, gpus: str) -> None:
        """Leave these GPUs to the user of the demo."""
        self._scripted[node].update(gpus.split())

    def fill(self, node: str) -> None:
        """Add random jobs on all GPUs without a script."""
        count, memory, mig = self.nodes[node]
        whole = [str(k) for k in range(count) if str(k) not in mig]
        parts = [(f"{gpu}/{d}", size) for gpu, devices in mig.items() for d, (_, size) in enumerate(devices)]
        left = [(gpu, memory) for gpu in whole] + parts
        for gpu, size in left:
            if gpu not in self._scripted[node]:
                self._random_jobs(node, gpu, size)

    def _random_jobs(self, node: str, gpu: str, memory: int) -> None:
        dice = self.dice
        at = dice.uniform(-200.0, 60.0)
        end = at + PERIOD_S - 30.0
        while at < end - 60.0:
            lasts_s = min(end - at, dice.uniform(70.0, 420.0))
            command, shape, share, utilization = dice.choice(_COMMANDS)
            user = dice.choice(PEOPLE)
            more: dict[str, Any] = {"container": f"{dice.randrange(16**12):012x}"} if dice.random() < 0.3 else {}
            self.job(
                node, gpu, user, (command, share * memory / _GIB, utilization),
                start=round(at, 1), until=round(at + lasts_s, 1), shape=shape, **more,
            )  # fmt: skip
            at += lasts_s + dice.uniform(25.0, 160.0)


def uid(user: str) -> int:
    """Return the uid of one of the simulated people."""
    return _FIRST_UID + PEOPLE.index(user)


def _leases(writer: _Writer) -> None:
    # A training on two nodes under one lease, which lasts for hours.
    writer.lease("h4t9wd", "alice", {"sim01": "0 1 2 3", "sim02": "4 5 6 7"}, "llama-8b pretraining", start=-5 * _HOUR)
    pretraining = ("python pretrain.py --config llama_8b.yaml", 71.5, 96)
    for node, gpus in (("sim01", "0 1 2 3"), ("sim02", "4 5 6 7")):
        writer.job(node, gpus, "alice", pretraining, start=-5 * _HOUR + 40, lease="h4t9wd")
    # Reserved for hours, but idle.
    writer.lease("q7m2ka", "carol", {"sim01": "5"}, "debug the loader", start=-3 * _HOUR, for_s=8 * _HOUR)
    writer.free("sim01", "6 7")
    # A user without a lease on a reserved GPU.
    writer.lease("c8x3rn", "erin", {"sim02": "0 1"}, "rlhf sweep", start=-0.7 * _HOUR, for_s=6 * _HOUR)
    writer.job("sim02", "0", "erin", ("python rlhf.py --beta 0.1", 58, 90), start=-0.6 * _HOUR, lease="c8x3rn")
    gan = ("python train_gan.py --gpu 1", 21, 77)
    writer.job("sim02", "1", "dave", gan, start=20.0, until=420.0, rogue=True)
    writer.free("sim02", "3")
    # A lease that begins and ends during the demo.
    course = ("torchrun --nproc-per-node 4 lab3.py", 14, 85)
    writer.lease("t5w8pz", "frank", {"sim03": "0 1 2 3"}, "course ML2", start=30.0, until=600.0, for_s=2 * _HOUR)
    writer.job("sim03", "0 1 2 3", "frank", course, start=42.0, until=520.0, lease="t5w8pz")
    writer.free("sim03", "12 13 14 15")
    # Ordinary leases.
    writer.lease("m5v9ct", "bob", {"sim04": "0 2"}, "qwen ablations", start=-2.2 * _HOUR, for_s=9 * _HOUR)
    writer.job("sim04", "0 2", "bob", ("python train.py --lora 16", 48, 93), start=-2.1 * _HOUR, lease="m5v9ct")
    writer.lease("k9r2hj", "dave", {"sim05": "0"}, "nightly eval", start=-0.4 * _HOUR, for_s=3 * _HOUR)
    writer.job("sim05", "0", "dave", ("python eval.py --suite full", 37, 81), start=-0.3 * _HOUR, lease="k9r2hj")
    # A MIG device.
    notebook = ("python -m ipykernel_launcher -f kernel-91ab.json", 9, 40)
    writer.lease("y3k7fb", "frank", {"sim05": "2/0"}, "notebook", start=-1.2 * _HOUR, for_s=4 * _HOUR)
    writer.job("sim05", "2/0", "frank", notebook, start=-_HOUR, shape="notebook", lease="y3k7fb")
    writer.job("sim05", "3/0", "dave", ("python eval.py --suite mmlu", 27, 80), start=-0.4 * _HOUR)
    writer.free("sim05", "2/1 3/1 3/2 3/3")


def _faults(writer: _Writer) -> None:
    # A GPU falls off the bus, one has an uncorrected error, one overheats, one has a narrow PCIe link.
    writer.fault("sim03", "11", 45.0, 780.0, xids=[79], lost=True, error="fallen off the bus")
    writer.fault("sim03", "4", -5 * _HOUR, None, xids=[94], ecc_uncorrected=2)
    writer.fault("sim04", "3", 35.0, 590.0, throttle=["hw_thermal"], temperature=93, utilization=58, power=254.0)
    writer.job("sim04", "3", "carol", ("python diffusion.py --resolution 1024", 66, 97), start=-2 * _HOUR)
    writer.fault("sim07", "3", -_DAY, None, pcie_width=4)
    # A node that stops answering, and recovers.
    writer.scripts["sim07"]["hangs"] += [[70.0, 112.0], [520.0, 556.0]]


def _oddities(writer: _Writer) -> None:
    # Processes of a lease that has ended.
    writer.job("sim04", "1", "bob", ("python finetune.py --model qwen2-7b", 62, 91), start=-26 * _HOUR, lease="n6d4ve")
    # A process with a hidden owner; memory in use without a visible process.
    server = ("/opt/app/server --listen 0.0.0.0:9000", 12, 44)
    writer.job("sim06", "1", None, server, shape="serve", container="6f1d0c9ab27e")
    writer.free("sim06", "2")
    writer.fault("sim06", "2", -_DAY, None, memory_used=18 * _GIB)
