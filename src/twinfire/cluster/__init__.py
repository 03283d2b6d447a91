"""Pools of workers on this machine and the edge before several clusters.

`cluster_file` says what is to run, `supervisor` keeps it running, `secret` is what its processes
share.
"""
