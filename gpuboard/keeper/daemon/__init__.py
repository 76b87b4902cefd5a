"""The keeper: one small process per user and host that renews that user's leases while their holders are alive.

It sends heartbeats to the claims every 30 s and watches the holders (a pidfd each). When a holder has ended, it looks
for carriers, which are processes that carry the lease or run on its GPUs, and releases the lease when there are none.
It kills nothing. It ends a few seconds after its last lease. If it is killed, its records remain, and the next gpuboard
command starts another keeper.
"""
