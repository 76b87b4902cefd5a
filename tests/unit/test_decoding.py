"""Decoding into types that several threads use for the first time at once."""

from __future__ import annotations

import subprocess
import sys

# New types each round, since only their first use is in question. msgspec alone crashes within 100 rounds.
PROGRAM = """
import sys, threading, types
from gpuboard.model.decoding import convert, from_json, from_msgpack
import msgspec

TYPES = '''
from __future__ import annotations
import msgspec
class Part(msgspec.Struct):
    words: dict[str, int] | None = None
    pairs: list[tuple[int, str]] | None = None
    number: int | str = 0
class Parent(msgspec.Struct):
    part: Part
    parts: list[Part] | None = None
class Top(msgspec.Struct):
    parent: Parent
    part: Part
'''
sys.setswitchinterval(1e-6)
part = {"words": {"a": 1}, "pairs": [[1, "a"]], "number": 2}
parent = {"part": part, "parts": [part]}
decoded = []

def decode(start, decoder, data, kind):
    start.wait()
    decoded.append(decoder(data, kind))

for number in range(400):
    module = sys.modules[f"types{number}"] = types.ModuleType(f"types{number}")
    exec(TYPES, vars(module))
    start = threading.Barrier(3)
    uses = [
        (from_json, msgspec.json.encode({"parent": parent, "part": part}), module.Top),
        (from_msgpack, msgspec.msgpack.encode(parent), module.Parent),
        (convert, part, module.Part),
    ]
    threads = [threading.Thread(target=decode, args=(start, *use)) for use in uses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(decoded))
"""


def test_threads_can_be_the_first_to_use_a_type_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "1200\n"), done.stderr
