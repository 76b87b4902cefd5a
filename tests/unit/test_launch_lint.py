"""Warnings from a script's syntax tree: each where it applies, and none about common correct code."""

from __future__ import annotations

import ast
import gc
import os
import textwrap
import warnings
from pathlib import Path

import pytest

from gpuboard.launch.lint.rules import RULES
from gpuboard.launch.lint.script import script_checks
from gpuboard.launch.preflight.check import check_text
from gpuboard.launch.target import Target

ROOT = Path(__file__).parents[2]
IMPORTS = """
import os, sys
import multiprocessing
import torch
import torch.nn as nn
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
"""
FIRST = IMPORTS.count("\n")


def found(folder: Path, script: str) -> dict[str, str]:
    """Return check name → evidence of a script after IMPORTS; its lines count from 1."""
    (folder / "train.py").write_text(IMPORTS + textwrap.dedent(script).lstrip("\n"))
    checks = script_checks(Target("script", "train.py"), folder)
    assert all(check.status == "warn" and check.cause and check.remedy for check in checks)
    assert not any("\n" in text for check in checks for text in (check.evidence, check.cause, check.remedy))
    lines = {f"train.py:{FIRST + n}": f"train.py:{n}" for n in range(1, 60)}
    evidence: dict[str, list[str]] = {}  # a name may have several checks
    for check in checks:
        evidence.setdefault(check.name.removeprefix("script: "), []).append(_relative(check.evidence, lines))
    return {name: ", ".join(texts) for name, texts in evidence.items()}


def _relative(text: str, lines: dict[str, str]) -> str:
    for there, here in sorted(lines.items(), key=lambda item: -len(item[0])):
        text = text.replace(f"{there} ", f"{here} ")
    return text


