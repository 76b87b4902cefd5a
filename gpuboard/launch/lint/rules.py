"""What is known to hang or fail under a launcher, each with its cure (pure). In doubt a rule does not warn."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import pairwise

import msgspec

from gpuboard.launch.lint.tree import Function, ScriptTree, argument, constant, unwrapped

Found = Iterator[tuple[int, str]]  # line, what is there
_Exits = dict[ast.AST | None, int]  # function → its first line that may end it; None: the module

_INIT = "torch.distributed.init_process_group"
_SPAWN = {"torch.multiprocessing.spawn", "torch.multiprocessing.spawn.spawn", "torch.multiprocessing.start_processes"}
_POOLS = {"multiprocessing.Pool", "torch.multiprocessing.Pool", "concurrent.futures.ProcessPoolExecutor"}
_PROCESSES = {*_SPAWN, *_POOLS, "multiprocessing.Process", "torch.multiprocessing.Process"}
# Calls that initialize CUDA. Others do not: is_available, device_count, manual_seed, amp
_CUDA = {
    f"torch.cuda.{name}"
    for name in ("init", "set_device", "current_device", "get_device_name", "get_device_properties", "synchronize",
                 "get_device_capability", "mem_get_info", "current_stream", "Stream", "Event",
                 "set_per_process_memory_fraction")
}  # fmt: skip
_COLLECTIVES = {
    f"torch.distributed.{name}"
    for name in ("barrier", "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter",
                 "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
                 "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
}  # fmt: skip
_CONSTANTS = {
    f"torch.{name}{like}"
    for name in ("zeros", "ones", "empty", "full", "rand", "randn", "tensor")
    for like in ("", "_like")
}  # fmt: skip
# Their parts may be executed never, or later
_SELDOM = (ast.ExceptHandler, ast.match_case, ast.Lambda, ast.comprehension, ast.ListComp, ast.SetComp, ast.DictComp,
           ast.GeneratorExp, ast.Assert)  # fmt: skip
_FIXED_URL = re.compile(r"tcp://.*:\d+/?$")
_WITHOUT_GPUS = {("CUDA_VISIBLE_DEVICES", ""), ("CUDA_VISIBLE_DEVICES", "-1")}  # for the CPU: takes no other GPUs
_CALLS = 20  # of one function in another that are looked at: bounds the time for a generated file
_LOSS = re.compile(r"(^|[._])loss(es)?$", re.IGNORECASE)


class Rule(msgspec.Struct, frozen=True):
    """One warning: the name of its check, the places where it applies, what happens there, and the cure."""

    name: str
    find: Callable[[ScriptTree], Found]
    cause: str
    remedy: str


def _cuda_at_import(tree: ScriptTree) -> Found:
    # not by pools, which are for work on the CPU
    started = [call for call, name in tree.calls if name in _PROCESSES - _POOLS or name == "os.fork"]
    if not started:
        return
    variables: dict[str, list[ast.expr]] = {}
    for node in tree.nodes:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(node, ast.Assign) and isinstance(target, ast.Name):
                variables.setdefault(target.id, []).append(node.value)
    cuda = {name for name, values in variables.items() if all(_has_cuda(value) for value in values)}
    for call, name in tree.calls:
        if not tree.at_import(call) or not _initializes_cuda(call, name, cuda):
            continue
        later = [one for one in started if tree.function(one) is not None or one.lineno > call.lineno]
        if later:
            yield call.lineno, f"initializes CUDA during import, and line {later[0].lineno} starts processes"


def _initializes_cuda(call: ast.Call, name: str, variables: set[str]) -> bool:
    """Whether a call initializes CUDA; ``variables`` are CUDA devices."""

    def is_cuda(device: ast.expr | None) -> bool:
        if isinstance(device, ast.Name):
            return device.id in variables
        return device is not None and _has_cuda(device)

    if name in _CUDA:
        return True
    if isinstance(call.func, ast.Attribute) and not name.startswith("torch."):
        return call.func.attr == "cuda" or (call.func.attr == "to" and is_cuda(argument(call, "device", 0)))
    return name.startswith("torch.") and any(k.arg == "device" and is_cuda(k.value) for k in call.keywords)


def _has_cuda(value: ast.expr) -> bool:
    return any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("cuda")
        for node in ast.walk(value)
    )


def _fixed_port(tree: ScriptTree) -> Found:
    for node, name, value in _variables_fixed(tree):
        if name == "MASTER_PORT" and not _for_another_start(tree, node):
            yield node.lineno, f"sets MASTER_PORT to {value}"


def _fixed_variable(tree: ScriptTree, variable: str) -> Found:
    variables = _variables_fixed(tree)
    sets = [(node, value) for node, name, value in variables if name == variable and (name, value) not in _WITHOUT_GPUS]
    if not sets:
        return
    exits = _first_exits(tree)
    scopes = _reached_scopes(tree, exits)
    for node, value in sets:
        if tree.function(node) in scopes and _always_runs(tree, node, exits):
            yield node.lineno, f"sets {variable} to {value}"


def _reached_scopes(tree: ScriptTree, exits: _Exits) -> set[ast.AST | None]:
    """Return the functions that a launch calls for sure; None: the module itself."""
    calls: dict[ast.AST | None, list[tuple[ast.Call, Function]]] = {}  # by where they are, with what is called
    counts: Counter[tuple[ast.AST | None, str]] = Counter()
    for call, name in tree.calls:
        function, scope = tree.functions.get(name), tree.function(call)
        if function is not None and counts[scope, name] < _CALLS:
            counts[scope, name] += 1
            calls.setdefault(scope, []).append((call, function))
    found: set[ast.AST | None] = {None}
    if (main := tree.functions.get("main")) is not None and "main" not in tree.uses:
        found.add(main)  # called by launch itself: train:main
    todo = list(found)
    while todo:
        for call, function in calls.get(todo.pop(), ()):
            if function not in found and all(_always_runs(tree, one, exits) for one in (call, function)):
                found.add(function)
                todo.append(function)
    return found


def _always_runs(tree: ScriptTree, node: ast.stmt | ast.expr, exits: _Exits) -> bool:
    """Whether every launch that enters the innermost function around ``node``, or the module, executes it."""
    function = tree.function(node)
    child: ast.AST = node
    for parent in tree.above(node):
        if not _runs_child(tree, parent, child):
            return False
        if parent is function:
            break
        child = parent
    return node.lineno <= exits.get(function, node.lineno) and not tree.depends_on_launcher(node)


def _runs_child(tree: ScriptTree, parent: ast.AST, child: ast.AST) -> bool:
    """Whether each execution of ``parent`` executes the part ``child``."""
    if isinstance(parent, ast.If):
        return child is parent.test or (child in parent.body and _about_count(tree, parent.test))
    if isinstance(parent, (ast.Try, ast.TryStar)):  # an earlier error may be handled
        return child in parent.finalbody or child is parent.body[0] or (child in parent.body and not parent.handlers)
    if isinstance(parent, (ast.IfExp, ast.While)):
        return child is parent.test
    if isinstance(parent, ast.BoolOp):
        return child is parent.values[0]
    if isinstance(parent, (ast.For, ast.AsyncFor)):
        return child is parent.iter
    if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return child in parent.body  # not its default values and decorators
    return not isinstance(parent, _SELDOM)


def _first_exits(tree: ScriptTree) -> _Exits:
    """Return where each function, and the module, may return or exit without an error."""
    exits = {"sys.exit", "os._exit", "exit", "quit"}
    found: list[ast.expr | ast.stmt] = [one for one in tree.nodes if isinstance(one, ast.Return)]
    for call, name in tree.calls:
        if name in exits and constant(call.args[0] if call.args else None) in {None, 0}:
            found.append(call)
    lines: _Exits = {}
    for node in found:
        function = tree.function(node)
        lines[function] = min(node.lineno, lines.get(function, node.lineno))
    return lines


def _variables_fixed(tree: ScriptTree) -> Iterator[tuple[ast.stmt | ast.expr, object, object]]:
    """Yield where the environment gets a constant, the variable, and the constant."""
    for node, name, value in _variables_set(tree):
        if (found := constant(value)) is not None:
            yield node, name, found


def _variables_set(tree: ScriptTree) -> Iterator[tuple[ast.stmt | ast.expr, object, ast.expr]]:
    """Yield where the environment gets a variable, its name, and its value."""
    for node in [one for one in tree.nodes if isinstance(one, ast.Assign)]:
        for target in node.targets:
            if isinstance(target, ast.Subscript) and tree.name(target.value) == "os.environ":
                yield node, constant(target.slice), node.value
    for call, name in tree.calls:
        if name == "os.environ.update" and call.args and isinstance(call.args[0], ast.Dict):
            for key, value in zip(call.args[0].keys, call.args[0].values, strict=True):
                yield call, constant(key), value


def _fixed_url(tree: ScriptTree) -> Found:
    for call, name in tree.calls:
        if name == _INIT and not _for_another_start(tree, call):
            url = argument(call, "init_method", 1)
            last = url.values[-1] if isinstance(url, ast.JoinedStr) and url.values else url
            text = constant(last)
            if last is not url and isinstance(text, str):
                text = f"tcp://{text}" if _starts_with_tcp(url) else text
            if isinstance(text, str) and _FIXED_URL.match(text):
                yield call.lineno, f"passes init_method with port {text.rstrip('/').rpartition(':')[2]}"


def _for_another_start(tree: ScriptTree, node: ast.AST) -> bool:
    """Whether ``node`` may be meant for runs without this launcher: by a look at the variables of launchers, in a
    function that sets RANK too, or in one that only processes of the script's own call."""
    function = tree.function(node)
    if tree.depends_on_launcher(node):
        return True
    return isinstance(function, ast.FunctionDef) and (function in tree.sets_rank or _started_only(tree, function))


