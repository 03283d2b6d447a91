"""Which workers serve a request: chosen by tokens, in seconds.

`router` is the whole of it for one model; `route` is what it is asked and answers. `worker_state`
keeps a worker's two `ledger`s and measured speeds, `costs` turns them into seconds, `policies`
choose by them, `leg_decision` says whether a prompt is worth a second worker. `prefix_index` knows
who holds which blocks, `speculative_index` who soon will; `session` and `affinity` keep
conversations where their cache is. `admission` makes requests wait that nobody can take yet. Pure
Python with an injected clock: no input or output, and no asyncio but in `admission`.
"""