WARNED = [
    (
        """
        model = nn.Linear(2, 2).cuda()
        def main():
            multiprocessing.Process(target=print).start()
        """,
        {"CUDA before fork": f"train.py:1 initializes CUDA during import, and line {FIRST + 3} starts processes"},
    ),
    (
        """
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = nn.Linear(2, 2).to(device)
        def main():
            os.fork()
        """,
        {"CUDA before fork": f"train.py:2 initializes CUDA during import, and line {FIRST + 4} starts processes"},
    ),
    (
        """
        def setup(port):
            os.environ["MASTER_ADDR"] = "localhost"
            os.environ["MASTER_PORT"] = str(12355)
        os.environ.update({"MASTER_PORT": "29500"})
        """,
        {"fixed port": "train.py:3 sets MASTER_PORT to 12355, train.py:4 sets MASTER_PORT to 29500"},
    ),
    (
        """
        dist.init_process_group("gloo", init_method="tcp://10.0.0.1:29500", rank=0, world_size=2)
        dist.init_process_group("gloo", f"tcp://{os.environ['MASTER_ADDR']}:29501", rank=0, world_size=2)
        """,
        {
            "fixed init_method": "train.py:1 passes init_method with port 29500, "
            "train.py:2 passes init_method with port 29501"
        },
    ),
    (
        """
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        def main(args):
            args.rank = dist.get_rank()
            torch.cuda.set_device(args.rank)
            model = DDP(nn.Linear(2, 2).to(f"cuda:{rank}"), device_ids=[rank])
        """,
        {"RANK as device": "train.py:4 uses RANK as the number of a GPU, train.py:5 uses RANK as the number of a GPU"},
    ),
    (
        """
        def setup(local_rank):
            dist.init_process_group("nccl")
            dist.barrier()
            torch.cuda.set_device(local_rank)
            dist.barrier()
        """,
        {
            "init before set_device": "train.py:3 calls barrier after init_process_group and before set_device "
            f"(line {FIRST + 4})"
        },
    ),
    (
        """
        try:
            dist.init_process_group("nccl")
        except Exception as error:
            print(error)
            sys.exit(0)
        """,
        {"except around init": "train.py:3 handles every error of init_process_group and goes on"},
    ),
    (
        """
        class Net(nn.Module):
            def forward(self, x):
                try:
                    return self.layer(x)
                except (RuntimeError, Exception):
                    return x
        """,
        {"except in forward": "train.py:5 handles every error inside forward and goes on"},
    ),
    (
        """
        def step(loss):
            loss.backward()
            dist.all_reduce(loss.grad)
        """,
        {"all_reduce of loss.grad": "train.py:3 calls all_reduce(loss.grad)"},
    ),
    (
        """
        def main():
            context = multiprocessing.get_context("spawn")
            context.Process(target=print).start()
        main()
        """,
        {"no __main__ guard": 'train.py:3 starts processes (Process) outside `if __name__ == "__main__":`'},
    ),
    (
        """
        def run(rank, world_size):
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", rank=rank, world_size=world_size)
        if __name__ == "__main__":
            world_size = torch.cuda.device_count()
            if world_size > 1:
                mp.spawn(run, args=(world_size,), nprocs=world_size)
        """,
        {"own spawning": "train.py:7 calls mp.spawn"},
    ),
    (
        """
        def run(rank, size):
            dist.init_process_group("nccl", rank=rank, world_size=size)
        if __name__ == "__main__":
            for rank in range(2):
                mp.Process(target=run, args=(rank, 2)).start()
        """,
        {"own spawning": "train.py:5 starts processes that call init_process_group"},
    ),
    (
        """
        def setup(rank, world_size):
            torch.cuda.set_device(rank)
        def main(rank):
            setup(rank, 2)
            return torch.device(f"cuda:{rank}")
        main(int(os.environ["RANK"]))
        """,
        {"RANK as device": "train.py:2 uses RANK as the number of a GPU, train.py:5 uses RANK as the number of a GPU"},
    ),
    (
        """
        os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
        """,
        {"fixed GPUs": "train.py:1 sets CUDA_VISIBLE_DEVICES to 0,1"},
    ),
    (
        """
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
        local_rank = int(os.getenv("LOCAL_RANK", 0))
        if torch.cuda.is_available():
            os.environ["CUDA_VISIBLE_DEVICES"] = f"{local_rank}"
        def setup(rank):
            os.environ.update({"CUDA_VISIBLE_DEVICES": str(rank)})
        setup(local_rank)
        """,
        {
            "rank as GPUs": "train.py:1 sets CUDA_VISIBLE_DEVICES to the number of a rank, "
            "train.py:4 sets CUDA_VISIBLE_DEVICES to the number of a rank, "
            "train.py:6 sets CUDA_VISIBLE_DEVICES to the number of a rank"
        },
    ),
    (
        """
        os.environ["RANK"] = "0"
        def setup():
            os.environ.update({"WORLD_SIZE": "1", "MASTER_ADDR": "localhost"})
        if __name__ == "__main__":
            setup()
        """,
        {"fixed RANK": "train.py:1 sets RANK to 0, train.py:3 sets WORLD_SIZE to 1"},
    ),
    (
        """
        def setup():
            if torch.cuda.device_count() > 1:
                with torch.no_grad():
                    os.environ["LOCAL_RANK"] = "0"
        def main():
            if len(sys.argv) > 9:
                sys.exit("usage")
            try:
                setup()
            finally:
                print("end")
        try:
            main()
        except KeyboardInterrupt:
            pass
        """,
        {"fixed RANK": "train.py:4 sets LOCAL_RANK to 0"},
    ),
    (
        """
        def main():
            os.environ["RANK"] = "0"
        """,
        {"fixed RANK": "train.py:2 sets RANK to 0"},
    ),
    (
        """
        class Net(nn.Module):
            def forward(self, x):
                try:
                    return self.layer(x)
                except Exception:
                    return torch.zeros_like(x)
        """,
        {"except in forward": "train.py:5 handles every error inside forward and goes on"},
    ),
]


@pytest.mark.parametrize(("script", "warned"), WARNED)
def test_what_is_known_to_fail_is_reported_with_its_line(tmp_path: Path, script: str, warned: dict[str, str]) -> None:
    assert found(tmp_path, script) == warned


@pytest.mark.parametrize(
    ("variable", "alone", "what", "cause"),
    [
        ("RANK", "0", "RANK", "several ranks would be the same one"),
        ("LOCAL_RANK", "0", "RANK", "all ranks of a node would use the same GPU"),
        ("WORLD_SIZE", "1", "RANK", "with another number of ranks init_process_group fails, or waits"),
        ("CUDA_VISIBLE_DEVICES", "0", "GPUs", "the ranks would use these GPUs in place of those that were chosen"),
    ],
)
def test_a_fixed_variable_is_explained_by_its_own_name(
    tmp_path: Path, variable: str, alone: str, what: str, cause: str
) -> None:
    (tmp_path / "train.py").write_text(f"{IMPORTS}os.environ['{variable}'] = '3'\n")
    (check,) = script_checks(Target("script", "train.py"), tmp_path)
    assert (check.name, check.status) == (f"script: fixed {what}", "warn")
    assert check.cause.startswith(cause)
    assert check.remedy.startswith(f"delete that line: gpuboard launch sets {variable} for each rank; ")
    assert check.remedy.endswith(f'os.environ.setdefault("{variable}", "{alone}")')