def _started_only(tree: ScriptTree, function: ast.AST | None) -> bool:
    """Whether only processes of the script's own call a function."""
    uses = tree.uses.get(function.name) if isinstance(function, ast.FunctionDef) else None
    starts = [call for call, name in tree.calls if name in _PROCESSES]
    passed = {word for call in starts for word in (*call.args, *(k.value for k in call.keywords))}
    return uses is not None and passed.issuperset(uses)


def _starts_with_tcp(url: ast.expr | None) -> bool:
    first = constant(url.values[0]) if isinstance(url, ast.JoinedStr) else None
    return isinstance(first, str) and first.startswith("tcp://")


def _rank_as_device(tree: ScriptTree) -> Found:
    is_rank = _ranks(tree, "RANK")
    for call, name in tree.calls:
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        device: ast.expr | None = None
        if name == "torch.cuda.set_device" or (method in {"cuda", "to"} and not name.startswith("torch.")):
            device = argument(call, "device", 0)
        elif name == "torch.device" and constant(argument(call, "type", 0)) == "cuda":
            device = argument(call, "index", 1)
        elif method == "DistributedDataParallel" or name.endswith(".DistributedDataParallel"):
            listed = argument(call, "device_ids", 1)
            device = listed.elts[0] if isinstance(listed, ast.List) and listed.elts else None
        if is_rank(device):
            yield call.lineno, "uses RANK as the number of a GPU"
    for node in tree.nodes:
        if isinstance(node, ast.JoinedStr) and len(node.values) == 2 and constant(node.values[0]) == "cuda:":
            part = node.values[1]
            if isinstance(part, ast.FormattedValue) and is_rank(part.value):
                yield node.lineno, "uses RANK as the number of a GPU"


