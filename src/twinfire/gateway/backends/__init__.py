"""Ways to reach an engine: `backend` is what every one of them offers.

`local_worker` is the one worker of `serve`. A cluster's workers dial `worker_listener`, join the
pool of their model (`worker_registry`) over a `worker_link` each, and are watched (`liveness`).
`cluster_backend` serves a model by such a pool: each request is a `pd_generation` of one or several
`branch`es, each a row of `attempt`s on one worker or two.
"""