def test_a_positional_only_parameter_may_be_the_rank(tmp_path: Path) -> None:
    script = """
        def setup(device, /, net):
            torch.cuda.set_device(device)
        setup(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
        """
    assert found(tmp_path, script) == {"RANK as device": "train.py:2 uses RANK as the number of a GPU"}


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in RULES} == {f"script: {name}" for _, warned in WARNED for name in warned}


CORRECT = {
    "a script for torchrun": """
        local_rank = int(os.environ["LOCAL_RANK"])
        rank = int(os.environ["RANK"])
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl")
        model = DDP(nn.Linear(2, 2).to(device), device_ids=[local_rank])
        x = torch.zeros(1, device=f"cuda:{local_rank}")
    """,
    "the device from the rank, modulo": """
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl")
        rank = dist.get_rank()
        device_id = rank % torch.cuda.device_count()
        model = nn.Linear(2, 2).to(device_id)
    """,
    "a rank that is a parameter": """
        rank = int(os.environ["RANK"])
        def main(rank):
            torch.cuda.set_device(rank)
    """,
    "a parameter that may be another number than RANK, or is changed": """
        def setup(rank):
            torch.cuda.set_device(rank)
        def local(rank):
            rank = rank % torch.cuda.device_count()
            torch.cuda.set_device(rank)
        def started(rank):
            torch.cuda.set_device(rank)
        setup(int(os.environ["RANK"]))
        setup(int(os.environ["LOCAL_RANK"]))
        local(int(os.environ["RANK"]))
        started(int(os.environ["RANK"]))
        print(started)
    """,
    "a RANK for plain python, or of processes that the script starts": """
        os.environ.setdefault("RANK", "0")
        if "RANK" not in os.environ:
            os.environ["RANK"], os.environ["WORLD_SIZE"] = "0", "1"
            os.environ["LOCAL_RANK"] = "0"
        def worker(port):
            os.environ["WORLD_SIZE"] = "2"
        def main(args):
            if args.local:
                os.environ["RANK"] = "0"
            if args.spawn:
                mp.spawn(worker, args=(2,), nprocs=2)
    """,
    "no GPU, or a GPU for plain python": """
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
        if "RANK" not in os.environ:
            os.environ["CUDA_VISIBLE_DEVICES"] = "0"
    """,
    "a RANK where there is one GPU": """
        def main():
            print(1)
        if torch.cuda.device_count() > 1:
            main()
        else:
            os.environ["RANK"] = "0"
            os.environ["WORLD_SIZE"] = "1"
    """,
    "a RANK after a return or an exit": """
        def main():
            if torch.cuda.device_count() > 1:
                return
            os.environ["RANK"] = "0"
        main()
        if len(sys.argv) > 1:
            sys.exit(print())
        os.environ["RANK"] = "0"
    """,
    "a RANK for imports": """
        if __name__ != "__main__":
            os.environ["RANK"] = "0"
    """,
    "a RANK that is set only where there is none": """
        "RANK" in os.environ or os.environ.update({"RANK": "0"})
        os.environ.update({"WORLD_SIZE": "1"}) if "WORLD_SIZE" not in os.environ else None
        while "RANK" not in os.environ:
            os.environ["RANK"] = "0"
    """,
    "a RANK in a function that an option calls, or nothing": """
        def single():
            os.environ["RANK"] = "0"
            os.environ["WORLD_SIZE"] = "1"
        def indirect():
            single()
        def unused():
            os.environ["RANK"] = "0"
            indirect()
        if __name__ == "__main__":
            args = sys.argv
            if args.single:
                single()
            for _ in args.runs:
                indirect()
    """,
    "a RANK in one of two functions, a handler, a lambda or a default": """
        try:
            import horovod
            os.environ["RANK"] = "0"
        except ImportError:
            os.environ["RANK"] = "0"
        else:
            os.environ["RANK"] = "0"
        alone = lambda: os.environ.update({"RANK": "0"})
        if sys.flags.debug:
            def setup():
                os.environ["RANK"] = "0"
        else:
            def setup():
                print(1)
        setup()
        match sys.argv:
            case [_]:
                os.environ["RANK"] = "0"
        class Run:
            def alone(self):
                os.environ["RANK"] = "0"
    """,
    "mp.spawn in the other branch": """
        if __name__ != "__main__":
            mp.spawn(print, nprocs=2)
        if __name__ == "__main__":
            if torch.cuda.is_available():
                print(1)
            else:
                mp.spawn(print, nprocs=2)
    """,
    "LOCAL_RANK after a positional-only parameter": """
        def setup(net, /, device):
            torch.cuda.set_device(device)
        setup(int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]))
    """,
    "processes that are no ranks": """
        def load(queue):
            queue.put(1)
        if __name__ == "__main__":
            mp.Process(target=load, args=(None,)).start()
    """,
    "a default port": """
        os.environ.setdefault("MASTER_PORT", "29500")
        os.environ["MASTER_PORT"] = os.environ.get("MASTER_PORT", "29500")
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = "29500"
        try:
            port = os.environ["MASTER_PORT"]
        except KeyError:
            os.environ["MASTER_PORT"] = "29500"
    """,
    "a port for runs without a launcher": """
        def init(args):
            if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
                args.rank = int(os.environ["RANK"])
            elif torch.cuda.is_available():
                os.environ["MASTER_PORT"] = "29500"
        def other():
            if dist.is_initialized():
                return
            os.environ["MASTER_PORT"] = "29500"
    """,
    "an URL from the environment": """
        dist.init_process_group("nccl", init_method="env://")
        dist.init_process_group("nccl", init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    """,
    "init before the device": """
        def main(args):
            dist.init_process_group("nccl")
            args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
            torch.cuda.set_device(args.rank % torch.cuda.device_count())
            dist.barrier()
    """,
    "a collective before the device with gloo, a device_id, device_ids, or an unknown backend": """
        def main():
            dist.init_process_group("gloo")
            dist.barrier()
            torch.cuda.set_device(0)
        def other(device, args):
            dist.init_process_group("nccl", device_id=device)
            dist.barrier()
            torch.cuda.set_device(device)
        def third(device):
            dist.init_process_group("nccl")
            dist.barrier(device_ids=[device])
            torch.cuda.set_device(device)
        def fourth(args):
            dist.init_process_group(args.backend)
            dist.barrier()
            torch.cuda.set_device(args.gpu)
    """,
    "handlers that raise, exit or expect an error": """
        try:
            dist.init_process_group("nccl")
        except KeyboardInterrupt:
            pass
        except Exception as error:
            print(error)
            raise
        try:
            dist.init_process_group("nccl")
        except Exception as error:
            sys.exit(f"failed: {error}")
        try:
            dist.init_process_group("nccl")
        except Exception:
            dist.init_process_group("gloo")
        class Net(nn.Module):
            def forward(self, x):
                try:
                    import flash_attn
                except Exception:
                    pass
                try:
                    return x
                except ValueError:
                    return x
    """,
    "gradients of parameters": """
        for p in nn.Linear(2, 2).parameters():
            dist.all_reduce(p.grad)
        loss = torch.ones(1)
        dist.all_reduce(loss)
    """,
    "CUDA in a script that starts no processes": """
        model = nn.Linear(2, 2).cuda()
        loader = torch.utils.data.DataLoader([], num_workers=4)
    """,
    "questions to CUDA that initialize nothing": """
        use_cuda = torch.cuda.is_available() and torch.cuda.device_count() > 1
        torch.cuda.manual_seed_all(0)
        scaler = torch.cuda.amp.GradScaler()
        def main():
            multiprocessing.Process(target=print).start()
    """,
    "a guarded helper process": """
        def main():
            multiprocessing.Process(target=print).start()
        if __name__ == "__main__":
            main()
    """,
    "forked helpers need no guard": """
        multiprocessing.set_start_method("fork")
        multiprocessing.Pool(2)
    """,
    "a port of processes that the script starts itself, or with a RANK of its own": """
        def worker(rank, world):
            os.environ["MASTER_PORT"] = "12355"
            dist.init_process_group("gloo", init_method="tcp://localhost:12355", rank=rank, world_size=world)
        def alone(args):
            if args.debug:
                os.environ["RANK"], os.environ["MASTER_PORT"] = "0", "12355"
                os.environ["MASTER_PORT"] = "12355"
        def main(args):
            if args.spawn:
                mp.spawn(worker, args=(2,), nprocs=2)
            alone(args)
    """,
    "an init that is tried again": """
        def init():
            while True:
                try:
                    return dist.init_process_group("nccl")
                except Exception:
                    print("again")
    """,
    "a pool for the CPU": """
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        def evaluate(outputs):
            with multiprocessing.Pool(4) as pool:
                return pool.map(len, outputs)
    """,
    "one of the chosen GPUs, or those that an option names": """
        local_rank = int(os.environ["LOCAL_RANK"])
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[local_rank]
        def setup(args):
            os.environ["CUDA_VISIBLE_DEVICES"] = str(args.gpus)
    """,
    "another way to compute": """
        class Net(nn.Module):
            def forward(self, x):
                try:
                    return torch.ops.fast.linear(x)
                except Exception:
                    return self.slow(x)
    """,
    "processes at import, forked by default": """
        multiprocessing.Process(target=print).start()
    """,
    "mp.spawn if an option asks for it": """
        def launch(main, n, args):
            if n > 1:
                mp.spawn(main, nprocs=n, args=args)
    """,
    "mp.spawn without a launcher only": """
        if __name__ == "__main__":
            if "RANK" in os.environ:
                print("launched")
            else:
                mp.spawn(print, nprocs=2)
    """,
    "mp.spawn with an option only": """
        def main(args):
            if args.multiprocessing_distributed:
                mp.spawn(print, nprocs=2)
    """,
}