def _rank_as_gpus(tree: ScriptTree) -> Found:
    is_rank = _ranks(tree, "LOCAL_RANK", "RANK")
    for node, name, value in _variables_set(tree):
        if name == "CUDA_VISIBLE_DEVICES" and is_rank(value):
            yield node.lineno, "sets CUDA_VISIBLE_DEVICES to the number of a rank"


def _ranks(tree: ScriptTree, *variables: str) -> Callable[[ast.expr | None], bool]:
    """Return whether an expression is one of these variables of the environment, as a number or a string."""
    ranks = _rank_variables(tree, variables)
    binds = cache(_binds)  # of this script only

    def is_rank(node: ast.expr | None) -> bool:
        if node is None:
            return False
        scope = tree.function(node)
        node = unwrapped(node)
        name = tree.name(node)
        if name:
            return (scope, name) in ranks or ((None, name) in ranks and not binds(scope, name))
        return _from_rank(tree, node, variables)

    while more := set(_rank_parameters(tree, is_rank)) - ranks:
        ranks |= more
    return is_rank


def _rank_variables(tree: ScriptTree, variables: Sequence[str]) -> set[tuple[ast.AST | None, str]]:
    """Return, with the function of each, the names whose only value is one of ``variables`` of the environment."""
    found: dict[tuple[ast.AST | None, str], bool] = {}
    for node in tree.nodes:
        if isinstance(node, ast.Assign):
            pairs = [pair for target in node.targets for pair in _pairs(target, node.value)]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            pairs = [(node.target, None if isinstance(node, ast.AugAssign) else node.value)]
        else:
            continue
        for target, value in pairs:
            if name := tree.name(target):
                # An attribute (args.rank) may be used in any function.
                key = (None if isinstance(target, ast.Attribute) else tree.function(node), name)
                found[key] = found.get(key, True) and value is not None and _from_rank(tree, value, variables)
    return {key for key, is_rank in found.items() if is_rank}


