"""Print who would hold a lease taken here, as gpuboard allocate would find it: ``pid kind``."""

from __future__ import annotations

from gpuboard.keeper import holder

found = holder.find_holder()
print(found.pid, holder.shell_kind(found.pid))