@pytest.mark.parametrize("script", CORRECT.values(), ids=CORRECT.keys())
def test_nothing_is_said_about_correct_code(tmp_path: Path, script: str) -> None:
    assert found(tmp_path, script) == {}


def test_nothing_is_said_about_the_examples() -> None:
    scripts = [*ROOT.glob("examples/*.py"), *ROOT.glob("tests/scripts/**/*.py"), *ROOT.glob("gpuboard/demo_train.py")]
    assert len(scripts) > 5
    for script in scripts:
        assert script_checks(Target("script", str(script)), ROOT) == [], script


@pytest.mark.parametrize(
    ("target", "file"),
    [
        (Target("script", "train.py"), "train.py"),
        (Target("script", "folder"), "folder/__main__.py"),
        (Target("module", "package.train"), "package/train.py"),
        (Target("module", "package"), "package/__main__.py"),
        (Target("function", "package.train:main"), "package/train.py"),
        (Target("function", "package:main"), "package/__init__.py"),
    ],
)
def test_every_kind_of_target_is_read(tmp_path: Path, target: Target, file: str) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("import os, torch\nos.environ['MASTER_PORT'] = '1'\n")
    assert [check.evidence for check in script_checks(target, tmp_path)] == [f"{file}:2 sets MASTER_PORT to 1"]
    assert script_checks(Target("program", target.name), tmp_path) == []


