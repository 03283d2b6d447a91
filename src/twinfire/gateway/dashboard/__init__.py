"""The dashboard: what a gateway and its workers do, and a playground, as a page at `/dashboard`.

`assets` are the page's files, `access` says who may see data, `readings` and `sampler` make numbers
of the metrics, `feed` sends them once a second while somebody looks, `routes` mounts it all.
"""