def _rank_parameters(
    tree: ScriptTree, is_rank: Callable[[ast.expr | None], bool]
) -> Iterator[tuple[ast.AST | None, str]]:
    """Yield the parameters that are RANK in every call of their function, which nothing but calls uses."""
    called: dict[str, list[ast.Call]] = {}
    for call, name in tree.calls:
        called.setdefault(name, []).append(call)
    for name, function in tree.functions.items():
        calls = called.get(name, [])
        if not calls or len(calls) != len(tree.uses.get(name, [])):
            continue
        names = (node for node in ast.walk(function) if isinstance(node, ast.Name))
        changed = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        for at, parameter in enumerate((*function.args.posonlyargs, *function.args.args)):
            if parameter.arg not in changed and all(is_rank(argument(call, parameter.arg, at)) for call in calls):
                yield function, parameter.arg


def _pairs(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, (ast.Tuple, ast.List)):
        return [(target, value)]
    if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
        return [(one, part) for one, part in zip(target.elts, value.elts, strict=True)]
    return [(one, None) for one in target.elts]


def _binds(scope: ast.AST | None, name: str) -> bool:
    """Whether a function has a parameter of this name, or assigns to it."""
    if not isinstance(scope, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
        return False
    return (
        any(
            (isinstance(node, ast.arg) and node.arg == name.partition(".")[0])
            or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name)
            for node in ast.walk(scope)
        )
        and "." not in name
    )


def _from_rank(tree: ScriptTree, value: ast.expr, variables: Sequence[str]) -> bool:
    """Whether an expression is one of ``variables`` of the environment, or the rank in the default process group."""
    value = unwrapped(value)
    if isinstance(value, ast.Subscript):
        return tree.name(value.value) == "os.environ" and constant(value.slice) in variables
    if not isinstance(value, ast.Call):
        return False
    name = tree.name(value.func)
    if name in {"os.environ.get", "os.getenv"} and value.args:
        return constant(value.args[0]) in variables
    return name == "torch.distributed.get_rank" and not value.args and not value.keywords


def _collective_before_device(tree: ScriptTree) -> Found:
    """The order of init_process_group and set_device alone is free: NCCL takes the device of the first collective."""
    for call, name in tree.calls:
        if name != _INIT or not _uses_nccl(call):
            continue
        here = [(one, called) for one, called in tree.calls if tree.function(one) is tree.function(call)]
        devices = [one.lineno for one, called in here if called == "torch.cuda.set_device"]
        for one, called in here:
            named = any(keyword.arg == "device_ids" for keyword in one.keywords)
            if called in _COLLECTIVES and not named and devices and call.lineno < one.lineno < min(devices):
                what = called.rpartition(".")[2]
                yield one.lineno, f"calls {what} after init_process_group and before set_device (line {min(devices)})"