BAD = "import os, torch\nos.environ['MASTER_PORT'] = '1'\n"
UNREADABLE = {
    "no file": None,
    "a syntax error": f"{BAD}if:\n",
    "a NUL": f"{BAD}\0\n",
    "nested too deeply": f"{BAD}x = {'-' * 100_000}1\n",
    "too large": BAD + "#" * 300_000,
    "not UTF-8": b"import torch # \xff\n",
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_file_that_cannot_be_read_is_left_to_the_ranks(tmp_path: Path, text: str | bytes | None) -> None:
    if text is not None:
        (tmp_path / "train.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert script_checks(Target("script", "train.py"), tmp_path) == []


def test_a_fifo_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.py")
    assert script_checks(Target("script", "train.py"), tmp_path) == []


def test_warnings_of_the_parser_are_not_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAD + 'pattern = "\\d"\n')
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(script_checks(Target("script", "train.py"), tmp_path)) == 1


def test_no_syntax_tree_is_kept(tmp_path: Path) -> None:
    assert found(tmp_path, "rank = dist.get_rank()\ndef kept(a):\n    torch.cuda.set_device(rank)\n")
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, ast.FunctionDef) and one.name == "kept"]


def test_many_places_are_counted(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BAD + BAD.splitlines()[1] + "\n" + "os.environ['MASTER_PORT'] = '2'\n" * 8)
    check = script_checks(Target("script", "train.py"), tmp_path)[0]
    assert check.evidence.endswith("train.py:4 sets MASTER_PORT to 2, 7 more")
    assert check_text(check).startswith("warn script: fixed port: train.py:2 sets MASTER_PORT to 1, train.py:3 sets")


def test_a_program_of_another_interpreter_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text("#!/usr/bin/env bash\nexec python train.py\n")
    (check,) = script_checks(Target("script", "train.sh"), tmp_path)
    assert (check.name, check.evidence) == ("script: not Python", "train.sh begins with #!/usr/bin/env bash")
    assert "--no-python train.sh" in check.remedy
    assert script_checks(Target("program", "train.sh"), tmp_path) == []
    script.write_text("#!/usr/bin/env python3\n")
    assert script_checks(Target("script", "train.sh"), tmp_path) == []
