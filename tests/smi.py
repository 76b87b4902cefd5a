"""A stand-in for nvidia-smi: a shell script that prints recorded output (tests/data/nvidia-smi) and records its calls.

fake = FakeSmi(folder)                         # folder/nvidia-smi; put the folder on PATH
fake.says("v13-h100-590")                      # -q -x from now on; messages from a .err beside it
fake.answers("csv-h100-580")                   # the queries; APPS from a .apps beside it
fake.lacks("memory.reserved")                  # a field that this driver does not know
fake.hangs(); fake.holds(); fake.lingers(); fake.calls()
"""

from __future__ import annotations

import shutil
from pathlib import Path

DATA = Path(__file__).parent / "data" / "nvidia-smi"

_SCRIPT = """#!/bin/sh
cd {folder} || exit 9
echo "$*" >> calls
[ -e hang ] && exec sleep 1000
while [ -e hold ]; do sleep 0.02; done
sleep "$(cat takes)"
case $1 in
-q) cat messages >&2; cat listing; exec >&- 2>&-
    while [ -e linger ]; do sleep 0.02; done
    exit "$(cat code)" ;;
--query-gpu=*)
    for field in $(cat lacking); do
        case ,${{1#*=}}, in *,$field,*) echo "Field \\"$field\\" is not a valid field to query."; echo; exit 2 ;; esac
    done
    cat rows ;;
--query-compute-apps=*) cat apps ;;
*) echo "Invalid combination of input arguments." >&2; exit 1 ;;
esac
"""


class FakeSmi:
    """The stand-in in ``folder``, writable for every user; ``seen_as``: the folder's path for the script."""

    def __init__(self, folder: Path, seen_as: str | None = None) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
        (folder / "nvidia-smi").write_text(_SCRIPT.format(folder=seen_as or folder))
        (folder / "nvidia-smi").chmod(0o755)
        for name in ("messages", "listing", "rows", "apps", "lacking", "calls"):
            (folder / name).write_text("")
        (folder / "calls").chmod(0o666)
        (folder / "code").write_text("0")
        self.takes(0)

    def says(self, name: str, code: int = 0) -> None:
        """Print the recorded listing ``name`` for ``-q -x``; a .txt is printed as it is."""
        found = DATA / f"{name}.xml"
        self.prints((found if found.exists() else DATA / f"{name}.txt").read_bytes(), code)
        messages = DATA / f"{name}.err"
        (self.folder / "messages").write_bytes(messages.read_bytes() if messages.exists() else b"")

    def prints(self, listing: bytes, code: int = 0) -> None:
        """Print ``listing`` for ``-q -x``."""
        (self.folder / "listing.new").write_bytes(listing)
        (self.folder / "listing.new").replace(self.folder / "listing")
        (self.folder / "code").write_text(str(code))

    def answers(self, name: str) -> None:
        """Print the recorded rows ``name`` for the queries."""
        shutil.copy(DATA / f"{name}.csv", self.folder / "rows")
        apps = DATA / f"{name}.apps"
        (self.folder / "apps").write_bytes(apps.read_bytes() if apps.exists() else b"")

    def lacks(self, *fields: str) -> None:
        """Refuse these fields in queries."""
        (self.folder / "lacking").write_text("\n".join(fields))

    def takes(self, seconds: float) -> None:
        """Make every run take ``seconds``."""
        (self.folder / "takes").write_text(str(seconds))

    def hangs(self, yes: bool = True) -> None:
        """Hang from now on."""
        if yes:
            (self.folder / "hang").touch()
        else:
            (self.folder / "hang").unlink(missing_ok=True)

    def holds(self, yes: bool = True) -> None:
        """Delay every answer from now on, until called with False."""
        if yes:
            (self.folder / "hold").touch()
        else:
            (self.folder / "hold").unlink()

    def lingers(self, yes: bool = True) -> None:
        """Let every run close its output but not exit, from now on, until called with False."""
        if yes:
            (self.folder / "linger").touch()
        else:
            (self.folder / "linger").unlink()

    def calls(self) -> list[str]:
        """Return the arguments of every run so far."""
        return (self.folder / "calls").read_text().splitlines()