def _uses_nccl(init: ast.Call) -> bool:
    """Whether a process group uses NCCL on the current device: by the backend's name, or where none is given."""
    if any(keyword.arg in {"device_id", None} for keyword in init.keywords):
        return False
    backend = argument(init, "backend", 0)
    return backend is None or "nccl" in str(constant(backend)).lower()


def _swallowed_init(tree: ScriptTree) -> Found:
    for call, name in tree.calls:
        if name != _INIT:
            continue
        function = tree.function(call)
        child: ast.AST = call
        if any(isinstance(one, (ast.For, ast.While)) and tree.function(one) is function for one in tree.above(call)):
            continue  # tried again
        for parent in tree.above(call):
            if parent is function:
                break
            if isinstance(parent, ast.Try) and child in parent.body:
                handler = tree.swallows(parent.handlers)
                again = handler is not None and any(
                    isinstance(node, ast.Call) and tree.name(node.func) == _INIT for node in ast.walk(handler)
                )
                if handler is not None and not again:  # with another backend
                    yield handler.lineno, "handles every error of init_process_group and goes on"
                    break
            child = parent


def _swallowed_forward(tree: ScriptTree) -> Found:
    for node in tree.nodes:
        if not isinstance(node, ast.Try) or all(isinstance(one, (ast.Import, ast.ImportFrom)) for one in node.body):
            continue
        function = tree.function(node)
        if not isinstance(function, ast.FunctionDef) or function.name != "forward":
            continue
        owner = next(tree.above(function), None)
        if not isinstance(owner, ast.ClassDef) or not owner.bases:
            continue
        handler = tree.swallows(node.handlers)
        last = handler.body[-1] if handler else None
        found = last.value if isinstance(last, ast.Return) else None
        computed = isinstance(found, ast.Call) and tree.name(found.func) not in _CONSTANTS  # in another way
        if handler and not computed:
            yield handler.lineno, "handles every error inside forward and goes on"


def _reduces_loss_gradient(tree: ScriptTree) -> Found:
    for call, name in tree.calls:
        tensor = argument(call, "tensor", 0) if name == "torch.distributed.all_reduce" else None
        if isinstance(tensor, ast.Attribute) and tensor.attr == "grad" and _LOSS.search(tree.name(tensor.value)):
            yield call.lineno, f"calls all_reduce({ast.unparse(tensor)})"


def _unguarded(tree: ScriptTree) -> Found:
    named = [
        arg for call, name in tree.calls if name.endswith(("set_start_method", "get_context")) for arg in call.args
    ]
    spawned = any(constant(arg) in {"spawn", "forkserver"} for arg in named)
    for call, name in tree.calls:
        if (name in _SPAWN or (spawned and name in _PROCESSES)) and tree.runs_at_import(call):
            yield call.lineno, f'starts processes ({name.rpartition(".")[2]}) outside `if __name__ == "__main__":`'


def _own_spawning(tree: ScriptTree) -> Found:
    """Under an option or another test, which may be for other ways to start the script, it does not count."""
    if any(isinstance(node, ast.Constant) and node.value == "LOCAL_RANK" for node in tree.nodes):
        return  # for launchers too
    for call, name in tree.calls:
        joins = name in _PROCESSES and _calls_init(tree, argument(call, "target", 1))
        if (name not in _SPAWN and not joins) or tree.depends_on_launcher(call):
            continue
        around = (call, *tree.above(call))
        pairs = [(one, child) for child, one in pairwise(around) if isinstance(one, ast.If)]
        if all(_runs_child(tree, one, child) for one, child in pairs):
            yield call.lineno, "starts processes that call init_process_group" if joins else "calls mp.spawn"


def _calls_init(tree: ScriptTree, target: ast.expr | None) -> bool:
    function = tree.functions.get(tree.name(target)) if target is not None else None
    return any(name == _INIT and tree.function(call) is function for call, name in tree.calls if function is not None)


