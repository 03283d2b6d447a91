"""Queued requests: kept in a database, computed with the capacity that other requests leave.

Knows no dialect: what a request means is told by whoever answers it.
"""