def _about_count(tree: ScriptTree, test: ast.expr) -> bool:
    """Whether a test is the main guard, for CUDA, or for several GPUs: it holds in a launch too."""
    if not isinstance(test, ast.Compare):
        return tree.name(test.func if isinstance(test, ast.Call) else test) == "torch.cuda.is_available"
    left = test.left.func if isinstance(test.left, ast.Call) else test.left
    if tree.name(left) == "__name__":
        return isinstance(test.ops[0], ast.Eq)
    return (
        (tree.name(left) == "torch.cuda.device_count" or (isinstance(left, ast.Name) and left.id in tree.gpu_counts))
        and isinstance(test.ops[0], (ast.Gt, ast.GtE))
        and isinstance(constant(test.comparators[0]), int)
    )


RULES = (
    Rule(
        "script: own spawning",
        _own_spawning,
        "each rank would start ranks of its own: N x N processes, several with the same RANK",
        "call the training function once, with RANK and LOCAL_RANK from the environment; or start the script with "
        "plain python (`gpuboard run`)",
    ),
    Rule(
        "script: no __main__ guard",
        _unguarded,
        "under the start methods spawn and forkserver each child runs the script again, which ends in an error",
        'put the calls at the end of the script below `if __name__ == "__main__":`',
    ),
    Rule(
        "script: CUDA before fork",
        _cuda_at_import,
        "forked processes cannot use CUDA (Cannot re-initialize CUDA in forked subprocess), spawned ones initialize it "
        "again on their import",
        'move it into a function that each process calls, or below `if __name__ == "__main__":`',
    ),
    Rule(
        "script: fixed port",
        _fixed_port,
        "the store of this run is at another port, so the ranks would wait for one that is not there",
        'delete that line, the launcher sets MASTER_PORT; for plain python: os.environ.setdefault("MASTER_PORT", …)',
    ),
    *(
        Rule(
            f"script: fixed {what}",
            partial(_fixed_variable, variable=variable),
            cause,
            f"delete that line: gpuboard launch sets {variable} for each rank; for plain python: "
            f'os.environ.setdefault("{variable}", "{alone}")',
        )
        for what, variable, alone, cause in (
            ("RANK", "RANK", "0", "several ranks would be the same one, and init_process_group waits for the others"),
            (
                "RANK",
                "LOCAL_RANK",
                "0",
                "all ranks of a node would use the same GPU: NCCL refuses that, or memory runs out",
            ),
            (
                "RANK",
                "WORLD_SIZE",
                "1",
                "with another number of ranks init_process_group fails, or waits for ranks that do not exist",
            ),
            (
                "GPUs",
                "CUDA_VISIBLE_DEVICES",
                "0",
                "the ranks would use these GPUs in place of those that were chosen and checked; others may use them",
            ),
        )
    ),
    Rule(
        "script: rank as GPUs",
        _rank_as_gpus,
        "it counts all GPUs of the node, so the rank would use another one than was chosen and checked",
        "delete that line: gpuboard launch sets CUDA_VISIBLE_DEVICES; torch.cuda.set_device(local_rank) is enough",
    ),
    Rule(
        "script: fixed init_method",
        _fixed_url,
        "the store of this run is at another port, so the ranks would wait for one that is not there",
        "call init_process_group without init_method: it then uses MASTER_ADDR and MASTER_PORT",
    ),
    Rule(
        "script: RANK as device",
        _rank_as_device,
        "correct on the first node only; on others: CUDA error: invalid device ordinal",
        'use LOCAL_RANK: int(os.environ["LOCAL_RANK"])',
    ),
    Rule(
        "script: init before set_device",
        _collective_before_device,
        "it uses the first GPU for every rank of the node: NCCL fails or hangs",
        "call torch.cuda.set_device(local_rank) first, or pass device_id= to init_process_group",
    ),
    Rule(
        "script: except around init",
        _swallowed_init,
        "that rank continues without a process group or ends with exit code 0, and the others wait for it",
        "remove the except clause, or end it with `raise`",
    ),
    Rule(
        "script: except in forward",
        _swallowed_forward,
        "that rank leaves out collectives of the step, and the others wait in them",
        "name the expected exceptions, or end the except clause with `raise`",
    ),
    Rule(
        "script: all_reduce of loss.grad",
        _reduces_loss_gradient,
        "the gradient of a loss is None, so this fails with a TypeError",
        "delete it: DistributedDataParallel averages the gradients of the parameters in backward()",
    ),
)
